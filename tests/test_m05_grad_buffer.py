"""Graded checks of module 5: gradients that are views of a padded, contiguous buffer."""

from collections import Counter
from functools import partial

import pytest
import torch

from brigade.checks.diagnose.evidence import find_leftover, join_names
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
    overlaps,
    require_launches,
)
from brigade.checks.reference import draw_generators
from brigade.events import launches, list_ready_gradients, summarize
from brigade.runner.ranks import PerRank
from helpers import training
from helpers.buffers import BUCKET_NUMEL, format_zero_grad
from helpers.easier import blame_visits, explain_late_launches
from helpers.odd_steps import expect_idle_rank, expect_no_old_gradients, expect_second_backward, expect_unsynced
from m05_grad_buffer import causes as diagnosis
from m05_grad_buffer import scenario as m05_grad_buffer
from m05_grad_buffer.expected import compute_layout

JOB = {"package": "m05_grad_buffer", "wrapper": "BufferedDDP", "arguments": {"bucket_numel": BUCKET_NUMEL}}
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
        expect(
            all(start % 64 == 0 for start, _ in answer["param_ranges"]),
            f"in the layout of {call}, every parameter starts at a multiple of 64 elements",
            f"param_ranges = {answer['param_ranges']}",
            diagnosis.ALIGNED,
        )
        layout = compute_layout(*case["arguments"], **case["keywords"])
        for field in ("bucket_of", "param_ranges", "bucket_ranges", "numel"):
            expect(
                answer[field] == layout[field],
                f"{call} returns {field} = {layout[field]}",
                f"{field} = {answer[field]}",
                partial(diagnosis.explain_layout, field, answer, layout, **case),
            )
    [frozen] = submission.run(m05_grad_buffer.is_frozen, world_size=1)
    expect(
        frozen,
        "a BufferLayout cannot be changed: it is a dataclass with frozen=True",
        "a value could be assigned to numel",
    )


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
        starts = [start for start, _ in compute_layout([v.numel() for v in values], BUCKET_NUMEL, 1)["param_ranges"]]
        for when, state in states.items():
            for i, start in enumerate(starts):
                for name, flat in (("data", "param_data"), (grad, "grad_data")):
                    offset, value = state[name][i]
                    expect(
                        offset == start,
                        f"{when}, p.{name} is the view of {flat} that begins at element {start}",
                        f"p.{name} is not a view of {flat}"
                        if offset is None
                        else f"p.{name} begins at element {offset}",
                        partial(diagnosis.explain_place, name, when, state["starts"] == starts),
                        parameter=f"parameter {i}",
                    )
                    # The scenario fills p.grad before it makes the buffer, and main_grad before it moves the buffer.
                    number = i + 1 if when == "after reallocate()" or name == "grad" else 0
                    expected = values[i] if name == "data" else torch.full_like(values[i], number, dtype=grad_dtype)
                    expect(
                        value.shape == expected.shape and torch.equal(value, expected),
                        f"{when}, p.{name} has the parameter's shape, and its values have not changed",
                        "the values are different"
                        if value.shape == expected.shape
                        else f"the shape is {tuple(value.shape)}, expected {tuple(expected.shape)}",
                        partial(diagnosis.explain_values, name, value, expected),
                        parameter=f"parameter {i}",
                    )


@pytest.mark.parts("Parts (c) to (g): gradients in place")
@pytest.mark.points(1)
def test_gradients_are_averaged(submission):
    """Replicas start with equal weights and buffers. One all-reduce per padded bucket averages every gradient."""
    for world, model in zip(submission.worlds(1, 2, 3, 4), ("Plain", "Buffers", "Frozen", "Tied")):
        case = submission.case(model, world)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        expect_start([result["start"] for result in results], case, events=results.events)
        expect_gradients(results, case)
        require_padded(results, case)


