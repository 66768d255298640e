"""Functions that the ranks run in the checks of module 15."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from brigade.course.checks.forms import DictOf, Like, ListOf, Maybe, like, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.memory import list_tensors
from brigade.ranks.rank.recording import phase
from helpers.training import create_group, name_error

PACKAGE = "m15_sharded_muon"
DEFAULTS = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0, "steps": 5}
PLANS = {"assign_matrices": ListOf(int), "plan_groups": ListOf(ListOf(ListOf(int)))}  # the forms of what they return


def form_orthogonalized(job: dict) -> list[dict]:
    """Return the form of what `orthogonalize_each` returns. The check compares dtypes and shapes of results."""
    return [{"result": Like(), "given": matrix} for matrix, *_ in job["problems"]]


@returns(form_orthogonalized)
def orthogonalize_each(job: dict) -> list[dict]:
    """Return the submission's result for each matrix, and the matrix afterwards."""
    function, answers = student(PACKAGE, "orthogonalize"), []
    for matrix, is_transposed, options in job["problems"]:
        given = make_parameter(matrix, is_transposed).detach()
        answers.append({"result": function(given, **options).detach(), "given": given})
    return answers


@returns(lambda job: [int] * len(job["problems"]))
def count_flops(job: dict) -> list[int]:
    """Return the FLOPs of the submission's orthogonalize for each matrix."""
    function, answers = student(PACKAGE, "orthogonalize"), []
    for matrix, options in job["problems"]:
        with FlopCounterMode(display=False) as counter:
            function(make_parameter(matrix, False).detach(), **options)
        answers.append(counter.get_total_flops())
    return answers


@returns(lambda job: [PLANS[job["function"]]] * len(job["problems"]))
def call_each(job: dict) -> list[Any]:
    """Return what a function of the submission returns for each problem: a list of shapes, and more arguments."""
    function = student(PACKAGE, job["function"])
    return [to_lists(function([tuple(shape) for shape in shapes], *more)) for shapes, *more in job["problems"]]


def to_lists(value: Any) -> Any:
    """Return lists of numbers in place of lists and tuples."""
    return [to_lists(each) for each in value] if isinstance(value, (list, tuple)) else int(value)


def make_parameter(values: Tensor, is_transposed: bool) -> nn.Parameter:
    """Return a parameter with these values, in memory column by column if `is_transposed`."""
    values = values.to(device())
    return nn.Parameter(values.T.contiguous().T if is_transposed else values.clone())


def form_training(job: dict) -> dict:
    """Return the form of what `train` returns."""
    step = {"weights": like(job["start"]), "flops": int, "calls": int, "is_loss": bool}
    groups = ListOf((ListOf(int), dict.fromkeys(DEFAULTS, float)))
    forms = {
        "is_optimizer": bool,
        "is_kept": bool,
        "saved": {"momentum": DictOf(Maybe(Like(torch.float64))), "devices": ListOf(str), "groups": groups},
        "owners": [int] * len(job["start"]),
        "sizes": ListOf(int),
        "owned": ListOf([int, int]),
    }
    return {"steps": [step] * len(job["gradients"])} | {part: forms[part] for part in job["parts"]}


@returns(form_training, lambda job: [*range(len(job["gradients"])), None])
def train(job: dict) -> dict:
    """Take a step with each of job["gradients"], of which each is a list of tensors and None.

    Return the weights after each step, and what job["parts"] names: "is_optimizer", "is_kept" (whether a loaded
    checkpoint keeps its entries), "saved" (a checkpoint), "owners" of matrices, "sizes" of the groups' buffers, "owned"
    (see `list_momentum`). The job may have: "load" (a checkpoint's momentum and options), "scheduler" (the learning
    rates of each step), "closure" (step gets one), "counts" (count FLOPs), "saves" (call state_dict in the end).
    """
    params = [make_parameter(values, i in job["transposed"]) for i, values in enumerate(job["start"].values())]
    for i in job["frozen"]:
        params[i].requires_grad_(False)
    groups = [{"params": [params[i] for i in numbers]} | options for numbers, options in job["param_groups"]]
    given, group = groups if len(groups) > 1 else iter(params), create_group(job)
    with phase("construct"):
        optimizer = student(PACKAGE, "ShardedMuon")(given, group, **job["options"])
    is_kept = "load" not in job or load(optimizer, *job["load"])
    steps = [take_step(job, params, optimizer, step) for step in range(len(job["gradients"]))]
    recording.note("step", step=None)
    if "saves" in job:
        with phase("save"):
            optimizer.state_dict()
    shapes = [tuple(p.shape) for p in params]
    parts = {
        "is_optimizer": lambda: isinstance(optimizer, torch.optim.Optimizer),
        "is_kept": lambda: is_kept,
        "saved": lambda: describe_checkpoint(optimizer),
        "owners": lambda: find_owners(job, shapes),
        "sizes": lambda: measure_groups(job, shapes),
        "owned": lambda: list_momentum(optimizer, params),
    }
    return {"steps": steps} | {part: parts[part]() for part in job["parts"]}


