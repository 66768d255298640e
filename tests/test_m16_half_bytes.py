"""Graded checks of module 16: 16 bits on the wire, 32 in the sum."""

import itertools
from functools import partial

import pytest
import torch

from brigade.checks.claims import Step
from brigade.checks.expectations import (
    blocks_backward,
    expect,
    expect_gradients,
    expect_start,
    expect_waited,
    format_distinct,
    join_names,
    list_steps,
    require_launches,
)
from brigade.checks.reference import draw_generators
from brigade.events import launches, list_ready_gradients, summarize
from brigade.runner.ranks import PerRank
from helpers import training
from helpers.buffers import BUCKET_NUMEL, compute_padded_numel, list_groups
from helpers.memory import WORLD, run_with_little_memory
from helpers.odd_steps import expect_silence
from helpers.steps import expect_interface
from helpers.zero import make_recipe
from m08_zero_optimizer import scenario as m08_zero
from m08_zero_optimizer.expected import compute_weights
from m16_half_bytes import causes, scenario
from m16_half_bytes.expected import compress_alone, describe_first

# Relative 2-norm errors of the average of normal values on 2, 3 and 4 ranks. Values that are rounded to bfloat16 once:
# 1.66e-3. A sum in bfloat16: 2.4e-3 to 3.3e-3. An average that is rounded once more: 2.3e-3 to 2.5e-3.
ERROR = 2e-3
FLOAT32 = 1e-6  # relative error of a few operations in float32
LARGE = 1 << 22  # elements
GRADIENT = 1e-2  # values and averages are rounded by at most 2**-9 each, that is 4e-3 together
SUBGROUPS = [[1, 3], [0, 2]]  # of four ranks
F16, F32, F64, BF16 = torch.float16, torch.float32, torch.float64, torch.bfloat16
JOB = {"package": "m16_half_bytes", "wrapper": "HalfBytesDDP"}


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
            limit = ERROR if len(group) > 1 else 0.0
            right = f"on {len(group)} ranks, the average of normal values has a relative error of at most {ERROR:g}"
            right = right if limit else "on one rank, the output is a copy of the values, without rounding"
            for rank, output, exact, values, index in list_outputs(results, calls, group):
                error = float((output.double() - exact).norm() / exact.norm())
                why = partial(causes.explain_error, output, values, index)
                expect(error <= limit, right, f"the relative error is {error:.3g}", why, rank=rank)


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
            for place, (rank, output, exact, values, index) in enumerate(list_outputs(results, calls, group)):
                wire, least = ((BF16, 1), (F16, 0))[place % 2]
                wrong = (output.double() - exact).abs() > FLOAT32 * exact.abs().clamp(min=least)
                at = int(wrong.int().argmax())
                got, wanted = format_distinct(float(output[at]), float(exact[at]))
                name = str(wire).removeprefix("torch.")
                right = f"values that {name} can represent are averaged with the accuracy of float32: {wanted}"
                why = partial(causes.explain_error, output, values, index, wire)
                is_right = not wrong.any() and bool(output.isfinite().all())
                expect(is_right, right, f"entry {at} of the output is {got}", why, rank=rank)