@pytest.mark.points(2)
def test_gradients_are_views(submission):
    """Gradients are views of the buffer at the layout's offsets. A step copies no more bytes than the bare model."""
    for world, form in zip(submission.worlds(2, 3), ("optimizer, to None", "optimizer, to zeros")):
        case = submission.case("Plain", world, steps=3)
        names, layout = lay_out(case, world)
        results = submission.run(m05_grad_buffer.train, case.make_jobs(zero=form, late=False, **JOB), world_size=world)
        for rank, result in enumerate(results):
            for step, buffers in enumerate(result["buffers"]):
                expect(
                    len(buffers) == 1 and buffers[0]["numel"] == layout["numel"],
                    f"there is one grad buffer, with {layout['numel']} elements",
                    f"the numbers of elements of the grad buffers are {join_names([b['numel'] for b in buffers])}"
                    if len(buffers) != 1
                    else f"the grad buffer has {buffers[0]['numel']} elements",
                    partial(diagnosis.explain_buffers, buffers, names),
                    rank=rank,
                    step=step,
                )
                for name, (start, _) in zip(names, layout["param_ranges"]):
                    offset = buffers[0]["offsets"].get(name)
                    expect(
                        offset == start,
                        f"after finish_grad_sync, p.grad is the view of the buffer that begins at element {start}",
                        "p.grad is not in the buffer" if offset is None else f"p.grad begins at element {offset}",
                        partial(diagnosis.explain_offset, results, buffers, names, name),
                        rank=rank,
                        step=step,
                        parameter=name,
                    )
    for model in ("Plain", "MixedDtypes"):
        case = submission.case(model, world)
        results = submission.run(
            m05_grad_buffer.measure_steady_step, case.make_jobs(**JOB), world_size=world, mode="record"
        )
        numels = [p.numel() for p in case.parameters().values()]
        gradient_bytes = sum(p.numel() * p.element_size() for p in case.parameters().values())
        for rank, result in enumerate(results):
            bare, ddp = ([n for n in result[key]["copied"] if n >= min(numels)] for key in ("bare", "ddp"))
            expect(
                sum(ddp) <= sum(bare),
                f"a step copies no more elements than a step of the bare model, which copies {sum(bare)}",
                f"the number of copied elements is {sum(ddp)}. The largest copies have "
                f"{join_names(sorted(ddp, reverse=True)[:4])} elements"
                if len(ddp) != 1
                else f"the only copy has {sum(ddp)} elements",
                partial(diagnosis.explain_copies, Counter(ddp) - Counter(bare), numels),
                rank=rank,
            )
            extra = result["ddp"]["allocated"] - result["bare"]["allocated"]
            expect(
                extra < 0.05 * gradient_bytes,
                "a step allocates no more memory than forward and backward of the bare model",
                f"the step allocated {extra} bytes more. All gradients together take {gradient_bytes} bytes",
                diagnosis.ALLOCATES,
                rank=rank,
            )


