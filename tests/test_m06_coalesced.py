"""Graded checks of module 6: coalesced collectives, and an all-reduce as a reduce-scatter and an all-gather."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from brigade.checks.diagnose.evidence import Evidence, find_leftover
from brigade.checks.expectations import (
    describe_gradients,
    expect,
    expect_equal,
    expect_gradients,
    expect_overlap,
    expect_restored,
    expect_silence,
    expect_start,
    expect_steps,
    expect_trained,
    expect_weights,
    explain_failures,
    format_ranks,
    join_names,
)
from brigade.checks.reference import draw_generators
from brigade.checks.verdict import CheckFailed
from brigade.events import launches, list_ready_gradients, summarize
from brigade.runner.ranks import PerRank
from helpers import training
from helpers.buffers import BUCKET_NUMEL, format_zero_grad, list_groups, require_halves
from helpers.easier import blame_visits, explain_late_launches
from helpers.odd_steps import expect_idle_rank, expect_no_old_gradients, expect_second_backward, expect_unsynced
from m05_grad_buffer import scenario as m05_grad_buffer
from m05_grad_buffer.causes import explain_lost_view
from m05_grad_buffer.expected import compute_layout
from m06_coalesced import causes as diagnosis
from m06_coalesced import scenario as m06_coalesced

SUBGROUPS = [[1, 3], [0, 2]]  # of four ranks
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


def split_ranks(world):
    """Return the groups in which the ranks of a run train: four ranks are two groups."""
    return SUBGROUPS if world == 4 else [list(range(world))]


@pytest.mark.parts("Part (a): coalesce")
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
        results = submission.run(m06_coalesced.run_blocks, jobs, world_size=world)
        for group in groups:
            for index, rank in enumerate(group):
                for number, (op, name, calls) in enumerate(blocks):
                    count = len(calls[rank])
                    what = f"{count} calls of {name} in the group of {format_ranks(group)}"
                    expect_one_launch(launches(results.events[rank], number), op, count, what, rank)
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
        ("an all_reduce and a reduce_scatter", "kinds", [("all_reduce", "SUM", F32), ("reduce_scatter", "SUM", F32)]),
        ("an all_gather and an all_reduce", "kinds", [("all_gather", None, F32), ("all_reduce", "SUM", F32)]),
        ("SUM and AVG", "reduce operations", [("all_reduce", op, F32) for op in ("SUM", "AVG")]),
        ("AVG and SUM", "reduce operations", [("reduce_scatter", op, F64) for op in ("AVG", "AVG", "SUM")]),
        ("float32 and float64", "dtypes", [("all_reduce", "SUM", dtype) for dtype in (F32, F32, F64)]),
        ("float32 and bfloat16", "dtypes", [("all_gather", None, dtype) for dtype in (F32, BF16)]),
        ("an exception from the caller", None, [("all_reduce", "SUM", F32)] * 2),
        ("a nested block of the same group", "nested", [("all_reduce", "SUM", F32)] * 2),
    ]
    calls = [draw_calls(rng, world, world, kinds) for _, _, kinds in blocks]
    after = [entry for [entry] in draw_calls(rng, world, world, [("all_reduce", "SUM", F32)])]
    jobs = PerRank(
        {"blocks": [block[rank] for block in calls], "interrupted": len(blocks) - 2, "nested": len(blocks) - 1}
        | {"after": after[rank], "labels": None}
        for rank in range(world)
    )
    results = submission.run(m06_coalesced.run_refused_blocks, jobs, world_size=world)
    for number, (label, compared, _) in enumerate(blocks):
        for rank, result in enumerate(results):
            raised, launched = result[number]["raised"], launches(results.events[rank], number, phase="block")
            if compared:
                expect(
                    raised is not None,
                    f"a coalesce block raises an exception if it contains {label}",
                    f"the block raised no exception and made {summarize(launched)}",
                    partial(diagnosis.explain_no_error, compared),
                    rank=rank,
                )
            else:
                expect(
                    result[number]["unchanged"],
                    "an exception that is raised inside a coalesce block reaches the caller unchanged",
                    f"the block raised {f'{raised} instead' if raised else 'nothing'}",
                    diagnosis.SWALLOWED,
                    rank=rank,
                )
            expect(
                not launched,
                f"a coalesce block that contains {label} raises an exception and launches nothing",
                f"the block made {summarize(launched)}",
                partial(diagnosis.explain_launch_after_error, compared),
                rank=rank,
            )
        expect_working([result[number] for result in results], [entry["input"] for entry in after], label)
    expect_equal(
        "a block still launches its calls if its caller catches the exception of a nested block",
        [{"the result": result[-2]} for result in results],
        {"the result": sum(entry["input"] for entry in after)},
        evidence=Evidence(diagnosis.OUTER_LOST),
    )
    expect_equal(
        "a block may contain a block of another group",
        [{"the sum of their results": result[-1]} for result in results],
        {"the sum of their results": 2 * sum(entry["input"] for entry in after)},
        evidence=Evidence(diagnosis.OTHER_GROUP),
    )


@pytest.mark.parts("Parts (b) to (d): the two halves of an all-reduce")
@pytest.mark.points(2)
def test_bucket_group(submission):
    """A BucketGroup averages this rank's shards of its buckets in one launch, and gathers parameters in another."""
    rng = submission.rng
    indices = [[0, 2], [1]]  # of the buckets in two groups; bucket 3, the last one, is in no group
    for world, dtype in zip(submission.worlds(2, 3, 4), (F32, F64, F32)):
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
        common = {"bucket_numel": BUCKET_NUMEL, "indices": indices, "groups": groups, "labels": [0, 1]}
        results = submission.run(
            m06_coalesced.sync_bucket_groups, PerRank(common | tensors for tensors in own), world_size=world
        )
        layout = compute_layout([value.numel() for value in own[0]["params"]], BUCKET_NUMEL, len(groups[0]))
        lengths = [sum(end - start for start, end in (layout["bucket_ranges"][i] for i in g)) for g in indices]
        for group in groups:
            group_results = [results[rank] for rank in group]
            with diagnosis.explain_wrong_buckets(results.events[group[0]], lengths):
                expect_averaged_shards(group_results, [own[rank]["grads"] for rank in group], layout, [0, 2, 1], group)
            expect_gathered_shards(group_results, [own[rank]["params"] for rank in group], layout, [0, 2, 1], group)
            for rank, result in zip(group, group_results):
                expected = [(dtype, numel) for numel in lengths]
                for step, op, what in ((0, "reduce_scatter", "grad_sync"), (1, "all_gather", "param_sync")):
                    expect_started(launches(results.events[rank], step), expected, op, what, rank)
                unused = slice(*layout["bucket_ranges"][3])
                for kind in ("grad_data", "param_data"):
                    expect(
                        torch.equal(result[kind][unused], result["before"][kind][unused]),
                        "a BucketGroup does not change buckets that are not in its bucket_indices",
                        f"the bucket_indices of the two groups are {indices[0]} and {indices[1]}, but bucket 3 of "
                        f"{kind} has changed",
                        diagnosis.WHOLE_BUFFER,
                        rank=rank,
                    )


