"""Graded checks of module 6: coalesced collectives, and an all-reduce as a reduce-scatter and an all-gather."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from test_m05_grad_buffer import BUCKET_NUMEL, planned

from brigade.checks.expectations import (
    expect,
    expect_equal,
    expect_gradients,
    expect_overlap,
    expect_restored,
    expect_silence,
    expect_start,
    expect_trained,
    expect_weights,
    explain_failures,
    join_names,
    overlaps,
    require_launches,
)
from brigade.events import launches, ready, summary
from brigade.runner.ranks import PerRank
from diagnosis import m06_coalesced as diagnosis
from diagnosis.easier import explain_late_launches
from diagnosis.m05_grad_buffer import no_view
from scenarios import m05_grad_buffer, m06_coalesced, training

SUBGROUPS = [[1, 3], [0, 2]]  # of four ranks
FUNCTIONS = {  # public names; torch 2.13 renamed two, and keeps the old ones for a while
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


def job(buckets_per_group=1, **arguments):
    """What ranks are told of the wrapper."""
    arguments = {"bucket_numel": BUCKET_NUMEL, "buckets_per_group": buckets_per_group} | arguments
    return {"package": "m06_coalesced", "wrapper": "CoalescedDDP", "arguments": arguments}


def subgroups(world):
    """The groups in which the ranks of a run train: four ranks are two groups."""
    return SUBGROUPS if world == 4 else [list(range(world))]


@pytest.mark.points(1)
def test_coalesce_is_one_launch(submission):
    """The collectives called inside coalesce are one launch when the block ends, complete after handle.wait()."""
    kinds = [("all_reduce", "SUM", F32), ("all_reduce", "MAX", F64), ("reduce_scatter", "AVG", F32)]
    kinds.append(("all_gather", None, BF16))
    for world in submission.worlds(2, 4):
        groups = subgroups(world)
        blocks = []
        for kind in kinds:
            for name in names_of(kind[0]):
                several = [kind] * submission.rng.randint(2, 5)
                blocks.append((kind[0], name, draw_calls(submission.rng, world, len(groups[0]), several, name)))
        told = PerRank({"groups": groups, "blocks": [calls[r] for _, _, calls in blocks]} for r in range(world))
        results = submission.run(m06_coalesced.coalesced, told, world_size=world)
        for group in groups:
            for place, rank in enumerate(group):
                for number, (op, name, calls) in enumerate(blocks):
                    count = len(calls[rank])
                    where = f"rank {rank}, {count} calls of {name} in the group of ranks {join_names(group)}"
                    expect_one_launch(launches(results.events[rank], number), op, count, where)
                    expect_equal(
                        f"after handle.wait() each of {count} coalesced calls of {name} has its result",
                        [{f"call {i}": tensor for i, tensor in enumerate(results[rank][number])}],
                        {f"call {i}": result_of([calls[r][i] for r in group], place) for i in range(count)},
                        ranks=[rank],
                    )
                expect_kernels(results.events[rank], len(blocks), f"rank {rank}")


@pytest.mark.points(2)
def test_coalesce_refuses_mixtures(submission):
    """Mixed kinds, reduce ops or dtypes, and nested blocks, raise and launch nothing; then collectives work again."""
    rng = submission.rng
    [world] = submission.worlds(2)
    blocks = [  # what raises, what has to be compared for that, the calls
        ("an all_reduce and a reduce_scatter", "kinds", [("all_reduce", "SUM", F32), ("reduce_scatter", "SUM", F32)]),
        ("an all_gather and an all_reduce", "kinds", [("all_gather", None, F32), ("all_reduce", "SUM", F32)]),
        ("SUM and AVG", "reduce operations", [("all_reduce", op, F32) for op in ("SUM", "AVG")]),
        ("AVG and SUM", "reduce operations", [("reduce_scatter", op, F64) for op in ("AVG", "AVG", "SUM")]),
        ("float32 and float64", "dtypes", [("all_reduce", "SUM", dtype) for dtype in (F32, F32, F64)]),
        ("float32 and bfloat16", "dtypes", [("all_gather", None, dtype) for dtype in (F32, BF16)]),
        ("an exception of the caller's", None, [("all_reduce", "SUM", F32)] * 2),
        ("a block of the same group", "nested", [("all_reduce", "SUM", F32)] * 2),
    ]
    calls = [draw_calls(rng, world, world, kinds) for _, _, kinds in blocks]
    after = [entry for [entry] in draw_calls(rng, world, world, [("all_reduce", "SUM", F32)])]
    told = PerRank(
        {"blocks": [mine[rank] for mine in calls], "interrupted": len(blocks) - 2, "nested": len(blocks) - 1}
        | {"after": after[rank]}
        for rank in range(world)
    )
    results = submission.run(m06_coalesced.refused, told, world_size=world)
    for number, (label, compared, _) in enumerate(blocks):
        for rank, result in enumerate(results):
            raised, found = result[number]["raised"], launches(results.events[rank], number, phase="block")
            if compared:
                expect(
                    raised is not None,
                    f"{label} in one block of coalesce raise an exception",
                    f"nothing was raised; {summary(found)}",
                    partial(diagnosis.not_refused, compared),
                    rank=rank,
                )
            else:
                expect(
                    result[number]["unchanged"],
                    "an exception that is raised inside a block comes out of it, the same one",
                    f"{f'a {raised}' if raised else 'nothing'} came out",
                    diagnosis.SWALLOWED,
                    rank=rank,
                )
            expect(
                not found,
                f"where a block of coalesce ends with an exception ({label}), nothing is launched",
                summary(found),
                partial(diagnosis.launched_though_refused, compared),
                rank=rank,
            )
        expect_working([result[number] for result in results], [entry["input"] for entry in after], label)


@pytest.mark.points(2)
def test_bucket_group(submission):
    """A BucketGroup averages the own shards of its buckets in one launch, and gathers their parameters in another."""
    rng = submission.rng
    indices = [[0, 2], [1]]  # two groups, of four buckets: the last one is in none
    for world, dtype in zip(submission.worlds(2, 3, 4), (F32, F64, F32)):
        groups = subgroups(world)
        shapes = [
            shape for _ in range(4) for shape in ((rng.randint(3, 60),), (rng.randint(15, 20), rng.randint(10, 30)))
        ]
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        own = [
            {
                kind: [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]
                for kind in ("params", "grads")
            }
            for _ in range(world)
        ]
        common = {"bucket_numel": BUCKET_NUMEL, "indices": indices, "groups": groups}
        results = submission.run(
            m06_coalesced.bucket_groups, PerRank(common | tensors for tensors in own), world_size=world
        )
        layout = planned([value.numel() for value in own[0]["params"]], BUCKET_NUMEL, len(groups[0]))
        lengths = [sum(end - start for start, end in (layout["bucket_ranges"][i] for i in g)) for g in indices]
        for group in groups:
            mine = [results[rank] for rank in group]
            expect_averaged_shards(mine, [own[rank]["grads"] for rank in group], layout, [0, 2, 1], group)
            expect_gathered_shards(mine, [own[rank]["params"] for rank in group], layout, [0, 2, 1], group)
            for rank, result in zip(group, mine):
                found = launches(results.events[rank], 0)
                expect_started(found, [(dtype, n) for n in lengths], "reduce_scatter", "grad_sync", f"rank {rank}")
                found = launches(results.events[rank], 1)
                expect_started(found, [(dtype, n) for n in lengths], "all_gather", "param_sync", f"rank {rank}")
                left = slice(*layout["bucket_ranges"][3])
                for kind in ("grad_data", "param_data"):
                    expect(
                        torch.equal(result[kind][left], result["before"][kind][left]),
                        "a BucketGroup leaves alone the buckets that are not in its bucket_indices",
                        f"bucket_indices were {indices}, and bucket 3 of {kind} has changed",
                        diagnosis.WHOLE_BUFFER,
                        rank=rank,
                    )


@pytest.mark.points(1)
def test_gradients_are_averaged(submission):
    """Replicas start equal, buffers included; a reduce-scatter and an all-gather per group average the gradients."""
    cases = zip(submission.worlds(1, 2, 3, 4), ("Plain", "Buffers", "Frozen", "Tied"), (1, 2, None, 2))
    for world, model, buckets_per_group in cases:
        case = submission.case(model, world)
        results = submission.run(training.train, case.make_jobs(**job(buckets_per_group)), world_size=world)
        expect_start([result["start"] for result in results], case)
        expect_gradients(results, case)
        require_halves(results, case)


@pytest.mark.points(2)
def test_launches_and_volume(submission):
    """A step is one reduce-scatter and one all-gather for each group: together the bytes of one all-reduce."""
    cases = zip(submission.worlds(2, 3, 2), ("Plain", "MixedDtypes", "MixedDtypes"), (2, 1, None))
    for world, model, buckets_per_group in cases:
        case = submission.case(model, world, hidden_layers=6 if model == "Plain" else 4, steps=2)
        results = submission.run(training.train, case.make_jobs(**job(buckets_per_group)), world_size=world)
        groups = groups_of(case, world, buckets_per_group)
        for rank, events in enumerate(results.events):
            for step in range(2):
                where = f"rank {rank}, step {step} ({model} model, buckets_per_group={buckets_per_group})"
                found = launches(events, step)
                expect_ops(found, ("reduce_scatter", "all_gather"), where)
                expect_launches(found, groups, "reduce_scatter", where, events=events)
                expect_launches(found, groups, "all_gather", where, ordered=False, events=events)
                expect_waited(found, step, where)
        expect_gradients(results, case, tolerance=2**-6)


@pytest.mark.points(2)
def test_groups_overlap_with_backward(submission):
    """A group is launched when its last bucket is ready, before the next group is; backward does not stop for it."""
    for world, is_uneven in zip(submission.worlds(2, 3), (False, True)):
        case = submission.case("Plain", world, hidden_layers=6, steps=2)
        buckets_per_group = uneven(case, world) if is_uneven else 1
        told = case.make_jobs(**job(buckets_per_group))
        results = submission.run(training.train, told, world_size=world)
        groups = groups_of(case, world, buckets_per_group)
        for rank, events in enumerate(results.events):
            for step in range(2):
                where = f"rank {rank}, step {step} (buckets_per_group={buckets_per_group})"
                expect_launches(launches(events, step), groups, "reduce_scatter", where, events=events)
                expect_complete(events, step, groups, where)
                why_late = partial(explain_late_launches, submission, told, events, step, "group")
                expect_group_overlap(events, step, [names for _, _, names in groups], where, why_late)


@pytest.mark.points(1)
def test_shards_without_gather(submission):
    """With gather_grads=False the own shards are averages; a step on them, and the parameters travel instead."""
    for world, buckets_per_group in zip(submission.worlds(2, 4), (2, 1)):
        case = submission.case("Plain", world, steps=3, dtype=F64, group=subgroups(world)[0])
        told = case.make_jobs(groups=subgroups(world), **job(buckets_per_group))
        results = submission.run(m06_coalesced.train_on_shards, told, world_size=world)
        names = list(reversed(case.parameters()))
        layout = planned([p.numel() for p in reversed(case.parameters().values())], BUCKET_NUMEL, len(case.group))
        groups = groups_of(case, len(case.group), buckets_per_group)
        for rank in case.group:
            expect_ranks(results.events[rank], case.group, rank)
            for step in range(3):
                where = f"rank {rank}, step {step}"
                found = launches(results.events[rank], step)
                gradients = [launch for launch in found if launch.phase != "start"]
                expect_ops(gradients, ("reduce_scatter",), f"{where}, with gather_grads = False")
                expect_launches(gradients, groups, "reduce_scatter", where, events=results.events[rank])
                parameters = [launch for launch in found if launch.phase == "start"]
                expect_started(parameters, groups, "all_gather", "param_sync", where)
                expect_waited(found, step, where)
        gradients = [case.gradients([rank]) for rank in case.group]
        expect_averaged_shards(
            [{"grad_data": results[rank]["grad_data"]} for rank in case.group],
            [[own[name] for name in names] for own in gradients],
            layout,
            range(len(layout["bucket_ranges"])),
            case.group,
        )
        expect_weights(results, case)


@pytest.mark.points(1)
def test_steps_and_subgroups(submission):
    """Steps are right with (interrupted) no_sync, other ready orders, subgroups, unused parameters, fp32 gradients."""
    for world, model in zip(submission.worlds(2, 3, 4), ("Plain", "Reordered", "Tied")):
        case = submission.case(
            model,
            world,
            steps=3,
            micro_batches=3 if model == "Plain" else 1,
            dtype=F64,
            group=subgroups(world)[0],
            branches=[0, 3, 1][:world] if model == "Reordered" else None,
        )
        told = case.make_jobs(groups=subgroups(world), interrupted=1 if model == "Plain" else None, **job(2))
        results = submission.run(training.train, told, world_size=world)
        if model == "Plain":
            expect_silence(results.events, case.group, 3)
            expect_restored(results.events, case.group, 1)
        for rank in case.group:
            expect_ranks(results.events[rank], case.group, rank)
            if model == "Reordered":
                events, groups = results.events[rank], groups_of(case, world, 2)
                expect_launches(launches(events, 0), groups, "reduce_scatter", f"rank {rank}", False, events)
                expect_complete(events, 0, groups, f"rank {rank}")
        hypotheses = partial(diagnosis.one_micro_batch, case) if model == "Plain" else None
        expect_gradients(results, case, hypotheses=hypotheses)
        expect_weights(results, case)
        require_halves(results, case, steps=3)
    forms = (("optimizer, to zeros", "before"), ("model, to None", "after"))
    for world, (form, when) in zip(submission.worlds(2, 2), forms):
        case = submission.case("Branches", world, steps=3, dtype=F64, branches=[1, -1][:world])
        told = case.make_jobs(zero=form, late=when == "after", **job(2))
        results = submission.run(m05_grad_buffer.train, told, world_size=world)
        with explain_failures(results.events, partial(no_view, results)):
            expect_trained(
                f"weights after 3 steps with unused parameters and zero_grad ({form}) {when} forward",
                [result["weights"] for result in results],
                case,
            )
    expect_fp32_gradients(submission)


# ---- what the checks use


def names_of(op):
    """The names that this torch has for a collective."""
    return [name for name in FUNCTIONS[op] if hasattr(dist, name)]


def draw_calls(rng, world, size, kinds, name=None):
    """For each rank the same calls, one for each (operation, reduce operation, dtype), with inputs of its own.

    `size` is that of the groups, `name` the function's, by default the newest that this torch has.
    """
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    lengths = [rng.randint(2, 40) for _ in kinds]
    return [
        [
            {
                "function": name or names_of(op)[0],
                "op": reduce_op,
                "input": torch.randn(length * (size if op == "reduce_scatter" else 1), generator=generator).to(dtype),
                "output_numel": {"all_reduce": None, "reduce_scatter": length, "all_gather": length * size}[op],
            }
            for (op, reduce_op, dtype), length in zip(kinds, lengths)
        ]
        for _ in range(world)
    ]


def result_of(calls, place):
    """What rank `place` of a group has after one call; `calls` are those of all ranks of the group."""
    inputs = [entry["input"] for entry in calls]
    if calls[0]["op"] is None:
        return torch.cat(inputs)
    reduced = REDUCED[calls[0]["op"]](inputs)
    return reduced if calls[0]["output_numel"] is None else reduced.chunk(len(inputs))[place]


def expect_kernels(events, blocks, where):
    """On GPUs, where events say what NCCL launched: so many blocks of coalesced calls were as many kernels."""
    for event in events:
        if event["kind"] == "kernels" and event["counts"] is not None:
            counts = event["counts"]
            expect(
                sum(counts.values()) == blocks,
                f"on the GPU {blocks} blocks of coalesced calls are {blocks} kernels of NCCL",
                f"{where}: {join_names([f'{count} {name}' for name, count in counts.items()], 8) or 'none'}",
                diagnosis.ONE_BY_ONE,
            )


def expect_one_launch(found, op, count, where):
    """A block of `count` calls made one launch, when it ended, and handle.wait() was the first to wait for it."""
    expect(
        [(launch.op, launch.parts) for launch in found] == [(op, count)],
        f"{count} calls of one collective in a block of coalesce are one launch of {count} tensors",
        f"{where}: {summary(found)}" + (f", with {found[0].parts} tensors" if len(found) == 1 else ""),
        partial(diagnosis.not_one_launch, found),
    )
    [launch] = found
    early = launch.sync or "block" in launch.wait_phases
    expect(not early, "the end of the block launches and goes on", f"{where}: it waited", diagnosis.SYNCHRONOUS)
    expect(launch.phase == "block", "the launch is made when the block ends", f"{where}: it was made by handle.wait()")
    expect(
        bool(launch.waits),
        "handle.wait() waits for the launch",
        f"{where}: it did not",
        diagnosis.OTHER_HANDLE,
    )


def expect_working(answers, inputs, label):
    """After a block that ended with an exception, an all_reduce works, and so does the next block."""
    whole = sum(inputs)
    expect_equal(
        f"after a block of coalesce that ended with an exception ({label}), the next all_reduce works",
        [{"its result": answer["alone"]} for answer in answers],
        {"its result": whole},
        hypotheses=partial(diagnosis.still_capturing, inputs),
    )
    for rank, answer in enumerate(answers):
        expect(
            answer["failure"] is None,
            f"after a block of coalesce that ended with an exception ({label}), the next block works",
            f"it raised {answer['failure']}",
            diagnosis.BLOCK_LEFT_OVER,
            rank=rank,
        )
    expect_equal(
        f"after a block of coalesce that ended with an exception ({label}), the next block works",
        [{"its result": answer["again"]} for answer in answers],
        {"its result": whole},
    )


def flat(layout, tensors):
    """A flat tensor with these in the parameters' places, zeros between them."""
    whole = torch.zeros(layout["numel"], dtype=tensors[0].dtype)
    for (start, end), tensor in zip(layout["param_ranges"], tensors):
        whole[start:end] = tensor.flatten()
    return whole


