"""Graded checks of module 16: 16 bits on the wire, 32 in the sum."""

import itertools
from functools import partial

import pytest
import torch

from brigade.course.checks.diagnose.evidence import find_wrong_group
from brigade.course.checks.expectations import (
    blocks_backward,
    expect_gradients,
    expect_start,
    expect_waited,
    format_distinct,
    require_launches,
)
from brigade.course.checks.reference import draw_generators
from brigade.ranks.claims import At, Launches, Step, each_step, in_phase, is_unchanged, show
from brigade.ranks.runner.ranks import PerRank
from helpers import training
from helpers.buffers import BUCKET_NUMEL, compute_padded_numel, list_groups
from helpers.memory import WORLD, run_with_little_memory
from helpers.odd_steps import expect_silence
from helpers.steps import expect_interface
from helpers.zero import make_recipe
from m08_zero_optimizer import scenario as m08_zero
from m08_zero_optimizer.expected import compute_weights
from m16_half_bytes import causes, scenario
from m16_half_bytes.expected import compress_alone, describe_first, is_same

# Relative 2-norm errors of the average of normal values on 2, 3 and 4 ranks. Values that are rounded to bfloat16 once:
# 1.66e-3. A sum in bfloat16: 2.4e-3 to 3.3e-3. An average that is rounded once more: 2.3e-3 to 2.5e-3.
ERROR = 2e-3
FLOAT32 = 1e-6  # relative error of a few operations in float32
LARGE = 1 << 22  # elements
GRADIENT = 1e-2  # values and averages are rounded by at most 2**-9 each, that is 4e-3 together
SUBGROUPS = [[1, 3], [0, 2]]  # of four ranks
F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
JOB = {"package": "m16_half_bytes", "wrapper": "HalfBytesDDP", "wire": BF16}


def make_job(buckets_per_group=1, **more):
    """Return what each rank's job says about the wrapper."""
    return JOB | {"arguments": {"bucket_numel": BUCKET_NUMEL, "buckets_per_group": buckets_per_group}} | more


@pytest.mark.parts("Parts (a) and (b): one reduction")
@pytest.mark.points(2)
def test_error_does_not_grow(submission):
    """The average of normal values has a relative error of at most 0.002 on 2, 3 and 4 ranks, and none on one."""
    for run, world in enumerate(submission.worlds(2, 1, 2, 3, 4)):
        own = draw_normal(submission.rng, world, [world * 8192] * 2)
        groups = None if run else [[rank] for rank in range(world)]  # first, each rank is alone in a group
        for results, calls, group in run_calls(submission, own, views=(False, True), groups=groups):
            what = f"in a group of {len(group)}, the average of normal values has a relative error of {{}}"
            for at, _, output, exact, why in list_outputs(results, calls, group):
                error = float((output.double() - exact).norm() / exact.norm())
                at.at_most(what, error, ERROR if len(group) > 1 else 0.0, why)  # alone, a rank copies its values


@pytest.mark.points(1)
def test_exact_values(submission):
    """Averages of whole numbers up to 256 are exact in bfloat16, and those of 2**-24 and 60000 in float16."""
    for world in submission.worlds(2, 3):
        own = []
        for rank, generator in enumerate(draw_generators(submission.rng, world)):
            whole = torch.randint(-256, 257, (world * 32,), generator=generator).float()
            whole[::8] = 256 - rank  # 255.5 and 511 are not bfloat16 numbers
            extreme = torch.tensor([2.0**-24, -(2.0**-24), 60_000, -60_000] * world)
            own.append([whole, extreme])
        for results, calls, group in run_calls(submission, own, wires=(BF16, F16)):
            for at, number, output, exact, why in list_outputs(results, calls, group):
                wire, least = ((BF16, 1), (F16, 0))[number]
                wrong = (output.double() - exact).abs() > FLOAT32 * exact.abs().clamp(min=least)
                entry = int(wrong.int().argmax())
                got, wanted = format_distinct(float(output[entry]), float(exact[entry]))
                at.claim(
                    f"values that {show(wire)} can represent are averaged with the accuracy of float32: {wanted}",
                    not wrong.any() and bool(output.isfinite().all()),
                    f"entry {entry} of the output is {got}",
                    partial(why, wire=wire),
                )


