"""The training loop that drives every wrapper, as one rank runs it.

Its input is a job: a model, weights and batches. It returns tensors by name, unchanged.
"""

import contextlib

import torch
import torch.distributed as dist

from brigade.checks import edge_case_models
from brigade.checks.edge_case_models import OPTIMIZERS, compute_loss, copy_gradients
from brigade.rank import recording
from brigade.rank.api import device, student
from brigade.rank.recording import phase


class Interruption(Exception):
    """Raised on purpose inside a block."""


def build(job: dict) -> torch.nn.Module:
    """Build this rank's model. Record each ready gradient before the submission's hooks run."""
    model = edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"]).to(device())
    recording.name_parameters(model)
    recording.watch_gradients(model)
    return model


def create_group(job: dict) -> dist.ProcessGroup | None:
    """Create all groups of job["groups"] and return this rank's group; None, the default group, if there are none."""
    own_group = None
    for ranks in job.get("groups", []):
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            own_group = group
    return own_group


def wrap(job: dict, model: torch.nn.Module) -> torch.nn.Module:
    """Wrap the model with the submission's wrapper."""
    wrapper = student(job["package"], job["wrapper"])
    group = create_group(job)
    with phase("construct"):
        return wrapper(model, **job.get("arguments", {}), **({} if group is None else {"process_group": group}))


def move_to_device(batch: dict) -> dict:
    """Move the tensors of a batch to this rank's device."""
    return {key: value.to(device()) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def reallocate_buffers(ddp: torch.nn.Module) -> None:
    """Move the flat tensors of all buffers to new memory."""
    for buffer in ddp.grad_buffers:
        buffer.reallocate()


def forward_backward(ddp: torch.nn.Module, batch: dict) -> None:
    """Run forward and backward on one batch."""
    with phase("forward"):
        loss = compute_loss(ddp, move_to_device(batch))
    with recording.record_backward(loss):
        loss.backward()


def accumulate(ddp: torch.nn.Module, batches: list[dict], interrupted: bool) -> None:
    """Run backward passes without communication, each in its own no_sync block.

    If `interrupted`, they share one block with nested blocks inside, and an exception ends it.
    """
    if not interrupted:
        for batch in batches:
            with ddp.no_sync():
                forward_backward(ddp, batch)
        return
    with contextlib.suppress(Interruption), ddp.no_sync():
        with ddp.no_sync():
            forward_backward(ddp, batches[0])
        for batch in batches[1:]:
            forward_backward(ddp, batch)
        with ddp.no_sync():
            raise Interruption


def train(job: dict) -> dict:
    """Construct the wrapper and take all steps. All micro-batches of a step except the last run inside no_sync.

    In step job["interrupted"], if it is set, exceptions end the no_sync blocks. Before step job["reallocate"], if it is
    set, the buffers move.
    """
    model = build(job)
    ddp = wrap(job, model)
    start = edge_case_models.copy_state(model)
    optimizer = OPTIMIZERS[job["optimizer"]]([p for p in model.parameters() if p.requires_grad])
    gradients, strides = [], []
    for step, batches in enumerate(job["batches"]):
        recording.note("step", step=step)
        if step == job.get("reallocate"):
            reallocate_buffers(ddp)
        optimizer.zero_grad()
        accumulate(ddp, batches[:-1], step == job.get("interrupted"))
        forward_backward(ddp, batches[-1])
        with phase("finish"):
            ddp.finish_grad_sync()
        gradients.append(copy_gradients(model))
        strides.append({n: None if p.grad is None else list(p.grad.stride()) for n, p in model.named_parameters()})
        with phase("step"):
            optimizer.step()
    weights = {name: p.detach() for name, p in model.named_parameters()}
    return {"start": start, "gradients": gradients, "strides": strides, "weights": weights}