def shard_of(layout, bucket, place, size):
    """Where shard `place` of a bucket lies in the buffer, for a group of this size."""
    start, end = layout["bucket_ranges"][bucket]
    length = (end - start) // size
    return slice(start + place * length, start + (place + 1) * length)


def expect_averaged_shards(results, grads, layout, buckets, group):
    """Rank group[i] has the averages in shard i of each bucket of results[i]["grad_data"]. `grads[i]` were its own."""
    size = len(group)
    own = [flat(layout, tensors) for tensors in grads]
    average = sum(own) / size
    for place, rank in enumerate(group):
        found = results[place]["grad_data"]
        expect_numel(found, layout, rank)

        def cut(whole, place=place):
            return {f"shard {place} of bucket {b}": whole[shard_of(layout, b, place, size)] for b in buckets}

        expect_equal(
            "after finish_grad_sync rank r of a group has the averages in the r-th of "
            f"{size} equal, contiguous shards of each bucket",
            [cut(found)],
            cut(average),
            ranks=[rank],
            hypotheses=partial(diagnosis.own_shards, own, average, place, cut),
        )


def expect_numel(found, layout, rank):
    expect(
        found.numel() == layout["numel"],
        f"the buffer has {layout['numel']} elements",
        f"it has {found.numel()}",
        diagnosis.WRONG_NUMEL,
        rank=rank,
    )


