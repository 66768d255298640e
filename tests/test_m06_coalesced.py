"""Graded checks of module 6: coalesced collectives, and an all-reduce as a reduce-scatter and an all-gather."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from brigade.course.checks.diagnose.evidence import Evidence, format_ranks
from brigade.course.checks.expectations import (
    ONE_STEP,
    expect_equal,
    expect_gradients,
    expect_waited,
    expect_weights,
    replace_cause,
)
from brigade.course.checks.reference import draw_generators
from brigade.ranks.claims import At, Step, each_step, in_phase
from brigade.ranks.runner.ranks import PerRank
from brigade.ranks.verdict import join_names
from helpers import training
from helpers.buffers import (
    BUCKET_NUMEL,
    expect_complete,
    expect_group_overlap,
    expect_zeroed,
    judge_order,
    list_groups,
    require_halves,
)
from helpers.late_launches import explain_late_launches
from helpers.odd_steps import expect_accumulated, expect_idle_rank, expect_no_old_gradients, expect_second_backward
from helpers.steps import expect_all_kinds_of_steps, expect_averages, split_ranks
from m05_grad_buffer import scenario as m05_grad_buffer
from m05_grad_buffer.expected import compute_layout
from m06_coalesced import causes, scenario

FUNCTIONS = {  # public names; torch 2.13 renamed two of them and still has the old names
    "all_reduce": ["all_reduce"],
    "reduce_scatter": ["reduce_scatter_single", "reduce_scatter_tensor"],
    "all_gather": ["all_gather_single", "all_gather_into_tensor"],
}
REDUCED = {
    "SUM": lambda tensors: sum(tensors),
    "AVG": lambda tensors: sum(tensors) / len(tensors),
    "MAX": lambda tensors: torch.stack(tensors).amax(dim=0),
}
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def make_job(buckets_per_group=1, **arguments):
    """Return what each rank's job says about the wrapper."""
    arguments = {"bucket_numel": BUCKET_NUMEL, "buckets_per_group": buckets_per_group} | arguments
    return {"package": "m06_coalesced", "wrapper": "CoalescedDDP", "arguments": arguments}


@pytest.mark.parts("Parts (a) to (d): the two halves of an all-reduce")
@pytest.mark.points(1)
def test_coalesce_is_one_launch(submission):
    """The collectives in a coalesce block become one launch when the block ends, and handle.wait() completes them."""
    kinds = [("all_reduce", "SUM", F32), ("all_reduce", "MAX", F64), ("reduce_scatter", "AVG", F32)]
    kinds.append(("all_gather", None, BF16))
    for world in submission.worlds(2, 4):
        groups = split_ranks(world)
        blocks = []
        for kind in kinds:
            for name in list_names(kind[0]):
                several = [kind] * submission.rng.randint(2, 5)
                blocks.append((kind[0], name, draw_calls(submission.rng, world, len(groups[0]), several, name)))
        jobs = PerRank({"groups": groups, "blocks": [calls[r] for _, _, calls in blocks]} for r in range(world))
        results = submission.run(scenario.run_blocks, jobs, world_size=world)
        for group in groups:
            for index, rank in enumerate(group):
                for number, (op, name, calls) in enumerate(blocks):
                    count = len(calls[rank])
                    what = f"{count} calls of {name} in the group of {format_ranks(group)}"
                    expect_one_launch(list_launches(results, rank, number), op, count, what)
                    expect_equal(
                        f"after handle.wait(), each of {count} coalesced calls of {name} has the right result",
                        [{f"call {i}": tensor for i, tensor in enumerate(results[rank][number])}],
                        {f"call {i}": compute_result([calls[r][i] for r in group], index) for i in range(count)},
                        ranks=[rank],
                    )


