"""The training loop that drives every wrapper, as one rank runs it.

Its input is a job: a model, weights and batches. It returns tensors by name, unchanged.
"""

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from brigade.course.checks import edge_case_models
from brigade.course.checks.edge_case_models import OPTIMIZERS, compute_loss, copy_gradients
from brigade.course.checks.forms import Maybe, like, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.recording import phase

# Where forwards may come that do not belong to the step, and which: see `visit`.
PLACES = (
    "between zero_grad and forward",
    "between forward and backward",
    "between backward and finish_grad_sync",
    "between finish_grad_sync and the optimizer's step",
    "after the optimizer's step",
)
KINDS = ("a forward without gradients", "a forward that is thrown away")
EVAL_MODE = ("in the last step", "eval mode")  # a whole step, not a forward
INTERFACE = {"module": bool, "process_group": str}  # the form of what `describe_interface` returns
VISITS = [*((place, kind) for place in PLACES for kind in KINDS), EVAL_MODE]


class Dots(torch.nn.Module):
    """A model with these weights, of any dtypes, whose gradients are exactly its inputs. None: the weight is unused."""

    def __init__(self, weights: list[torch.Tensor]):
        super().__init__()
        self.weights = torch.nn.ParameterList(weight.clone() for weight in weights)

    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:
        return sum((weight * x).sum().float() for weight, x in zip(self.weights, inputs, strict=True) if x is not None)


def draw(seed: int, numel: int) -> torch.Tensor:
    """Return this many random float64 numbers in [-1/2, 1/2), so that a large job need not contain them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(numel, dtype=torch.float64, generator=generator).sub_(0.5).to(device())


class DrawnGradient(torch.autograd.Function):
    """The sum of a weight, whose gradient is not ones but `draw(seed, ...)`, and exists from backward on."""

    @staticmethod
    def forward(ctx, weight, seed):
        ctx.seed, ctx.like = seed, (weight.shape, weight.dtype)
        return weight.sum()

    @staticmethod
    def backward(ctx, _):
        shape, dtype = ctx.like
        return draw(ctx.seed, shape.numel()).view(shape).to(dtype), None


class Large(torch.nn.Module):
    """Large weights, `draw(seed + i, numel)`. Their gradients are `draw(other + i, numel)` for forward's `other`."""

    def __init__(self, seed: int, count: int, numel: int, dtype: torch.dtype):
        super().__init__()
        self.weights = torch.nn.ParameterList(draw(seed + i, numel).to(dtype) for i in range(count))

    def forward(self, other: int) -> torch.Tensor:
        return sum(DrawnGradient.apply(weight, other + i) for i, weight in enumerate(self.weights))


@functools.lru_cache(maxsize=64)
def _make_meta_model(model: str, sizes: tuple[int, ...], dtype: torch.dtype | None) -> torch.nn.Module:
    with torch.device("meta"):
        return edge_case_models.MODELS[model](sizes).to(dtype)


def make_meta_model(job: Mapping[str, Any]) -> torch.nn.Module:
    """Return the model of a job without memory, for the forms of what ranks return."""
    return _make_meta_model(job["model"], tuple(job["sizes"]), job["dtype"])