@pytest.mark.parts("Parts (e) and (f): groups of buckets")
@pytest.mark.points(1)
@pytest.mark.needs("test_bucket_group")
def test_shards_without_gather(submission):
    """With gather_grads=False, this rank's shards are averaged, and parameters are gathered instead of gradients."""
    for world, buckets_per_group in zip(submission.worlds(2, 4), (2, 1)):
        case = submission.case("Plain", world, steps=3, dtype=F64, group=split_ranks(world)[0])
        jobs = case.make_jobs(groups=split_ranks(world), **make_job(buckets_per_group))
        results = submission.run(m06_coalesced.train_on_shards, jobs, world_size=world)
        names = list(reversed(case.parameters()))
        layout = compute_layout(
            [p.numel() for p in reversed(case.parameters().values())], BUCKET_NUMEL, len(case.group)
        )
        groups = list_groups(case.parameters(), len(case.group), buckets_per_group)
        for rank in case.group:
            expect_ranks(results.events[rank], case.group, rank)
            for step in range(3):
                launched, at = launches(results.events[rank], step), {"rank": rank, "step": step}
                gradients = [launch for launch in launched if launch.phase != "start"]
                setting = " before start_param_sync if gather_grads is False"
                expect_ops(gradients, ("reduce_scatter",), at, setting, is_gather_off=True)
                expect_launches(gradients, groups, "reduce_scatter", at, events=results.events[rank])
                parameters = [launch for launch in launched if launch.phase == "start"]
                expect_started(parameters, groups, "all_gather", "param_sync", rank, step)
                expect_waited(launched, at, results.events[rank])
        gradients = [case.gradients([rank]) for rank in case.group]
        expect_averaged_shards(
            [{"grad_data": results[rank]["grad_data"]} for rank in case.group],
            [[own[name] for name in names] for own in gradients],
            layout,
            range(len(layout["bucket_ranges"])),
            case.group,
        )
        expect_weights(results, case)


