"""Graded checks of module 10: gradients of which each rank keeps only its own shards."""

from functools import partial
from itertools import product

import pytest
import torch

from brigade.course.checks.diagnose.evidence import Evidence
from brigade.course.checks.expectations import MANY_STEPS, blocks_backward, expect_equal, replace_cause
from brigade.ranks.claims import At, Step, each_step
from helpers import training
from helpers.buffers import BUCKET_NUMEL, compute_padded_numel, list_groups
from helpers.late_launches import blame_visits
from helpers.memory import average, draw_sample, expect_delivered, run_with_little_memory
from helpers.odd_steps import LATE_FORWARDS, TWO_BACKWARDS, expect_restored, expect_right_or_refused, expect_silence
from helpers.zero import expect_norms, expect_trained, expect_views, get_rounding, make_recipe
from m08_zero_optimizer import causes as zero_causes
from m08_zero_optimizer import scenario as m08_zero
from m08_zero_optimizer.expected import compute_weights, train_alone
from m10_grad_shards import causes, scenario

JOB = {
    "package": "m10_grad_shards",
    "wrapper": "GradShardedDDP",
    "optimizer_class": ("m10_grad_shards", "Zero2Optimizer"),
}
LARGE, COUNT = 5 << 16, 16  # elements of each of so many weights, whose gradients have 40 MiB in float64


def make_jobs(case, max_live_buckets=2, grad_dtype=None, **more):
    """Return each rank's job."""
    arguments = {"bucket_numel": BUCKET_NUMEL, "max_live_buckets": max_live_buckets, "grad_dtype": grad_dtype}
    return case.make_jobs(**{**JOB, "arguments": arguments, **more})


@pytest.mark.points(3)
def test_equals_unsharded(submission):
    """Weights equal the plain optimizer's, even with clipping and evaluations. finish_grad_sync clears p.grad."""
    problems = (("Plain", "AdamW"), ("Tied", "SGD"), ("Branches", "SGD"), ("Frozen", "Adam"))
    for world, (model, name) in submission.pair_worlds((1, 2, 3, 4), problems):
        groups = [[1, 3], [0, 2]] if world == 4 else [list(range(world))]
        case = submission.case(
            model,
            world,
            steps=20 if world < 3 else 8,
            dtype=torch.float64,
            branches=[0, 1, -1][:world] if model == "Branches" else None,
            group=groups[0],
        )
        recipe = make_recipe(name, **({"max_norm": 0.5} if world == 2 else {}))
        visits = training.VISITS if world == 2 else ()
        parts = [*m08_zero.TRAINED, "copied_bytes", *["norms", "norm_dtypes"] * ("max_norm" in recipe)]
        common = {"groups": groups, "micro_batches": 1, "finish_each": False, "visits": visits, "parts": parts}
        jobs = make_jobs(case, world, recipe=recipe, **common)
        for job in jobs[1:]:
            job["visits"] = ()  # only one rank evaluates
        judge = partial(expect_unsharded, submission, jobs, case, recipe)
        with (
            replace_cause(partial(causes.explain_failed_run, groups)),
            blame_visits(submission, jobs, judge, scenario.train),
        ):
            results = submission.run(scenario.train, jobs, world_size=world)
            judge(results)
        for rank in case.group:
            expect_views(results[rank], rank)