def expect_gathered_shards(results, params, layout, buckets, group):
    """After the parameter sync the buckets have shard i from rank group[i], whose parameters were `params[i]`."""
    own = [flat(layout, tensors) for tensors in params]
    whole = torch.zeros_like(own[0])
    for bucket in buckets:
        for place, values in enumerate(own):
            shard = shard_of(layout, bucket, place, len(group))
            whole[shard] = values[shard]

    def cut(data):
        return {f"bucket {b} of param_data": data[slice(*layout["bucket_ranges"][b])] for b in buckets}

    expect_equal(
        "after finish_param_sync each bucket is complete: its shard r is what rank r of the group had there",
        [cut(result["param_data"]) for result in results],
        cut(whole),
        ranks=group,
        hypotheses=partial(diagnosis.not_gathered, own, cut),
        tolerance=0.0,
    )
    members = [i for i, bucket in enumerate(layout["bucket_of"]) if bucket in buckets]
    expect_equal(
        "after finish_param_sync the parameters are what param_data holds",
        [{f"parameter {i}": result["params"][i].flatten() for i in members} for result in results],
        {f"parameter {i}": whole[slice(*layout["param_ranges"][i])] for i in members},
        ranks=group,
        hypotheses=partial(diagnosis.no_param_views, params, members),
        tolerance=0.0,
    )