@pytest.mark.parts("Part (g): gather gradients during backward")
@pytest.mark.points(1)
def test_gradients_are_averaged(submission):
    """Replicas start equal. One reduce-scatter and one all-gather per group of buckets average the gradients."""
    cases = zip(submission.worlds(1, 2, 3, 4), ("Plain", "Buffers", "Frozen", "Tied"), (1, 2, None, 2))
    for world, model, buckets_per_group in cases:
        case = submission.case(model, world)
        results = submission.run(training.train, case.make_jobs(**make_job(buckets_per_group)), world_size=world)
        expect_start([result["start"] for result in results], case, events=results.events)
        expect_gradients(results, case)
        require_halves(results, case)


@pytest.mark.points(2)
def test_launches_and_volume(submission):
    """A step launches one reduce-scatter and one all-gather per group. Together, they send as much as an all-reduce."""
    cases = zip(submission.worlds(2, 3, 2), ("Plain", "MixedDtypes", "MixedDtypes"), (2, 1, None))
    for world, model, buckets_per_group in cases:
        case = submission.case(model, world, hidden_layers=6 if model == "Plain" else 4, steps=2)
        results = submission.run(training.train, case.make_jobs(**make_job(buckets_per_group)), world_size=world)
        groups = list_groups(case.parameters(), world, buckets_per_group)
        for rank, events in enumerate(results.events):
            for step in range(2):
                setting = f" ({model} model, buckets_per_group={buckets_per_group})"
                launched, at = launches(events, step), {"rank": rank, "step": step}
                expect_ops(launched, ("reduce_scatter", "all_gather"), at, setting)
                expect_launches(launched, groups, "reduce_scatter", at, setting, events=events)
                expect_launches(launched, groups, "all_gather", at, setting, ordered=False, events=events)
                expect_waited(launched, at, events)
        expect_gradients(results, case, tolerance=2**-6)


@pytest.mark.points(2)
def test_groups_overlap_with_backward(submission):
    """Backward launches each complete group before the next group is complete, and does not wait for it immediately."""
    for world, is_uneven in zip(submission.worlds(2, 3), (False, True)):
        case = submission.case("Plain", world, hidden_layers=6, steps=2)
        buckets_per_group = choose_uneven(case, world) if is_uneven else 1
        jobs = case.make_jobs(proven=1, **make_job(buckets_per_group))
        results = submission.run(training.train, jobs, world_size=world)
        groups = list_groups(case.parameters(), world, buckets_per_group)
        for rank, events in enumerate(results.events):
            for step in range(2):
                setting = f" (buckets_per_group={buckets_per_group})"
                at = {"rank": rank, "step": step}
                expect_launches(launches(events, step), groups, "reduce_scatter", at, setting, events=events)
                expect_complete(events, step, groups, rank)
                why_late = partial(explain_late_launches, submission, jobs, events, step, "group")
                expect_group_overlap(events, step, [names for _, _, names in groups], rank, setting, why_late)