@pytest.mark.points(1)
def test_one_all_to_all(submission):
    """A reduction launches one all-to-all in 16 bits in its group, and does not wait for it."""
    for world in submission.worlds(2, 4):
        groups = SUBGROUPS if world == 4 else [list(range(world))]
        size = len(groups[0])
        own = draw_normal(submission.rng, world, [size * 24] * 2)
        for results, calls, group in run_calls(submission, own, views=(True, False), wires=(BF16, F16), groups=groups):
            for at, _, launched in list_steps(results.events, 2, group if size > 1 else []):
                expect_one_launch(launched, size * 24, at["rank"])
                is_right = not launched[0].sync and "launch" not in launched[0].wait_phases
                right = "start_reduce_scatter returns without waiting for the all_to_all"
                expect(is_right, right, "it waits", causes.BLOCKED, rank=at["rank"])
            right = f"each rank of the group {join_names(group)} gets its part of the group's average"
            for rank, output, exact, values, index in list_outputs(results, calls, group):
                wrong = f"the output is wrong by up to {float((output.double() - exact).abs().max()):.3g}"
                why = partial(causes.explain_error, output, values, index, world=world)
                expect(torch.allclose(output.double(), exact, atol=0.05), right, wrong, why, rank=rank)


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
            for at, _, launched in list_steps(results.events, 4, group):
                rank, number = at["rank"], at["step"]
                for key, (right, why) in KEPT.items():
                    is_free = len(group) == 1 and key in ("kept_input", "kept_output")
                    is_right = is_free or results[rank][number][key]
                    expect(is_right, right, "its values have changed", why, rank=rank)
                raced = [x for x in launched if x.raced or not x.waits]
                right = "the tensors of a launch stay as they are until its wait"
                wrong = f"those of reduction {number} have changed before, or nothing waits for it"
                why = causes.SHARED if raced and raced[0].waits else causes.UNAWAITED
                expect(not raced, right, wrong, why, rank=rank)
            right = f"four reductions in flight, awaited in the order {join_names(order)}, all get their averages"
            for place, (rank, output, exact, values, index) in enumerate(list_outputs(results, calls, group)):
                error = float((output - exact).abs().max())
                wrong = f"the output of reduction {place % 4} is wrong by up to {error:.3g}"
                why = partial(causes.explain_error, output, values, index)
                expect(torch.allclose(output.double(), exact, atol=0.05), right, wrong, why, rank=rank)