def like_weights(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of the weights of a job's model, by name."""
    return like(dict(make_meta_model(job).named_parameters()))


def like_state(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of the weights and buffers of a job's model, by name."""
    return like(edge_case_models.copy_state(make_meta_model(job)))


def like_gradients(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return the form of the gradients of a job's model, by name. A gradient may be None."""
    trained = {name: p for name, p in make_meta_model(job).named_parameters() if p.requires_grad}
    return {name: Maybe(form) for name, form in like(trained).items()}


class Interruption(Exception):
    """Raised on purpose inside a block."""


def name_error(function: Callable, *arguments: Any) -> str | None:
    """Return the type of the exception that a call raises, or None. Let the exception of an unwritten part pass."""
    try:
        function(*arguments)
    except NotImplementedError:
        raise
    except Exception as error:
        return type(error).__name__
    return None


def build(job: dict) -> torch.nn.Module:
    """Build this rank's model. Record each ready gradient before the submission's hooks run."""
    model = edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"]).to(device())
    recording.name_parameters(model)
    recording.watch_gradients(model)
    return model


def list_steps(job: Mapping[str, Any]) -> range:
    """Return the steps of a scenario that takes one for each element of job["batches"]."""
    return range(len(job["batches"]))


def list_steps_and_end(job: Mapping[str, Any]) -> list[int | None]:
    """Return the steps of a scenario that also reports that the last one has ended."""
    return [*list_steps(job), None]


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


def describe_interface(ddp: torch.nn.Module, model: torch.nn.Module) -> dict:
    """Return what every wrapper promises to others: whether .module is the model, and the ranks of .process_group.

    The ranks are in words, such as "[1, 3]", or "missing".
    """
    group = getattr(ddp, "process_group", "missing")
    ranks = group if group == "missing" else str(dist.get_process_group_ranks(group))
    return {"module": getattr(ddp, "module", None) is model, "process_group": ranks}


def move_to_device(batch: dict) -> dict:
    """Move the tensors of a batch to this rank's device."""
    return {key: value.to(device()) if isinstance(value, torch.Tensor) else value for key, value in batch.items()}


def reallocate_buffers(ddp: torch.nn.Module) -> None:
    """Move the flat tensors of all buffers to new memory."""
    for buffer in ddp.grad_buffers:
        buffer.reallocate()


def visit(ddp: torch.nn.Module, batch: dict, place: str, visits: Sequence[tuple[str, str]]) -> None:
    """Run the forwards that `visits`, a part of VISITS, has at this place, in training mode and in eval mode."""
    for where, kind in visits:
        if where == place:
            was_training = ddp.training
            for is_training in (True, False):
                ddp.train(is_training)
                with torch.set_grad_enabled(kind == KINDS[1]):
                    forward(ddp, batch)
            ddp.train(was_training)


def forward(ddp: torch.nn.Module, batch: dict) -> torch.Tensor:
    """Run forward on one batch and return the loss."""
    with phase("forward"):
        return compute_loss(ddp, move_to_device(batch))


def forward_backward(
    ddp: torch.nn.Module, batch: dict, visits: Sequence[tuple[str, str]] = (), block: Callable = contextlib.nullcontext
) -> None:
    """Run forward and, in a `block`, backward on one batch, and the forwards of `visits` between and after them."""
    loss = forward(ddp, batch)
    visit(ddp, batch, PLACES[1], visits)
    with block():
        with phase("backward"):
            loss.backward()
        visit(ddp, batch, PLACES[2], visits)


def accumulate(
    ddp: torch.nn.Module, batches: list[dict], interrupted: bool, visits: Sequence[tuple[str, str]] = ()
) -> None:
    """Run backward passes without communication, each in its own no_sync block if the wrapper has no_sync.

    If `interrupted`, they share one block with nested blocks inside, and an exception ends it.
    """
    if not interrupted or not batches:
        for batch in batches:
            with ddp.no_sync() if hasattr(ddp, "no_sync") else contextlib.nullcontext():
                forward_backward(ddp, batch, visits)
        return
    with contextlib.suppress(Interruption), ddp.no_sync():
        with ddp.no_sync():
            forward_backward(ddp, batches[0])
        for batch in batches[1:]:
            forward_backward(ddp, batch)
        with ddp.no_sync():
            raise Interruption


def form_training(job: dict) -> dict:
    """Return the form of what `train` returns."""
    steps, gradients = len(job["batches"]), like_gradients(job)
    strides = {name: Maybe([int] * p.dim()) for name, p in make_meta_model(job).named_parameters()}
    results = {"start": like_state(job), "gradients": [gradients] * steps}
    results["strides"] = strides if job.get("returns_strides") else None
    return results | {"weights": like_weights(job), "interface": INTERFACE}


@returns(form_training, list_steps)
def train(job: dict) -> dict:
    """Construct the wrapper and take all steps. All micro-batches of a step except the last run inside no_sync.

    In step job["interrupted"], exceptions end the no_sync blocks. In step job["unsynced"], all backward passes run
    inside no_sync, but no forward does. Before step job["reallocate"], the buffers move. job["visits"] is for `visit`.
    With job["returns_strides"], also return the strides of the gradients of the last step.
    """
    visits = job.get("visits", ())
    model = build(job)
    ddp = wrap(job, model)
    start = edge_case_models.copy_state(model)
    optimizer = OPTIMIZERS[job["optimizer"]]([p for p in model.parameters() if p.requires_grad])
    gradients, strides = [], None
    for step, batches in enumerate(job["batches"]):
        recording.note("step", step=step, unsynced=step == job.get("unsynced"))
        ddp.train(EVAL_MODE not in visits or step < len(job["batches"]) - 1)
        if step == job.get("reallocate"):
            reallocate_buffers(ddp)
        optimizer.zero_grad()
        visit(ddp, batches[0], PLACES[0], visits)
        is_unsynced = step == job.get("unsynced")
        if not is_unsynced:
            accumulate(ddp, batches[:-1], step == job.get("interrupted"), visits)
        for batch in batches if is_unsynced else batches[-1:]:
            forward_backward(ddp, batch, visits, ddp.no_sync if is_unsynced else contextlib.nullcontext)
        with phase("finish"):
            ddp.finish_grad_sync()
        visit(ddp, batches[0], PLACES[3], visits)
        gradients.append(copy_gradients(model))
        if job.get("returns_strides"):
            strides = {n: None if p.grad is None else list(p.grad.stride()) for n, p in model.named_parameters()}
        with phase("step"):
            optimizer.step()
        visit(ddp, batches[0], PLACES[4], visits)
        visits = visits[::-1]  # each kind of forward is the last one in some step
    weights = {name: p.detach() for name, p in model.named_parameters()}
    results = {"start": start, "gradients": gradients, "strides": strides, "weights": weights}
    return results | {"interface": describe_interface(ddp, model)}


train.has_plain_steps = True  # brigade/grader/witness/content.py judges what its launches carry
train.reports = ("ready",)  # brigade/course/checks/borders.py demands them


@returns(lambda job: Maybe(like_gradients(job)))
def take_odd_step(job: dict) -> dict | None:
    """Follow job["order"]. Return the gradients, or None if the wrapper refuses a part of it with RuntimeError.

    With job["has_other"], wrap another model before the first action.
    """
    model = build(job)
    ddp = wrap(job, model)
    _other = wrap(job, build(job)) if job.get("has_other") else None
    return copy_gradients(model) if follow(job["order"], ddp, job["batches"][0]) else None


def follow(order: Sequence[str], ddp: torch.nn.Module, batches: list[dict], optimizer: Any = None) -> bool:
    """Take these actions, each forward on the next batch and each backward on the oldest loss.

    Return False if the submission refuses one with RuntimeError.
    """
    unused, losses, saved = iter(batches), [], []

    def run_forward() -> None:
        compute_loss(ddp, move_to_device(batches[0]))

    actions = {
        "zero_grad": (optimizer or ddp).zero_grad,
        "finish": getattr(ddp, "finish_grad_sync", None),
        "step": getattr(optimizer, "step", None),
        "clip": lambda: optimizer.clip_grad_norm_(1e9),
        "save": lambda: saved.append(optimizer.state_dict()),
        "load": lambda: optimizer.load_state_dict(saved[0]),
        "forward": lambda: losses.append(compute_loss(ddp, move_to_device(next(unused)))),
        KINDS[0]: torch.no_grad()(run_forward),
        KINDS[1]: run_forward,
    }
    try:
        for action in order:
            if "backward" in action:
                loss, is_quiet = losses.pop(0), "no_sync" in action
                with ddp.no_sync() if is_quiet else contextlib.nullcontext(), phase("backward"):
                    loss.backward()
            else:
                with phase(action):
                    actions[action]()
    except NotImplementedError:
        raise  # a part that is not written yet
    except RuntimeError:
        return False
    return True