def expect_started(found, groups, op, what, where):
    """One launch for each group, made in start_... without waiting, and waited for in finish_..."""
    expect_ops(found, (op,), f"{where}, start_{what}")
    expect_launches(found, groups, op, f"{where}, start_{what}", ordered=False)
    early = [launch for launch in found if launch.sync or "start" in launch.wait_phases]
    late = [launch for launch in found if launch.phase != "start" or "wait" not in launch.wait_phases]
    expect(
        not early and not late,
        f"start_{what} launches and goes on, and finish_{what} waits",
        f"{where}: start_{what} waited for {len(early)} of {len(found)} launches; {len(late)} were launched later, "
        "or not waited for in the finish",
        partial(diagnosis.waits_at_once, found),
    )


def expect_ops(found, ops, where):
    """The launches are of these kinds."""
    others = [launch for launch in found if launch.op not in ops]
    expect(
        not others,
        f"nothing is launched but {' and '.join(ops)}",
        f"{where}: also {summary(others)}",
        partial(diagnosis.other_kinds, others, ops),
    )


def expect_launches(found, groups, op, where, ordered=True, events=()):
    """One launch of this kind for each group, given as (dtype, elements); those of a dtype in order if `ordered`.

    `events` are the rank's record, where a DDP launched.
    """
    mine = [launch for launch in found if launch.op == op]
    made = by_dtype((launch.dtype, launch.numel) for launch in mine)
    wanted = by_dtype((str(dtype).removeprefix("torch."), numel) for dtype, numel, *_ in groups)
    expect(
        made == wanted if ordered else sorted(made) == sorted(wanted),
        f"one {op} for each of {len(wanted)} groups: {join_names([f'{numel} {dtype}' for dtype, numel in wanted], 8)}",
        f"{where}: {summary(mine)}",
        partial(diagnosis.not_one_for_each_group, made, wanted, op, events),
    )


