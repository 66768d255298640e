"""Functions that the ranks run in module 8's checks of ZeroOptimizer. The expected values use `take_steps` too."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR

from brigade.course.checks import edge_case_models
from brigade.course.checks.edge_case_models import compute_loss
from brigade.course.checks.forms import Anything, ListOf, Maybe, like, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.memory import list_tensors
from brigade.ranks.rank.recording import phase
from helpers.training import (
    PLACES,
    Dots,
    Large,
    follow,
    like_weights,
    list_steps,
    move_to_device,
    reallocate_buffers,
    visit,
    wrap,
)

SCHEDULERS = {
    "none": lambda optimizer: None,
    # The learning rate of each group falls at its own speed.
    "lambda": lambda optimizer: LambdaLR(
        optimizer, [lambda step, k=k: 1 / (1 + step / k) for k in range(1, 1 + len(optimizer.param_groups))]
    ),
    # Changes the learning rate and one of Adam's betas, or the learning rate only.
    "one cycle": partial(OneCycleLR, max_lr=0.05, total_steps=10),
    "one cycle of lr": partial(OneCycleLR, max_lr=0.05, total_steps=10, cycle_momentum=False),
}


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


def build(job: dict) -> nn.Module:
    """Return this rank's model. Nothing is recorded in its backward."""
    return edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"]).to(device())


def make_groups(recipe: dict, model: nn.Module) -> list | None:
    """Return the recipe's parameter groups; None if it has none."""
    return [build_param_group(group, model) for group in recipe["groups"]] if "groups" in recipe else None


def build_param_group(group: dict, model: nn.Module, as_generator: bool = False) -> dict:
    """Return a parameter group as a user writes it, from one that names its parameters."""
    named = dict(model.named_parameters())
    params = (named[name] for name in group["names"])
    return group["options"] | {"params": params if as_generator else list(params)}


def take_steps(
    recipe: dict,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    gradients: Callable[[int], Any],
    clip: Callable[[float], Any],
) -> dict:
    """Train. `gradients(step)` computes the gradients and returns the loss.

    Return the norms, their dtypes (None for a Python number), the losses, and what step returned for its closures.
    The recipe may have: "gamma", by which the learning rate shrinks in every step, or "scheduler"; "change", options
    that all groups get before step "at"; "late", a group that is added before step "at"; "closure", if step gets one;
    "max_norm", or one for each step; "skip", a step that is not taken; and forms of zero_grad: "zeros" (keep the
    tensors), "zero_by_model" (call the model's) and "never_zero" (a mistake that a check imitates).
    """
    scheduler = SCHEDULERS[recipe.get("scheduler", "none")](optimizer)
    if "gamma" in recipe:
        scheduler = ExponentialLR(optimizer, recipe["gamma"])
    norms, norm_dtypes, losses, returned = [], [], [], []

    def closure() -> Any:
        if not recipe.get("never_zero"):
            (model if "zero_by_model" in recipe else optimizer).zero_grad(set_to_none="zeros" not in recipe)
        loss = gradients(step)
        losses.append(float(loss))
        return loss

    for step in range(steps):
        recording.note("step", step=step)
        if step == recipe.get("at") and "change" in recipe:
            for group in optimizer.param_groups:
                group.update(recipe["change"])
        if step == recipe.get("at") and "late" in recipe:
            with phase("construct"):
                optimizer.add_param_group(build_param_group(recipe["late"], model, as_generator="params" in recipe))
        if recipe.get("closure"):
            with phase("step"):
                loss = optimizer.step(closure)
            returned.append(None if loss is None else float(loss))
        else:
            closure()
            if "max_norm" in recipe:
                limit = recipe["max_norm"]
                with phase("clip"):
                    norm = clip(limit[step] if isinstance(limit, list) else limit)
                    norms.append(float(norm))
                norm_dtypes.append(norm.dtype if isinstance(norm, Tensor) else None)
            if step != recipe.get("skip"):
                with phase("step"):
                    optimizer.step()
        if scheduler:
            scheduler.step()
    return {"norms": norms, "norm_dtypes": norm_dtypes, "losses": losses, "returned": returned}


def make_zero_optimizer(job: dict, ddp: nn.Module, model: nn.Module) -> torch.optim.Optimizer:
    """Return the submission's ZeroOptimizer, or the class job["optimizer_class"], as the job's recipe describes it."""
    recipe = job["recipe"]
    groups = make_groups(recipe, model)
    with phase("construct"):
        return student(*job.get("optimizer_class", ("m08_zero_optimizer", "ZeroOptimizer")))(
            ddp, getattr(torch.optim, recipe["optimizer"]), *([] if groups is None else [groups]), **recipe["options"]
        )


TRAINED = ("weights", "is_optimizer", "gather_grads")  # the parts that `train_wrapped` usually returns


def form_wrapped(job: dict, weights: dict) -> dict:
    """Return the form of what `train_wrapped` returns for a model with weights of this form."""
    steps = len(job["batches"])
    forms = dict.fromkeys(("fp32_bytes", "grad_bytes", "copied_bytes", "num_foreign"), int) | {
        "weights": weights,
        "is_optimizer": bool,
        "gather_grads": bool,
        "state_bytes": Maybe(int),
        "groups": dict.fromkeys(weights, int),
        "norms": [float] * steps,
        "norm_dtypes": [Maybe(torch.dtype)] * steps,
        "losses": ListOf(float),  # a submission may call the closure too often
        "returned": [Maybe(float)] * steps,
        "state_dict": Anything(),
    }
    return {part: forms[part] for part in job.get("parts", TRAINED)}


