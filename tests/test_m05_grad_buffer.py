"""Graded checks of module 5: gradients that are views of a padded, contiguous buffer."""

from collections import Counter
from functools import partial

import pytest
import torch

from brigade.checks.diagnose.evidence import find_leftover, join_names
from brigade.checks.expectations import (
    expect,
    expect_equal,
    expect_gradients,
    expect_overlap,
    explain_failures,
    list_steps,
    overlaps,
    replace_cause,
    require_launches,
)
from brigade.checks.reference import draw_generators
from brigade.events import summarize
from brigade.runner.ranks import PerRank
from helpers import training
from helpers.buffers import BUCKET_NUMEL, expect_zeroed, judge_order
from helpers.easier import explain_late_launches
from helpers.odd_steps import expect_accumulated, expect_idle_rank, expect_no_old_gradients, expect_second_backward
from helpers.steps import expect_all_kinds_of_steps, expect_averages
from m05_grad_buffer import causes as diagnosis
from m05_grad_buffer import scenario as m05_grad_buffer
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
    [answers] = submission.run(m05_grad_buffer.plan_layouts, cases, world_size=1)
    for case, answer in zip(cases, answers):
        call = f"plan_layout({', '.join(map(str, case['arguments']))}{', pad_for_busbw=True' * bool(case['keywords'])})"
        is_aligned = all(start % 64 == 0 for start, _ in answer["param_ranges"])
        right = f"in the layout of {call}, every parameter starts at a multiple of 64 elements"
        expect(is_aligned, right, f"param_ranges = {answer['param_ranges']}", diagnosis.ALIGNED)
        layout = compute_layout(*case["arguments"], **case["keywords"])
        for field, explain in diagnosis.LAYOUT.items():
            right, wrong = f"{call} returns {field} = {layout[field]}", f"{field} = {answer[field]}"
            expect(answer[field] == layout[field], right, wrong, partial(explain, answer, layout, **case))
    [frozen] = submission.run(m05_grad_buffer.is_frozen, world_size=1)
    right = "a BufferLayout cannot be changed: it is a dataclass with frozen=True"
    expect(frozen, right, "a value could be assigned to numel")


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
        [states] = submission.run(m05_grad_buffer.move_buffer, job, world_size=1)
        right = "a parameter whose gradient is None has none after it is in a GradBuffer"
        expect(states["after construction"]["is_unset"], right, "p.grad is a tensor")
        starts = [start for start, _ in compute_layout([v.numel() for v in values], BUCKET_NUMEL, 1)["param_ranges"]]
        for when, state in states.items():
            for i, start in enumerate(starts):
                for name, flat in (("data", "param_data"), (grad, "grad_data")):
                    offset, value = state[name][i]
                    at = {"parameter": f"parameter {i}"}
                    right = f"{when}, p.{name} is the view of {flat} that begins at element {start}"
                    wrong = f"p.{name} is not a view of {flat}"
                    if offset is not None:
                        wrong = f"p.{name} begins at element {offset}"
                    why = partial(diagnosis.explain_place, name, when, state["starts"] == starts)
                    expect(offset == start, right, wrong, why, **at)
                    # The scenario fills p.grad before it makes the buffer, and main_grad before it moves the buffer.
                    number = i + 1 if when == "after reallocate()" or name == "grad" else 0
                    expected = values[i] if name == "data" else torch.full_like(values[i], number, dtype=grad_dtype)
                    right = f"{when}, p.{name} has the parameter's shape, and its values have not changed"
                    wrong = f"the shape is {tuple(value.shape)}, expected {tuple(expected.shape)}"
                    if has_shape := value.shape == expected.shape:
                        wrong = "the values are different"
                    why = partial(diagnosis.explain_values, name, value, expected)
                    expect(has_shape and torch.equal(value, expected), right, wrong, why, **at)


