"""Functions that the ranks run in module 8's checks of ZeroOptimizer. The expected values use `take_steps` too."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

from brigade.checks import edge_case_models
from brigade.checks.edge_case_models import compute_loss
from brigade.rank import recording
from brigade.rank.api import device, student
from brigade.rank.recording import phase
from helpers.training import PLACES, follow, move_to_device, reallocate_buffers, visit, wrap
from m08_zero_optimizer.scenario_sharded import count_state_bytes


class LARS(torch.optim.Optimizer):
    """A layer-wise optimizer: a step depends on the norm of the whole parameter, not on each element by itself."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    trust = parameter.norm() / (parameter.grad.norm() + 1e-9)
                    parameter.sub_(group["lr"] * trust * parameter.grad)


class Dots(nn.Module):
    """A model with parameters of several dtypes, whose gradients are exactly its inputs."""

    def __init__(self, weights: list[Tensor]):
        super().__init__()
        self.weights = nn.ParameterList(weight.clone() for weight in weights)

    def forward(self, inputs: list[Tensor]) -> Tensor:
        return sum((weight * x).sum().float() for weight, x in zip(self.weights, inputs))


def build(job: dict) -> nn.Module:
    """Return this rank's model. Nothing is recorded in its backward."""
    return edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"]).to(device())


def make_groups(recipe: dict, model: nn.Module) -> list | None:
    """Return the recipe's parameter groups; None if it has none."""
    return [build_param_group(group, model) for group in recipe["groups"]] if "groups" in recipe else None


def build_param_group(group: dict, model: nn.Module) -> dict:
    """Return a parameter group as a user writes it, from one that names its parameters."""
    named = dict(model.named_parameters())
    return group["options"] | {"params": [named[name] for name in group["names"]]}


def take_steps(
    recipe: dict,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    gradients: Callable[[int], float],
    clip: Callable[[float], Any],
) -> dict:
    """Train. `gradients(step)` computes the gradients and returns the loss.

    Return the norms, their dtypes (None for a Python number), and whether step returned the loss of its closure.
    The recipe may have: "gamma", by which the learning rate shrinks in every step; "change", options that all groups
    get before step "at"; "late", a group that is added before step "at"; "closure", if step gets one; "max_norm".
    """
    scheduler = ExponentialLR(optimizer, recipe["gamma"]) if "gamma" in recipe else None
    norms, norm_dtypes, losses, returned = [], [], [], True

    def closure() -> float:
        if not recipe.get("never_zero"):  # unless a check imitates this mistake
            optimizer.zero_grad()
        losses.append(gradients(step))
        return losses[-1]

    for step in range(steps):
        recording.note("step", step=step)
        if step == recipe.get("at") and "change" in recipe:
            for group in optimizer.param_groups:
                group.update(recipe["change"])
        if step == recipe.get("at") and "late" in recipe:
            with phase("construct"):
                optimizer.add_param_group(build_param_group(recipe["late"], model))
        if recipe.get("closure"):
            losses.clear()
            with phase("step"):
                loss = optimizer.step(closure)
            returned = returned and losses == [loss]
        else:
            closure()
            if "max_norm" in recipe:
                with phase("clip"):
                    norm = clip(recipe["max_norm"])
                    norms.append(float(norm))
                norm_dtypes.append(norm.dtype if isinstance(norm, Tensor) else None)
            with phase("step"):
                optimizer.step()
        if scheduler:
            scheduler.step()
    return {"norms": norms, "norm_dtypes": norm_dtypes, "returned": returned}


def make_zero_optimizer(job: dict, ddp: nn.Module, model: nn.Module) -> torch.optim.Optimizer:
    """Return the submission's ZeroOptimizer, or the class job["optimizer_class"], as the job's recipe describes it."""
    recipe = job["recipe"]
    groups = make_groups(recipe, model)
    with phase("construct"):
        return student(*job.get("optimizer_class", ("m08_zero_optimizer", "ZeroOptimizer")))(
            ddp, getattr(torch.optim, recipe["optimizer"]), *([] if groups is None else [groups]), **recipe["options"]
        )


def train(job: dict) -> dict:
    """Wrap the model, make the optimizer, load job["load"] and take all steps.

    job["reallocate"] moves the buffers before every step. job["poison"] is a parameter and a value, which replaces one
    entry of its gradient on this rank. With job["save"], return the state_dict too. With job["finish"], call
    `finish_param_sync` before reading the weights. job["visits"] has forwards that do not belong to a step.
    """
    model = build(job)
    ddp = wrap(job, model)
    if "poison" in job:
        name, value = job["poison"]
        dict(model.named_parameters())[name].register_hook(lambda grad: replace_last_entry(grad, value))

    def gradients(step: int) -> float:
        if job.get("reallocate"):
            reallocate_buffers(ddp)
        *before, last = job["batches"][step]
        look_around = partial(visit, ddp, last, visits=job.get("visits", ()))
        look_around(PLACES[0])
        for batch in before:
            with ddp.no_sync():
                (compute_loss(ddp, move_to_device(batch)) * job["recipe"].get("loss_scale", 1)).backward()
        with phase("forward"):
            loss = compute_loss(ddp, move_to_device(last)) * job["recipe"].get("loss_scale", 1)
        look_around(PLACES[1])
        with phase("backward"):
            loss.backward()
        look_around(PLACES[2])
        with phase("finish"):
            ddp.finish_grad_sync()
        look_around(PLACES[3])
        return loss.item()

    return train_wrapped(job, ddp, model, gradients)