def by_dtype(pairs):
    return sorted(pairs, key=lambda pair: pair[0])


def expect_waited(found, step, where):
    """Each launch of the step is waited for in it, and left alone until then."""
    forgotten = [launch for launch in found if step not in launch.wait_steps]
    expect(
        not forgotten,
        "every launch of a step is waited for in that step",
        f"{where}: not so {summary(forgotten)}",
        diagnosis.NOT_AWAITED,
    )
    raced = [launch for launch in found if launch.raced]
    expect(
        not raced,
        "what was launched is left alone until its handle was waited on",
        f"{where}: changed in between were the tensors of {summary(raced)}",
        diagnosis.RACED,
    )


def groups_of(case, size, buckets_per_group):
    """The groups as the rules of modules 5 and 6 have them: (dtype, elements, names of parameters), by dtype."""
    trainable = [(name, p) for name, p in reversed(case.parameters().items()) if p.requires_grad]
    groups = []
    for dtype in dict.fromkeys(p.dtype for _, p in trainable):
        named = [(name, p.numel()) for name, p in trainable if p.dtype == dtype]
        layout = planned([numel for _, numel in named], BUCKET_NUMEL, size)
        ranges = layout["bucket_ranges"]
        length = buckets_per_group or len(ranges)
        for first in range(0, len(ranges), length):
            members = [name for (name, _), b in zip(named, layout["bucket_of"]) if first <= b < first + length]
            groups.append((dtype, sum(end - start for start, end in ranges[first : first + length]), members))
    return groups


