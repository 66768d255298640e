"""Functions that the ranks run in the checks of module 1, apart from training."""

from brigade.course.checks import edge_case_models
from brigade.course.checks.forms import returns
from brigade.ranks.rank.api import student
from brigade.ranks.rank.recording import phase
from helpers.training import build, create_group, like_state, wrap


@returns(like_state)
def broadcast(job: dict) -> dict:
    """Call only broadcast_module_state, and return the parameters and buffers of the model."""
    model = build(job)
    group = create_group(job)
    with phase("construct"):
        student("m01_naive_ddp", "broadcast_module_state")(model, **({} if group is None else {"process_group": group}))
    return edge_case_models.copy_state(model)


@returns(like_state)
def construct(job: dict) -> dict:
    """Only construct the wrapper, and return the parameters and buffers of the model."""
    model = build(job)
    wrap(job, model)
    return edge_case_models.copy_state(model)