@pytest.mark.points(1)
def test_steps_and_subgroups(submission):
    """Gradients stay correct with no_sync, evaluations and unused parameters, in any ready order, and in sub-groups."""
    for world, model in zip(submission.worlds(2, 3, 4), ("Plain", "Reordered", "Tied")):
        case = submission.case(
            model,
            world,
            steps=4 if model == "Plain" else 3,
            micro_batches=3 if model == "Plain" else 1,
            dtype=F64,
            group=split_ranks(world)[0],
            branches=[0, 3, 1][:world] if model == "Reordered" else None,
        )
        visits = training.VISITS if model == "Tied" else ()
        jobs = case.make_jobs(groups=split_ranks(world), interrupted=2, unsynced=3, visits=visits, **make_job(2))
        judge = partial(expect_steps, case, partial(require_halves, steps=3))
        with diagnosis.explain_mixed_order(), blame_visits(submission, jobs, judge):
            results = submission.run(training.train, jobs, world_size=world)
            if visits:
                judge(results)
        if model == "Plain":
            expect_silence(results.events, case.group, 3)
            expect_restored(results.events, case.group, 2)
            expect_unsynced(results, case, step=3)
        for rank in case.group:
            expect_ranks(results.events[rank], case.group, rank)
            if model == "Reordered":
                events, groups = results.events[rank], list_groups(case.parameters(), world, 2)
                expect_launches(
                    launches(events, 0),
                    groups,
                    "reduce_scatter",
                    {"rank": rank, "step": 0},
                    ordered=False,
                    events=events,
                )
                expect_complete(events, 0, groups, rank)
        hypotheses = partial(diagnosis.suspect_lost_micro_batches, case) if model == "Plain" else None
        expect_gradients(results, case, hypotheses=hypotheses)
        expect_weights(results, case)
        require_halves(results, case, steps=3)
    expect_second_backward(submission, submission.worlds(2)[0], make_job(2))
    forms = (("optimizer, to zeros", "before"), ("model, to None", "after"))
    [world] = submission.worlds(2)
    cases = [submission.case("Branches", world, steps=3, dtype=F64, branches=[1, -1][:world]) for _ in forms]
    jobs = [case.make_jobs(zero=form, late=when == "after", **make_job(2)) for case, (form, when) in zip(cases, forms)]
    for (form, when), case, results in zip(forms, cases, submission.run_each(m05_grad_buffer.train, jobs)):
        with explain_failures(results.events, partial(explain_lost_view, results)):
            expect_trained(
                f"after 3 steps with unused parameters and {format_zero_grad(form)} {when} forward, the weights equal "
                "those from training in one process",
                [result["weights"] for result in results],
                case,
            )
    expect_no_old_gradients(submission, submission.worlds(2)[0], make_job(2))
    expect_idle_rank(submission, make_job(2))
    expect_fp32_gradients(submission)


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
            for (op, reduce_op, dtype), length in zip(kinds, lengths)
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


def expect_one_launch(launched, op, count, what, rank):
    """Expect that a block of `count` calls made one launch when it ended, and that only handle.wait() waited for it."""
    expect(
        [(launch.op, launch.parts) for launch in launched] == [(op, count)],
        f"{what}, inside one coalesce block, become one launch of {count} tensors",
        f"the block made {summarize(launched)}"
        + (f", which contains {launched[0].parts} of the tensors" if len(launched) == 1 else ""),
        partial(diagnosis.explain_calls, launched, count),
        rank=rank,
    )
    [launch] = launched
    expect(
        not launch.sync and "block" not in launch.wait_phases,
        f"a coalesce block with {what} launches when it ends, without waiting",
        "the block waited for the result",
        partial(diagnosis.explain_early_wait, launch),
        rank=rank,
    )
    expect(
        launch.phase == "block",
        f"a coalesce block with {what} launches when it ends",
        "handle.wait() made the launch",
        diagnosis.MADE_BY_WAIT,
        rank=rank,
    )
    expect(
        bool(launch.waits),
        f"handle.wait() waits for the launch of a coalesce block with {what}",
        "handle.wait() did not wait for this launch",
        diagnosis.OTHER_HANDLE,
        rank=rank,
    )


