"""The solutions are right or raise RuntimeError, whatever the order of backward passes, finishes and other calls."""

import pytest

from brigade.course.checks.context import CheckContext
from brigade.course.checks.expectations import expect_equal
from brigade.course.table.modules import get_module
from brigade.course.table.submission import read
from helpers import training
from m08_zero_optimizer import scenario
from m08_zero_optimizer.expected import compute_weights

BACKWARD, QUIET = ["forward", "backward"], ["forward", "backward in no_sync"]
RIGHT = [  # the actions, the micro-batches whose gradients count
    ([*BACKWARD, "finish"], slice(0, 1)),
    (["forward", "zero_grad", "backward", "finish"], slice(0, 1)),
    ([*QUIET, *BACKWARD, "finish"], slice(0, 2)),
    ([*QUIET, *QUIET, "finish"], slice(0, 2)),
    ([*BACKWARD, "finish", "zero_grad", *BACKWARD, "finish"], slice(1, 2)),  # a step is skipped
]
RIGHT_OR_REFUSED = [
    ([*BACKWARD, *BACKWARD, "finish"], slice(0, 2)),
    (["forward", *BACKWARD, "backward", "finish"], slice(0, 2)),
    ([*BACKWARD, *QUIET, "finish"], slice(0, 2)),
    ([*BACKWARD, "finish", "finish"], slice(0, 1)),
    ([*BACKWARD, "finish", *QUIET, "finish"], slice(0, 2)),
    ([*BACKWARD, "finish", *BACKWARD, "finish"], slice(0, 2)),
    (["finish", *BACKWARD, "finish"], slice(0, 1)),
    ([*BACKWARD, "zero_grad", *BACKWARD], slice(1, 2)),  # finish_grad_sync forgotten: refused by the second backward
]
STEP_TOO_EARLY = [(BACKWARD, slice(0, 1)), ([*BACKWARD, "finish", *QUIET], slice(0, 2))]
CLEARED_IN_FLIGHT = [([*BACKWARD, "zero_grad", "finish"], slice(0, 0))]
BUFFERED, GROUPED = {"bucket_numel": 150}, {"bucket_numel": 150, "buckets_per_group": 2}
ARGUMENTS = {3: {}, 4: {"bucket_cap_mb": 600 / 2**20}, 5: BUFFERED, 6: GROUPED, 7: GROUPED, 8: GROUPED, 9: GROUPED}
ARGUMENTS[10] = BUFFERED
OPTIMIZERS = {9: "PrefetchedZeroOptimizer", 10: "Zero2Optimizer"}  # module 8's is the scenario's default
SGD = {"optimizer": "SGD", "options": {"lr": 0.05, "momentum": 0.9}}


CASES = [(3, "Plain"), *[(number, "Branches") for number in range(4, 11)], (10, "Plain")]
ALWAYS = [(1, 8, "Branches"), *((2, number, model) for number, model in CASES if number % 2 == 0)]


@pytest.mark.parametrize(
    ("world", "number", "model"),
    [
        pytest.param(world, *case, marks=[pytest.mark.extended] * ((world, *case) not in ALWAYS))
        for world in (1, 2, 3)
        for case in CASES
    ],
)
def test_right_or_refused(world, number, model):
    entry = get_module(number)
    wrapped = get_module(7) if number == 8 else entry
    wrapper = next(name for name in wrapped.public if name.endswith("DDP"))
    job = {"package": wrapped.package, "wrapper": wrapper, "arguments": ARGUMENTS[number], "finish": number == 9}
    if number in OPTIMIZERS:
        job["optimizer_class"] = entry.package, OPTIMIZERS[number]
    context = CheckContext(read("solutions", number))
    case = context.case(model, world, micro_batches=2)
    batches = case.batches
    rows = RIGHT + RIGHT_OR_REFUSED + STEP_TOO_EARLY * (number >= 8) + CLEARED_IN_FLIGHT * (number == 10)
    orders = [order if number < 8 else [*order, "step"] for order, _ in rows]
    jobs = [case.make_jobs(order=order, recipe=SGD, **job) for order in orders]
    run = training.take_odd_step if number < 8 else scenario.take_odd_step
    results_per_order = context.run_each(run, jobs)
    for (order, used), results in zip(rows, results_per_order, strict=True):
        case.batches = [[own[0][used]] for own in batches]
        expected = case.gradients() if number < 8 else compute_weights(case, SGD)
        if (order, used) in RIGHT or None not in results:
            expect_equal(" ".join(order), list(results), expected, tolerance=1e-4)
