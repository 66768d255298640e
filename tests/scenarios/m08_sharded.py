"""What the ranks do in module 8's checks of ShardedOptimizer. `loop` is also what the parent's truth runs."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from brigade.checks.reference import compute_loss
from brigade.rank import recording
from brigade.rank.api import device, student
from brigade.rank.recording import phase
from scenarios.training import build, create_group, move_to_device

SCHEDULERS = {
    "none": lambda optimizer: None,
    # Each group's learning rate falls at a pace of its own.
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(
        optimizer, [lambda step, k=k: 1 / (1 + step / k) for k in range(1, 1 + len(optimizer.param_groups))]
    ),
    # Changes the learning rate and one of Adam's betas, or the learning rate only.
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=10),
    "one cycle of lr": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=0.05, total_steps=10, cycle_momentum=False
    ),
}


def sharded(job: dict, params: Iterable[Any]) -> torch.optim.Optimizer:
    """The submission's ShardedOptimizer in the job's group."""
    group = create_group(job)
    with phase("construct"):
        return student("m08_zero_optimizer", "ShardedOptimizer")(
            params,
            getattr(torch.optim, job["optimizer"]),
            **job["options"],
            **({} if group is None else {"process_group": group}),
        )


def params_of(job: dict, model: nn.Module) -> Iterable[Any]:
    """Parameters in the form job["params"]: "generator", "list", or groups of names with their options."""
    if job["params"] == "generator":
        return model.parameters()
    if job["params"] == "list":
        return list(model.parameters())
    return [group_from(group, model) for group in job["params"]]


def group_from(group: dict, model: nn.Module) -> dict:
    """A parameter group as a user writes it, its parameters from a generator."""
    named = dict(model.named_parameters())
    return group["options"] | {"params": (named[name] for name in group["names"])}


def loop(
    job: dict,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[list[dict]],
    clip: Callable[[float], Any],
) -> dict:
    """Takes a step on the mean loss of each entry of `batches`, and returns what there is to compare.

    What the job may have: "scheduler", "late" (a group added before step 2), "closure" (step gets one), "max_norms" (of
    each step, to clip), "skip" (a step that is not taken), "zeros" (zero_grad keeps the tensors), "zero_by_model" (it
    is the model's, not the optimizer's).
    """
    scheduler = SCHEDULERS[job.get("scheduler", "none")](optimizer)
    weights, norms, norm_dtypes, losses, returned, left = [], [], [], [], [], set()

    def compute(step: int, own: list[dict]) -> Tensor:
        (model if "zero_by_model" in job else optimizer).zero_grad(set_to_none="zeros" not in job)
        if "late" not in job or step >= 2:
            left.update(name for name, p in model.named_parameters() if p.grad is not None and p.grad.any())
        total = 0.0
        for batch in own:
            with phase("forward"):
                loss = compute_loss(model, batch) / len(own)
            with recording.record_backward(loss):
                loss.backward()
            total += loss.detach()
        losses.append(total.item())
        return total

    for step, own in enumerate(batches):
        recording.note("step", step=step)
        if "late" in job and step == 2:
            with phase("construct"):
                optimizer.add_param_group(group_from(job["late"], model))
        if "closure" in job:
            with phase("step"):
                loss = optimizer.step(lambda step=step, own=own: compute(step, own))
            returned.append(None if loss is None else float(loss))
        else:
            compute(step, own)
            if "max_norms" in job:
                with phase("clip"):
                    norm = clip(job["max_norms"][step])
                    norms.append(float(norm))
                norm_dtypes.append(norm.dtype if isinstance(norm, Tensor) else None)
            if step != job.get("skip"):
                with phase("step"):
                    optimizer.step()
        if scheduler:
            scheduler.step()
        weights.append({name: p.detach().clone() for name, p in model.named_parameters()})
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    found = {"weights": weights, "norms": norms, "norm_dtypes": norm_dtypes, "losses": losses, "returned": returned}
    return found | {"sizes": sizes, "left": sorted(left)}


def train(job: dict) -> dict:
    """Trains this rank's replica on its own batches. All ranks start with job["start"]."""
    model = build(job | {"state": job["start"]})
    optimizer = sharded(job, params_of(job, model))
    batches = [[move_to_device(batch) for batch in step] for step in job["batches"]]
    return loop(job, model, optimizer, batches, lambda max_norm: optimizer.clip_grad_norm_(max_norm))


def parameters(numels: list[int], frozen: list[int]) -> list[nn.Parameter]:
    """Flat parameters of these sizes; those at the places in `frozen` do not train."""
    found = [nn.Parameter(torch.ones(numel, device=device())) for numel in numels]
    for place in frozen:
        found[place].requires_grad_(False)
    return found


def state_bytes(state: dict) -> int:
    """The bytes of an optimizer's state, but for scalars such as Adam's step."""
    tensors = recording.list_tensors([list(entries.values()) for entries in state.values()])
    return sum(tensor.nbytes for tensor in tensors if tensor.numel() > 1)


def states(problems: list[dict]) -> list[dict]:
    """For each problem: the bytes of optimizer state on this rank, and the places of the parameters they belong to.

    A problem has the sizes in its `first` parameter groups, and in `late` ones, added after a step.
    """
    found = []
    for problem in problems:
        groups = [parameters(numels, problem["frozen"]) for numels in problem["first"]]
        late = [parameters(numels, []) for numels in problem["late"]]
        optimizer = sharded(problem, [{"params": group} for group in groups])
        everyone = [parameter for group in groups for parameter in group]
        train_once(optimizer, everyone)
        if late:
            for group in late:
                optimizer.add_param_group({"params": group})
                everyone += group
            train_once(optimizer, everyone)
        place = {id(parameter): i for i, parameter in enumerate(everyone)}
        state = optimizer.optim.state
        found.append({"bytes": state_bytes(state), "places": sorted(place.get(id(p), -1) for p in state)})
    return found


def train_once(optimizer: torch.optim.Optimizer, everyone: list[nn.Parameter]) -> None:
    """One step with gradients of ones."""
    for parameter in everyone:
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    with phase("step"):
        optimizer.step()
