"""Graded checks of module 4: buckets."""

from collections import Counter
from functools import partial

import pytest
import torch

from brigade.checks.expectations import (
    expect,
    expect_gradients,
    expect_overlap,
    expect_restored,
    expect_silence,
    expect_start,
    expect_weights,
    overlaps,
    require_launches,
)
from brigade.events import launches, ready, summary
from diagnosis import m04_bucketed_ddp as diagnosis
from diagnosis.easier import explain_late_launches
from scenarios import m04_bucketed_ddp, training

CAP_BYTES = 600  # of the buckets in the checks below: a few parameters each
JOB = {"package": "m04_bucketed_ddp", "wrapper": "BucketedDDP", "arguments": {"bucket_cap_mb": CAP_BYTES / 2**20}}
XL = {1: 435, 10: 339, 100: 98, 1000: 8}  # buckets of the XL model, by cap in MiB


@pytest.mark.points(3)
def test_bucket_rule(submission):
    """plan_buckets follows the rule: reverse order, closed before the cap is exceeded, one dtype per bucket."""
    rng = submission.rng
    cases = [
        {"numels": [25, 25, 50, 50], "dtypes": [torch.float32] * 4, "cap_bytes": 400},  # fits exactly
        {"numels": [10, 500, 10, 10], "dtypes": [torch.float32] * 4, "cap_bytes": 100},  # one is larger than the cap
        {"numels": [40], "dtypes": [torch.float32], "cap_bytes": 100},
        {"numels": [], "dtypes": [], "cap_bytes": 100},
    ]
    for _ in range(60):
        dtypes = rng.choice([[torch.float32], [torch.bfloat16], [torch.float32, torch.bfloat16]])
        numels = [rng.randint(1, 60) for _ in range(rng.randint(1, 20))]
        drawn = [rng.choice(dtypes) for _ in numels]
        cases.append({"numels": numels, "dtypes": drawn, "cap_bytes": rng.randint(4, 400)})
    [answers] = submission.run(m04_bucketed_ddp.plan, cases, world_size=1)
    for case, buckets in zip(cases, answers):
        expect_buckets(case, buckets if case["numels"] else [bucket for bucket in buckets if bucket])
    [counts] = submission.run(m04_bucketed_ddp.plan_model, "xl", list(XL), world_size=1)
    for (cap, expected), count in zip(XL.items(), counts):
        expect(
            count == expected,
            f"the XL model has {expected} buckets at a cap of {cap} MiB",
            f"{count} buckets",
            partial(diagnosis.wrong_count, cap, count),
        )


@pytest.mark.points(2)
def test_gradients_are_averaged(submission):
    """Replicas start equal, buffers included; one all-reduce per bucket, of one dtype, averages every gradient."""
    for world, model in zip(submission.worlds(1, 2, 3, 4), ("Plain", "Buffers", "Frozen", "Tied")):
        case = submission.case(model, world)
        with diagnosis.plan_suspected(submission, case, CAP_BYTES):
            results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
            expect_start([result["start"] for result in results], case)
            expect_gradients(results, case)
        require_buckets(results, case)
    # All parameters of a dtype are neighbours and share a bucket of the default size, wherever a bucket is closed.
    [world] = submission.worlds(2)
    case = submission.case("MixedDtypes", world)
    with diagnosis.plan_suspected(submission, case, CAP_BYTES):
        results = submission.run(training.train, case.make_jobs(**JOB | {"arguments": {}}), world_size=world)
        expect_gradients(results, case, tolerance=2**-6)
    expect_dtypes(results.events, case)
    require_buckets(results, case, cap=25 * 2**20)


@pytest.mark.points(3)
def test_buckets_overlap_with_backward(submission):
    """Each bucket is launched once, asynchronously, before the next one is complete; nothing waits in backward."""
    for world in submission.worlds(2, 3):
        case = sharing_case(submission, world)
        jobs = case.make_jobs(**JOB)
        results = submission.run(training.train, jobs, world_size=world)
        buckets = buckets_of(case)
        expected = numels_of(case, buckets)
        for rank, events in enumerate(results.events):
            for step in range(2):
                where = f"rank {rank}, step {step}"
                found = launches(events, step)
                expect(
                    [launch.numel for launch in found] == expected and all(x.op == "all_reduce" for x in found),
                    f"one all_reduce for each of the {len(expected)} buckets, in their order: {listed(expected)}",
                    f"{where}: {summary(found)}",
                    partial(diagnosis.wrong_launches, submission, case, buckets, CAP_BYTES, events, step),
                )
                why_late = partial(explain_late_launches, submission, jobs, events, step)
                expect_overlap(events, step, buckets, where, why_late=why_late)