@pytest.mark.points(2)
def test_zero_grad_in_any_form(submission):
    """With every form of zero_grad, before or after forward, weights equal those from training in one process."""
    forms = ("optimizer, to None", "optimizer, to zeros", "model, to None", "model, to zeros")
    [world] = submission.worlds(2)
    variants = [(form, late) for form in forms for late in (False, True)]
    cases = [
        submission.case("Branches", world, steps=3, dtype=torch.float64, branches=[1, -1][:world]) for _ in variants
    ]
    jobs = [case.make_jobs(zero=form, late=late, **JOB) for case, (form, late) in zip(cases, variants)]
    for (form, late), case, results in zip(variants, cases, submission.run_each(m05_grad_buffer.train, jobs)):
        when = "between forward and backward" if late else "before forward"
        with explain_failures(results.events, partial(diagnosis.explain_lost_view, results)):
            what = f"3 steps with {format_zero_grad(form)} {when} give the same weights as training in one process"
            expect_trained(what, [result["weights"] for result in results], case)


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
        for rank, events in enumerate(results.events):
            for step in range(2):
                launched = launches(events, step)
                buffers = results[rank]["buffers"][step]
                expect(
                    [launch.numel for launch in launched] == expected and all(x.op == "all_reduce" for x in launched),
                    f"a step launches one all_reduce for each of the {len(expected)} buckets, in order, with "
                    f"{join_names(expected, 8)} elements",
                    f"the step made {summarize(launched)}",
                    partial(diagnosis.explain_launches, buffers, names, layout, events, step),
                    rank=rank,
                    step=step,
                )
                why_late = partial(explain_late_launches, submission, jobs, events, step)
                expect_overlap(events, step, list_buckets(names, layout), rank, why_late=why_late)
            for step, buffers in enumerate(results[rank]["buffers"]):
                expect(
                    not buffers[0]["padding"],
                    "the padding is zero after every step",
                    f"the absolute values of the padding add up to {buffers[0]['padding']:g}",
                    diagnosis.LEAKS,
                    rank=rank,
                    step=step,
                )


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_steps_and_subgroups(submission):
    """Gradients stay correct over several steps with no_sync and evaluations, in any ready order, and in sub-groups."""
    for world, model in zip(submission.worlds(2, 3, 4), ("Plain", "Reordered", "Tied")):
        groups = [[1, 3], [0, 2]] if world == 4 else [list(range(world))]
        case = submission.case(
            model,
            world,
            steps=4 if model == "Plain" else 3,
            micro_batches=3 if model == "Plain" else 1,
            dtype=torch.float64,
            group=groups[0],
            branches=list(range(world)) if model == "Reordered" else None,
        )
        visits = training.VISITS if model == "Tied" else ()
        jobs = case.make_jobs(groups=groups, interrupted=2, unsynced=3, visits=visits, **JOB)
        judge = partial(expect_steps, case, partial(require_padded, steps=3))
        with blame_visits(submission, jobs, judge):
            results = submission.run(training.train, jobs, world_size=world)
            if visits:
                judge(results)
        if model == "Plain":
            expect_silence(results.events, case.group, 3)
            expect_restored(results.events, case.group, 2)
            expect_unsynced(results, case, step=3)
        elif model == "Reordered":
            for rank in case.group:
                expect_bucket_order(results.events[rank], *lay_out(case, world), rank)
        expect_gradients(results, case)
        expect_weights(results, case)
        if model == "Plain":
            count, expected = len(launches(results.events[0], 0)), len(lay_out(case, world)[1]["bucket_ranges"])
            expect(
                count == expected,
                f"a step with 3 micro-batches launches {expected} collectives, one per bucket",
                f"the step made {count} launches",
                partial(find_leftover, results.events[0]),
                rank=0,
                step=0,
            )
        require_padded(results, case, steps=3)
    expect_second_backward(submission, submission.worlds(2)[0], JOB)
    expect_no_old_gradients(submission, submission.worlds(2)[0], JOB)
    expect_idle_rank(submission, JOB)


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
        arguments = {"bucket_numel": BUCKET_NUMEL, "grad_dtype": torch.float32}
        common = JOB | {"sizes": sizes, "set_to_none": set_to_none, "arguments": arguments}
        jobs = PerRank(common | {"batches": own} for own in batches)
        results = submission.run(m05_grad_buffer.accumulate, jobs, world_size=world)
        for rank, result in enumerate(results):
            absent = [i for i, main_grad in result["steps"][0]["main_grad"].items() if main_grad is None]
            expect(
                not absent,
                "with grad_dtype=float32, every bf16 parameter has a main_grad",
                f"main_grad is missing for {len(absent)} of {len(sizes)} parameters",
                diagnosis.NO_MAIN_GRAD,
                rank=rank,
                step=0,
            )
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
                    expect(
                        grad is not None and grad.dtype == torch.bfloat16 and torch.equal(grad, main_grad.bfloat16()),
                        "after finish_grad_sync, p.grad equals main_grad rounded to the parameter's dtype",
                        describe_grad(grad),
                        diagnosis.NO_ROUNDED_GRAD,
                        rank=rank,
                        step=step,
                        parameter=f"parameter {i}",
                    )
        for rank, events in enumerate(results.events):
            expect(
                {launch.dtype for launch in launches(events, 0)} == {"float32"},
                "gradients are reduced in fp32, the dtype of the buffer",
                f"the step made {summarize(launches(events, 0))}",
                rank=rank,
                step=0,
            )
            expect(
                not results[rank]["set"],
                "after finish_accumulation(set_grads=False), p.grad stays None",
                f"{len(results[rank]['set'])} of {len(sizes)} parameters have a p.grad",
                rank=rank,
            )
            offsets = results[rank]["steps"][1]["buffers"][0]["offsets"]
            expect(
                None not in offsets.values(),
                "each main_grad is a view of the buffer",
                f"main_grad is not a view for {sum(offset is None for offset in offsets.values())} of {len(offsets)} "
                "parameters",
                rank=rank,
                step=1,
            )


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_one_buffer_per_dtype(submission):
    """The parameters of each dtype share one buffer, in this dtype or a wider grad_dtype. Gradients are averaged."""
    for world, grad_dtype in zip(submission.worlds(2, 3), (None, torch.float32)):
        case = submission.case("MixedDtypes", world, hidden_layers=4)
        job = JOB | {"arguments": JOB["arguments"] | {"grad_dtype": grad_dtype}}
        wide = [dtype for dtype in (torch.float64, torch.float32) if grad_dtype]  # float32 is not wider than these
        with diagnosis.suspect_buffer_dtype(wide):
            results = submission.run(m05_grad_buffer.train, case.make_jobs(**ZEROED, **job), world_size=world)
        expected = {}
        for name, parameter in case.parameters().items():
            expected.setdefault(parameter.dtype, set()).add(name)
        dtypes = {name: p.dtype if p.dtype in wide else grad_dtype or p.dtype for name, p in case.parameters().items()}
        for rank, result in enumerate(results):
            buffers = result["buffers"][0]
            parameter_sets = [set(buffer["offsets"]) for buffer in buffers]
            expect(
                len(buffers) == len(expected) and all(names in parameter_sets for names in expected.values()),
                f"there are {len(expected)} grad buffers, one for the parameters of each dtype: "
                f"{join_names(sorted(map(str, expected)))}",
                "the dtypes of the grad buffers are "
                f"{join_names(sorted(str(buffer['dtype']) for buffer in buffers), 8)}",
                rank=rank,
            )
            for buffer in buffers:
                name = next(iter(buffer["offsets"]))
                own = case.parameters()[name].dtype
                expect(
                    buffer["dtype"] == dtypes[name],
                    f"with grad_dtype={grad_dtype}, the gradients of {own} parameters are in a {dtypes[name]} buffer",
                    f"the gradients are in a {buffer['dtype']} buffer",
                    diagnosis.NARROWER if own in wide else "",
                    rank=rank,
                )
            lost = [name for buffer in buffers for name, offset in buffer["offsets"].items() if offset is None]
            expect(
                not lost,
                "every gradient is a view of its buffer",
                f".grad is not a view for {join_names(lost)}",
                partial(diagnosis.explain_lost_view, results),
                rank=rank,
                step=0,
            )
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


def expect_bucket_order(events, names, layout, rank):
    """Expect launch i of step 0 when all gradients of bucket i are ready, in a layout of the parameters `names`."""
    ready_at = {name: position for position, name in list_ready_gradients(events, 0)}
    buckets = list_buckets(names, layout)
    lengths = [end - start for start, end in layout["bucket_ranges"]]
    for number, (launch, bucket) in enumerate(zip(launches(events, 0), buckets)):
        missing = [name for name in bucket if ready_at.get(name, -1) > launch.place]
        expect(
            not missing,
            "buckets are launched in order, each when all its gradients are ready",
            f"launch {number} (bucket {number}) came before {describe_gradients(missing)} ready",
            partial(diagnosis.explain_early_launch, events, 0, launch, buckets, lengths),
            rank=rank,
            step=0,
        )