@pytest.mark.points(2)
def test_coalesce_refuses_mixtures(submission):
    """Nested or mixed blocks (kinds, operations, dtypes) raise an exception and launch nothing. Later calls work."""
    rng = submission.rng
    [world] = submission.worlds(2)
    blocks = [  # (what the block contains, what must be compared to reject it, its calls)
        # The first two show whether exceptions are swallowed. Otherwise, a block without one compares too little.
        ("an exception from the caller", None, [("all_reduce", "SUM", F32)] * 2),
        ("a KeyboardInterrupt", None, [("all_reduce", "SUM", F32)] * 2),
        ("an all_reduce and a reduce_scatter", "kinds", [("all_reduce", "SUM", F32), ("reduce_scatter", "SUM", F32)]),
        ("an all_gather and an all_reduce", "kinds", [("all_gather", None, F32), ("all_reduce", "SUM", F32)]),
        ("SUM and AVG", "reduce operations", [("all_reduce", op, F32) for op in ("SUM", "AVG", "SUM")]),
        ("AVG and SUM", "reduce operations", [("reduce_scatter", op, F64) for op in ("AVG", "AVG", "SUM")]),
        ("float32 and float64", "dtypes", [("all_reduce", "SUM", dtype) for dtype in (F32, F32, F64)]),
        ("float32 and bfloat16", "dtypes", [("all_gather", None, dtype) for dtype in (F32, BF16, F32)]),
        ("a nested block of the same group", "nested", [("all_reduce", "SUM", F32)] * 2),
        ("a nested block of group.WORLD, the default group", "nested", [("all_reduce", "SUM", F32)] * 2),
    ]
    calls = [draw_calls(rng, world, world, kinds) for _, _, kinds in blocks]
    after = [entry for [entry] in draw_calls(rng, world, world, [("all_reduce", "SUM", F32)])]
    common = {"nested": len(blocks) - 2, "counts_launches": False}
    jobs = PerRank(common | {"blocks": [block[rank] for block in calls], "after": after[rank]} for rank in range(world))
    with replace_cause(partial(causes.explain_unmade_launch, blocks)):
        results = submission.run(scenario.run_refused_blocks, jobs, world_size=world)
    for number, (label, compared, _) in enumerate(blocks):
        for rank, result in enumerate(results):
            raised, launched = result[number]["raised"], list_launches(results, rank, number)
            launched = launched.where(in_phase("block"))
            if compared:
                launched.claim(
                    f"a coalesce block raises an exception if it contains {label}",
                    raised is not None,
                    "the block raised no exception and made {these}",
                    lambda _, compared=compared: causes.explain_no_error(compared),
                )
            else:
                what = "an exception that is raised inside a coalesce block reaches the caller unchanged"
                got = f"the block raised {f'{raised} instead' if raised else 'nothing'}"
                At(rank).claim(what, result[number]["unchanged"], got, causes.SWALLOWED)
            what = f"a coalesce block that contains {label} raises an exception and launches nothing"
            launched.are_none(what, partial(causes.explain_launch_after_error, compared))
        expect_working([result[number] for result in results], [entry["input"] for entry in after], label)
    total = sum(entry["input"] for entry in after)
    for what, place, expected, cause in (
        ("still launches its calls if its caller catches the exception of a nested block", -2, total,
         causes.OUTER_LOST),
        ("may contain a block of another group, and both are summed", -1, 2 * total, causes.OTHER_GROUP),
    ):  # fmt: skip
        actual, expected = [{"the result": result[place]} for result in results], {"the result": expected}
        expect_equal(f"a block {what}", actual, expected, evidence=Evidence(cause))
    for rank in range(world):  # only the rank says which launches are in a block
        what = "calls and blocks make {}, and those that raise an exception none"
        list_launches(results, rank, None).are_so_many(what, 2 * len(blocks) + 4)