def expect_working(answers, inputs, label):
    """Expect that an all_reduce and the next block work after a block that ended with an exception."""
    total = sum(inputs)
    expect_equal(
        f"after a failed coalesce block with {label}, the next all_reduce works",
        [{"the result": answer["alone"]} for answer in answers],
        {"the result": total},
        hypotheses=partial(diagnosis.suspect_capturing, inputs),
    )
    for rank, answer in enumerate(answers):
        expect(
            answer["failure"] is None,
            f"after a failed coalesce block with {label}, the next block works",
            f"the next block raised {answer['failure']}",
            diagnosis.BLOCK_LEFT_OVER,
            rank=rank,
        )
    expect_equal(
        f"after a failed coalesce block with {label}, the next block works",
        [{"the result": answer["again"]} for answer in answers],
        {"the result": total},
    )


def flatten_into_buffer(layout, tensors):
    """Return a flat tensor that contains these tensors at the parameters' offsets, and zeros between them."""
    whole = torch.zeros(layout["numel"], dtype=tensors[0].dtype)
    for (start, end), tensor in zip(layout["param_ranges"], tensors):
        whole[start:end] = tensor.flatten()
    return whole


def locate_shard(layout, bucket, index, size):
    """Return the slice of the buffer that is shard `index` of a bucket, for a group of this size."""
    start, end = layout["bucket_ranges"][bucket]
    length = (end - start) // size
    return slice(start + index * length, start + (index + 1) * length)


def expect_averaged_shards(results, grads, layout, buckets, group):
    """Expect the averages in shard i of each bucket of results[i]["grad_data"]; rank group[i] had `grads[i]`."""
    size = len(group)
    own = [flatten_into_buffer(layout, tensors) for tensors in grads]
    average = sum(own) / size
    for index, rank in enumerate(group):
        actual = results[index]["grad_data"]
        expect(
            actual.numel() == layout["numel"],
            f"the grad buffer has {layout['numel']} elements",
            f"the grad buffer has {actual.numel()} elements",
            diagnosis.WRONG_NUMEL,
            rank=rank,
        )

        def cut(whole, index=index):
            return {f"shard {index} of bucket {b}": whole[locate_shard(layout, b, index, size)] for b in buckets}

        is_subgroup = list(group) != list(range(size))
        expect_equal(
            f"after finish_grad_sync, rank r of a group of size {size} has the averages in shard r of each bucket",
            [cut(actual)],
            cut(average),
            ranks=[rank],
            hypotheses=partial(diagnosis.suspect_shards, own, average, index, cut, is_subgroup),
        )


def expect_gathered_shards(results, params, layout, buckets, group):
    """Expect shard i of each bucket from rank group[i] after the parameter sync; its parameters were `params[i]`."""
    own = [flatten_into_buffer(layout, tensors) for tensors in params]
    whole = torch.zeros_like(own[0])
    for bucket in buckets:
        for index, values in enumerate(own):
            shard = locate_shard(layout, bucket, index, len(group))
            whole[shard] = values[shard]

    def cut(data):
        return {f"bucket {b} of param_data": data[slice(*layout["bucket_ranges"][b])] for b in buckets}

    expect_equal(
        "after finish_param_sync, each bucket is complete: its shard r comes from rank r of the group",
        [cut(result["param_data"]) for result in results],
        cut(whole),
        ranks=group,
        hypotheses=partial(diagnosis.suspect_no_gather, own, cut),
        tolerance=0.0,
    )
    indices = [i for i, bucket in enumerate(layout["bucket_of"]) if bucket in buckets]
    expect_equal(
        "after finish_param_sync, the parameters have the values in param_data",
        [{f"parameter {i}": result["params"][i].flatten() for i in indices} for result in results],
        {f"parameter {i}": whole[slice(*layout["param_ranges"][i])] for i in indices},
        ranks=group,
        hypotheses=partial(diagnosis.suspect_no_param_views, params, indices),
        tolerance=0.0,
    )


