"""Functions that the ranks run in the checks of module 14."""

import contextlib

import torch
from torch import nn

from brigade.course.checks import edge_case_models
from brigade.course.checks.edge_case_models import OPTIMIZERS
from brigade.course.checks.forms import ListOf, OneOf, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.recording import phase
from helpers.training import (
    INTERFACE,
    Interruption,
    build,
    create_group,
    describe_interface,
    forward,
    forward_backward,
    like_state,
    like_weights,
    list_steps_and_end,
)
from m11_fully_sharded import scenario as fully_sharded
from m11_fully_sharded.scenario import UNIT_TYPES, form_training, form_unusual, select_weights

PACKAGE = "m14_hybrid_sharded"
IN_BLOCKS = "a block for each micro-batch"
NESTED = "nested blocks and an exception"
QUIET = "no_sync inside a block"
UNSYNCED = "only no_sync"
REPEATED = "a finish outside of blocks for each micro-batch"
CROSSED = "one block from the first backward to the last forward"


GRID = ListOf(ListOf(ListOf(int)))


@returns(lambda grids, traffic: ([OneOf(str, GRID)] * len(grids), [[float, float]] * len(traffic)))
def plan(grids: list[tuple], traffic: list[tuple]) -> tuple[list, list[list[float]]]:
    """Return what plan_grid and plan_traffic return for these arguments, or the name of the exception."""
    return [find_grid(*arguments) for arguments in grids], [find_traffic(*arguments) for arguments in traffic]


def find_grid(world_size: int, shard_size: int) -> list | str:
    try:
        grid = student(PACKAGE, "plan_grid")(world_size, shard_size)
    except (ValueError, ArithmeticError) as error:
        return type(error).__name__
    return [[[int(rank) for rank in ranks] for ranks in groups] for groups in grid]


def find_traffic(*arguments: int) -> list[float]:
    traffic = student(PACKAGE, "plan_traffic")(*arguments)
    return [float(traffic.inner), float(traffic.outer)]


def wrap(job: dict, model: nn.Module) -> nn.Module:
    """Wrap the model with the submission's wrapper, on the groups job["grid"]."""
    groups = [create_group({"groups": groups}) for groups in job["grid"]]
    with phase("construct"):
        unit_types = UNIT_TYPES[job["unit_type"]]
        return student(PACKAGE, "HybridShardedDDP")(model, unit_types, *groups, **job.get("arguments", {}))


@returns(lambda job: {"start": like_state(job), "numels": ListOf(int), "interface": INTERFACE})
def construct(job: dict) -> dict:
    """Construct the wrapper. Return all weights and buffers, and what the rank keeps."""
    model = edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"]).to(device())
    ddp = wrap(job, model)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    state = {name: value for name, value in ddp.full_state_dict().items() if isinstance(value, torch.Tensor)}
    numels = [shard.numel() for shard in ddp.shards()]
    return {"start": state | buffers, "numels": numels, "interface": describe_interface(ddp, model)}


@returns(form_training, list_steps_and_end)
def train(job: dict) -> dict:
    """Train as in module 11's checks."""
    return fully_sharded.train(job, wrap)


train.has_plain_steps = True  # brigade/grader/witness/content.py judges what its launches carry


@returns(form_unusual, list_steps_and_end)
def train_unusually(job: dict) -> dict:
    """Train with unusual orders of calls, as in module 11's checks."""
    return fully_sharded.train_unusually(job, wrap)


@returns(lambda job: {"weights": like_weights(job)}, list_steps_and_end)
def accumulate(job: dict) -> dict:
    """Take a step with each of job["orders"], on three micro-batches. Return the weights.

    The last micro-batch is inside a block of another wrapper, which must not matter.
    """
    model, other = build(job), wrap(job, build(job))
    ddp = wrap(job, model)
    optimizer = OPTIMIZERS[job["optimizer"]](list(ddp.shards()))
    for step, (order, batches) in enumerate(zip(job["orders"], job["batches"], strict=True)):
        recording.note("step", step=step)
        optimizer.zero_grad()
        take_step(order, ddp, batches, other)
        with phase("step"):
            optimizer.step()
    recording.note("step", step=None)
    with phase("checkpoint"):
        return {"weights": select_weights(model, ddp.full_state_dict())}


def take_step(order: str, ddp: nn.Module, batches: list[dict], other: nn.Module) -> None:
    """Accumulate the gradients of the micro-batches in this order of calls."""
    if order == CROSSED:
        take_crossed_step(ddp, batches)
        return
    if order == UNSYNCED:
        for batch in batches:
            with ddp.no_sync():
                forward_backward(ddp, batch)
        finish(ddp)
        return
    if order == IN_BLOCKS:
        for batch in batches[:-1]:
            with ddp.no_replica_sync():
                take_micro_batch(ddp, batch)
    elif order == NESTED:
        with contextlib.suppress(Interruption), ddp.no_replica_sync():
            with ddp.no_replica_sync():
                take_micro_batch(ddp, batches[0])
            take_micro_batch(ddp, batches[1])
            raise Interruption
    elif order == REPEATED:
        for batch in batches[:-1]:
            take_micro_batch(ddp, batch)
    else:
        with ddp.no_replica_sync():
            with ddp.no_sync():
                forward_backward(ddp, batches[0])
            take_micro_batch(ddp, batches[1])
    with other.no_replica_sync():
        take_micro_batch(ddp, batches[-1])


def take_crossed_step(ddp: nn.Module, batches: list[dict]) -> None:
    loss = forward(ddp, batches[0])
    with ddp.no_replica_sync():
        for batch in batches[1:]:
            backward(ddp, loss)
            loss = forward(ddp, batch)
    backward(ddp, loss)


def backward(ddp: nn.Module, loss: torch.Tensor) -> None:
    with phase("backward"):
        loss.backward()
    finish(ddp)


def take_micro_batch(ddp: nn.Module, batch: dict) -> None:
    forward_backward(ddp, batch)
    finish(ddp)


def finish(ddp: nn.Module) -> None:
    with phase("finish"):
        ddp.finish_grad_sync()