@pytest.mark.parts("Parts (c) to (g): gradients in place")
@pytest.mark.points(1)
def test_gradients_are_averaged(submission):
    """Replicas start with equal weights and buffers. One all-reduce per padded bucket averages every gradient."""
    expect_averages(submission, [JOB] * 4, require_padded)


@pytest.mark.points(2)
def test_gradients_are_views(submission):
    """Gradients are views of the buffer at the layout's offsets. A step copies no more bytes than the bare model."""
    for world, form in zip(submission.worlds(2, 3), ("optimizer, to None", "optimizer, to zeros")):
        case = submission.case("Plain", world, steps=3)
        names, layout = lay_out(case, world)
        results = submission.run(m05_grad_buffer.train, case.make_jobs(zero=form, late=False, **JOB), world_size=world)
        for rank, result in enumerate(results):
            for step, buffers in enumerate(result["buffers"]):
                at, numels = {"rank": rank, "step": step}, [buffer["numel"] for buffer in buffers]
                right = f"there is one grad buffer, with {layout['numel']} elements"
                wrong = f"the numbers of elements of the grad buffers are {join_names(numels)}"
                why = partial(diagnosis.explain_buffers, buffers, names)
                expect(numels == [layout["numel"]], right, wrong, why, **at)
                for name, (start, _) in zip(names, layout["param_ranges"]):
                    offset = buffers[0]["offsets"].get(name)
                    right = f"after finish_grad_sync, p.grad is the view of the buffer that begins at element {start}"
                    wrong = "p.grad is not in the buffer" if offset is None else f"p.grad begins at element {offset}"
                    why = partial(diagnosis.explain_offset, results, buffers, names, name)
                    expect(offset == start, right, wrong, why, parameter=name, **at)
    for model in ("Plain", "MixedDtypes"):
        case = submission.case(model, world)
        results = submission.run(
            m05_grad_buffer.measure_steady_step, case.make_jobs(**JOB), world_size=world, mode="record"
        )
        numels = [p.numel() for p in case.parameters().values()]
        gradient_bytes = sum(p.numel() * p.element_size() for p in case.parameters().values())
        for rank, result in enumerate(results):
            bare, ddp = ([n for n in result[key]["copied"] if n >= min(numels)] for key in ("bare", "ddp"))
            right = f"a step copies no more elements than a step of the bare model, which copies {sum(bare)}"
            wrong = f"the number of copied elements is {sum(ddp)}. The largest copies have "
            wrong += f"{join_names(sorted(ddp, reverse=True)[:4])} elements"
            why = partial(diagnosis.explain_copies, Counter(ddp) - Counter(bare), numels)
            expect(sum(ddp) <= sum(bare), right, wrong, why, rank=rank)
            extra = result["ddp"]["allocated"] - result["bare"]["allocated"]
            right = "a step allocates no more memory than forward and backward of the bare model"
            wrong = f"the step allocated {extra} bytes more. All gradients together take {gradient_bytes} bytes"
            expect(extra < 0.05 * gradient_bytes, right, wrong, diagnosis.ALLOCATES, rank=rank)


@pytest.mark.points(2)
def test_zero_grad_in_any_form(submission):
    """With every form of zero_grad, before or after forward, weights equal those from training in one process."""
    forms = ("optimizer, to None", "optimizer, to zeros", "model, to None", "model, to zeros")
    expect_zeroed(submission, JOB, [(form, late) for form in forms for late in (False, True)])