def expect_started(launched, groups, op, what, rank, step=None):
    """Expect one launch for each group, made in start_{what} without waiting, and awaited in finish_{what}."""
    at = {"rank": rank, "step": step}
    expect_ops(launched, (op,), at, f" in start_{what}")
    expect_launches(launched, groups, op, at, f" in start_{what}", ordered=False)
    early = [launch for launch in launched if launch.sync or "start" in launch.wait_phases]
    late = [launch for launch in launched if launch.phase != "start" or "wait" not in launch.wait_phases]
    expect(
        not early and not late,
        f"start_{what} launches without waiting, and finish_{what} waits",
        f"start_{what} waited for {len(early)} of {len(launched)} launches"
        if early
        else f"for {len(late)} of {len(launched)} launches, start_{what} did not launch or finish_{what} did not wait",
        partial(diagnosis.explain_waits, launched, what),
        **at,
    )


def expect_ops(launched, ops, at, setting="", is_gather_off=False):
    """Expect only launches of these kinds; `at` has rank and step, and `setting` is added to what is expected."""
    others = [launch for launch in launched if launch.op not in ops]
    expect(
        not others,
        f"only {' and '.join(ops)} {'is' if len(ops) == 1 else 'are'} launched{setting}",
        f"the step also made {summarize(others)}",
        partial(diagnosis.explain_other_kinds, others, is_gather_off),
        **at,
    )


def expect_launches(launched, groups, op, at, setting="", ordered=True, events=()):
    """Expect one launch of this kind for each group, given as (dtype, elements).

    If `ordered`, those of a dtype come in this order. `events` are the rank's record, where a DDP launched.
    """
    of_kind = [launch for launch in launched if launch.op == op]
    made = sort_by_dtype((launch.dtype, launch.numel) for launch in of_kind)
    expected = sort_by_dtype((str(dtype).removeprefix("torch."), numel) for dtype, numel, *_ in groups)
    count_groups = f"each of {len(expected)} groups" if len(expected) > 1 else "the only group"
    expect(
        made == expected if ordered else sorted(made) == sorted(expected),
        f"one {op} is launched for {count_groups}{setting}, with "
        f"{join_names([f'{numel} {dtype}' for dtype, numel in expected], 8)} elements",
        f"the step made {summarize(of_kind)}"
        if of_kind or not launched
        else f"the step made no {op}, only {summarize(launched)}",
        partial(diagnosis.explain_groups, made, expected, op, events),
        **at,
    )


def sort_by_dtype(pairs):
    return sorted(pairs, key=lambda pair: pair[0])


def expect_waited(launched, at, events):
    """Expect that each launch of the step at["step"] is awaited in it, and its tensors unchanged until then."""
    forgotten = [launch for launch in launched if at["step"] not in launch.wait_steps]
    expect(
        not forgotten,
        "every handle is waited on in the step that launched it",
        f"the step did not wait for {summarize(forgotten)}",
        lambda: find_leftover(events) or diagnosis.NOT_AWAITED,
        **at,
    )
    raced = [launch for launch in launched if launch.raced]
    expect(
        not raced,
        "the tensors of a launch do not change before its handle is waited on",
        f"the tensors changed in {summarize(raced)}",
        diagnosis.RACED,
        **at,
    )


def expect_complete(events, step, groups, rank):
    """Expect each group's reduce-scatter when all its gradients are ready."""
    ready_at = {name: position for position, name in list_ready_gradients(events, step)}
    scatters = [launch for launch in launches(events, step) if launch.op == "reduce_scatter"]
    for number, (launch, (_, _, names)) in enumerate(zip(scatters, groups)):
        missing = [name for name in names if ready_at.get(name, -1) > launch.place]
        expect(
            not missing,
            "a group is launched when all gradients of all its buckets are ready",
            f"launch {number}, which should be group {number}, came before {describe_gradients(missing)} ready",
            partial(diagnosis.explain_early_launch, events, step, launch, groups),
            rank=rank,
            step=step,
        )


