"""Graded checks of module 4: buckets."""

from collections import Counter
from functools import partial

import pytest
import torch

from brigade.course.checks.expectations import (
    expect_gradients,
    expect_overlap,
    expect_weights,
    overlaps,
    replace_cause,
    require_launches,
    start_after_backward,
)
from brigade.ranks.claims import At, each_step
from brigade.ranks.events import launches
from brigade.ranks.verdict import join_names
from helpers import odd_steps, training
from helpers.late_launches import explain_late_last, explain_late_launches
from helpers.steps import expect_averages, expect_four_steps
from m04_bucketed_ddp import causes, scenario

CAP_BYTES = 600  # the cap in the checks below: a bucket contains a few parameters
JOB = {"package": "m04_bucketed_ddp", "wrapper": "BucketedDDP", "arguments": {"bucket_cap_mb": CAP_BYTES / 2**20}}
MB_PER_MIB = 10**6 / 2**20
XL = {1: 435, 10: 339, 100: 98, 1000: 8}  # number of buckets of the XL model, by cap in MiB


@pytest.mark.parts("Part (a): the plan")
@pytest.mark.points(3)
def test_bucket_rule(submission):
    """plan_buckets follows the rule: reverse order, no bucket above the cap, one dtype per bucket."""
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
    [answers] = submission.run(scenario.plan, cases, world_size=1)
    for case, buckets in zip(cases, answers, strict=True):
        expect_buckets(case, buckets if case["numels"] else [bucket for bucket in buckets if bucket])
    [counts] = submission.run(scenario.plan_model, "xl", list(XL), world_size=1)
    for (cap, expected), count in zip(XL.items(), counts, strict=True):
        why = partial(causes.explain_count, cap, expected, count)
        At().equal(f"the XL model has {{}} buckets at a cap of {cap} MiB", count, expected, why)


@pytest.mark.parts("Parts (b) to (h): the wrapper")
@pytest.mark.points(2)
def test_gradients_are_averaged(submission):
    """Replicas start with equal weights and buffers. One all-reduce per bucket averages every gradient."""
    with replace_cause(partial(causes.find_lost_parameter, submission, submission.case("Tied", 1), CAP_BYTES)):
        expect_averages(submission, [JOB] * 4, partial(require_buckets, submission))
    # Parameters of one dtype are neighbours, so they share a bucket of the default size, wherever buckets close.
    [world] = submission.worlds(2)
    case = submission.case("MixedDtypes", world)
    with replace_cause(partial(causes.find_lost_parameter, submission, case, CAP_BYTES)):
        results = submission.run(training.train, case.make_jobs(**JOB | {"arguments": {}}), world_size=world)
        expect_gradients(results, case, tolerance=2**-6)
    expect_dtypes(results.events, case)
    require_buckets(submission, results, case, cap=25 * 2**20)


