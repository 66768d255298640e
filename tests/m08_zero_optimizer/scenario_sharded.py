"""Functions that the ranks run in module 8's checks of ShardedOptimizer. The expected values use `run_loop` too."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from brigade.course.checks.edge_case_models import compute_loss
from brigade.course.checks.forms import ListOf, Maybe, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.recording import phase
from helpers.training import build, create_group, draw, follow, like_weights, list_steps, move_to_device
from m08_zero_optimizer.scenario import build_param_group, count_state_bytes, take_steps


def make_sharded_optimizer(job: dict, params: Iterable[Any]) -> torch.optim.Optimizer:
    """Return the submission's ShardedOptimizer in the job's group."""
    group = create_group(job)
    with phase("construct"):
        return student("m08_zero_optimizer", "ShardedOptimizer")(
            params,
            getattr(torch.optim, job["optimizer"]),
            **job["options"],
            **({} if group is None else {"process_group": group}),
        )


def select_params(job: dict, model: nn.Module) -> Iterable[Any]:
    """Return parameters in the form job["params"]: "generator", "list", or groups of names with their options."""
    if job["params"] == "generator":
        return model.parameters()
    if job["params"] == "list":
        return list(model.parameters())
    return [build_param_group(group, model, as_generator=True) for group in job["params"]]


def run_loop(
    job: dict,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: list[list[dict]],
    clip: Callable[[float], Any],
) -> dict:
    """Take a step on the mean loss of each entry of `batches`, as the job, a recipe of `take_steps`, describes it.

    Return what `take_steps` returns, the weights after each step, the sizes of the parameter groups (None if one is
    missing), the number of parameters in other groups, and whether each parameter still has a gradient after zero_grad
    (`left`), except before the late group is added.
    """
    weights, left = {}, set()

    def copy_weights() -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in model.named_parameters()}

    def compute(step: int) -> Tensor:
        weights[step] = copy_weights()
        if step >= job.get("at", 0):
            left.update(name for name, p in model.named_parameters() if p.grad is not None and p.grad.any())
        total = 0.0
        for batch in batches[step]:
            with phase("forward"):
                loss = compute_loss(model, batch) / len(batches[step])
            with phase("backward"):
                loss.backward()
            total += loss.detach()
        return total

    outcome = take_steps(job, model, optimizer, len(batches), compute, clip)
    weights[len(batches)] = copy_weights()
    count = count_groups(job)
    sizes = [len(group["params"]) for group in optimizer.param_groups] + [None] * count
    return outcome | {
        "weights": [weights.get(step + 1, weights[len(batches)]) for step in range(len(batches))],
        "sizes": sizes[:count],
        "num_others": sum(filter(None, sizes[count:])),
        "left": {name: name in left for name, _ in model.named_parameters()},
    }


def count_groups(job: dict) -> int:
    """Return the number of parameter groups that a job makes."""
    return (len(job["params"]) if isinstance(job["params"], list) else 1) + ("late" in job)


TRAINED = ("weights", "left")  # the parts that `train` usually returns


def form_training(job: dict) -> dict:
    """Return the form of what `train` returns."""
    weights, steps = like_weights(job), len(job["batches"])
    forms = {
        "weights": [weights] * steps,
        "left": dict.fromkeys(weights, bool),
        "sizes": [Maybe(int)] * count_groups(job),
        "num_others": int,
        "norms": [float] * steps,
        "norm_dtypes": [Maybe(torch.dtype)] * steps,
        "losses": ListOf(float),  # a submission may call the closure too often
        "returned": [Maybe(float)] * steps,
    }
    return {part: forms[part] for part in job.get("parts", TRAINED)}


@returns(form_training, list_steps)
def train(job: dict) -> dict:
    """Train this rank's replica on its own batches, and return job["parts"]. All ranks start with job["start"]."""
    model = build(job | {"state": job["start"]})
    optimizer = make_sharded_optimizer(job, select_params(job, model))
    batches = [[move_to_device(batch) for batch in step] for step in job["batches"]]
    outcome = run_loop(job, model, optimizer, batches, lambda max_norm: optimizer.clip_grad_norm_(max_norm))
    return {part: outcome[part] for part in job.get("parts", TRAINED)}


@returns(lambda job: Maybe(like_weights(job)))
def take_odd_step(job: dict) -> dict | None:
    """Follow job["order"]. Return the weights, or None if the submission refuses a part of it with RuntimeError."""
    model = build(job | {"state": job["start"]})
    optimizer = make_sharded_optimizer(job, select_params(job, model))
    done = follow(job["order"], model, job["batches"][0], optimizer)
    return {name: p.detach().clone() for name, p in model.named_parameters()} if done else None


def make_parameters(numels: list[int], frozen: list[int], wide: list[int]) -> list[nn.Parameter]:
    """Return flat parameters of these sizes. Those at the indices in `wide` are fp64; `frozen` ones do not train."""
    dtypes = [torch.float64 if index in wide else torch.float32 for index in range(len(numels))]
    return [
        nn.Parameter(torch.ones(numel, dtype=dtype, device=device()), requires_grad=index not in frozen)
        for index, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True))
    ]


def form_states(problems: list[dict]) -> list[dict]:
    """Return the form of what `measure_states` returns."""
    counts = [sum(map(len, problem["first"] + problem["late"])) for problem in problems]
    return [{"bytes": int, "owned": [bool] * count} for count in counts]


@returns(form_states)
def measure_states(problems: list[dict]) -> list[dict]:
    """Return, for each problem, this rank's bytes of optimizer state, and whether it has state of each parameter.

    A problem contains the sizes of its parameters, by group: the `first` groups, and `late` groups added after a step.
    """
    measured = []
    for problem in problems:
        groups = [make_parameters(numels, problem["frozen"], problem["wide"]) for numels in problem["first"]]
        late = [make_parameters(numels, [], []) for numels in problem["late"]]
        optimizer = make_sharded_optimizer(problem, [{"params": group} for group in groups])
        everyone = [parameter for group in groups for parameter in group]
        train_once(optimizer, everyone)
        if late:
            for group in late:
                optimizer.add_param_group({"params": group})
                everyone += group
            train_once(optimizer, everyone)
        state = optimizer.optim.state
        measured.append({"bytes": count_state_bytes(state), "owned": [parameter in state for parameter in everyone]})
    return measured


@returns(lambda job: None, lambda job: range(job["steps"]))
def train_large(job: dict) -> None:
    """Take job["steps"] steps with large parameters."""
    params = [nn.Parameter(draw(job["start"] + i, job["numel"])) for i in range(job["count"])]
    optimizer = make_sharded_optimizer(job, params)
    for step in range(job["steps"]):
        recording.note("step", step=step)
        for i, parameter in enumerate(params):
            parameter.grad = draw(job["seed"] + step * job["count"] + i, job["numel"])
        optimizer.step()
        optimizer.zero_grad()


def train_once(optimizer: torch.optim.Optimizer, everyone: list[nn.Parameter]) -> None:
    """Take one step with gradients of ones."""
    for parameter in everyone:
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    with phase("step"):
        optimizer.step()