def choose_uneven(case, size):
    """Return a number of buckets per group that leaves fewer for the last group, of four buckets or more."""
    count = len(list_groups(case.parameters(), size, 1))
    return next(number for number in range(2, count) if count % number)


def expect_group_overlap(events, step, groups, rank, setting, why_late):
    """Expect the groups' reduce-scatters to overlap with backward; `groups` are the names of their parameters."""
    scatters = [event for event in events if event["kind"] != "launch" or event["op"] == "reduce_scatter"]
    options = {"unit": "group", "gathered": True, "why_late": why_late, "setting": setting}
    try:
        expect_overlap(scatters, step, groups, rank, **options)
    except CheckFailed as failed:
        leftover = find_leftover(events)  # also of the all-gathers, after which nothing is gathered and awaited
        raise failed.with_cause(leftover) if leftover else failed from None


def expect_ranks(events, group, rank):
    """Expect the launches of all steps on the group that trains."""
    used = [
        event["ranks"] for event in events if event["kind"] == "launch" and event["phase"] in ("backward", "finish")
    ]
    others = [ranks for ranks in used if ranks != group]
    expect(
        not others,
        f"every collective uses the process group that CoalescedDDP received: {format_ranks(group)}",
        f"for {len(others)} of {len(used)} collectives, the group contains {format_ranks(others[0] if others else [])}",
        diagnosis.WRONG_GROUP,
        rank=rank,
    )


def expect_fp32_gradients(submission):
    """Expect that gradients of bf16 parameters accumulate and are reduced in fp32, and each step starts from zero.

    Without gathered gradients, one rank has all averages.
    """
    for gather_grads, world in zip((True, False), submission.worlds(2, 1)):
        expect_fp32_steps(submission, world, gather_grads)


def expect_fp32_steps(submission, world, gather_grads):
    """Expect fp32 gradients in two steps, gathered or not."""
    sizes = submission.rng.sample(range(3, 200), 4)
    batches = [  # for each rank, two steps of three micro-batches
        [[[torch.rand(size, generator=generator).to(BF16) for size in sizes] for _ in range(3)] for _ in range(2)]
        for generator in draw_generators(submission.rng, world)
    ]
    common = make_job(2, grad_dtype=F32) | {"sizes": sizes, "set_to_none": True, "gather_grads": gather_grads}
    jobs = PerRank(common | {"batches": own} for own in batches)
    results = submission.run(m05_grad_buffer.accumulate, jobs, world_size=world)
    for rank, events in enumerate(results.events):
        launched = launches(events, 0)
        expect(
            {launch.dtype for launch in launched} <= {"float32"},
            "gradients are reduced and gathered in fp32, the dtype of the buffer",
            f"the step made {summarize(launched)}",
            rank=rank,
            step=0,
        )
    sums = [
        {str(i): sum(x[i].float() for own in batches for x in own[step]) / world for i in range(len(sizes))}
        for step in range(2)
    ]
    where = "" if gather_grads else " and gather_grads=False"
    for step, expected in enumerate(sums):
        for key, what, dtype in (("main_grad", "main_grad", F32), ("grad", "p.grad", BF16))[: 1 + gather_grads]:
            expect_equal(
                f"in step {step}, with grad_dtype=float32{where}, {what} is the average of the accumulated gradients",
                [name_tensors(result["steps"][step][key], dtype) for result in results],
                name_tensors(expected, dtype),
                hypotheses=partial(diagnosis.suspect_kept_gradients, expected, sums[0], dtype, world, gather_grads),
            )


def name_tensors(tensors, dtype):
    return {f"parameter {i}": None if tensor is None else tensor.to(dtype) for i, tensor in tensors.items()}
