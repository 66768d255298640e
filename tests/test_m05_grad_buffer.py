"""Graded checks of module 5: gradients that are views of a padded, contiguous buffer."""

import math
from functools import partial
from itertools import product

import pytest
import torch

from brigade.course.checks.expectations import (
    expect_equal,
    expect_gradients,
    expect_overlap,
    explain_failures,
    overlaps,
    replace_cause,
    require_launches,
)
from brigade.course.checks.reference import draw_generators
from brigade.ranks.claims import At, each_step, show
from brigade.ranks.events import launches
from brigade.ranks.runner.ranks import PerRank
from helpers import training
from helpers.buffers import BUCKET_NUMEL, expect_members, expect_zeroed, judge_order
from helpers.late_launches import explain_late_launches
from helpers.odd_steps import expect_accumulated, expect_idle_rank, expect_no_old_gradients, expect_second_backward
from helpers.steps import expect_all_kinds_of_steps, expect_averages
from m05_grad_buffer import causes, scenario
from m05_grad_buffer.expected import compute_layout

JOB = {"package": "m05_grad_buffer", "wrapper": "BufferedDDP", "arguments": {"bucket_numel": BUCKET_NUMEL}}
BF16 = torch.bfloat16
ZEROED = {"zero": "optimizer, to None", "late": False}


@pytest.mark.parts("Part (a): plan the buffer")
@pytest.mark.points(3)
def test_layout_rule(submission):
    """plan_layout follows the rule: parameters start at multiples of 64, and full buckets are closed and padded."""
    rng = submission.rng
    cases = [
        {"arguments": [[100], 40, 1], "keywords": {}},
        {"arguments": [[64, 64, 64], 128, 2], "keywords": {}},  # exactly full
        {"arguments": [[10, 20, 30], None, 3], "keywords": {}},
        {"arguments": [[1, 1], 1, 4096], "keywords": {"pad_for_busbw": True}},
        {"arguments": [[], 10, 2], "keywords": {}},
    ]
    for _ in range(150):
        numels = [rng.randint(1, rng.choice([10, 300, 5000])) for _ in range(rng.randint(1, 30))]
        bucket_numel = rng.choice([None, rng.randint(1, 500), rng.randint(1, 20_000)])
        dp_size = rng.choice([1, 2, 3, 4, 6, 7, 8, 12, 48, 100, 128, 1000, 4096])
        keywords = {"pad_for_busbw": True} if rng.random() < 0.3 else {}
        cases.append({"arguments": [numels, bucket_numel, dp_size], "keywords": keywords})
    cases.sort(key=lambda case: len(case["arguments"][0]))  # the first wrong plan, which a student sees, is small
    [answers] = submission.run(scenario.plan_layouts, cases, world_size=1)
    for case, answer in zip(cases, answers, strict=True):
        call = f"plan_layout({', '.join(map(str, case['arguments']))}{', pad_for_busbw=True' * bool(case['keywords'])})"
        is_aligned, what = all(start % 64 == 0 for start, _ in answer["param_ranges"]), f"in the layout of {call}, "
        what += "every parameter starts at a multiple of 64 elements"
        At().claim(what, is_aligned, f"param_ranges = {answer['param_ranges']}", causes.ALIGNED)
        layout = compute_layout(*case["arguments"], **case["keywords"])
        for field, find in causes.LAYOUT.items():
            got, why = f"{field} = {answer[field]}", partial(find, answer, layout, **case)
            At().claim(f"{call} returns {field} = {layout[field]}", answer[field] == layout[field], got, why)
    [frozen] = submission.run(scenario.is_frozen, world_size=1)
    what = "a BufferLayout cannot be changed: it is a dataclass with frozen=True"
    At().claim(what, frozen, "a value could be assigned to numel")