def require_halves(results, case, steps=1):
    """The numbers count only with reduce_scatters, launched asynchronously while backward runs, and all_gathers."""

    def accepts(found):
        return {launch.op for launch in found} == {"reduce_scatter", "all_gather"} and all(
            overlaps(launch) for launch in found if launch.op == "reduce_scatter"
        )

    kind = "asynchronous reduce_scatters, launched while backward runs, and all_gathers"
    require_launches(results.events, case.group, kind, accepts, steps)


def expect_complete(events, step, groups, where):
    """Each group's reduce-scatter is launched when all its gradients are ready."""
    places = {name: place for place, name in ready(events, step)}
    scatters = [launch for launch in launches(events, step) if launch.op == "reduce_scatter"]
    for number, (launch, (_, _, names)) in enumerate(zip(scatters, groups)):
        missing = [name for name in names if places.get(name, -1) > launch.place]
        expect(
            not missing,
            "a group is launched when all gradients of all its buckets are ready",
            f"{where}: group {number} was launched when {join_names(missing)} were not ready",
            diagnosis.TOO_EARLY,
        )


def uneven(case, size):
    """A number of buckets per group that leaves fewer for the last group; the case has four buckets or more."""
    count = len(groups_of(case, size, 1))
    return next(number for number in range(2, count) if count % number)