@pytest.mark.points(2)
def test_bucket_group(submission):
    """A BucketGroup averages this rank's shards of its buckets in one launch, and gathers parameters in another."""
    rng = submission.rng
    indices = [[0, 2], [1]]  # of the buckets in two groups; bucket 3, the last one, is in no group
    for world, dtype in submission.pair_worlds((2, 3, 4), (F32, F64, F32)):
        groups = split_ranks(world)
        shapes = [
            shape for _ in range(4) for shape in ((rng.randint(3, 60),), (rng.randint(15, 20), rng.randint(10, 30)))
        ]
        own = [
            {
                kind: [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
                for kind in ("params", "grads")
            }
            for generator in draw_generators(rng, world)
        ]
        common = {"bucket_numel": BUCKET_NUMEL, "indices": indices, "groups": groups}
        results = submission.run(
            scenario.sync_bucket_groups, PerRank(common | tensors for tensors in own), world_size=world
        )
        layout = compute_layout([value.numel() for value in own[0]["params"]], BUCKET_NUMEL, len(groups[0]))
        lengths = [sum(end - start for start, end in (layout["bucket_ranges"][i] for i in g)) for g in indices]
        all_grads = [tensors["grads"] for tensors in own]
        for group in groups:
            group_results = [results[rank] for rank in group]
            with replace_cause(partial(causes.find_wrong_buckets, results.events[group[0]], lengths)):
                grads, records = ([values[rank] for rank in group] for values in (all_grads, results.events))
                expect_averaged_shards(group_results, grads, layout, [0, 2, 1], group, records)
            expect_gathered_shards(group_results, [own[rank]["params"] for rank in group], layout, [0, 2, 1], group)
            with replace_cause(lambda failed: causes.STALE_SHARDS):
                moved = [result["moved"] for result in group_results]
                expect_averaged_shards(moved, grads, layout, [0, 2, 1], group, records)
                expect_gathered_shards(moved, [own[rank]["params"] for rank in group], layout, [0, 2, 1], group)
            for rank, result in zip(group, group_results, strict=True):
                expected = [(dtype, numel) for numel in lengths]
                for step, op, what in ((0, "reduce_scatter", "grad_sync"), (1, "all_gather", "param_sync")):
                    expect_started(list_launches(results, rank, step), expected, op, what)
                unused = [slice(*r) for r, b in zip(layout["param_ranges"], layout["bucket_of"], strict=True) if b == 3]
                changed = [
                    kind
                    for kind, name in (("grad_data", "grads"), ("param_data", "params"))
                    if not all(
                        torch.equal(result[kind][part], whole[part])
                        for whole in [flatten_into_buffer(layout, own[rank][name])]
                        for part in unused
                    )
                ]
                At(rank).claim(
                    "a BucketGroup does not change buckets that are not in its bucket_indices",
                    not changed,
                    f"the bucket_indices of the two groups are {indices[0]} and {indices[1]}, but bucket 3 of "
                    f"{join_names(changed)} has changed",
                    causes.WHOLE_BUFFER,
                )


@pytest.mark.parts("Parts (e) and (f): groups of buckets")
@pytest.mark.points(1)
@pytest.mark.needs("test_bucket_group")
def test_shards_without_gather(submission):
    """With gather_grads=False, this rank's shards are averaged, and parameters are gathered instead of gradients."""
    for world, buckets_per_group in submission.pair_worlds((2, 4), (2, 1)):
        case = submission.case("Plain", world, steps=3, dtype=F64, group=split_ranks(world)[0])
        jobs = case.make_jobs(groups=split_ranks(world), **make_job(buckets_per_group))
        results = submission.run(scenario.train_on_shards, jobs, world_size=world)
        names = list(reversed(case.parameters()))
        layout = compute_layout(
            [p.numel() for p in reversed(case.parameters().values())], BUCKET_NUMEL, len(case.group)
        )
        groups = list_groups(case.parameters(), len(case.group), buckets_per_group)
        for step in each_step(results.events, 3, case.group):
            expect_ranks(step, case.group)
            parameters, gradients = (
                step.launches().where(lambda x, n=n: (x.phase == "start") == n) for n in (True, False)
            )
            setting = " before start_param_sync if gather_grads is False"
            expect_ops(gradients, ("reduce_scatter",), setting, is_gather_off=True)
            expect_launches(gradients, groups, "reduce_scatter", setting)
            expect_started(parameters, groups, "all_gather", "param_sync")
            expect_waited(step.launches())
        gradients = [case.gradients([rank]) for rank in case.group]
        expect_averaged_shards(
            [{"grad_data": results[rank]["grad_data"]} for rank in case.group],
            [[own[name] for name in names] for own in gradients],
            layout,
            range(len(layout["bucket_ranges"])),
            case.group,
            [results.events[rank] for rank in case.group],
        )
        expect_weights(results, case)


@pytest.mark.parts("Part (g): gather gradients during backward")
@pytest.mark.points(1)
def test_gradients_are_averaged(submission):
    """Replicas start equal. One reduce-scatter and one all-gather per group of buckets average the gradients."""
    expect_averages(submission, [make_job(count) for count in (1, 2, None, 2)], require_halves)


@pytest.mark.points(2)
def test_launches_and_volume(submission):
    """A step launches one reduce-scatter and one all-gather per group. Together, they send as much as an all-reduce."""
    cases = submission.pair_worlds((2, 3, 2, 2), ("Plain", "MixedDtypes", "MixedDtypes", "Plain"), (2, 1, None, None))
    for world, model, buckets_per_group in cases:
        case = submission.case(model, world, hidden_layers=6 if model == "Plain" else 4, steps=2)
        results = submission.run(training.train, case.make_jobs(**make_job(buckets_per_group)), world_size=world)
        groups = list_groups(case.parameters(), world, buckets_per_group)
        setting = f" ({model} model, buckets_per_group={buckets_per_group})"
        for step in each_step(results.events, 2):
            launched = step.launches()
            expect_ops(launched, ("reduce_scatter", "all_gather"), setting)
            expect_launches(launched, groups, "reduce_scatter", setting)
            expect_launches(launched, groups, "all_gather", setting, ordered=False)
            expect_waited(launched)
        expect_gradients(results, case, tolerance=2**-6 if model == "MixedDtypes" else ONE_STEP)


@pytest.mark.points(2)
def test_groups_overlap_with_backward(submission):
    """Backward launches each complete group before the next group is complete, and does not wait for it immediately."""
    for world, is_uneven in submission.pair_worlds((2, 3), (False, True)):
        case = submission.case("Plain", world, hidden_layers=6, steps=2)
        buckets_per_group = choose_uneven(case, world) if is_uneven else 1
        jobs = case.make_jobs(proven=1, **make_job(buckets_per_group))
        results = submission.run(training.train, jobs, world_size=world)
        groups = list_groups(case.parameters(), world, buckets_per_group)
        setting = f" (buckets_per_group={buckets_per_group})"
        why_late = partial(explain_late_launches, submission, jobs, unit="group")
        for step in each_step(results.events, 2):
            expect_launches(step.launches(), groups, "reduce_scatter", setting)
            expect_complete(step, groups, "reduce_scatter", "group")
            expect_group_overlap(step.launches(), groups, setting, why_late)
    # Layer 1's gradients are ready first, so half of group 1 (layers 1 and 0) is ready before group 0 (layers 3 and 2).
    [world] = submission.worlds(2)
    case = submission.case("Reordered", world, branches=[1] * world)
    numels = [p.numel() for p in reversed(case.parameters().values())]
    ranges = compute_layout(numels, None, world)["param_ranges"]
    job = make_job(bucket_numel=ranges[7][1] - ranges[4][0])
    results = submission.run(training.train, case.make_jobs(**job), world_size=world)
    for step in each_step(results.events, 1):
        expect_late_waits(step)


@pytest.mark.points(1)
def test_steps_and_subgroups(submission):
    """Gradients stay correct with no_sync, evaluations and unused parameters, in any ready order, and in sub-groups."""

    def inspect(results, case):
        for step in each_step(results.events, 1, case.group):
            expect_ranks(step, case.group)
            if case.model == "Reordered":
                groups = list_groups(case.parameters(), len(case.group), 2)
                expect_launches(step.launches(), groups, "reduce_scatter", ordered=False)

    with replace_cause(causes.find_mixed_order):
        why = causes.suspect_lost_micro_batches
        judge = partial(judge_order, 2, "reduce_scatter", "group")
        expect_all_kinds_of_steps(submission, "Plain", make_job(2), require_halves, inspect, why, judge)
    expect_second_backward(submission, submission.worlds(2)[0], make_job(2))
    expect_zeroed(submission, make_job(2), [("optimizer, to zeros", False), ("model, to None", True)])
    expect_no_old_gradients(submission, submission.worlds(2)[0], make_job(2))
    expect_idle_rank(submission, make_job(2))
    expect_accumulated(submission, submission.worlds(2)[0], make_job(2))
    for world, gather_grads in submission.pair_worlds((2, 1), (True, False)):  # one rank has all averages, ungathered
        expect_fp32_gradients(submission, world, gather_grads)


# ---- what the checks use


def list_names(op):
    """Return the names that this torch has for a collective."""
    return [name for name in FUNCTIONS[op] if hasattr(dist, name)]


def draw_calls(rng, world, size, kinds, name=None):
    """Return the same calls for each rank, one per (operation, reduce operation, dtype), with inputs of its own.

    `size` is that of the groups. `name` is the name of the function (default: the newest that this torch has).
    """
    lengths = [rng.randint(2, 40) for _ in kinds]
    return [
        [
            {
                "function": name or list_names(op)[0],
                "op": reduce_op,
                "input": torch.randn(length * (size if op == "reduce_scatter" else 1), generator=generator).to(dtype),
                "output_numel": {"all_reduce": None, "reduce_scatter": length, "all_gather": length * size}[op],
            }
            for (op, reduce_op, dtype), length in zip(kinds, lengths, strict=True)
        ]
        for generator in draw_generators(rng, world)
    ]


def compute_result(calls, index):
    """Return what rank `index` of a group has after one call; `calls` are those of all ranks of the group."""
    inputs = [entry["input"] for entry in calls]
    if calls[0]["op"] is None:
        return torch.cat(inputs)
    reduced = REDUCED[calls[0]["op"]](inputs)
    return reduced if calls[0]["output_numel"] is None else reduced.chunk(len(inputs))[index]


def list_launches(results, rank, number):
    """Return the launches of one block of calls. Messages name the rank only, because the number is the scenario's."""
    step = Step(results.events[rank], rank, number)
    step.place = {"rank": rank}
    return step.launches()


def expect_one_launch(launched, op, count, what):
    """Expect that a block of `count` calls made one launch when it ended, and that only handle.wait() waited for it."""
    parts = f", which contains {launched[0].parts} of the tensors" if len(launched) == 1 else ""
    launched.claim(
        f"{what}, inside one coalesce block, become one launch of {count} tensors",
        [(launch.op, launch.parts) for launch in launched] == [(op, count)],
        f"the block made {{these}}{parts}",
        partial(causes.explain_calls, count),
    )
    [launch], block = launched, f"a coalesce block with {what}"
    is_early, got = launch.sync or "block" in launch.wait_phases, "the block waited for the result"
    launched.claim(f"{block} launches when it ends, without waiting", not is_early, got, causes.explain_early_wait)
    is_made, got = launch.phase == "block", "handle.wait() made the launch"
    launched.claim(f"{block} launches when it ends", is_made, got, causes.MADE_BY_WAIT)
    what, got = f"handle.wait() waits for the launch of {block}", "it did not wait for this launch"
    launched.claim(what, bool(launch.waits), got, causes.OTHER_HANDLE)


def expect_working(answers, inputs, label):
    """Expect that an all_reduce and the next block work after a block that ended with an exception."""
    after, expected = f"after a failed coalesce block with {label}, the next ", {"the result": sum(inputs)}
    alone, again = ([{"the result": answer[key]} for answer in answers] for key in ("alone", "again"))
    why = partial(causes.suspect_capturing, inputs)
    expect_equal(f"{after}all_reduce works", alone, expected, hypotheses=why)
    for rank, answer in enumerate(answers):
        failure = answer["failure"]
        At(rank).claim(f"{after}block works", failure is None, f"it raised {failure}", causes.BLOCK_LEFT_OVER)
    expect_equal(f"{after}block works", again, expected)


def flatten_into_buffer(layout, tensors):
    """Return a flat tensor that contains these tensors at the parameters' offsets, and zeros between them."""
    whole = torch.zeros(layout["numel"], dtype=tensors[0].dtype)
    for (start, end), tensor in zip(layout["param_ranges"], tensors, strict=True):
        whole[start:end] = tensor.flatten()
    return whole


def locate_shard(layout, bucket, index, size):
    """Return the slice of the buffer that is shard `index` of a bucket, for a group of this size."""
    start, end = layout["bucket_ranges"][bucket]
    length = (end - start) // size
    return slice(start + index * length, start + (index + 1) * length)


def expect_averaged_shards(results, grads, layout, buckets, group, records):
    """Expect the averages in shard i of each bucket of results[i]["grad_data"].

    Rank group[i] had the gradients `grads[i]`, and has the record `records[i]`.
    """
    size = len(group)
    own = [flatten_into_buffer(layout, tensors) for tensors in grads]
    average = sum(own) / size
    for index, rank in enumerate(group):
        actual = results[index]["grad_data"].flatten()
        At(rank).equal("the grad buffer has {} elements", actual.numel(), layout["numel"], causes.WRONG_NUMEL)

        def cut(whole, index=index):
            return {f"shard {index} of bucket {b}": whole[locate_shard(layout, b, index, size)] for b in buckets}

        is_subgroup = list(group) != list(range(size))
        why = partial(causes.suspect_shards, own, average, actual, index, cut, records[index], is_subgroup)
        what = f"after finish_grad_sync, rank r of a group of size {size} has the averages in shard r of each bucket"
        expect_equal(what, [cut(actual)], cut(average), ranks=[rank], hypotheses=why)


def expect_gathered_shards(results, params, layout, buckets, group):
    """Expect shard i of each bucket from rank group[i] after the parameter sync; its parameters were `params[i]`."""
    own = [flatten_into_buffer(layout, tensors) for tensors in params]
    whole = torch.zeros_like(own[0])
    for rank, result in zip(group, results, strict=True):
        numel = result["param_data"].numel()
        At(rank).equal("the flat tensor of the parameters has {} elements", numel, layout["numel"], causes.WRONG_NUMEL)
    for bucket in buckets:
        for index, values in enumerate(own):
            shard = locate_shard(layout, bucket, index, len(group))
            whole[shard] = values[shard]

    def cut(data):
        return {f"bucket {b} of param_data": data[slice(*layout["bucket_ranges"][b])] for b in buckets}

    options = {"ranks": group, "tolerance": 0.0}
    what, why = "each bucket is complete: its shard r comes from rank r of the group", causes.suspect_no_gather
    actual = [cut(result["param_data"]) for result in results]
    expect_equal(f"after finish_param_sync, {what}", actual, cut(whole), hypotheses=why(own, cut), **options)
    indices = [i for i, bucket in enumerate(layout["bucket_of"]) if bucket in buckets]
    what, why = "the parameters have the values in param_data", causes.suspect_no_param_views(params, indices)
    actual = [{f"parameter {i}": result["params"][i].flatten() for i in indices} for result in results]
    expected = {f"parameter {i}": whole[slice(*layout["param_ranges"][i])] for i in indices}
    expect_equal(f"after finish_param_sync, {what}", actual, expected, hypotheses=why, **options)


def expect_started(launched, groups, op, what):
    """Expect one launch for each group, made in start_{what} without waiting, and awaited in finish_{what}."""
    expect_ops(launched, (op,), f" in start_{what}")
    expect_launches(launched, groups, op, f" in start_{what}", ordered=False, is_ddp=False)
    expected, why = (
        f"start_{what} launches without waiting, and finish_{what} waits",
        partial(causes.explain_waits, what),
    )
    got = f"start_{what} waited for {{count}} of {{all}} launches"
    last = max((one.place for one in launched), default=0)  # a wait before it is in start, whatever its phase
    is_late = [not one.sync and "start" not in one.wait_phases and min([last, *one.waits]) == last for one in launched]
    launched.satisfy(expected, lambda one: is_late[launched.index(one)], why, got)
    got = f"for {{count}} of {{all}} launches, start_{what} did not launch or finish_{what} did not wait"
    launched.satisfy(expected, lambda one: one.phase == "start" and "wait" in one.wait_phases, why, got)


def expect_ops(launched, ops, setting="", is_gather_off=False):
    """Expect only launches of these kinds; `setting` is added to what is expected."""
    what = f"only {' and '.join(ops)} {'is' if len(ops) == 1 else 'are'} launched{setting}"
    why = partial(causes.explain_other_kinds, is_gather_off)
    launched.satisfy(what, lambda one: one.op in ops, why, "the step also made {these}")


def expect_launches(launched, groups, op, setting="", ordered=True, is_ddp=True):
    """Expect one launch of this kind for each group, given as (dtype, elements).

    If `ordered`, those of a dtype come in this order. `is_ddp` says that a wrapper launched, in equal steps.
    """
    of_kind = launched.where(lambda one: one.op == op)
    made = sort_by_dtype((launch.dtype, launch.numel) for launch in of_kind)
    expected = sort_by_dtype((str(dtype).removeprefix("torch."), numel) for dtype, numel, *_ in groups)
    count_groups = f"each of {len(expected)} groups" if len(expected) > 1 else "the only group"
    elements = join_names([f"{numel} {dtype}" for dtype, numel in expected], 8)
    launched.claim(
        f"one {op} is launched for {count_groups}{setting}, with {elements} elements",
        made == expected or not ordered and sorted(made) == sorted(expected),
        cause=partial(causes.explain_groups, made, expected, op, is_ddp),
    )


def sort_by_dtype(pairs):
    return sorted(pairs, key=lambda pair: pair[0])


def choose_uneven(case, size):
    """Return a number of buckets per group that leaves fewer for the last group, of four buckets or more."""
    count = len(list_groups(case.parameters(), size, 1))
    return next(number for number in range(2, count) if count % number)


def expect_late_waits(step):
    """Expect that no hook waits for the group that it launches, unless it launches the next group, too."""
    scatters = step.launches("reduce_scatter")
    for number, (launch, after) in enumerate(pairwise(scatters)):
        next_ready = min((position for position, _ in step.ready if position > launch.place), default=launch.place)
        early = [place for place, phase in zip(launch.waits, launch.wait_phases, strict=True) if phase == "backward"]
        is_early = any(place < next_ready for place in early) and after.place > next_ready
        what = "no hook waits for the group that it launches, even if half of the next group is already ready"
        step.claim(what, not is_early, f"the hook that launched group {number} waited for it", causes.GATHERED_AT_ONCE)


def expect_ranks(step, group):
    """Expect the launches of all steps on the group that trains."""
    launched = Step(step.events, step.rank, None).launches().where(in_phase("backward", "finish"))
    what = f"every collective uses the process group that CoalescedDDP received: {format_ranks(group)}"
    launched.satisfy(what, lambda one: one.ranks == group, causes.WRONG_GROUP, "{count} launches use another one")


def expect_fp32_gradients(submission, world, gather_grads):
    """Expect that gradients of bf16 parameters accumulate and are reduced in fp32, and each step starts from zero."""
    sizes = submission.rng.sample(range(3, 200), 4)
    batches = [  # for each rank, two steps of three micro-batches
        [[[torch.rand(size, generator=generator).to(BF16) for size in sizes] for _ in range(3)] for _ in range(2)]
        for generator in draw_generators(submission.rng, world)
    ]
    common = make_job(2, grad_dtype=F32) | {"sizes": sizes, "set_to_none": True, "gather_grads": gather_grads}
    jobs = PerRank(common | {"batches": own} for own in batches)
    results = submission.run(m05_grad_buffer.accumulate, jobs, world_size=world)
    for step in each_step(results.events, 1):  # reduced and gathered in the dtype of the buffer
        step.launches().have_dtype(F32)
    sums = [
        {str(i): sum(x[i].float() for own in batches for x in own[step]) / world for i in range(len(sizes))}
        for step in range(2)
    ]
    where = "" if gather_grads else " and gather_grads=False"
    for step, expected in enumerate(sums):
        for key, what, dtype in (("main_grad", "main_grad", F32), ("grad", "p.grad", BF16))[: 1 + gather_grads]:
            what = f"in step {step}, with grad_dtype=float32{where}, {what} is the average of the accumulated gradients"
            why = partial(causes.suspect_kept_gradients, expected, sums[0], dtype, world, gather_grads)
            actual = [name_tensors(result["steps"][step][key], dtype) for result in results]
            expect_equal(what, actual, name_tensors(expected, dtype), hypotheses=why)


def name_tensors(tensors, dtype):
    return {f"parameter {i}": None if tensor is None else tensor.to(dtype) for i, tensor in tensors.items()}