@pytest.mark.points(1)
def test_scratch(submission):
    """After the wait, a reduction keeps no memory, even if its handle still exists."""
    [world] = submission.worlds(2)
    jobs = PerRank({"values": values} for [values] in draw_normal(submission.rng, world, [world * 4096]))
    results = submission.run(scenario.measure_scratch, jobs, world_size=world)
    right = "after the wait, the scratch memory of a reduction is gone, even if its handle still exists"
    for rank, result in enumerate(results):
        launched = launches(results.events[rank])
        if world > 1:
            expect_one_launch(launched, world * 4096, rank)
        wrong = f"{result['after']} bytes are alive. In flight, there were {result['during']}"
        why = partial(causes.explain_scratch, result, launched)
        expect(result["after"] <= 64, right, wrong, why, rank=rank)  # numbers may stay, tensors may not
    first, count = submission.rng.randrange(16), 6
    job = {"numel": LARGE, "count": count, "first": first}
    if run := run_with_little_memory(submission, scenario.reduce_many, job, mib=77, steps=count):
        results, seeds = run
        expected, largest = torch.zeros(WORLD, len(range(first, LARGE // WORLD, 16))), 0.0
        for seed, number in itertools.product(seeds, range(count)):
            values = torch.randn(LARGE, generator=torch.Generator().manual_seed(seed + number))
            expected += values.view(WORLD, -1)[:, first::16] / WORLD
            largest = max(largest, float(values.abs().max()))
        for rank, total in enumerate(results):
            error, limit = float((total - expected[rank]).abs().max()), count * largest * 2**-8
            right = f"the outputs of {count} large reductions add up to the sum of the averages, within {limit:.3g}"
            expect(error <= limit, right, f"the error is {error:.3g}", rank=rank)


@pytest.mark.parts("Parts (c) to (e): the wrapper")
@pytest.mark.points(1)
def test_gradients(submission):
    """All ranks have the same averages, to the bit. No scratch memory stays. Weights must be float32."""
    settings = (("Buffers", None), ("Branches", [0, -1]), ("Tied", None), ("Frozen", None))
    for world, (model, branches), micro_batches in zip(submission.worlds(1, 2, 3, 4), settings, (1, 1, 2, 2)):
        groups = SUBGROUPS if world == 4 else [list(range(world))]
        options = {"branches": branches[:world] if branches else None, "group": groups[0]}
        case = submission.case(model, world, steps=2, micro_batches=micro_batches, **options)
        results = submission.run(training.train, case.make_jobs(groups=groups, **make_job(2)), world_size=world)
        expect_start([result["start"] for result in results], case, events=results.events)
        hypotheses = partial(causes.suspect_mistakes, case)
        expect_gradients(results, case, tolerance=GRADIENT, hypotheses=hypotheses)
        if micro_batches > 1:
            expect_silence(results.events, case.group)
        for step in range(2):
            expect_same_bits([results[rank]["gradients"][step] for rank in case.group], case.group, step)
        require_launches(results.events, case.group, "all_to_alls and all_gathers", is_half, 2, False)
        expect_interface(results, case)
    [world] = submission.worlds(2)
    job = JOB | {"dtypes": [(F64, True), (BF16, True), (F64, False), (F32, True)]}
    right = "trainable weights in float64 or bfloat16 raise ValueError. Frozen ones in float64 are accepted"
    for rank, answers in enumerate(submission.run(scenario.wrap_dtypes, job, world_size=world)):
        wrong = f"the four answers are {join_names([answer or 'accepted' for answer in answers])}"
        is_right = answers == ["ValueError", "ValueError", None, None]
        expect(is_right, right, wrong, partial(causes.explain_refusals, answers), rank=rank)
    for is_zero in (False, True):
        case = submission.case("Plain", world, hidden_layers=6, steps=2)
        results = submission.run(
            scenario.measure_kept, case.make_jobs(is_zero=is_zero, labels=None, **make_job(2)), world_size=world
        )
        right = "after a step, the wrapper keeps no memory besides its buffers"
        right += " (with ZeroOptimizer)" * is_zero
        for rank, kept in enumerate(results):
            for step, nbytes in enumerate(kept):
                expect(
                    nbytes <= 256, right, f"it keeps {nbytes} bytes more", causes.KEPT_BY_GROUP, rank=rank, step=step
                )


@pytest.mark.points(1)
def test_launches_overlap(submission):
    """Each bucket has one all-to-all in backward, and averages are gathered once: half of module 7's bytes."""
    for world, buckets_per_group in zip(submission.worlds(2, 3), (1, 2)):
        case = submission.case("Plain", world, hidden_layers=6, steps=2)
        jobs = case.make_jobs(proven=1, **make_job(buckets_per_group))
        results = submission.run(training.train, jobs, world_size=world)
        buckets, groups = (list_groups(case.parameters(), world, length) for length in (1, buckets_per_group))
        for at, events, launched in list_steps(results.events if world > 1 else [], 2):
            expect_half(events, launched, at, buckets)
            expect_overlap(events, launched, at, groups, buckets_per_group)


@pytest.mark.points(1)
def test_zero_optimizer(submission):
    """Under ZeroOptimizer, averages are not rounded again, and weights travel in float32 instead of gradients."""
    recipe = make_recipe("SGD") | {"options": {"lr": 0.01}}
    for world, model in zip(submission.worlds(2, 3), ("Frozen", "Tied")):
        case = submission.case(model, world, steps=4, micro_batches=2)
        jobs = case.make_jobs(recipe=recipe, **make_job(2))
        results = submission.run(m08_zero.train, jobs, world_size=world)
        expected, start = compute_weights(case, recipe), case.start()
        scale = 0.01 * 4 * max(case.largest_entries().values())
        right = "after 4 steps of SGD with ZeroOptimizer, the weights are those of training in one process"
        for rank in case.group:
            why = partial(causes.explain_zero, launches(results.events[rank], 0))
            for name, value in expected.items():
                error = float((results[rank]["weights"][name] - value).abs().max())
                is_right = error <= GRADIENT * max(float((start[name] - value).abs().max()), scale)
                expect(is_right, right, f"the weights differ by up to {error:.3g}", why, rank=rank, parameter=name)
        expect_same_bits([results[rank]["weights"] for rank in case.group], case.group, None, "weights")
        numel = compute_padded_numel(case.parameters().values(), world)
        for at, _, launched in list_steps(results.events if world > 1 else [], 4):
            expect_zero_bytes(launched, numel, at)
        # Gradients that are whole numbers: 256 on rank 0, 255 on rank 1, ...
        inputs = [[[torch.full((200,), 256.0 - rank)]] for rank in range(world)]
        weights = {"weights": [torch.zeros(200)], "recipe": recipe | {"options": {"lr": 1.0}}}
        jobs = PerRank(make_job() | weights | {"batches": own} for own in inputs)
        mean = 256 - (world - 1) / 2
        for rank, result in enumerate(submission.run(m08_zero.train_dots, jobs, world_size=world)):
            [weight] = result["weights"].values()
            got, wanted = format_distinct(-float(weight.max()), mean)
            right = f"a step of SGD with lr=1 subtracts the average of 256 to {257 - world}, which is {wanted}"
            is_rounded = -float(weight.max()) == float(torch.tensor(mean).bfloat16())
            why = causes.ROUNDED_AGAIN if is_rounded else ""
            is_right = bool(((weight + mean).abs() <= FLOAT32 * mean).all())
            expect(is_right, right, f"it subtracts {got}", why, rank=rank)


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
    first = result["errors"][0]
    is_right = first.dtype == F32 and first.shape == (64,) and not first.any()
    right = "a new ErrorFeedback(64) has an error of 64 zeros in float32"
    expect(is_right, right, f"{first.dtype}, {tuple(first.shape)}")
    expected = compress_alone(steps, lambda values, error: (values + error, values + error))
    for number, (rounded, error) in enumerate(expected):
        right = torch.equal(result["rounded"][number].float(), rounded) and result["rounded"][number].dtype == BF16
        why = partial(causes.explain_feedback, steps, result)
        got = f"call {number} returned {describe_first(result['rounded'][number], rounded)}"
        expect(right, "compress returns values + error, rounded to bfloat16", got, why)
        right = torch.equal(result["errors"][number + 1].float(), error) and result["errors"][number + 1].dtype == F32
        got = f"after call {number}, error has {describe_first(result['errors'][number + 1], error)}"
        expect(right, "error becomes values + error minus the rounded numbers, in float32", got, why)
        expect(result["kept"][number], "compress does not change values", "it does", causes.VALUES_CHANGED)
        right = "the result of compress is a new tensor, which later calls do not change"
        expect(result["lasting"][number], right, "a later call changes it", causes.SAME_RESULT)


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
    jobs = PerRank(common | {"tensors": values} for values in own)
    results = submission.run(scenario.reduce, jobs, world_size=world)
    for group in groups:
        yield results, [own[rank] for rank in group], group
        for rank in group if len(group) > 1 else []:
            for number, values in enumerate(own[rank]):
                expect_one_launch(launches(results.events[rank], number), values.numel(), rank)


def list_outputs(results, calls, group):
    """Yield (rank, output, exact average, the ranks' values, position in the group) for all outputs of each rank."""
    for index, rank in enumerate(group):
        for number, result in enumerate(results[rank]):
            values = [own[number] for own in calls]
            average = sum(value.double() for value in values) / len(group)
            yield rank, result["output"].cpu(), average.chunk(len(group))[index], values, index


def expect_one_launch(launched, numel, rank):
    """Expect that a reduction of `numel` elements launches one all_to_all, in 16 bits."""
    is_right = [(launch.op, launch.nbytes) for launch in launched] == [("all_to_all", 2 * numel)]
    right = f"a reduction of {numel} elements launches one all_to_all, of {2 * numel} bytes, and nothing else"
    expect(is_right, right, summarize(launched), partial(causes.explain_calls, launched, numel), rank=rank)


def expect_same_bits(tensors_by_rank, group, step, kind="gradients"):
    """Expect all ranks of a group to have the same bits."""
    first = tensors_by_rank[0]
    right, wrong = f"all ranks have the same bits in their {kind}", f"they differ from those of rank {group[0]}"
    for rank, tensors in zip(group, tensors_by_rank):
        for name, tensor in tensors.items():
            is_right = (tensor is None and first[name] is None) or torch.equal(tensor, first[name])
            why = causes.OWN_PART if kind == "gradients" else ""
            expect(is_right, right, wrong, why, rank=rank, step=step, parameter=name)


def is_half(launched):
    """Return whether a step launches nothing but all_to_alls and all_gathers."""
    return {launch.op for launch in launched} == {"all_to_all", "all_gather"}


def expect_half(events, launched, at, buckets):
    """Expect one all_to_all for each bucket, and all_gathers of as many bytes."""
    nbytes = [2 * numel for _, numel, _ in buckets]
    exchanges, gathers = ([x for x in launched if x.op == op] for op in ("all_to_all", "all_gather"))
    is_right = [x.nbytes for x in exchanges] == nbytes and "float16" not in {x.dtype for x in exchanges}
    right = f"one all_to_all in bfloat16 for each of {len(nbytes)} buckets, of {join_names(nbytes)} bytes"
    why = partial(causes.explain_buckets, launched, nbytes)
    expect(is_right, right, summarize(launched), why, **at)
    is_right = sum(x.nbytes for x in gathers) == sum(nbytes) and "float16" not in {x.dtype for x in gathers}
    is_right &= len(exchanges) + len(gathers) == len(launched)
    right = f"all_gathers of {sum(nbytes)} bytes together, in bfloat16, and nothing else, complete the gradients"
    wrong = summarize([x for x in launched if x.op != "all_to_all"])
    expect(is_right, right, wrong, partial(causes.explain_gathers, gathers, nbytes), **at)
    expect_waited(Step(events, at["rank"], at["step"]).launches())


def expect_overlap(events, launched, at, groups, buckets_per_group):
    """Expect the all_to_alls of each group during backward, before the next group is complete, and no early wait."""
    exchanges = [x for x in launched if x.op == "all_to_all"]
    ready_at = {name: place for place, name in list_ready_gradients(events, at["step"])}
    at_once = [x for x in launched if waits_at_once(x, ready_at.values())]
    for number, (*_, names) in enumerate(groups):
        own = exchanges[number * buckets_per_group : (number + 1) * buckets_per_group]
        after = groups[number + 1][-1] if number + 1 < len(groups) else []
        late = [x for x in own if x.phase != "backward" or after and x.place > max(ready_at[name] for name in after)]
        right = f"during backward, group {number} is launched before the next group is complete"
        when = late[0].phase if late else ""
        wrong = f"it was launched in {when}. These gradients were ready: {join_names(after or names)}"
        expect(not late, right, wrong, causes.LATE, **at)
        blocking = [x for x in own if blocks_backward(x, after, ready_at)] if after else [x for x in own if x.sync]
        right = f"backward does not wait for group {number} before gradients of the next group are ready"
        expect(not blocking, right, "it waits earlier", causes.BLOCKED if at_once else "", **at)
    gathers = [x for x in at_once if x.op == "all_gather"]
    right = "backward does not wait for an all_gather where it is launched"
    expect(not gathers, right, f"it waits for {summarize(gathers)}", causes.BLOCKED, **at)


def waits_at_once(launch, ready):
    """Return whether backward waits for a launch before another gradient is ready."""
    is_early = launch.waits and launch.wait_phases[0] == "backward" and not launch.is_polled
    return launch.sync or (is_early and not any(launch.place < place < launch.waits[0] for place in ready))


def expect_zero_bytes(launched, numel, at):
    """Expect 16-bit all_to_alls of all gradients, and float32 all_gathers of all weights in the optimizer's step."""
    why = partial(causes.explain_zero, launched)
    for phases, op, nbytes, right in (
        (
            ("backward", "finish"),
            "all_to_all",
            2 * numel,
            "backward and finish launch all_to_alls of {} bytes together",
        ),
        (("step",), "all_gather", 4 * numel, "the optimizer's step gathers the weights in float32, {} bytes"),
    ):
        own = [x for x in launched if x.phase in phases]
        is_right = {x.op for x in own} == {op} and sum(x.nbytes for x in own) == nbytes
        expect(is_right, right.format(nbytes) + ", and nothing else", summarize(own), why, **at)