def take_step(job: dict, params: list[nn.Parameter], optimizer: torch.optim.Optimizer, step: int) -> dict:
    """Take one step. Return the weights, the FLOPs, and what the closure and `step` returned."""
    recording.note("step", step=step)
    losses: list[Tensor] = []

    def compute() -> Tensor:
        optimizer.zero_grad()
        both = zip(params, job["gradients"][step], strict=True)
        pairs = [(p, g) for p, g in both if g is not None and p.requires_grad]
        losses.append(sum(((p * g.to(p.device)).sum() for p, g in pairs), torch.zeros((), requires_grad=True)))
        losses[-1].backward()  # the gradients are exactly those of the job
        return losses[-1]

    if "scheduler" in job:
        for group, lr in zip(optimizer.param_groups, job["scheduler"][step], strict=True):
            group["lr"] = lr
    has_closure = "closure" in job
    if not has_closure:
        compute()
    counter = FlopCounterMode(display=False)
    with phase("step"), counter if "counts" in job else contextlib.nullcontext():
        returned = optimizer.step(*[compute] * has_closure)
    weights = dict(zip(job["start"], [p.detach().clone() for p in params], strict=True))
    is_loss = returned is not None and torch.as_tensor(returned).item() == losses[-1].item()
    return {"weights": weights, "flops": counter.get_total_flops(), "calls": len(losses), "is_loss": is_loss}


def find_owners(job: dict, shapes: list[tuple[int, int]]) -> list[int]:
    """Return the submission's owners of matrices."""
    return list(map(int, student(PACKAGE, "assign_matrices")(shapes, len(job["group"]))))


def measure_groups(job: dict, shapes: list[tuple[int, int]]) -> list[int]:
    """Return the elements of the buffers of the submission's groups."""
    size, num_groups = len(job["group"]), job["options"].get("num_groups", 4)
    groups = student(PACKAGE, "plan_groups")(shapes, find_owners(job, shapes), size, num_groups)
    rows = [[sum(shapes[i][0] * shapes[i][1] for i in row) for row in rows] for rows in groups]
    return sorted(size * max(numels, default=0) for numels in rows)


def list_momentum(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[list[int]]:
    """Return [number of the parameter, bytes] for each parameter with state, its scalars aside."""
    numbers = {p: i for i, p in enumerate(params)}
    nbytes = {
        numbers.get(p, -1): sum(t.nbytes for t in list_tensors(list(state.values())) if t.numel() > 1)
        for p, state in optimizer.state.items()
    }
    return sorted([i, count] for i, count in nbytes.items() if count)


def describe_checkpoint(optimizer: torch.optim.Optimizer) -> dict:
    """Return the content of the state dict: momentum, its devices, and each group's numbers and options."""
    with phase("save"):
        saved = optimizer.state_dict()
    state = {str(number): dict(entry).get("momentum_buffer") for number, entry in saved["state"].items()}
    devices = sorted({value.device.type for value in state.values() if value is not None})
    groups = [list(map(int, group["params"])) for group in saved["param_groups"]]
    options = [{name: float(group[name]) for name in DEFAULTS} for group in saved["param_groups"]]
    return {"momentum": state, "devices": devices, "groups": list(zip(groups, options, strict=True))}


def load(optimizer: torch.optim.Optimizer, momentum: dict[int, Tensor], options: list[dict]) -> bool:
    """Load one process's checkpoint, with these options of each group. Return whether it still has its entries."""
    saved = optimizer.state_dict()
    groups = [group | own for group, own in zip(saved["param_groups"], options, strict=True)]
    state = {number: {"momentum_buffer": value.clone()} for number, value in momentum.items()}
    with phase("load"):
        optimizer.load_state_dict(given := {"state": state, "param_groups": groups})
    return len(given["state"]) == len(momentum) and all(given["state"].values())


@returns(lambda job: [Maybe(str)] * len(job["problems"]))
def refuse(job: dict) -> list[str | None]:
    """Return the type of the exception for each list of parameters; None if they are accepted."""
    create = student(PACKAGE, "ShardedMuon")
    return [name_error(create, [make_parameter(values, False) for values in own]) for own in job["problems"]]