@pytest.mark.points(3)
def test_buckets_overlap_with_backward(submission):
    """Each bucket is launched once, asynchronously, before the next one is complete. Backward waits for nothing."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, hidden_layers=4, steps=2)
        cap, job = fit_cap(case)
        jobs = case.make_jobs(proven=1, **job)
        results = submission.run(training.train, jobs, world_size=world)
        buckets = choose_plan(submission, results, case, cap)
        why = partial(causes.explain_launches, submission, case, buckets, cap)
        for step in each_step(results.events, 2):
            launched = step.launches()
            launched.are_one_for_each("bucket", "all_reduce", count_elements(case, buckets), cause=why)
            expect_overlap(launched, buckets, why_late=partial(explain_late_launches, submission, jobs))


@pytest.mark.points(3)
def test_launch_order_does_not_depend_on_ready_order(submission):
    """If gradients become ready in a different order on each rank, all ranks still launch buckets in the same order."""
    for world in submission.worlds(2, 3, 4):
        case = submission.case("Reordered", world, steps=2, branches=list(range(world)))
        cap, job = fit_cap(case)
        jobs = case.make_jobs(**job)
        with replace_cause(partial(causes.find_ready_order, submission)):
            results = submission.run(training.train, jobs, world_size=world)
        buckets = choose_plan(submission, results, case, cap)
        why = partial(causes.explain_launches, submission, case, buckets, cap)
        for step in each_step(results.events, 2):
            launched = step.launches()
            launched.are_one_for_each("bucket", "all_reduce", count_elements(case, buckets), cause=why)
            due_at = 0  # the position in the record from which a bucket and all buckets before it are complete
            for number, (bucket, launch) in enumerate(zip(buckets, launched, strict=True)):
                due_at = max([due_at, *(place for place, name in step.ready if name in bucket)])
                late = [name for place, name in step.ready if due_at < place < launch.place]
                launched.claim(
                    f"bucket {number} is launched as soon as it and all buckets before it are complete",
                    len(late) < 2,
                    f"{len(late)} more gradients became ready before the launch",
                    partial(causes.explain_delay, submission, jobs),
                )
        expect_gradients(results, case)


@pytest.mark.points(2)
def test_unused_parameters(submission):
    """A bucket is launched in every step, even if some or all ranks do not use one of its parameters."""
    for world in submission.worlds(2, 3):
        case = submission.case(
            "Branches", world, branches=[1, -1, 0][:world], steps=3, dtype=torch.float64, optimizer="adam"
        )
        cap, job = fit_cap(case)
        with replace_cause(partial(causes.find_lost_parameter, submission, case, cap)):
            with replace_cause(partial(causes.find_ready_order, submission)):
                results = submission.run(training.train, case.make_jobs(**job), world_size=world)
            expect_gradients(results, case, "every gradient is the average, even if the ranks use different layers")
        buckets = choose_plan(submission, results, case, cap)
        for step in each_step(results.events, 3):
            launched, why = step.launches(), partial(causes.explain_launches, submission, case, buckets, cap)
            launched.are_so_many("every step launches {}, one per bucket", len(buckets), why)
        with replace_cause(partial(odd_steps.find_old_averages, results, case)):
            expect_weights(results, case)
    odd_steps.expect_idle_rank(submission, JOB)


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_no_sync_accumulates(submission):
    """Inside no_sync, backward launches nothing, and the next finish averages the sum. A second backward is refused."""
    [world] = submission.worlds(2)
    case = submission.case("Plain", world, micro_batches=3, steps=3, dtype=torch.float64, hidden_layers=8)
    cap, job = fit_cap(case)
    with replace_cause(partial(causes.find_lost_parameter, submission, case, cap)):
        jobs = case.make_jobs(interrupted=1, unsynced=2, **job)
        results = submission.run(training.train, jobs, world_size=world)
        odd_steps.expect_silence(results.events, range(world), steps=2)
        expect_gradients(results, case, "every gradient is the average over the ranks of the sum over 3 micro-batches")
    buckets = choose_plan(submission, results, case, cap)
    for step in each_step(results.events, 2):
        if step.number:
            odd_steps.expect_restored(results.events, [step.rank], step.number)
        launched, why = step.launches(), partial(causes.explain_launches, submission, case, buckets, cap)
        launched.are_so_many("a step of 3 micro-batches launches {}, one per bucket", len(buckets), why)
        is_late = start_after_backward(launched)
        launched.satisfy(
            f"all {len(buckets)} launches of a step of 3 micro-batches are in the last backward",
            lambda one, is_late=is_late: one.phase == "backward" and not is_late,
            partial(explain_late_launches, submission, jobs),
            "{count} of the launches came after backward",
        )
    odd_steps.expect_unsynced(results, case, step=2)
    odd_steps.expect_second_backward(submission, world, JOB)
    odd_steps.expect_accumulated(submission, world, JOB)


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_steps_and_subgroups(submission):
    """Four overlapped steps with evaluations give the weights of one process, even in a group of ranks 1 and 3."""
    with replace_cause(partial(causes.find_lost_parameter, submission, submission.case("Tied", 1), CAP_BYTES)):
        expect_four_steps(submission, JOB, partial(require_buckets, submission))


# ---- what the checks use


def apply_rule(sizes, dtypes, cap):
    """Return the buckets that follow the rule, as indices into these lists. `cap` is in the unit of the sizes."""
    buckets, filled = [], 0
    for i in reversed(range(len(sizes))):
        if not buckets or filled + sizes[i] > cap or dtypes[i] != dtypes[buckets[-1][0]]:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += sizes[i]
    return buckets


def plan_by_rule(case, cap=CAP_BYTES):
    """Return the buckets of a case's model that follow the rule, as lists of names."""
    named = [(name, p) for name, p in case.parameters().items() if p.requires_grad]
    buckets = apply_rule([p.nbytes for _, p in named], [p.dtype for _, p in named], cap)
    return [[named[i][0] for i in bucket] for bucket in buckets]


def choose_plan(submission, results, case, cap):
    """Return the buckets that follow the rule, or the submission's own plan if the first step launches that plan.

    So a wrapper that follows a wrong plan loses only the points of the plan.
    """
    buckets = plan_by_rule(case, cap)
    launched = [launch.numel for launch in launches(results.events[0], 0)]
    if launched == count_elements(case, buckets):
        return buckets
    planned = causes.run_plan(submission, case, cap) or []
    names = [name for name, parameter in case.parameters().items() if parameter.requires_grad]
    is_plan = [name for bucket in planned for name in bucket] == names[::-1] and 1 < len(planned) < len(names)
    return planned if is_plan and launched == count_elements(case, planned) else buckets