@pytest.mark.parts("Part (b): views of the buffer")
@pytest.mark.points(1)
def test_buffer_memory(submission):
    """Parameters and gradients are views of the flat tensors at the layout's offsets, even after reallocate()."""
    rng = submission.rng
    for dtype, grad_dtype in ((torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float32, None)):
        grad = "main_grad" if grad_dtype else "grad"
        generator = torch.Generator().manual_seed(rng.randrange(2**31))
        shapes = [(rng.randint(1, 20), rng.randint(2, 30)) for _ in range(rng.randint(4, 7))]
        values = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
        job = {"values": values, "bucket_numel": BUCKET_NUMEL, "grad_dtype": grad_dtype}
        [states] = submission.run(scenario.move_buffer, job, world_size=1)
        what = "a parameter whose gradient is None has none after it is in a GradBuffer"
        At().claim(what, states.pop("is_unset"), "p.grad is a tensor")
        for (when, state), i in product(states.items(), range(len(values))):
            for name, flat in (("data", "param_data"), (grad, "grad_data")):
                At().claim("reallocate() moves the buffer", state is not None, f"there is no p.{grad} to move")
                at, (offset, value) = At(parameter=f"parameter {i}"), state[name][i] or (None, None)
                what = f"{when}, p.{name} is the view of {flat} that begins at element {{}}"
                at.equal(what, offset, state["starts"][i], partial(causes.explain_place, name, when))
                # The scenario fills p.grad before it makes the buffer, and main_grad before it moves the buffer.
                number = i + 1 if when == "after reallocate()" or name == "grad" else 0
                expected = values[i] if name == "data" else torch.full_like(values[i], number, dtype=grad_dtype)
                why = partial(causes.explain_values, name, value, expected)
                at.equal(f"{when}, p.{name} has the shape {{}}", [*value.shape], [*expected.shape], why)
                what = f"{when}, the values of p.{name} have not changed"
                is_same = value.dtype == expected.dtype and torch.equal(value, expected)
                at.claim(what, is_same, f"they are different, or not {str(expected.dtype)[6:]}", why)


@pytest.mark.parts("Parts (c) to (g): gradients in place")
@pytest.mark.points(1)
def test_gradients_are_averaged(submission):
    """Replicas start with equal weights and buffers. One all-reduce per padded bucket averages every gradient."""
    expect_averages(submission, [JOB] * 4, require_padded)


@pytest.mark.points(2)
def test_gradients_are_views(submission):
    """Gradients are views of the buffer at the layout's offsets. A step copies no more bytes than the bare model."""
    for world, form in submission.pair_worlds((2, 3), ("optimizer, to None", "optimizer, to zeros")):
        case = submission.case("Plain", world, steps=3)
        results = submission.run(scenario.train, case.make_jobs(zero=form, late=False, **JOB), world_size=world)
        names, layout = choose_layout(submission, results, case)
        for step in each_step(results.events, 3):
            buffers = results[step.rank]["buffers"][step.number]
            numels = [buffer["numel"] for buffer in buffers]
            what, why = "each dtype has a grad buffer, of {} elements", partial(causes.explain_buffers, buffers, names)
            step.equal(what, numels, [layout["numel"]], why)
            for name, (start, _) in zip(names, layout["param_ranges"], strict=True):
                why = partial(causes.explain_offset, results, buffers, names, name)
                what = f"after finish_grad_sync, the gradient of {name} begins at element {{}} of its buffer"
                step.equal(what, buffers[0]["offsets"].get(name), start, why)
            expect_members(step, buffers, case)
    for model in ("Plain", "MixedDtypes"):
        case = submission.case(model, world)
        results = submission.run(scenario.measure_steady_step, case.make_jobs(**JOB), world_size=world, mode="record")
        gradient_bytes = sum(p.numel() * p.element_size() for p in case.parameters().values())
        for rank, result in enumerate(results):
            At(rank).at_most(
                "a step copies {} elements, the number that forward and backward of the bare model copy",
                result["ddp"]["copied"],
                result["bare"]["copied"],
                partial(causes.explain_copies, result),
            )
            extra = result["ddp"]["allocated"] - result["bare"]["allocated"]
            what = "a step allocates {} bytes more than forward and backward of the bare model, 5 % of all gradients"
            At(rank).at_most(what, extra, 0.05 * gradient_bytes, causes.ALLOCATES)


