"""Graded checks of module 2: one flat all-reduce per dtype."""

from functools import partial

import pytest
import torch

from brigade.course.checks.expectations import expect_equal, expect_gradients, replace_cause, require_launches
from brigade.ranks.claims import At, each_step
from helpers import training
from helpers.odd_steps import OLD_AVERAGE, expect_idle_rank, train_on_old_averages
from helpers.steps import expect_averages, expect_four_steps
from m02_flat_ddp import causes

JOB = {"package": "m02_flat_ddp", "wrapper": "FlatDDP"}


# In the mixed model, every layer receives activations that were rounded to bfloat16, so all gradients contain that
# rounding error: 2^-8 each in forward, backward and the sum.
MIXED = 2**-6


@pytest.mark.points(1)
def test_gradients_are_averaged(submission):
    """Replicas start with equal weights and buffers. One all-reduce per dtype averages every gradient."""
    expect_averages(submission, [JOB] * 4, require_flat)


@pytest.mark.points(2)
def test_one_all_reduce_per_dtype(submission):
    """A step launches exactly one all-reduce for each dtype among the trainable parameters."""
    [world] = submission.worlds(2)
    cases = [submission.case(model, world, steps=2) for model in ("Tied", "Frozen", "MixedDtypes")]
    all_results = submission.run_each(training.train, [case.make_jobs(**JOB) for case in cases])
    for case, num_dtypes, results in zip(cases, (1, 1, 3), all_results, strict=True):
        for step in each_step(results.events, 2):
            launched = step.launches()
            kinds = {(launch.op, launch.dtype) for launch in launched}
            launched.claim(
                f"a step of the {case.model} model launches one all_reduce per dtype, {num_dtypes} in total",
                len(launched) == num_dtypes == len(kinds) and {op for op, _ in kinds} == {"all_reduce"},
                cause=partial(causes.explain_launches, case),
            )


@pytest.mark.points(1)
def test_bytes_on_the_wire(submission):
    """One all-reduce per dtype carries each trainable gradient exactly once, in that dtype."""
    for model in ("Tied", "Frozen", "MixedDtypes"):
        [world] = submission.worlds(2)
        case = submission.case(model, world)
        with replace_cause(partial(causes.find_padding, case)):
            results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        nbytes = sum(p.nbytes for p in case.parameters().values() if p.requires_grad)
        for step in each_step(results.events, 1):
            what = f", the size of the trainable parameters of the {model} model"
            step.launches().carry(nbytes, what, cause=partial(causes.explain_volume, case))
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
                dtype = None if gradient is None else gradient.dtype
                At(rank).equal(f"the dtype of the gradient of {name} is {{}}", dtype, parameter.dtype)
        expect_gradients(results, case, tolerance=MIXED)
        require_flat(results, case)
        expect_gradients(float64_results, float64_case, "float64 gradients are averaged in float64")


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_gradients_keep_shape_and_stride(submission):
    """A single all-reduce also averages non-contiguous gradients and preserves their shapes and strides."""
    for world in submission.worlds(2, 3):
        case = submission.case("Transposed", world)
        jobs = case.make_jobs(returns_strides=True, **JOB)
        results = submission.run(training.train, jobs, world_size=world)
        hypotheses = partial(causes.explain_copies, case)
        expect_gradients(results, case, "the gradients of transposed weights are the averages", hypotheses=hypotheses)
        for rank, result in enumerate(results):
            for name, parameter in case.parameters().items():
                what, stride = (
                    f"after finish_grad_sync, the gradient of {name} has the strides {{}}",
                    parameter.stride(),
                )
                At(rank).equal(what, result["strides"][name], [*stride], causes.REPLACED)
        require_flat(results, case)


@pytest.mark.points(1)
def test_branches_and_unused_parameters(submission):
    """Ranks that do not use a parameter contribute zeros to the single all-reduce, even if no rank uses it."""
    for world, dtype in submission.pair_worlds((2, 3), (torch.float32, torch.float64)):
        branches = [1, -1, 0][:world]
        case = submission.case("Branches", world, branches=branches, dtype=dtype, steps=2)
        for steps, branch in zip(case.batches, [*branches[1:], branches[0]], strict=True):
            steps[1][0]["branch"] = branch  # in step 1, a rank does not use the layers that it used in step 0
        with replace_cause(causes.find_left_out_gradients):
            results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        expect_gradients(results, case, "every gradient is the average, even if the ranks use different layers")
        expect_equal(
            "after two steps in which a rank uses different layers, the weights equal those of one process",
            [result["weights"] for result in results],
            case.train(),
            hypotheses={OLD_AVERAGE: [train_on_old_averages(case)] * world},
        )
        require_flat(results, case, steps=2)
    expect_idle_rank(submission, JOB)


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_steps_and_subgroups(submission):
    """After four steps with evaluations, and one or two backward passes, weights equal those from one process."""
    expect_four_steps(submission, JOB, require_flat, micro_batches=(1, 2))


# ---- what the checks use


def require_flat(results, case, steps=1):
    """Give points for correct numbers only if no step launches more than one all_reduce per dtype."""
    dtypes = {parameter.dtype for parameter in case.parameters().values() if parameter.requires_grad}

    def accepts(launched):
        return len(launched) <= len(dtypes)

    kind = "at most one all_reduce per dtype"
    why = partial(causes.explain_split, case)
    require_launches(results.events, case.group, kind, accepts, steps, in_backward=False, cause=why)