def fit_cap(case):
    """Return a cap that a bucket of several parameters fills exactly, and the job with this cap.

    With a cap in MB instead of MiB, there are more buckets, so every case reveals this mistake. If possible, one of
    them has several parameters, so the mistake differs from one launch for each parameter. A plan that counts elements
    instead of bytes has several buckets too, so that `choose_plan` can follow it.
    """
    sizes = [parameter.nbytes for parameter in case.parameters().values() if parameter.requires_grad]
    ends = range(len(sizes) + 1)
    sums = sorted({sum(sizes[i:j]) for i in ends for j in ends[i + 2 :]}, key=lambda cap: abs(cap - CAP_BYTES))
    counts = {cap: len(plan_by_rule(case, cap * MB_PER_MIB)) for cap in sums}
    itemsize = max(parameter.itemsize for parameter in case.parameters().values())
    revealing = [
        cap
        for cap in sums
        if len(plan_by_rule(case, cap)) < counts[cap] and len(plan_by_rule(case, itemsize * cap)) > 1
    ]
    cap = min(revealing, key=lambda cap: counts[cap] == len(sizes))
    return cap, JOB | {"arguments": {"bucket_cap_mb": cap / 2**20}}


def count_elements(case, buckets):
    """Return the number of elements in each bucket."""
    parameters = case.parameters()
    return [sum(parameters[name].numel() for name in bucket) for bucket in buckets]


def require_buckets(submission, results, case, cap=CAP_BYTES, steps=1):
    """Give points for correct numbers only if backward launches the buckets of each step asynchronously."""
    count = sum(parameter.requires_grad for parameter in case.parameters().values())
    has_shared = len(plan_by_rule(case, cap * MB_PER_MIB)) < count  # a bucket of several parameters, in either unit

    def accepts(launched):
        return all(map(overlaps, launched)) and (len(launched) < count or not has_shared)

    kind = "one asynchronous all_reduce per bucket, launched in backward and waited for in finish_grad_sync"
    jobs = case.make_jobs(**JOB | {"arguments": {"bucket_cap_mb": cap / 2**20}})
    names = [name for name, parameter in case.parameters().items() if parameter.requires_grad]

    def why(launched):
        return explain_late_launches(submission, jobs, launched) or explain_late_last(names, launched)

    require_launches(results.events, case.group, kind, accepts, steps, cause=why)


def expect_buckets(case, buckets):
    """Expect buckets that follow the rule, for one list of parameters."""
    sizes = [numel * dtype.itemsize for numel, dtype in zip(case["numels"], case["dtypes"], strict=True)]
    dtypes = join(sorted({str(dtype).removeprefix("torch.") for dtype in case["dtypes"]}))
    given = f"for parameters of {join(sizes)} bytes ({dtypes}) and a cap of {case['cap_bytes']} bytes"
    got = f"{given}, the buckets are {[[f'#{i}' for i in bucket] for bucket in buckets]}".replace("'", "")
    flat = [i for bucket in buckets for i in bucket]
    At().claim(
        "each parameter is in exactly one bucket, and no bucket is empty",
        sorted(flat) == list(range(len(sizes))) and all(buckets),
        got,
        partial(causes.explain_missing, buckets, len(sizes)),
    )
    for dtype in set(case["dtypes"]):
        order = [i for bucket in buckets for i in bucket if case["dtypes"][i] == dtype]
        why = partial(causes.explain_position, case, sizes, buckets)
        At().claim("the parameters are in reverse registration order", order == sorted(order, reverse=True), got, why)
    has_one_dtype = all(len({case["dtypes"][i] for i in bucket}) == 1 for bucket in buckets)
    At().claim("all parameters of a bucket have the same dtype", has_one_dtype, got, causes.MIXED_DTYPES)
    totals = [sum(sizes[i] for i in bucket) for bucket in buckets]
    for bucket, total in zip(buckets, totals, strict=True):
        At().claim(
            f"a bucket of several parameters contains at most {case['cap_bytes']} bytes",
            total <= case["cap_bytes"] or len(bucket) == 1,
            f"{got}. One bucket contains {total} bytes",
            partial(causes.explain_large_bucket, apply_rule, case, sizes, buckets),
        )
    followed = zip(totals[:-1], buckets[1:], strict=True)
    for total, after in followed if len(set(case["dtypes"])) == 1 else ():
        At().claim(
            "a bucket closes only if the next parameter does not fit. One that fits exactly belongs to the bucket",
            total + sizes[after[0]] > case["cap_bytes"],
            f"{got}. Parameter #{after[0]} would still fit",
            partial(causes.explain_small_bucket, apply_rule, case, sizes, buckets),
        )


def join(values):
    """Return all values, joined for use in a sentence."""
    values = list(values)
    return join_names(values, len(values))


def expect_dtypes(events, case):
    """Expect the launches of each dtype to carry exactly the gradients of that dtype."""
    expected = Counter()
    for parameter in case.parameters().values():
        expected[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    for step in each_step(events, 1):
        launched, carried = step.launches(), Counter()
        for launch in launched:
            carried[launch.dtype] += launch.numel
        launched.claim(
            "each bucket contains gradients of one dtype and is all-reduced in that dtype. A step all-reduces "
            + join(f"{numel} elements of {dtype}" for dtype, numel in expected.items()),
            carried == expected or len(events) == 1,
            cause=causes.CAST if carried.total() == expected.total() else "",
        )