@pytest.mark.points(2)
def test_zero_grad_in_any_form(submission):
    """With every form of zero_grad, before or after forward, weights equal those from training in one process."""
    forms = ("optimizer, to None", "optimizer, to zeros", "model, to None", "model, to zeros")
    expect_zeroed(submission, JOB, [(form, late) for form in forms for late in (False, True)])


@pytest.mark.points(2)
def test_buckets_overlap_with_backward(submission):
    """Each bucket is launched in place, with its padding, before the next one is complete. The padding stays zero."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, hidden_layers=4, steps=2)
        jobs = case.make_jobs(proven=1, **ZEROED, **JOB)
        results = submission.run(scenario.train, jobs, world_size=world)
        names, layout = choose_layout(submission, results, case)
        expected = [end - start for start, end in layout["bucket_ranges"]]
        for step in each_step(results.events, 2):
            launched, buffers = step.launches(), results[step.rank]["buffers"][step.number]
            why = partial(causes.explain_launches, buffers, names, layout)
            launched.are_one_for_each("bucket", "all_reduce", expected, cause=why)
            why_late = partial(explain_late_launches, submission, jobs)
            expect_overlap(launched, list_buckets(names, layout), why_late=why_late)
            what = "after a step, the absolute values of the padding add up to {}"
            step.equal(what, sum(buffer["padding"] for buffer in buffers), 0.0, causes.LEAKS)
            expect_members(step, buffers, case)


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_steps_and_subgroups(submission):
    """Gradients stay correct over several steps with no_sync and evaluations, in any ready order, and in sub-groups."""

    def inspect(results, case):
        expected = len(lay_out(case, len(case.group))[1]["bucket_ranges"])
        for step in each_step(results.events, 1, case.group if case.model == "Plain" else []):
            what = "a step with 3 micro-batches makes {}, one per bucket"
            step.launches().are_so_many(what, expected)

    judge = partial(judge_order, 1, "all_reduce", "bucket")
    expect_all_kinds_of_steps(submission, "Plain", JOB, require_padded, inspect, judge_order=judge)
    expect_second_backward(submission, submission.worlds(2)[0], JOB)
    expect_no_old_gradients(submission, submission.worlds(2)[0], JOB)
    expect_idle_rank(submission, JOB)
    expect_accumulated(submission, submission.worlds(2)[0], JOB)


@pytest.mark.parts("Parts (h) and (i): accumulate in fp32")
@pytest.mark.points(2)
@pytest.mark.needs("test_gradients_are_averaged")
def test_main_grad_accumulates_in_fp32(submission):
    """With grad_dtype=float32, many small bf16 gradients accumulate in fp32, and each step starts from zero."""
    sizes = submission.rng.sample(range(3, 200), 4)
    # One gradient is about 1, and 40 gradients are about 1/500. In bf16, each of these 40 would be rounded away.
    scales = [1.0] + [0.002] * 40
    for world, set_to_none in submission.pair_worlds((2, 3), (True, False)):
        batches = [  # for each rank, two steps of 41 micro-batches
            [[[(scale * (0.5 + torch.rand(size, generator=rng))).bfloat16() for size in sizes] for scale in scales]
             for _ in range(2)]
            for rng in draw_generators(submission.rng, world)
        ]  # fmt: skip
        for own in batches:
            for micro in own[1]:
                micro[0].zero_()  # step 1 does not use parameter 0
        arguments = {"bucket_numel": BUCKET_NUMEL, "grad_dtype": torch.float32}
        common = JOB | {"sizes": sizes, "set_to_none": set_to_none, "arguments": arguments}
        jobs = PerRank(common | {"batches": own} for own in batches)
        results = submission.run(scenario.accumulate, jobs, world_size=world)
        for rank, result in enumerate(results):
            absent = [int(i) for i, main_grad in result["steps"][0]["main_grad"].items() if main_grad is None]
            what = "with grad_dtype=float32, bf16 parameters without main_grad: {}"
            At(rank, 0).equal(what, absent, [], causes.NO_MAIN_GRAD)
        for step in range(2):
            average = {
                f"main_grad of parameter {i}": sum(micro[i].float() for own in batches for micro in own[step]) / world
                for i in range(len(sizes))
            }
            with explain_failures(results.events):
                expect_equal(
                    f"in step {step}, main_grad is the average over the ranks of the fp32 sum over 41 micro-batches",
                    [name_main_grads(result["steps"][step]) for result in results],
                    average,
                    tolerance=1e-5,
                    hypotheses=partial(causes.suspect_main_grads, batches, step, results),
                )
            for rank, result in enumerate(results):
                for i, main_grad in result["steps"][step]["main_grad"].items():
                    grad = result["steps"][step]["grad"][i]
                    is_rounded = grad is not None and grad.dtype == BF16 and torch.equal(grad, main_grad.bfloat16())
                    what = "after finish_grad_sync, p.grad equals main_grad rounded to the parameter's dtype"
                    at = At(rank, step, f"parameter {i}")
                    at.claim(what, is_rounded, describe_grad(grad), causes.NO_ROUNDED_GRAD)
        for step in each_step(results.events, 1):
            step.launches().have_dtype(torch.float32)
            last, ended = results[step.rank]["last"] or {}, "after finish_accumulation(set_grads=False), "
            kept = [i for i, (is_set, _) in last.items() if is_set]
            step.equal(f"{ended}parameters with p.grad: {{}}", kept, [])
            ones = [[math.nan] if main_grad is None else main_grad.unique().tolist() for _, main_grad in last.values()]
            others = {value for values in ones for value in values} - {1.0}
            step.equal(f"{ended}gradients of 1 give other values in main_grad: {{}}", sorted(others), [])
            is_view = results[step.rank]["steps"][1]["is_view"]
            lost = [f"weights.{i}" for i in is_view if not is_view[i]]
            step.equal("parameters whose main_grad is no view of the buffer: {}", lost, [])


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_one_buffer_per_dtype(submission):
    """The parameters of each dtype share one buffer, in this dtype or a wider grad_dtype. Gradients are averaged."""
    for world, grad_dtype in submission.pair_worlds((2, 3), (None, torch.float32)):
        case = submission.case("MixedDtypes", world, hidden_layers=4)
        job = JOB | {"arguments": JOB["arguments"] | {"grad_dtype": grad_dtype}}
        wide = [dtype for dtype in (torch.float64, torch.float32) if grad_dtype]  # float32 is not wider than these
        with replace_cause(partial(causes.find_buffer_dtype, wide)):
            results = submission.run(scenario.train, case.make_jobs(**ZEROED, **job), world_size=world)
        expected = {}
        for name, parameter in case.parameters().items():
            expected.setdefault(parameter.dtype, set()).add(name)
        dtypes = {name: p.dtype if p.dtype in wide else grad_dtype or p.dtype for name, p in case.parameters().items()}
        for rank, result in enumerate(results):
            buffers = result["buffers"][0]
            parameter_sets = [set(buffer["offsets"]) for buffer in buffers]
            At(rank).claim(
                f"each dtype has one grad buffer: {show(sorted(map(str, expected)))}",
                len(buffers) == len(expected) and all(names in parameter_sets for names in expected.values()),
                f"the dtypes of the grad buffers are {show(sorted(str(buffer['dtype']) for buffer in buffers))}",
            )
            for buffer in buffers:
                name = next(iter(buffer["offsets"]))
                own, cause = (
                    case.parameters()[name].dtype,
                    causes.NARROWER if case.parameters()[name].dtype in wide else "",
                )
                what = f"with grad_dtype={grad_dtype}, the gradients of {own} parameters are in a {{}} buffer"
                At(rank).equal(what, buffer["dtype"], dtypes[name], cause)
            offsets = [offset for buffer in buffers for offset in buffer["offsets"].items()]
            lost = [name for name, offset in offsets if isinstance(offset, str)]
            why = partial(causes.explain_lost_view, results)
            At(rank, 0).equal("parameters whose gradient is no view of its buffer: {}", lost, [], why)
            expect_members(At(rank, 0), buffers, case)
        results = submission.run(training.train, case.make_jobs(**job), world_size=world)
        expect_gradients(results, case, tolerance=2**-6)


# ---- what the checks of this module and of later ones use


def lay_out(case, world):
    """Return the names from the last parameter to the first, and their buffer's layout. The model has one dtype."""
    named = list(reversed([(name, p) for name, p in case.parameters().items() if p.requires_grad]))
    return [name for name, _ in named], compute_layout([p.numel() for _, p in named], BUCKET_NUMEL, world)