def take_odd_step(job: dict) -> dict | None:
    """Follow job["order"]. Return the weights, or None if the submission refuses a part of it with RuntimeError."""
    model = build(job)
    ddp = wrap(job, model)
    if not follow(job["order"], ddp, job["batches"][0], make_zero_optimizer(job, ddp, model)):
        return None
    if job.get("finish"):
        ddp.finish_param_sync()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def train_dots(job: dict) -> dict:
    """Train like `train`, for the weights job["weights"], whose gradients are job["batches"][step]."""
    model = Dots([weight.to(device()) for weight in job["weights"]])
    ddp = wrap(job, model)

    def gradients(step: int) -> float:
        loss = ddp([x.to(device()) for x in job["batches"][step]])
        with phase("backward"):
            loss.backward()
        with phase("finish"):
            ddp.finish_grad_sync()
        return loss.item()

    return train_wrapped(job, ddp, model, gradients)


def train_wrapped(job: dict, ddp: nn.Module, model: nn.Module, gradients: Callable[[int], float]) -> dict:
    """Make the optimizer, take all steps, and return the values that a check compares.

    job["late_weights"] replace the weights after the optimizer is made, before it loads job["load"].
    """
    optimizer = make_zero_optimizer(job, ddp, model)
    with torch.no_grad():
        for parameter, weight in zip(model.parameters(), job.get("late_weights", [])):
            parameter.copy_(weight)
    if "load" in job:
        optimizer.load_state_dict(move_state_to_device(job["load"]))
    outcome = take_steps(
        job["recipe"], model, optimizer, len(job["batches"]), gradients, lambda limit: optimizer.clip_grad_norm_(limit)
    )
    if job.get("finish"):  # in module 9, the weights may still be in flight
        with phase("finish weights"):
            ddp.finish_param_sync()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    inner = getattr(optimizer, "optim", None)
    return outcome | {
        "weights": weights,
        "is_optimizer": isinstance(optimizer, torch.optim.Optimizer),
        "gather_grads": bool(getattr(ddp, "gather_grads", False)),
        "groups": [[names.get(id(p), "") for p in group["params"]] for group in optimizer.param_groups],
        "state_bytes": None if inner is None else count_state_bytes(inner.state),
        "inner_bytes": None if inner is None else count_bytes_by_dtype(inner.param_groups),
        "grad_bytes": 0 if inner is None else count_gradient_bytes(inner.param_groups, ddp),
        "state_dict": optimizer.state_dict() if job.get("save") else None,
    }


def replace_last_entry(grad: Tensor, value: float) -> Tensor:
    """Return the gradient with its last entry replaced."""
    grad = grad.clone()
    grad.view(-1)[-1] = value
    return grad


def move_state_to_device(value: Any) -> Any:
    """Move every tensor of a nested dict, list or tuple to this rank's device, except scalars such as Adam's step."""
    if isinstance(value, Tensor):
        return value.to(device()) if value.dim() else value
    if isinstance(value, dict):
        return {key: move_state_to_device(item) for key, item in value.items()}
    return type(value)(move_state_to_device(item) for item in value) if isinstance(value, (list, tuple)) else value


def count_bytes_by_dtype(param_groups: list[dict]) -> dict[str, int]:
    """Return the bytes of the parameters in these groups, by the name of their dtype."""
    totals: dict[str, int] = {}
    for tensor in (parameter for group in param_groups for parameter in group["params"]):
        name = str(tensor.dtype).removeprefix("torch.")
        totals[name] = totals.get(name, 0) + tensor.nbytes
    return totals


def count_gradient_bytes(param_groups: list[dict], ddp: nn.Module) -> int:
    """Return the bytes of the gradients of these groups that are not views of the wrapper's buffers."""
    buffers = {buffer.grad_data.untyped_storage().data_ptr() for buffer in ddp.grad_buffers}
    gradients = [p.grad for group in param_groups for p in group["params"] if p.grad is not None]
    return sum(grad.nbytes for grad in gradients if grad.untyped_storage().data_ptr() not in buffers)


def collect_refusals(job: dict) -> list[str | None]:
    """Return what ZeroOptimizer raises for each optimizer that is not elementwise, as text; None if it accepts it."""
    answers: list[str | None] = []
    for optimizer_cls in (torch.optim.Adafactor, LARS, torch.optim.LBFGS):
        ddp = wrap(job, build(job))
        try:
            student("m08_zero_optimizer", "ZeroOptimizer")(ddp, optimizer_cls, lr=0.01)
            answers.append(None)
        except NotImplementedError as error:
            if "part (" in str(error):
                raise  # the skeleton's
            answers.append(str(error))
        except Exception as error:
            answers.append(str(error))
    return answers