@pytest.mark.points(3)
def test_launch_order_does_not_depend_on_ready_order(submission):
    """Where gradients become ready in another order on each rank, all ranks launch the buckets in the same order."""
    for world in submission.worlds(2, 3, 4):
        case = submission.case("Reordered", world, steps=2, branches=list(range(world)))
        jobs = case.make_jobs(**JOB)
        results = submission.run(training.train, jobs, world_size=world)
        buckets = buckets_of(case)
        expected = numels_of(case, buckets)
        for rank, events in enumerate(results.events):
            for step in range(2):
                found = launches(events, step)
                expect(
                    [launch.numel for launch in found] == expected,
                    f"buckets are launched in their order on every rank, with {listed(expected)} elements",
                    summary(found),
                    partial(diagnosis.wrong_launches, submission, case, buckets, CAP_BYTES, events, step),
                    rank=rank,
                    step=step,
                )
                order = ready(events, step)
                turn = 0  # the place in the record from which on a bucket and all in front of it are complete
                for number, (bucket, launch) in enumerate(zip(buckets, found)):
                    turn = max([turn, *(place for place, name in order if name in bucket)])
                    late = [name for place, name in order if turn < place < launch.place]
                    expect(
                        len(late) < 2,
                        f"bucket {number} is launched when it and those in front of it are complete",
                        f"{len(late)} more gradients became ready first",
                        partial(diagnosis.not_at_once, submission, jobs, events, step),
                        rank=rank,
                        step=step,
                    )
        expect_gradients(results, case)


@pytest.mark.points(2)
def test_unused_parameters(submission):
    """A bucket with a parameter that is unused on some rank, or on all, still completes, in every step."""
    for world in submission.worlds(2, 3):
        case = submission.case(
            "Branches", world, branches=[1, -1, 0][:world], steps=3, dtype=torch.float64, optimizer="adam"
        )
        with diagnosis.plan_suspected(submission, case, CAP_BYTES):
            results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
            expect_gradients(results, case, "gradients are the average, where ranks use different layers")
        counts = [[len(launches(events, step)) for step in range(3)] for events in results.events]
        buckets = buckets_of(case)
        expected = len(buckets)
        for rank, events in enumerate(results.events):
            for step in range(3):
                expect(
                    counts[rank][step] == expected,
                    f"{expected} launches in every step, one for each bucket",
                    f"launches by rank and step: {counts}",
                    partial(diagnosis.wrong_launches, submission, case, buckets, CAP_BYTES, events, step),
                )
        expect_weights(results, case)


@pytest.mark.points(1)
def test_no_sync_accumulates(submission):
    """Backward passes inside no_sync, also nested or interrupted, launch nothing; the last one averages their sum."""
    [world] = submission.worlds(2)
    case = submission.case("Plain", world, micro_batches=3, steps=2, dtype=torch.float64)
    with diagnosis.plan_suspected(submission, case, CAP_BYTES):
        jobs = case.make_jobs(interrupted=1, **JOB)
        results = submission.run(training.train, jobs, world_size=world)
        expect_silence(results.events, range(world), steps=2)
        expect_gradients(results, case, "gradients are the average of what 3 micro-batches accumulated")
    buckets = buckets_of(case)
    expected = len(buckets)
    for step in range(2):
        if step:
            expect_restored(results.events, range(world), step)
        for rank, events in enumerate(results.events):
            found = launches(events, step)
            late = sum(launch.phase != "backward" for launch in found)
            expect(
                len(found) == expected,
                f"{expected} launches in a step of 3 micro-batches: one for each bucket",
                f"{len(found)} launches",
                partial(diagnosis.wrong_launches, submission, case, buckets, CAP_BYTES, events, step),
                rank=rank,
                step=step,
            )
            expect(
                not late,
                f"{expected} launches in a step of 3 micro-batches: all in the last backward",
                f"{late} of them after backward",
                partial(explain_late_launches, submission, jobs, events, step),
                rank=rank,
                step=step,
            )
    expect_weights(results, case)


@pytest.mark.points(1)
def test_steps_and_subgroups(submission):
    """Over four overlapped steps, and in a group of ranks 1 and 3 of four, the weights are those of one process."""
    for world, optimizer in zip(submission.worlds(2, 4), ("adam", "sgd")):
        groups = [[1, 3], [0, 2]] if world == 4 else [list(range(world))]
        case = submission.case("Tied", world, steps=4, dtype=torch.float64, optimizer=optimizer, group=groups[0])
        with diagnosis.plan_suspected(submission, case, CAP_BYTES):
            results = submission.run(training.train, case.make_jobs(groups=groups, **JOB), world_size=world)
            expect_gradients(results, case)
            expect_weights(results, case)
        require_buckets(results, case, steps=4)


