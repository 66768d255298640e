"""Functions that the ranks run in the checks of module 9, apart from module 8's training."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from brigade.course.checks.edge_case_models import compute_loss
from brigade.course.checks.forms import Like, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device
from brigade.ranks.rank.recording import phase
from helpers.training import like_weights, move_to_device, wrap
from m08_zero_optimizer.scenario import build, build_param_group, make_zero_optimizer


def note_forwards(model: nn.Module) -> None:
    """Record an event "module" when the forward of each submodule starts, after its other pre-hooks, and ends.

    At the start, `own` are the trainable parameters that the submodule owns directly, and `incomplete` are the
    parameters of the model that contain NaN. Record the number of modules that already have a pre-hook as an event
    "hooks".
    """
    recording.note("hooks", count=sum(bool(module._forward_pre_hooks) for module in model.modules()))
    names = {p: parameter for parameter, p in model.named_parameters()}
    for name, module in model.named_modules():

        def note_start(module: nn.Module, inputs: Any, name: str = name) -> None:
            incomplete = [parameter for p, parameter in names.items() if p.isnan().any()]
            own = [names[p] for p in module.parameters(recurse=False) if p.requires_grad]
            recording.note("module", name=name, at="start", own=own, incomplete=incomplete)

        def note_end(_: nn.Module, inputs: Any, output: Any, name: str = name) -> None:
            recording.note("module", name=name, at="end")

        module.register_forward_pre_hook(note_start)
        module.register_forward_hook(note_end)


def note_writes(optimizer: torch.optim.Optimizer) -> None:
    """Record an event "write" just before the inner optimizer writes weights."""
    inner = getattr(optimizer, "optim", None)
    if isinstance(inner, torch.optim.Optimizer):
        inner.register_step_pre_hook(lambda *_: recording.note("write"))


@returns(lambda job: None, lambda job: range(len(job["batches"]) + 1))
def observe(job: dict) -> None:
    """Take a training step on each of the job's batches, and record the forwards of the modules."""
    model = build(job)
    ddp = wrap(job, model)
    note_forwards(model)
    optimizer = make_zero_optimizer(job, ddp, model)
    note_writes(optimizer)
    for step, [batch] in enumerate(job["batches"]):
        recording.note("step", step=step)
        optimizer.zero_grad()
        with phase("forward"):
            loss = compute_loss(ddp, move_to_device(batch))
        with phase("backward"):
            loss.backward()
        with phase("finish"):
            ddp.finish_grad_sync()
        with phase("step"):
            optimizer.step()
    recording.note("step", step=len(job["batches"]))
    with phase("finish weights"):
        ddp.finish_param_sync()
        ddp.finish_param_sync()  # the second call does nothing


observe.reports = ("module",)  # brigade/course/checks/borders.py demands them


def form_read(job: dict) -> dict:
    """Return the form of what `read_weights` returns. The check compares the shape of an output."""
    return {"output": Like(job["dtype"])} if "evaluation" in job["read"] else like_weights(job)


@returns(form_read, lambda job: range(3 if "load_state_dict" in job["read"] else 2))
def read_weights(job: dict) -> dict:
    """Take a step, then read the weights in the way job["read"]. Return them, or the output for job["probe"]."""
    model = build(job)
    ddp = wrap(job, model)
    note_forwards(model)
    optimizer = make_zero_optimizer(job, ddp, model)
    note_writes(optimizer)
    recording.note("step", step=0)
    saved = optimizer.state_dict() if "load_state_dict" in job["read"] else {}

    def take_step() -> None:
        with phase("step"):
            optimizer.step()

    compute_loss(ddp, move_to_device(job["batches"][0][0])).backward()
    ddp.finish_grad_sync()
    take_step()
    recording.note("step", step=1)
    values = None
    if job["read"] == "ddp.state_dict()":
        with phase("ddp.state_dict()"):
            weights = ddp.state_dict()
        values = {name: find_entry(weights, name).clone() for name, _ in model.named_parameters()}
    elif "evaluation" in job["read"]:
        ddp.eval()
        with phase("forward"), torch.no_grad():
            values = {"output": ddp(job["probe"].to(device()))}
    elif job["read"] == "a second step":
        take_step()
    else:
        with phase("load_state_dict"):
            optimizer.load_state_dict({"state": {}, "param_groups": saved["param_groups"]})
        take_step()
        recording.note("step", step=2)
        with phase("add_param_group"):
            optimizer.add_param_group(build_param_group(job["recipe"]["late"], model))
        take_step()
    with phase("finish weights"):
        ddp.finish_param_sync()
    return values or {name: p.detach().clone() for name, p in model.named_parameters()}


def find_entry(weights: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the entry of a wrapper's state dict for this parameter of its model."""
    return next(value for key, value in weights.items() if key == name or key.endswith(f".{name}"))