def choose_layout(submission, results, case):
    """Return what `lay_out` returns or, if step 0 does not follow that, the layout that the submission plans instead.

    So a wrapper that follows a wrong plan loses only the points of the plan.
    """
    names, layout = lay_out(case, len(results))
    starts = dict(zip(names, (start for start, _ in layout["param_ranges"]), strict=True))
    numels = [end - start for start, end in layout["bucket_ranges"]]
    launched = [launch.numel for launch in launches(results.events[0], 0)]
    if [buffer["offsets"] for buffer in results[0]["buffers"][0]] == [starts] and launched == numels:
        return names, layout
    arguments = [[case.parameters()[name].numel() for name in names], BUCKET_NUMEL, len(results)]
    problem = {"arguments": arguments, "keywords": {}}
    answers = submission.try_run(scenario.plan_layouts, [problem], world_size=1)
    return names, answers[0][0] if answers and is_layout(answers[0][0], arguments[0]) else layout


def is_layout(planned, numels):
    """Return whether parameters of these sizes are one after the other in several buckets, which fill the buffer."""
    buckets, places = planned["bucket_ranges"], planned["param_ranges"]
    borders = [0, *(border for pair in places for border in pair), planned["numel"]]
    return (
        [end - start for start, end in places] == numels
        and borders == sorted(borders)
        and [start for start, _ in buckets] + [planned["numel"]] == [0] + [end for _, end in buckets]
        and len(planned["bucket_of"]) == len(numels) > len(buckets) > 1
        and all(
            bucket in range(len(buckets)) and buckets[bucket][0] <= start and end <= buckets[bucket][1]
            for bucket, (start, end) in zip(planned["bucket_of"], places, strict=True)
        )
    )


def require_padded(results, case, steps=1):
    """Require that each step launches parts of a padded buffer asynchronously, while backward runs."""
    total = sum(parameter.numel() for parameter in case.parameters().values() if parameter.requires_grad)

    def accepts(launched):
        return all(map(overlaps, launched)) and sum(launch.numel for launch in launched) > total

    kind = (
        "one asynchronous all_reduce for each bucket of the buffer, padding included, launched in backward and waited "
        "for in finish_grad_sync"
    )
    require_launches(results.events, case.group, kind, accepts, steps)


def name_main_grads(step):
    """Return the main_grads of a step by their names in messages."""
    return {f"main_grad of parameter {i}": main_grad for i, main_grad in step["main_grad"].items()}


def describe_grad(grad):
    """Return how p.grad, which should be main_grad in bf16, differs from it."""
    if grad is None:
        return "p.grad is None"
    return "p.grad has other values" if grad.dtype == torch.bfloat16 else f"p.grad has the dtype {grad.dtype}"


def list_buckets(names, layout):
    """Return the names of the parameters of each bucket."""
    count = len(layout["bucket_ranges"])
    return [
        [name for name, bucket in zip(names, layout["bucket_of"], strict=True) if bucket == i] for i in range(count)
    ]