def expect_group_overlap(events, step, groups, where, why_late):
    """The reduce-scatters of the groups (the names of their parameters) overlap with backward as buckets have to."""
    scatters = [event for event in events if event["kind"] != "launch" or event["op"] == "reduce_scatter"]
    expect_overlap(scatters, step, groups, where, unit="group", gathered=True, why_late=why_late)


def expect_ranks(events, group, rank):
    """The steps' launches are on the group that trains."""
    found = [
        event["ranks"] for event in events if event["kind"] == "launch" and event["phase"] in ("backward", "finish")
    ]
    wrong = [ranks for ranks in found if ranks != group]
    expect(
        not wrong,
        f"on rank {rank} collectives run on the process group of CoalescedDDP, ranks {join_names(group)}",
        f"{len(wrong)} of {len(found)} are on the group of ranks {join_names(wrong[0] if wrong else [])}",
        diagnosis.WRONG_GROUP,
    )


def expect_fp32_gradients(submission):
    """Gradients of bf16 parameters accumulate in main_grad and travel in fp32; each step starts anew."""
    [world] = submission.worlds(2)
    generator = torch.Generator().manual_seed(submission.rng.randrange(2**31))
    sizes = submission.rng.sample(range(3, 200), 4)
    batches = [  # of each rank: two steps of three micro-batches
        [[[torch.rand(size, generator=generator).to(BF16) for size in sizes] for _ in range(3)] for _ in range(2)]
        for _ in range(world)
    ]
    common = job(2, grad_dtype=F32) | {"sizes": sizes, "set_to_none": True}
    told = PerRank(common | {"batches": own} for own in batches)
    results = submission.run(m05_grad_buffer.accumulate, told, world_size=world)
    for rank, events in enumerate(results.events):
        found = launches(events, 0)
        dtypes = {launch.dtype for launch in found}
        expect(
            dtypes <= {"float32"}, "gradients travel in fp32, the dtype of the buffer", f"{summary(found)}", rank=rank
        )
    sums = [
        {str(i): sum(x[i].float() for own in batches for x in own[step]) / world for i in range(len(sizes))}
        for step in range(2)
    ]
    for step, truth in enumerate(sums):
        for key, what, dtype in (("main_grad", "main_grad", F32), ("grad", "p.grad", BF16)):
            expect_equal(
                f"with grad_dtype=float32, after the finish of step {step}, {what} is the average of what accumulated",
                [named(result["steps"][step][key], dtype) for result in results],
                named(truth, dtype),
                hypotheses=partial(diagnosis.kept_gradients, truth, sums[0], dtype, world),
            )


def named(tensors, dtype):
    return {f"parameter {i}": tensor.to(dtype) for i, tensor in tensors.items()}