@returns(lambda job: form_wrapped(job, like_weights(job)), list_steps)
def train(job: dict) -> dict:
    """Wrap the model, make the optimizer, load job["load"], take all steps and return job["parts"].

    job["reallocate"] moves the buffers before every step. job["poison"] is a parameter and a value, which replaces one
    entry of its gradient on this rank. With job["finish"], call `finish_param_sync` before reading the weights.
    job["visits"] has forwards that do not belong to a step.
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


train.has_plain_steps = True  # brigade/grader/witness/content.py judges what its launches carry


@returns(lambda job: Maybe(like_weights(job)))
def take_odd_step(job: dict) -> dict | None:
    """Follow job["order"]. Return the weights, or None if the submission refuses a part of it with RuntimeError."""
    model = build(job)
    ddp = wrap(job, model)
    if not follow(job["order"], ddp, job["batches"][0], make_zero_optimizer(job, ddp, model)):
        return None
    if job.get("finish"):
        ddp.finish_param_sync()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@returns(lambda job: None, lambda job: range(job["steps"]))
def train_large(job: dict) -> None:
    """Take job["steps"] steps with a large model."""
    model = Large(job["start"], job["count"], job["numel"], job["dtype"])
    ddp = wrap(job, model)
    optimizer = make_zero_optimizer(job, ddp, model)
    for step in range(job["steps"]):
        recording.note("step", step=step)
        optimizer.zero_grad()
        ddp(job["seed"] + step * job["count"]).backward()
        ddp.finish_grad_sync()
        optimizer.step()
    if job.get("finish"):
        ddp.finish_param_sync()


@returns(lambda job: form_wrapped(job, like({f"weights.{i}": w for i, w in enumerate(job["weights"])})), list_steps)
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
    """Make the optimizer, take all steps, and return the values that a check compares: those that job["parts"] names.

    "groups" has, for each parameter, 1000 times the number of its group plus its place there, or -1, and "num_foreign"
    counts other tensors.
    job["late_weights"] replace the weights after the optimizer is made, before it loads job["load"].
    """
    optimizer = make_zero_optimizer(job, ddp, model)
    with torch.no_grad():
        if "late_weights" in job:
            for parameter, weight in zip(model.parameters(), job["late_weights"], strict=True):
                parameter.copy_(weight)
    if "load" in job:
        optimizer.load_state_dict(move_state_to_device(job["load"]))
    inner, copied = getattr(optimizer, "optim", None), [0]
    if inner is not None:
        inner.register_step_pre_hook(lambda *_: copied.append(count_gradient_bytes(inner.param_groups, ddp)))
    outcome = take_steps(
        job["recipe"], model, optimizer, len(job["batches"]), gradients, lambda limit: optimizer.clip_grad_norm_(limit)
    )
    if job.get("finish"):  # in module 9, the weights may still be in flight
        with phase("finish weights"):
            ddp.finish_param_sync()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    listed = [
        (id(p), 1000 * i + k) for i, group in enumerate(optimizer.param_groups) for k, p in enumerate(group["params"])
    ]
    places = dict(listed)
    grouped = {name: places.get(id(parameter), -1) for name, parameter in model.named_parameters()}
    groups = [] if inner is None else inner.param_groups
    parts = job.get("parts", TRAINED)
    outcome |= {
        "weights": weights,
        "is_optimizer": isinstance(optimizer, torch.optim.Optimizer),
        "gather_grads": bool(getattr(ddp, "gather_grads", False)),
        "groups": grouped,
        "num_foreign": len(listed) - sum(place >= 0 for place in grouped.values()),
        "state_bytes": None if inner is None else count_state_bytes(inner.state),
        "fp32_bytes": sum(p.nbytes for group in groups for p in group["params"] if p.dtype == torch.float32),
        "grad_bytes": count_gradient_bytes(groups, ddp),
        "copied_bytes": max(copied),
        "state_dict": optimizer.state_dict() if "state_dict" in parts else None,
    }
    return {part: outcome[part] for part in parts}


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


def count_state_bytes(state: dict) -> int:
    """Return the bytes of an optimizer's state, except scalars such as Adam's step."""
    tensors = list_tensors([list(entries.values()) for entries in state.values()])
    return sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1)


def count_gradient_bytes(param_groups: list[dict], ddp: nn.Module) -> int:
    """Return the bytes of the gradients of these groups that are not views of the wrapper's buffers."""
    buffers = {buffer.grad_data.untyped_storage().data_ptr() for buffer in ddp.grad_buffers}
    gradients = [p.grad for group in param_groups for p in group["params"] if p.grad is not None]
    return sum(grad.nbytes for grad in gradients if grad.untyped_storage().data_ptr() not in buffers)


NOT_ELEMENTWISE = {"torch.optim.Adafactor": torch.optim.Adafactor, "a layer-wise LARS": LARS} | {
    "torch.optim.LBFGS": torch.optim.LBFGS
}


@returns(lambda job: dict.fromkeys(NOT_ELEMENTWISE, Maybe(str)))
def collect_refusals(job: dict) -> dict[str, str | None]:
    """Return what ZeroOptimizer raises for each optimizer that is not elementwise, as text; None if it accepts it."""
    answers: dict[str, str | None] = {}
    for name, optimizer_cls in NOT_ELEMENTWISE.items():
        ddp = wrap(job, build(job))
        try:
            student("m08_zero_optimizer", "ZeroOptimizer")(ddp, optimizer_cls, lr=0.01)
            answers[name] = None
        except Exception as error:
            if isinstance(error, NotImplementedError) and "part (" in str(error):
                raise  # the skeleton's
            answers[name] = str(error)
    return answers
