"""Graded checks of module 99: TODO the topic."""

import pytest

from brigade.course.checks.expectations import expect_gradients
from helpers import training

JOB = {"package": "m99_scratch", "wrapper": "ScratchDDP"}


@pytest.mark.points(2)
def test_scratch_averages_gradients(submission):
    """TODO: After finish_grad_sync, every gradient is the average over the group."""
    for world in submission.worlds(1, 2, 3):
        case = submission.case("Plain", world)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        expect_gradients(results, case)
        # TODO: `require_launches` with a condition that the launches of an earlier module do not meet.