@pytest.mark.points(1)
def test_one_all_to_all(submission):
    """A reduction launches one all-to-all in 16 bits in its group, and does not wait for it."""
    for world in submission.worlds(2, 4):
        groups = SUBGROUPS if world == 4 else [list(range(world))]
        size = len(groups[0])
        own = draw_normal(submission.rng, world, [size * 24] * 2)
        for results, calls, group in run_calls(submission, own, views=(True, False), wires=(BF16, F16), groups=groups):
            for step in each_step(results.events, 2, group if size > 1 else []):
                launched = expect_one_launch(step, size * 24)
                what = "start_reduce_scatter returns without waiting for the all_to_all"
                launched.satisfy(what, lambda one: not one.sync and "launch" not in one.wait_phases, causes.BLOCKED)
            expect_averages(f"each rank of the group {show(group)} gets its part of the average", results, calls, group)


KEPT = {  # what must stay as it is -> what a change says
    "kept_input": ("the input keeps its values", causes.INPUT_CHANGED),
    "kept_output": ("the output keeps its values until the wait", causes.WRITTEN_EARLY),
    "kept_rest": ("a wait writes nothing except the output", causes.INPUT_CHANGED),
    "kept_twice": ("a second wait changes nothing", causes.WRITTEN_TWICE),
}


@pytest.mark.points(1)
def test_several_in_flight(submission):
    """Several reductions may be in flight. The first wait, in any order, writes the output, and the second nothing."""
    for world in submission.worlds(1, 2, 3):
        own = draw_normal(submission.rng, world, [world * numel for numel in (40, 40, 16, 40)])
        order = submission.rng.choice([[2, 0, 3, 1], [3, 2, 1, 0], [1, 3, 0, 2]])
        for results, calls, group in run_calls(submission, own, views=(False, True, True, False), order=order):
            for step in each_step(results.events, 4, group):
                for key, (what, why) in KEPT.items():
                    is_free = len(group) == 1 and key in ("kept_input", "kept_output")
                    is_right = is_free or results[step.rank][step.number][key]
                    step.claim(what, is_right, "its values have changed", why)
                launched = step.launches()
                launched.satisfy("a wait ends every launch", lambda one: bool(one.waits), causes.UNAWAITED)
                what = "the tensors of a launch stay as they are until its wait"
                launched.satisfy(what, is_unchanged, causes.SHARED)
            what = f"four reductions in flight, awaited in the order {show(order)}, all get their averages"
            expect_averages(what, results, calls, group)