@pytest.mark.points(5)
def test_gradient_memory(submission):
    """At every gradient hook and between steps, the gradients in memory take no more bytes than the reading allows."""
    for case, max_live, results in measure(submission):
        world = len(case.group)
        buckets = [4 * numel for _, numel, _ in list_groups(case.parameters(), world, 1)]
        largest = max(4 * parameter.numel() for parameter in case.parameters().values())
        kept, outputs = sum(buckets) // world, max_live * max(buckets) // world
        bound = (max_live + 1) * max(buckets) + largest + kept + outputs
        setting = f"(max_live_buckets={max_live}, {world} ranks)"
        for rank, result in enumerate(results):
            what = f"the constructor allocates {{}} bytes: the shards, {kept}, and less than a bucket {setting}"
            At(rank).at_most(what, result["constructed"], kept + min(buckets) - 1, causes.WHOLE_AT_START)
            steps = range(len(case.batches[rank]))
            for step, name in product(steps, reversed(case.gradients())):  # in backward
                At(rank, step).at_most(
                    f"at every gradient hook, here of {name}, {{}} bytes of gradients are alive: "
                    f"{max_live + 1} buckets of {max(buckets)} bytes, a gradient of {largest}, shards of {kept} and "
                    f"{outputs} for outputs of reduce-scatters {setting}",
                    result["hooks"][step][name],
                    bound,
                    partial(causes.explain_bytes, step, result, results.events[rank], buckets, world, max_live),
                )
            what = f"after finish_grad_sync, {{}} bytes are alive: the shards, {kept}, and one output {setting}"
            for step in steps:
                nbytes = result["finished"][step]
                why = partial(causes.explain_left, nbytes, result["left"][step], buckets, kept)
                At(rank, step).at_most(what, nbytes, kept + max(buckets) // world, why)
        require_shards(results.events, case)
    start = submission.rng.randrange(1 << 31)
    arguments = {"bucket_numel": LARGE, "max_live_buckets": 1, "grad_dtype": torch.float64}
    job = JOB | {"start": start, "count": COUNT, "numel": LARGE, "dtype": torch.float32, "arguments": arguments}
    if run := run_with_little_memory(submission, scenario.train_large, job, mib=60):
        results, seeds = run
        expected = [average(seeds, i, LARGE, draw_sample(submission.rng, LARGE), torch.float32) for i in range(COUNT)]
        expect_delivered(results, 0, len(results) * torch.cat(expected), "the averages of all gradients")


@pytest.mark.points(2)
def test_live_buckets(submission):
    """Backward launches the buckets in order. If too many buckets are live, it first waits for the oldest one."""
    for case, max_live, results in measure(submission, ("MixedDtypes", 1)):
        groups = list_groups(case.parameters(), len(case.group), 1)
        for step in each_step(results.events, 2):
            expect_bounded_launches(step.launches("reduce_scatter"), groups, max_live)
    [world] = submission.worlds(2)
    jobs = make_jobs(submission.case("Plain", world), values=[0, -1, 1])
    for rank, answers in enumerate(submission.run(scenario.refuse, jobs, world_size=world)):
        got, what = [answer or "accepted" for answer in answers], "the values 0, -1 and 1 of max_live_buckets: {}"
        At(rank).equal(what, got, ["ValueError", "ValueError", "accepted"], causes.NO_VALUE_ERROR)


@pytest.mark.points(3)
@pytest.mark.needs("test_equals_unsharded")
def test_accumulation(submission):
    """Gradients accumulate, with or without no_sync. Odd orders are right or refused. Only zero_grad clears."""
    for world, finish_each, model in submission.pair_worlds(
        (2, 3, 2), (True, False, False), ("Tied", "Plain", "Frozen")
    ):
        micro_batches = 3
        case = submission.case(model, world, steps=6, micro_batches=micro_batches, dtype=torch.float64)
        idle = submission.rng.randrange(world)
        if world > 1:
            case.batches[idle][2] = []  # a rank without a backward only calls finish_grad_sync
        recipe = make_recipe("Adam")
        interrupted = 1 if model == "Plain" else None  # before the step in which a rank is idle
        common = {"finish_each": finish_each, "micro_batches": micro_batches, "interrupted": interrupted}
        jobs = make_jobs(case, recipe=recipe, **common)
        results = submission.run(scenario.train, jobs, world_size=world)
        expect_no_gradient(results, case)
        how = "finish_grad_sync after each" if finish_each else "no_sync"
        what = f"weights after 6 steps of Adam with {micro_batches} micro-batches and {how} are the plain optimizer's"
        why = partial(causes.suspect_accumulation, case, recipe, finish_each)
        with replace_cause(partial(causes.explain_clearing, submission, jobs)):
            expect_trained(what, results, compute_weights(case, recipe), case.start(), why)
        if interrupted:
            expect_silence(results.events, case.group, steps=2)
            expect_restored(results.events, case.group, interrupted)
        require_shards(results.events, case)
    [world] = submission.worlds(2)
    case = submission.case("Plain", world, dtype=torch.float64)
    recipe = make_recipe("SGD")
    for backward in ("backward", "backward in no_sync"):
        jobs = make_jobs(case, recipe=recipe, order=["forward", backward, "step"])
        expect_right_or_refused(
            f"a step after a {backward}, without finish_grad_sync, gives the plain optimizer's weights",
            submission.run(m08_zero.take_odd_step, jobs, world_size=world),
            compute_weights(case, recipe),
            evidence=Evidence(causes.NO_FINISH),
        )
    results = submission.run(scenario.collect_points, make_jobs(case, orders=ORDERS), world_size=world)
    expect_all_averages([points["one"] for points in results], case)
    for rank, points in enumerate(results):
        one = points["one"]
        for name, factor in POINTS.items():
            if points[name] is None and ("second" in name or training.KINDS[1] in name):  # refused
                continue
            refused = points[name] is None
            At(rank).claim(f"a step {name} is accepted", not refused, "RuntimeError", causes.POINTS.get(name, ""))
            when = "after two calls of finish_grad_sync" if name == "two" else name
            with replace_cause(partial(causes.explain_point, name, points)):
                expect_equal(
                    f"{when}, the gradient shards are {factor} times those of one backward",
                    [{"grad_data": points[name]}],
                    {"grad_data": factor * one},
                    ranks=[rank],
                    scale={"grad_data": float(one.abs().max())},
                    tolerance=MANY_STEPS,
                )


ORDERS = TWO_BACKWARDS | LATE_FORWARDS | {"a backward inside no_sync": ("forward", "backward in no_sync", "finish")}
POINTS = {  # at which shards are copied -> how often they contain the gradients of one backward
    "two": 2,
    "after step": 2,
    "after optimizer.zero_grad()": 0,
    "after ddp.zero_grad(set_to_none=False)": 0,
    "after ddp.zero_grad(set_to_none=False) and finish_grad_sync": 0,
    "after ddp.zero_grad() and finish_grad_sync": 0,
    "after optimizer.zero_grad() and finish_grad_sync": 0,
    "after a backward inside no_sync": 1,
    "after a second backward": 2,
    "after a second backward inside no_sync": 2,
} | {f"after {name}": 2 for name in LATE_FORWARDS}


@pytest.mark.points(2)
def test_volume_and_dtypes(submission):
    """A step sends as many bytes as in module 8. With 16-bit weights, a wider grad_dtype and clipping work."""
    dtypes = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32))
    for world, (dtype, grad_dtype) in submission.pair_worlds((2, 3), dtypes):
        case = submission.case("Plain", world, steps=3, dtype=dtype)
        common = {"finish_each": False, "micro_batches": 1, "parts": ["weights"]}
        jobs = make_jobs(case, 2, grad_dtype, recipe=make_recipe("AdamW"), **common)
        results = submission.run(scenario.train, jobs, world_size=world)
        numel = compute_padded_numel(case.parameters().values(), world)
        weights, is_wider = str(dtype).removeprefix("torch."), grad_dtype.itemsize > dtype.itemsize
        for step in each_step(results.events, 3):
            for op, where, name in (
                ("reduce_scatter", "backward and finish launch", "float32"),
                ("all_gather", "step launches", weights),
            ):
                launched, is_gather = step.launches().without_flags(), op == "all_gather"
                own = launched.where(lambda one, is_gather=is_gather: (one.phase == "step") == is_gather)
                got = {launch.op for launch in own}, {launch.dtype for launch in own}, sum(x.numel for x in own)
                what = f"{where} {op}s of all {numel} elements of the buckets once, in {name}, and nothing else"
                why = partial(causes.explain_volume, op, numel, name, is_wider)
                own.claim(what, got == ({op}, {name}, numel), cause=why)
    # In bfloat16 the sum of many equal micro-batches stops growing: 256 + 1 is 256 there.
    [world] = submission.worlds(2)
    ones = [torch.ones(200, dtype=torch.bfloat16)]
    arguments = {"bucket_numel": BUCKET_NUMEL, "grad_dtype": torch.float32}
    job = {"weights": ones, "inputs": ones, "count": 300, "arguments": arguments}
    jobs = submission.case("Plain", world).make_jobs(**JOB, **job)
    clipped = 1 - 200**-0.5  # the norm of 200 ones is the root of 200
    for rank, result in enumerate(submission.run(scenario.accumulate_many, jobs, world_size=world)):
        what = "with grad_dtype=torch.float32, 300 micro-batches in no_sync whose gradients are 1 accumulate to {}"
        At(rank).equal(what, result["largest"], 300.0, causes.NARROW_SUM * (result["largest"] == 256))
        At(rank).claim(
            "with 200 bfloat16 weights and gradients that are all 1, clip_grad_norm_(1.0) and a step of SGD with lr=1 "
            f"give weights of {clipped:.4f}, with an error of at most {2**-7:.4f}",
            all(abs(result[end] - clipped) <= 2**-7 for end in ("lowest", "highest")),
            f"weights are from {result['lowest']:.4f} to {result['highest']:.4f}",
            partial(causes.explain_clipping, result),
        )