# ---- what the checks use


def ruled(sizes, dtypes, cap):
    """The buckets as the rule has them, as places in these lists; `cap` is in the unit of the sizes."""
    buckets, held = [], 0
    for i in reversed(range(len(sizes))):
        if not buckets or held + sizes[i] > cap or dtypes[i] != dtypes[buckets[-1][0]]:
            buckets.append([])
            held = 0
        buckets[-1].append(i)
        held += sizes[i]
    return buckets


def buckets_of(case, cap=CAP_BYTES):
    """The same for a case, in names."""
    named = [(name, p) for name, p in case.parameters().items() if p.requires_grad]
    buckets = ruled([p.nbytes for _, p in named], [p.dtype for _, p in named], cap)
    return [[named[i][0] for i in bucket] for bucket in buckets]


def sharing_case(submission, world):
    """A case in which some bucket has several parameters; most random ones are like that."""
    while True:
        case = submission.case("Plain", world, hidden_layers=4, steps=2)
        if any(len(bucket) > 1 for bucket in buckets_of(case)):
            return case


def numels_of(case, buckets):
    parameters = case.parameters()
    return [sum(parameters[name].numel() for name in bucket) for bucket in buckets]


def require_buckets(results, case, cap=CAP_BYTES, steps=1):
    """The numbers count only if each step launches buckets asynchronously, while backward runs."""
    count = sum(parameter.requires_grad for parameter in case.parameters().values())
    has_shared = len(buckets_of(case, cap)) < count  # a bucket of several parameters

    def accepts(found):
        return all(map(overlaps, found)) and (len(found) < count or not has_shared)

    kind = "an asynchronous all_reduce for each bucket, launched while backward runs and awaited in the finish"
    require_launches(results.events, case.group, kind, accepts, steps)


def expect_buckets(case, buckets):
    """The rule, for one list of parameters."""
    sizes = [numel * dtype.itemsize for numel, dtype in zip(case["numels"], case["dtypes"])]
    dtypes = listed(sorted({str(dtype).removeprefix("torch.") for dtype in case["dtypes"]}))
    given = f"parameters of {listed(sizes)} bytes ({dtypes}), cap {case['cap_bytes']} bytes"
    happened = f"{given}: the buckets are {[[f'#{i}' for i in bucket] for bucket in buckets]}".replace("'", "")
    flat = [i for bucket in buckets for i in bucket]
    expect(
        sorted(flat) == list(range(len(sizes))) and all(buckets),
        "each parameter is in exactly one bucket, and no bucket is empty",
        happened,
        partial(diagnosis.not_each_once, buckets, len(sizes)),
    )
    for dtype in set(case["dtypes"]):
        mine = [[i for i in bucket if case["dtypes"][i] == dtype] for bucket in buckets]
        order = [i for bucket in mine for i in bucket]
        expect(
            order == sorted(order, reverse=True),
            "parameters come in the reverse of their order of registration",
            happened,
            diagnosis.NOT_REVERSED,
        )
    expect(
        all(len({case["dtypes"][i] for i in bucket}) == 1 for bucket in buckets),
        "a bucket has parameters of one dtype only",
        happened,
    )
    for bucket in buckets:
        total = sum(sizes[i] for i in bucket)
        expect(
            total <= case["cap_bytes"] or len(bucket) == 1,
            f"a bucket of several parameters holds at most {case['cap_bytes']} bytes",
            f"{happened}; one holds {total} bytes",
            partial(diagnosis.over_the_cap, ruled, case, sizes, buckets),
        )
    for bucket, after in zip(buckets, buckets[1:]):
        if case["dtypes"][bucket[0]] == case["dtypes"][after[0]] and len(set(case["dtypes"])) == 1:
            total = sum(sizes[i] for i in bucket)
            expect(
                total + sizes[after[0]] > case["cap_bytes"],
                "a bucket closes only when the next parameter does not fit; one that fits exactly belongs to it",
                f"{happened}; #{after[0]} would still have fitted",
            )


def listed(values):
    return ", ".join(str(value) for value in values)


def expect_dtypes(events, case):
    """The launches of each dtype carry the gradients of that dtype, and no others."""
    expected = Counter()
    for parameter in case.parameters().values():
        expected[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    for rank, own in enumerate(events):
        found = Counter()
        for launch in launches(own, 0):
            found[launch.dtype] += launch.numel
        expect(
            found == expected or len(events) == 1,
            "a bucket has gradients of one dtype and travels in it; a step carries "
            + listed(f"{numel} elements of {dtype}" for dtype, numel in expected.items()),
            summary(launches(own, 0)),
            diagnosis.MIXED_BUCKETS,
            rank=rank,
        )