@pytest.mark.points(1)
def test_scratch(submission):
    """After the wait, a reduction keeps no memory, even if its handle still exists."""
    [world] = submission.worlds(2)
    jobs = PerRank({"values": values} for [values] in draw_normal(submission.rng, world, [world * 4096]))
    results = submission.run(scenario.measure_scratch, jobs, world_size=world)
    for rank, result in enumerate(results):
        step = Step(results.events[rank], rank, None)
        if world > 1:
            expect_one_launch(step, world * 4096)
        what = "after the wait, {} bytes of scratch memory are alive, even if the handle of the reduction still exists"
        what += f" (in flight, there were {result['during']})"
        # Numbers may stay, tensors may not.
        step.at_most(what, result["after"], 64, partial(causes.explain_scratch, result, step.launches()))
    first, count = submission.rng.randrange(16), 6
    job = {"numel": LARGE, "count": count, "first": first, "size": WORLD}
    if run := run_with_little_memory(submission, scenario.reduce_many, job, mib=77):
        results, seeds = run
        expected, largest = torch.zeros(WORLD, len(range(first, LARGE // WORLD, 16))), 0.0
        for seed, number in itertools.product(seeds, range(count)):
            values = torch.randn(LARGE, generator=torch.Generator().manual_seed(seed + number))
            expected += values.view(WORLD, -1)[:, first::16] / WORLD
            largest = max(largest, float(values.abs().max()))
        for rank, total in enumerate(results):
            error, limit = float((total - expected[rank]).abs().max()), count * largest * 2**-8
            what = f"the outputs of {count} large reductions add up to the sum of the averages, with an error of {{}}"
            At(rank).at_most(what, error, limit)


@pytest.mark.parts("Parts (c) to (e): the wrapper")
@pytest.mark.points(1)
def test_gradients(submission):
    """All ranks have the same averages, to the bit. No scratch memory stays. Weights must be float32."""
    settings = (("Buffers", None), ("Branches", [0, -1]), ("Tied", None), ("Frozen", None))
    for world, (model, branches), micro_batches in submission.pair_worlds((1, 2, 3, 4), settings, (1, 1, 2, 2)):
        groups = SUBGROUPS if world == 4 else [list(range(world))]
        options = {"branches": branches[:world] if branches else None, "group": groups[0]}
        case = submission.case(model, world, steps=2, micro_batches=micro_batches, **options)
        results = submission.run(training.train, case.make_jobs(groups=groups, **make_job(2)), world_size=world)
        expect_start([result["start"] for result in results], case, events=results.events)
        nbytes = [2 * numel for _, numel, _ in list_groups(case.parameters(), len(case.group), 1)]
        hypotheses = partial(causes.suspect_mistakes, case, results, nbytes)
        expect_gradients(results, case, tolerance=GRADIENT, hypotheses=hypotheses)
        if micro_batches > 1:
            expect_silence(results.events, case.group)
        for step in range(2):
            expect_same_bits({rank: results[rank]["gradients"][step] for rank in case.group}, case.gradients(), step)
        require_launches(results.events, case.group, "all_to_alls and all_gathers", is_half, 2, False)
        expect_interface(results, case)
    [world] = submission.worlds(2)
    job = JOB | {"dtypes": [(F64, True), (BF16, True), (F64, False), (F32, True)]}
    wanted = ["ValueError", "ValueError", "accepted", "accepted"]
    for rank, answers in enumerate(submission.run(scenario.wrap_dtypes, job, world_size=world)):
        what = "weights in float64 and bfloat16, frozen ones in float64, and float32 ones: {}"
        got, why = [answer or "accepted" for answer in answers], partial(causes.explain_refusals, answers)
        At(rank).equal(what, got, wanted, why)
    for is_zero in (False, True):
        case = submission.case("Plain", world, hidden_layers=6, steps=2)
        results = submission.run(
            scenario.measure_kept, case.make_jobs(is_zero=is_zero, **make_job(2)), world_size=world
        )
        what = "after a step, the wrapper keeps {} bytes besides its buffers" + " (with ZeroOptimizer)" * is_zero
        for rank, step in itertools.product(range(world), range(2)):
            At(rank, step).at_most(what, results[rank][step], 256, causes.KEPT_BY_GROUP)


@pytest.mark.points(1)
def test_launches_overlap(submission):
    """Each bucket has one all-to-all in backward, and averages are gathered once: half of module 7's bytes."""
    for world, buckets_per_group in submission.pair_worlds((2, 3), (1, 2)):
        case = submission.case("Plain", world, hidden_layers=6, steps=2)
        jobs = case.make_jobs(proven=1, **make_job(buckets_per_group))
        results = submission.run(training.train, jobs, world_size=world)
        buckets, groups = (list_groups(case.parameters(), world, length) for length in (1, buckets_per_group))
        for step in each_step(results.events if world > 1 else [], 2):
            expect_half(step, buckets)
            expect_overlap(step, groups, buckets_per_group)


@pytest.mark.points(1)
def test_zero_optimizer(submission):
    """Under ZeroOptimizer, averages are not rounded again, and weights travel in float32 instead of gradients."""
    recipe = make_recipe("SGD") | {"options": {"lr": 0.01}}
    for world, model in submission.pair_worlds((2, 3), ("Frozen", "Tied")):
        case = submission.case(model, world, steps=4, micro_batches=2)
        jobs = case.make_jobs(recipe=recipe, parts=["weights"], **make_job(2))
        results = submission.run(m08_zero.train, jobs, world_size=world)
        expected, start = compute_weights(case, recipe), case.start()
        scale = 0.01 * 4 * max(case.gradients_and_scale()[1].values())
        what = "after 4 steps of SGD with ZeroOptimizer, the weights differ by {} from those of training in one process"
        for rank in case.group:
            why = partial(causes.explain_zero, Step(results.events[rank], rank, 0).launches())
            for name, value in expected.items():
                error = float((results[rank]["weights"][name] - value).abs().max())
                limit = GRADIENT * max(float((start[name] - value).abs().max()), scale)
                At(rank, parameter=name).at_most(what, error, limit, why)
        expect_same_bits({rank: results[rank]["weights"] for rank in case.group}, expected, None, "weights")
        numel = compute_padded_numel(case.parameters().values(), world)
        for step in each_step(results.events if world > 1 else [], 4):
            expect_zero_bytes(step, numel)
        # Gradients that are whole numbers: 256 on rank 0, 255 on rank 1, ...
        inputs = [[[torch.full((200,), 256.0 - rank)]] for rank in range(world)]
        weights = {"weights": [torch.zeros(200)], "recipe": recipe | {"options": {"lr": 1.0}}}
        jobs = PerRank(make_job() | weights | {"batches": own, "parts": ["weights"]} for own in inputs)
        mean = 256 - (world - 1) / 2
        for rank, result in enumerate(submission.run(m08_zero.train_dots, jobs, world_size=world)):
            [weight] = result["weights"].values()
            got, wanted = format_distinct(-float(weight.max()), mean)
            is_rounded = -float(weight.max()) == float(torch.tensor(mean).bfloat16())
            At(rank).claim(
                f"a step of SGD with lr=1 subtracts the average of 256 to {257 - world}, which is {wanted}",
                bool(((weight + mean).abs() <= FLOAT32 * mean).all()),
                f"it subtracts {got}",
                causes.ROUNDED_AGAIN * is_rounded,
            )


@pytest.mark.parts("Part (f): what rounding loses")
@pytest.mark.points(1)
def test_error_feedback(submission):
    """compress rounds values plus error to bfloat16, and error becomes what this rounding has lost."""
    generator = draw_generators(submission.rng, 1)[0]
    steps = [torch.randint(-8192, 8193, (64,), generator=generator) / 4096 for _ in range(12)]
    for values in steps:
        values[:2] = torch.tensor([1 + 2**-10, -3 * 2**-12])  # the first is 1 in bfloat16
    [world] = submission.worlds(1)
    [result] = submission.run(scenario.compress, {"values": steps}, world_size=world)
    first, zeros = result["errors"][0], torch.zeros(64)
    what, got = "a new ErrorFeedback(64) has an error of 64 zeros in float32", f"it has {describe_first(first, zeros)}"
    At().claim(what, is_same(first, zeros), got)
    expected = compress_alone(steps, lambda values, error: (values + error, values + error))
    for number, (rounded, error) in enumerate(expected):
        at, why = At(step=number), partial(causes.explain_feedback, steps, result)
        actual, after = result["rounded"][number], result["errors"][number + 1]
        what, got = "compress returns values + error, rounded to bfloat16", describe_first(actual, rounded)
        at.claim(what, is_same(actual, rounded), f"it returned {got}", why)
        what, got = "error becomes values + error minus the rounded numbers, in float32", describe_first(after, error)
        at.claim(what, is_same(after, error), f"it has {got}", why)
        at.claim("compress does not change values", result["kept"][number], "it does", causes.VALUES_CHANGED)
        what = "the result of compress is a new tensor, which later calls do not change"
        at.claim(what, result["lasting"][number], "a later call changes it", causes.SAME_RESULT)


# ---- what the checks use


def draw_normal(rng, world, numels):
    """Return tensors of normal values with these lengths for each rank."""
    return [[torch.randn(numel, generator=g) for numel in numels] for g in draw_generators(rng, world)]


def run_calls(submission, own, views=None, wires=None, groups=None, order=None):
    """Reduce own[rank][number]. Yield the results, the values of the group's ranks, and the group, for each group.

    `views` says for which calls the output is a part of the input, and `wires` has the dtypes, if they are given. After
    a group's results have been judged, require one all_to_all in 16 bits for each call.
    """
    world, count = len(own), len(own[0])
    groups = groups or [list(range(world))]
    options = [{"wire_dtype": wire} if wire not in (None, BF16) else {} for wire in wires or [None] * count]
    common = {"groups": groups, "order": order or list(range(count))}
    common |= {"options": options, "views": views or [False] * count}
    assert len({len(group) for group in groups}) == 1  # see `scenario.form_reductions`
    jobs = PerRank(common | {"tensors": values} for values in own)
    results = submission.run(scenario.reduce, jobs, world_size=world)
    for group in groups:
        yield results, [own[rank] for rank in group], group
        for rank in group if len(group) > 1 else []:
            for number, values in enumerate(own[rank]):
                expect_one_launch(Step(results.events[rank], rank, number), values.numel())


def list_outputs(results, calls, group):
    """Yield (rank as a place, number of the call, output, exact average, cause) for all outputs of each rank."""
    for index, rank in enumerate(group):
        for number in range(len(calls[0])):
            values, output = [own[number] for own in calls], results[rank][number]["output"].cpu()
            average = sum(value.double() for value in values) / len(group)
            is_elsewhere = bool(find_wrong_group(results.events, group, ["all_to_all"]))
            why = partial(causes.explain_error, output, values, index, len(results), is_elsewhere)
            yield At(rank), number, output, average.chunk(len(group))[index], why


def expect_averages(what, results, calls, group):
    """Expect all outputs of each rank of the group to be near the average."""
    for at, number, output, exact, why in list_outputs(results, calls, group):
        got = f"the output of reduction {number} is wrong by up to {float((output.double() - exact).abs().max()):.3g}"
        at.claim(what, torch.allclose(output.double(), exact, atol=0.05), got, why)


def expect_one_launch(step, numel):
    """Expect that a reduction of `numel` elements launches one all_to_all, in 16 bits. Return it."""
    launched, what = step.launches(), f"a reduction of {numel} elements launches one all_to_all, of {2 * numel} bytes, "
    is_right = [(one.op, one.nbytes) for one in launched] == [("all_to_all", 2 * numel)]
    return launched.claim(what + "and nothing else", is_right, cause=partial(causes.explain_calls, numel))


def expect_same_bits(tensors_by_rank, names, step, kind="gradients"):
    """Expect all ranks to have the same bits in the tensors of these names. A gradient may be None on all ranks."""
    first, *others = tensors_by_rank
    why, what = causes.OWN_PART * (kind == "gradients"), f"all ranks have the same bits in their {kind}"
    for rank, name in itertools.product(others, names):
        one, other = tensors_by_rank[first][name], tensors_by_rank[rank][name]
        is_right = one is other if one is None or other is None else is_same(one, other)
        At(rank, step, name).claim(what, is_right, f"they differ from those of rank {first}", why)


def is_half(launched):
    """Return whether a step launches nothing but all_to_alls and all_gathers."""
    return {launch.op for launch in launched} == {"all_to_all", "all_gather"}


def expect_half(step, buckets):
    """Expect one all_to_all for each bucket, and all_gathers of as many bytes."""
    launched, nbytes = step.launches(), [2 * numel for _, numel, _ in buckets]
    exchanges, others = step.launches("all_to_all"), launched.where(lambda one: one.op != "all_to_all")
    launched.claim(
        f"one all_to_all in bfloat16 for each of {len(nbytes)} buckets, of {show(nbytes)} bytes",
        [one.nbytes for one in exchanges] == nbytes and "float16" not in {one.dtype for one in exchanges},
        cause=partial(causes.explain_buckets, nbytes),
    )
    others.claim(
        f"all_gathers of {sum(nbytes)} bytes together, in bfloat16, and nothing else, complete the gradients",
        {one.op for one in others} == {"all_gather"}
        and sum(one.nbytes for one in others) == sum(nbytes)
        and "float16" not in {one.dtype for one in others},
        cause=partial(causes.explain_gathers, nbytes),
    )
    expect_waited(launched)


def expect_overlap(step, groups, buckets_per_group):
    """Expect the all_to_alls of each group during backward, before the next group is complete, and no early wait."""
    exchanges, ready_at = step.launches("all_to_all"), {name: place for place, name in step.ready}
    at_once = step.launches().where(lambda one: waits_at_once(one, ready_at.values()))
    is_single = buckets_per_group > 1 and len(step.launches("all_gather")) == len(exchanges)
    for number, (*_, names) in enumerate(groups):
        own = Launches(exchanges[number * buckets_per_group : (number + 1) * buckets_per_group], step)
        after = groups[number + 1][-1] if number + 1 < len(groups) else []
        end = max((ready_at[name] for name in after), default=float("inf"))
        own.satisfy(
            f"during backward, group {number} is launched before the next group is complete",
            lambda one, end=end: one.phase == "backward" and one.place < end,
            causes.LATE,
            f"{{these}} came later. These gradients were ready: {show(after or names)}",
        )
        own.satisfy(
            f"backward does not wait for group {number} before gradients of the next group are ready",
            lambda one, after=after: not (blocks_backward(one, after, ready_at) if after else one.sync),
            causes.BLOCKED if at_once else causes.ONE_EACH * is_single,
        )
    gathers = at_once.where(lambda one: one.op == "all_gather")
    gathers.are_none("backward waits at once for none of the all_gathers that it launches", causes.BLOCKED)


def waits_at_once(launch, ready):
    """Return whether backward waits for a launch before another gradient is ready."""
    is_early = launch.waits and launch.wait_phases[0] == "backward" and not launch.is_polled
    return launch.sync or (is_early and not any(launch.place < place < launch.waits[0] for place in ready))


def expect_zero_bytes(step, numel):
    """Expect 16-bit all_to_alls of all gradients, and float32 all_gathers of all weights in the optimizer's step."""
    for phases, op, nbytes, where in (
        (("backward", "finish"), "all_to_all", 2 * numel, "backward and finish launch"),
        (("step",), "all_gather", 4 * numel, "the optimizer's step launches, for weights in float32,"),
    ):
        own = step.launches().where(in_phase(*phases))
        is_right = {one.op for one in own} == {op} and sum(one.nbytes for one in own) == nbytes
        what = f"{where} {op}s of {nbytes} bytes together, and nothing else"
        own.claim(what, is_right, cause=causes.explain_zero)
    elsewhere = step.launches().where(lambda one: one.phase not in ("backward", "finish", "step"))
    elsewhere.are_none("only backward, finish and the optimizer's step launch anything")
