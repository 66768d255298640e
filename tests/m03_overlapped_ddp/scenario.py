"""Functions that the ranks run in the checks of module 3, apart from training."""

from brigade.course.checks.edge_case_models import copy_gradients
from brigade.course.checks.forms import returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.recording import phase
from helpers.training import Interruption, build, forward_backward, like_gradients, wrap


@returns(lambda job: [like_gradients(job)] * 2)
def interrupted_no_sync(job: dict) -> list:
    """Run one micro-batch in a nested no_sync, one in the outer no_sync afterwards, and one after an exception.

    Then run one on a second wrapper, inside the first wrapper's no_sync, and finish the steps of both. Return the
    gradients of both models. Events of kind "part" mark the four parts, and the exception that leaves no_sync.
    """
    model, other_model = build(job), build(job)
    ddp, other = wrap(job, model), wrap(job, other_model)
    first, second, third = job["batches"][0]
    recording.note("part", part="inside")
    try:
        with ddp.no_sync():
            with ddp.no_sync():
                forward_backward(ddp, first)
            recording.note("part", part="outer")
            forward_backward(ddp, second)
            raise Interruption
    except Interruption:
        recording.note("part", part="exception")
    recording.note("part", part="after")
    forward_backward(ddp, third)
    recording.note("part", part="other")
    with ddp.no_sync():
        forward_backward(other, first)
    with phase("finish"):
        ddp.finish_grad_sync()
        other.finish_grad_sync()
    return [copy_gradients(model), copy_gradients(other_model)]