@pytest.mark.points(2)
@pytest.mark.needs("test_layout_rule")
def test_buckets_overlap_with_backward(submission):
    """Each bucket is launched in place, with its padding, before the next one is complete. The padding stays zero."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, hidden_layers=4, steps=2)
        names, layout = lay_out(case, world)
        jobs = case.make_jobs(proven=1, **ZEROED, **JOB)
        results = submission.run(m05_grad_buffer.train, jobs, world_size=world)
        expected = [end - start for start, end in layout["bucket_ranges"]]
        for at, events, launched in list_steps(results.events, 2):
            buffers = results[at["rank"]]["buffers"][at["step"]]
            right = f"a step launches one all_reduce for each of the {len(expected)} buckets, in order, with "
            right += f"{join_names(expected, 8)} elements"
            is_right = [(x.op, x.numel) for x in launched] == [("all_reduce", numel) for numel in expected]
            why = partial(diagnosis.explain_launches, buffers, names, layout, events, at["step"])
            expect(is_right, right, f"the step made {summarize(launched)}", why, **at)
            why_late = partial(explain_late_launches, submission, jobs, events, at["step"])
            expect_overlap(events, at, list_buckets(names, layout), why_late=why_late)
            wrong = f"the absolute values of the padding add up to {buffers[0]['padding']:g}"
            right = "the padding is zero after every step"
            expect(not buffers[0]["padding"], right, wrong, diagnosis.LEAKS, **at)


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_steps_and_subgroups(submission):
    """Gradients stay correct over several steps with no_sync and evaluations, in any ready order, and in sub-groups."""

    def inspect(results, case):
        expected = len(lay_out(case, len(case.group))[1]["bucket_ranges"])
        for at, events, launched in list_steps(results.events, 1, case.group if case.model == "Plain" else []):
            right = f"a step with 3 micro-batches launches {expected} collectives, one per bucket"
            wrong, why = f"the step made {len(launched)} launches", partial(find_leftover, events)
            expect(len(launched) == expected, right, wrong, why, **at)

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
    for world, set_to_none in zip(submission.worlds(2, 3), (True, False)):
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
        results = submission.run(m05_grad_buffer.accumulate, jobs, world_size=world)
        for rank, result in enumerate(results):
            absent = [i for i, main_grad in result["steps"][0]["main_grad"].items() if main_grad is None]
            right = "with grad_dtype=float32, every bf16 parameter has a main_grad"
            wrong = f"main_grad is missing for {len(absent)} of {len(sizes)} parameters"
            expect(not absent, right, wrong, diagnosis.NO_MAIN_GRAD, rank=rank, step=0)
        for step in range(2):
            average = {
                f"main_grad of parameter {i}": sum(micro[i].float() for own in batches for micro in own[step]) / world
                for i in range(len(sizes))
            }
            with explain_failures(results.events):
                expect_equal(
                    f"in step {step}, main_grad is the average over the ranks of the fp32 sum over 41 micro-batches",
                    [dict(zip(average, result["steps"][step]["main_grad"].values())) for result in results],
                    average,
                    tolerance=1e-5,
                    hypotheses=partial(diagnosis.suspect_main_grads, batches, step, results),
                )
            for rank, result in enumerate(results):
                for i, main_grad in result["steps"][step]["main_grad"].items():
                    grad = result["steps"][step]["grad"][i]
                    is_right = grad is not None and grad.dtype == BF16 and torch.equal(grad, main_grad.bfloat16())
                    right = "after finish_grad_sync, p.grad equals main_grad rounded to the parameter's dtype"
                    at = {"rank": rank, "step": step, "parameter": f"parameter {i}"}
                    expect(is_right, right, describe_grad(grad), diagnosis.NO_ROUNDED_GRAD, **at)
        for at, _, launched in list_steps(results.events, 1):
            right, wrong = (
                "gradients are reduced in fp32, the dtype of the buffer",
                f"the step made {summarize(launched)}",
            )
            expect({launch.dtype for launch in launched} == {"float32"}, right, wrong, **at)
            result = results[at["rank"]]
            offsets = list(result["steps"][1]["buffers"][0]["offsets"].values())
            kept = [is_set for is_set, _ in result["last"] if is_set]
            right = "after finish_accumulation(set_grads=False), p.grad stays None"
            expect(not kept, right, f"{len(kept)} of {len(sizes)} parameters have a p.grad", rank=at["rank"])
            sums = {value for _, main_grad in result["last"] for value in main_grad.unique().tolist()}
            right = "after finish_accumulation(set_grads=False), main_grad starts from zero: gradients of 1 give 1"
            expect(sums <= {1.0}, right, f"main_grad contains {join_names(sorted(sums))}", rank=at["rank"])
            wrong = f"main_grad is not a view for {offsets.count(None)} of {len(offsets)} parameters"
            expect(None not in offsets, "each main_grad is a view of the buffer", wrong, rank=at["rank"], step=1)


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_one_buffer_per_dtype(submission):
    """The parameters of each dtype share one buffer, in this dtype or a wider grad_dtype. Gradients are averaged."""
    for world, grad_dtype in zip(submission.worlds(2, 3), (None, torch.float32)):
        case = submission.case("MixedDtypes", world, hidden_layers=4)
        job = JOB | {"arguments": JOB["arguments"] | {"grad_dtype": grad_dtype}}
        wide = [dtype for dtype in (torch.float64, torch.float32) if grad_dtype]  # float32 is not wider than these
        with replace_cause(partial(diagnosis.find_buffer_dtype, wide)):
            results = submission.run(m05_grad_buffer.train, case.make_jobs(**ZEROED, **job), world_size=world)
        expected = {}
        for name, parameter in case.parameters().items():
            expected.setdefault(parameter.dtype, set()).add(name)
        dtypes = {name: p.dtype if p.dtype in wide else grad_dtype or p.dtype for name, p in case.parameters().items()}
        for rank, result in enumerate(results):
            buffers = result["buffers"][0]
            parameter_sets = [set(buffer["offsets"]) for buffer in buffers]
            is_right = len(buffers) == len(expected) and all(names in parameter_sets for names in expected.values())
            right = f"there are {len(expected)} grad buffers, one for the parameters of each dtype: "
            right += join_names(sorted(map(str, expected)))
            wrong = "the dtypes of the grad buffers are "
            wrong += join_names(sorted(str(buffer["dtype"]) for buffer in buffers), 8)
            expect(is_right, right, wrong, rank=rank)
            for buffer in buffers:
                name = next(iter(buffer["offsets"]))
                own, dtype = case.parameters()[name].dtype, dtypes[name]
                right = f"with grad_dtype={grad_dtype}, the gradients of {own} parameters are in a {dtype} buffer"
                wrong = f"the gradients are in a {buffer['dtype']} buffer"
                expect(buffer["dtype"] == dtype, right, wrong, diagnosis.NARROWER if own in wide else "", rank=rank)
            lost = [name for buffer in buffers for name, offset in buffer["offsets"].items() if offset is None]
            right, wrong = "every gradient is a view of its buffer", f".grad is not a view for {join_names(lost)}"
            expect(not lost, right, wrong, partial(diagnosis.explain_lost_view, results), rank=rank, step=0)
        results = submission.run(training.train, case.make_jobs(**job), world_size=world)
        expect_gradients(results, case, tolerance=2**-6)


# ---- what the checks of this module and of later ones use


def lay_out(case, world):
    """Return the names from the last parameter to the first, and their buffer's layout. The model has one dtype."""
    named = list(reversed([(name, p) for name, p in case.parameters().items() if p.requires_grad]))
    return [name for name, _ in named], compute_layout([p.numel() for _, p in named], BUCKET_NUMEL, world)


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


def describe_grad(grad):
    """Return how p.grad, which should be main_grad in bf16, differs from it."""
    if grad is None:
        return "p.grad is None"
    return "p.grad has other values" if grad.dtype == torch.bfloat16 else f"p.grad has the dtype {grad.dtype}"


def list_buckets(names, layout):
    """Return the names of the parameters of each bucket."""
    count = len(layout["bucket_ranges"])
    return [[name for name, bucket in zip(names, layout["bucket_of"]) if bucket == i] for i in range(count)]