# ---- what the checks use


def expect_unsharded(submission, jobs, case, recipe, results):
    """Expect the plain optimizer's weights and norms, no gradients after a finish, and reduce-scatters."""
    weights, _, norms = train_alone(case, recipe)
    expect_no_gradient(results, case)
    steps, name = len(case.batches[0]), recipe["optimizer"]
    what = f"weights after {steps} steps of {name} equal those of the plain optimizer ({case.model} model)"
    why = partial(causes.suspect_mistakes, case, recipe, results.events[case.group[0]])
    with replace_cause(partial(causes.explain_clearing, submission, jobs)):
        expect_trained(what, results, weights, case.start(), why, ranks=case.group)
    if norms:
        ranks_norms = [results[rank]["norms"] for rank in case.group]
        expect_norms(
            ranks_norms, norms, get_rounding(results), why=partial(zero_causes.explain_norms, len(case.parameters()))
        )
    require_shards(results.events, case)


def measure(submission, *more):
    """Measure steps with these and `more` models and max_live_buckets. Yield (case, max_live_buckets, results)."""
    for world, pairs in submission.pair_worlds((2, 3), ((("Plain", 1), ("Plain", 3), *more), (("Plain", 2),))):
        models, limits = zip(*pairs, strict=True)
        cases = [submission.case(model, world, steps=2, hidden_layers=10) for model in models]
        jobs_per_call = [make_jobs(case, max_live, proven=1) for case, max_live in zip(cases, limits, strict=True)]
        yield from zip(cases, limits, submission.run_each(scenario.measure, jobs_per_call), strict=True)


