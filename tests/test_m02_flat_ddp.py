"""Graded checks of module 2: one flat all-reduce per dtype."""

from functools import partial

import pytest
import torch

from brigade.checks.expectations import expect, expect_gradients, expect_start, expect_steps, require_launches
from brigade.events import launches, summarize
from helpers import training
from helpers.easier import blame_visits
from helpers.odd_steps import expect_idle_rank
from m02_flat_ddp import causes as diagnosis

JOB = {"package": "m02_flat_ddp", "wrapper": "FlatDDP"}


# In the mixed model, every layer receives activations that were rounded to bfloat16, so all gradients contain that
# rounding error: 2^-8 each in forward, backward and the sum.
MIXED = 2**-6


@pytest.mark.points(1)
def test_gradients_are_averaged(submission):
    """Replicas start with equal weights and buffers. One all-reduce per dtype averages every gradient."""
    for world, model in zip(submission.worlds(1, 2, 3, 4), ("Plain", "Buffers", "Frozen", "Tied")):
        case = submission.case(model, world)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        expect_start([result["start"] for result in results], case, events=results.events)
        expect_gradients(results, case)
        require_flat(results, case)


@pytest.mark.points(2)
def test_one_all_reduce_per_dtype(submission):
    """A step launches exactly one all-reduce for each dtype among the trainable parameters."""
    [world] = submission.worlds(2)
    cases = [submission.case(model, world, steps=2) for model in ("Tied", "Frozen", "MixedDtypes")]
    all_results = submission.run_each(training.train, [case.make_jobs(**JOB) for case in cases])
    for case, num_dtypes, results in zip(cases, (1, 1, 3), all_results):
        for rank, events in enumerate(results.events):
            for step in range(2):
                launched = launches(events, step)
                kinds = [(launch.op, launch.dtype) for launch in launched]
                expect(
                    len(kinds) == num_dtypes == len(set(kinds)) and all(op == "all_reduce" for op, _ in kinds),
                    f"a step of the {case.model} model launches one all_reduce per dtype, {num_dtypes} in total",
                    f"the step made {summarize(launched)}",
                    partial(diagnosis.explain_launches, launched, case),
                    rank=rank,
                    step=step,
                )


@pytest.mark.points(1)
def test_bytes_on_the_wire(submission):
    """One all-reduce per dtype carries each trainable gradient exactly once, in that dtype."""
    for model in ("Tied", "Frozen", "MixedDtypes"):
        [world] = submission.worlds(2)
        case = submission.case(model, world)
        with diagnosis.suspect_padding(case):
            results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        trainable = [p for p in case.parameters().values() if p.requires_grad]
        nbytes = sum(p.numel() * p.element_size() for p in trainable)
        for rank, events in enumerate(results.events):
            launched = launches(events, 0)
            sent = sum(launch.nbytes for launch in launched)
            expect(
                sent == nbytes,
                f"a step of the {model} model all-reduces {nbytes} bytes, the size of its trainable parameters",
                f"the step all-reduced {sent} bytes",
                partial(diagnosis.explain_volume, launched, case),
                rank=rank,
            )
        require_flat(results, case)


@pytest.mark.points(1)
def test_mixed_dtypes(submission):
    """Gradients keep their dtypes, and float64 gradients the precision of float64, with few all-reduces."""
    for world in submission.worlds(2, 3):
        case = submission.case("MixedDtypes", world, hidden_layers=4)
        # A pure float64 model reveals a cast to float32, which bfloat16 activations would hide.
        float64_case = submission.case("Plain", world, dtype=torch.float64)
        jobs = [case.make_jobs(**JOB), float64_case.make_jobs(**JOB)]
        results, float64_results = submission.run_each(training.train, jobs)
        for rank, result in enumerate(results):
            for name, parameter in case.parameters().items():
                gradient = result["gradients"][0][name]
                expect(
                    gradient is not None and gradient.dtype == parameter.dtype,
                    f"the gradient of {name} has the dtype of the parameter, {parameter.dtype}",
                    "the gradient is None" if gradient is None else f"the dtype is {gradient.dtype}",
                    rank=rank,
                )
        expect_gradients(results, case, tolerance=MIXED)
        require_flat(results, case)
        expect_gradients(float64_results, float64_case, "float64 gradients are averaged in float64")


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_gradients_keep_shape_and_stride(submission):
    """A single all-reduce also averages non-contiguous gradients and preserves their shapes and strides."""
    for world in submission.worlds(2, 3):
        case = submission.case("Transposed", world)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        hypotheses = partial(diagnosis.explain_copies, case)
        expect_gradients(results, case, "the gradients of transposed weights are the averages", hypotheses=hypotheses)
        for rank, result in enumerate(results):
            for name, parameter in case.parameters().items():
                expect(
                    result["strides"][0][name] == list(parameter.stride()),
                    f"after finish_grad_sync, the gradient of {name} has the strides {parameter.stride()}",
                    f"the strides are {tuple(result['strides'][0][name])}",
                    diagnosis.REPLACED,
                    rank=rank,
                )
        require_flat(results, case)


@pytest.mark.points(1)
def test_branches_and_unused_parameters(submission):
    """Ranks that do not use a parameter contribute zeros to the single all-reduce, even if no rank uses it."""
    for world, dtype in zip(submission.worlds(2, 3), (torch.float32, torch.float64)):
        case = submission.case("Branches", world, branches=[1, -1, 0][:world], dtype=dtype)
        with diagnosis.suspect_left_out_gradients():
            results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        expect_gradients(results, case, "every gradient is the average, even if the ranks use different layers")
        require_flat(results, case)
    expect_idle_rank(submission, JOB)


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_steps_and_subgroups(submission):
    """After four steps with evaluations, and one or two backward passes, weights equal those from one process."""
    for world, optimizer, count in zip(submission.worlds(2, 4), ("adam", "sgd"), (1, 2)):
        groups = [[1, 3], [0, 2]] if world == 4 else [list(range(world))]
        options = {"dtype": torch.float64, "optimizer": optimizer, "group": groups[0]}
        case = submission.case("Tied", world, steps=4, micro_batches=count, **options)
        jobs = case.make_jobs(groups=groups, visits=training.VISITS, **JOB)
        judge = partial(expect_steps, case, partial(require_flat, steps=4))
        with blame_visits(submission, jobs, judge):
            judge(submission.run(training.train, jobs, world_size=world))


# ---- what the checks use


def require_flat(results, case, steps=1):
    """Give points for correct numbers only if no step launches more than one all_reduce per dtype."""
    dtypes = {parameter.dtype for parameter in case.parameters().values() if parameter.requires_grad}

    def accepts(launched):
        return len(launched) <= len(dtypes)

    kind = "at most one all_reduce per dtype"
    require_launches(results.events, case.group, kind, accepts, steps, in_backward=False)