def expect_bounded_launches(launched, buckets, max_live):
    """Expect one reduce-scatter per bucket, during backward and in order, and at most `max_live` live buckets."""
    setting, numels = f" (max_live_buckets={max_live})", [numel for _, numel, _ in buckets]
    why = partial(causes.explain_launches, numels)
    launched.are_one_for_each("bucket", "reduce_scatter", numels, setting, cause=why)
    launched.where(lambda one: one.phase != "backward").claim(
        f"during backward, each bucket is launched when its last gradient is ready{setting}",
        all(launch.phase == "backward" for launch in launched[:-1]),
        "{these} came after backward",
        causes.explain_late,
    )
    ready_at = {name: place for place, name in launched.step.ready}
    for number, launch in enumerate(launched):
        oldest = launched[number - max_live] if number >= max_live else None
        launched.claim(
            f"backward waits for bucket {number - max_live} before it launches bucket {number}{setting}",
            oldest is None or bool(oldest.waits and oldest.waits[0] < launch.place),
            "it launches without this wait",
            partial(causes.explain_unbounded, max_live),
        )
        after = [name for *_, names in buckets[number + 1 : number + max_live] for name in names]
        awaited_at = launch.waits[0] if launch.waits and not launch.is_polled else float("inf")
        too_early = launch.sync or (bool(after) and awaited_at < max(ready_at.get(name, -1) for name in after))
        blocks = number + 1 < len(buckets) and blocks_backward(launch, buckets[number + 1][-1], ready_at)
        launched.claim(
            f"the code waits for bucket {number} only in backward, when there are too many live buckets, or in "
            f"finish_grad_sync{setting}",
            not too_early and not blocks,
            "the launch itself waits" if launch.sync else "it waits earlier",
            causes.TOO_EARLY,
        )


def expect_all_averages(shards, case):
    """Expect the shards of all ranks to contain every entry of the averages once, and zeros as padding."""
    expected = torch.cat([gradient.double().flatten() for gradient in case.gradients().values()])
    padding = torch.zeros(compute_padded_numel(case.parameters().values(), len(shards)) - len(expected))
    what = f"the gradient shards of {len(shards)} ranks have {{}} elements together"
    At().equal(what, sum(map(len, shards)), len(expected) + len(padding))
    expect_equal(
        "after finish_grad_sync, the shards of all ranks have the averages of all gradients, in any order",
        [{"grad_data": torch.cat(shards).sort().values}],
        {"grad_data": torch.cat([expected, padding]).sort().values},
        tolerance=MANY_STEPS,
    )


def expect_no_gradient(results, case):
    """Expect p.grad to be None after every finish."""
    what = "gradients exist as shards only: parameters whose p.grad is set after finish_grad_sync: {}"
    for rank in case.group:
        At(rank).equal(what, results[rank]["left"], [], causes.GRADIENTS_LEFT)


def require_shards(events_by_rank, case):
    """Require that gradients are reduce-scattered."""
    for rank in case.group if len(case.group) > 1 else []:
        launched = Step(events_by_rank[rank], rank, None).launches()
        launched = launched.where(lambda one: one.phase not in ("construct", "step")).without_flags()
        what = "correct numbers earn points only if gradients are reduce-scattered, and each rank gets its own shards"
        launched.claim(what, {launch.op for launch in launched} == {"reduce_scatter"}, "{these}", causes.NOT_SCATTERED)
