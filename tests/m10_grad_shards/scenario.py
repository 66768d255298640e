"""Functions that the ranks run in the checks of module 10, apart from module 8's training."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from brigade.course.checks.edge_case_models import compute_loss
from brigade.course.checks.forms import Like, ListOf, Maybe, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.memory import LiveMemory
from brigade.ranks.rank.recording import phase
from helpers.training import (
    PLACES,
    Large,
    accumulate,
    build,
    follow,
    forward_backward,
    like_gradients,
    like_weights,
    list_steps,
    move_to_device,
    name_error,
    visit,
    wrap,
)
from m08_zero_optimizer import scenario as m08_zero


@returns(lambda job: m08_zero.form_wrapped(job, like_weights(job)) | {"left": ListOf(str)}, list_steps)
def train(job: dict) -> dict:
    """Train on the micro-batches of each step. A rank without micro-batches only calls finish_grad_sync.

    With job["finish_each"], call finish_grad_sync after each micro-batch. Otherwise, run all micro-batches except the
    last inside no_sync. In step job["interrupted"], exceptions end the no_sync blocks. job["visits"] has forwards that
    do not belong to a step.
    """
    model = m08_zero.build(job)
    ddp = wrap(job, model)
    left = set()

    def gradients(step: int) -> float:
        batches, visits = job["batches"][step], job.get("visits", ())
        if job["finish_each"]:
            for batch in batches:
                forward_backward(ddp, batch)
                finish(ddp, model, left)
            for _ in range(job["micro_batches"] - len(batches)):
                finish(ddp, model, left)
        else:
            accumulate(ddp, batches[:-1], step == job.get("interrupted"), visits)
            for batch in batches[-1:]:
                visit(ddp, batch, PLACES[0], visits)
                forward_backward(ddp, batch, visits)
            finish(ddp, model, left)
            for batch in batches[-1:]:
                visit(ddp, batch, PLACES[3], visits)
        return 0.0  # no check looks at the loss

    return m08_zero.train_wrapped(job, ddp, model, gradients) | {"left": sorted(left)}


train.has_plain_steps = True  # brigade/grader/witness/content.py judges what its launches carry


def finish(ddp: nn.Module, model: nn.Module, left: set[str]) -> None:
    """Call finish_grad_sync, and add the names of parameters that have a gradient afterwards to `left`."""
    with phase("finish"):
        ddp.finish_grad_sync()
    left |= {name for name, p in model.named_parameters() if p.grad is not None}


def form_measured(job: dict) -> dict:
    """Return the form of what `measure` returns."""
    steps = len(job["batches"])
    hooks = [dict.fromkeys(like_gradients(job), int)] * steps
    return {"constructed": int, "hooks": hooks, "finished": [int] * steps, "left": [int] * steps}


@returns(form_measured, list_steps)
def measure(job: dict) -> dict:
    """Return the bytes of gradients that are alive at each gradient hook and after each finish_grad_sync.

    They do not include the parameters, or the activations of the bare model at the same hook. "constructed" contains
    the bytes that the constructor adds, and "left" the bytes of all p.grad after each finish_grad_sync.
    """
    bare, model = (m08_zero.build(job) for _ in range(2))
    recording.watch_gradients(model)
    batches = [move_to_device(batch) for [batch] in job["batches"]]
    without_borders = [batch | {"borders": None} for batch in batches]  # whose factors a rank may not know twice
    activations = count_at_hooks(bare, without_borders, lambda model: model)["hooks"]
    counted = count_at_hooks(model, batches, lambda model: wrap(job, model))
    pairs = zip(counted["hooks"], activations, strict=True)
    return counted | {"hooks": [{name: one[name] - other[name] for name in one} for one, other in pairs]}


def count_at_hooks(
    model: nn.Module, batches: list[dict[str, Any]], make_wrapper: Callable[[nn.Module], nn.Module]
) -> dict[str, Any]:
    """Train on each batch, without an optimizer. Count all bytes except parameters and a bare model's gradients."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    nodes = {get_gradient_edge(p).node: name for p, name in names.items() if p.requires_grad}
    constructed, hooks, finished, left = 0, [{} for _ in batches], [], []
    with LiveMemory(model.parameters()) as memory:
        ddp = make_wrapper(model)

        def count() -> int:
            nbytes = memory.count(weights=names, gradients=[p.grad for p in names])
            return nbytes["other"] + (0 if ddp is model else nbytes["gradients"])

        def count_left() -> int:
            return sum(p.grad.nbytes for p in names if p.grad is not None)

        constructed = count()
        for node, name in nodes.items():  # after the wrapper's own hooks, of either kind
            node.register_hook(lambda *_, name=name: hooks[step].update({name: count()}))
        for step, batch in enumerate(batches):
            if ddp is not model:
                recording.note("step", step=step)
            ddp.zero_grad()
            loss = compute_loss(ddp, batch)
            with phase("backward"):
                loss.backward()
            del loss
            if ddp is not model:
                with phase("finish"):
                    ddp.finish_grad_sync()
            finished.append(count())
            left.append(count_left())
    return {"constructed": constructed, "hooks": hooks, "finished": finished, "left": left}


@returns(lambda job: None, lambda job: [0])
def train_large(job: dict) -> None:
    """Run forward, backward and finish_grad_sync on a large model."""
    ddp = wrap(job, Large(job["start"], job["count"], job["numel"], job["dtype"]))
    recording.note("step", step=0)
    ddp(job["seed"]).backward()
    ddp.finish_grad_sync()


def form_points(job: dict) -> dict[str, Any]:
    """Return the form of what `collect_points` returns."""
    cleared = ("ddp.zero_grad(set_to_none=False)", "ddp.zero_grad()", "optimizer.zero_grad()")
    shards = Like(torch.float64)
    names = ["one", "two", "after step", *(f"after {form}" for form in cleared)]
    names += [f"after {form} and finish_grad_sync" for form in cleared]
    return dict.fromkeys(names, shards) | {f"after {name}": Maybe(shards) for name in job.get("orders", {})}


@returns(form_points)
def collect_points(job: dict) -> dict[str, torch.Tensor | None]:
    """Return the shards after each of two calls of finish_grad_sync, after a step, and after each form of zero_grad.

    Then come those of new wrappers after each of job["orders"] (see `follow`), or None if the wrapper refuses it.
    """
    ddp = wrap(job, build(job))
    optimizer = student(*job["optimizer_class"])(ddp, torch.optim.SGD, lr=0.01)
    [batch], *_ = job["batches"]
    forward_backward(ddp, batch)
    ddp.finish_grad_sync()
    points = {"one": copy_shards(ddp)}
    forward_backward(ddp, batch)
    ddp.finish_grad_sync()
    points["two"] = copy_shards(ddp)
    optimizer.step()
    points["after step"] = copy_shards(ddp)
    optimizer.zero_grad()
    points["after optimizer.zero_grad()"] = copy_shards(ddp)
    forward_backward(ddp, batch)
    ddp.finish_grad_sync()
    ddp.zero_grad(set_to_none=False)
    points["after ddp.zero_grad(set_to_none=False)"] = copy_shards(ddp)
    for form, zero_grad in {
        "ddp.zero_grad(set_to_none=False)": partial(ddp.zero_grad, set_to_none=False),
        "ddp.zero_grad()": ddp.zero_grad,
        "optimizer.zero_grad()": optimizer.zero_grad,
    }.items():
        accumulate(ddp, [batch], interrupted=False)
        zero_grad()
        points.setdefault(f"after {form}", copy_shards(ddp))
        ddp.finish_grad_sync()
        points[f"after {form} and finish_grad_sync"] = copy_shards(ddp)
    for name, order in job.get("orders", {}).items():
        ddp = wrap(job, build(job))
        points[f"after {name}"] = copy_shards(ddp) if follow(order, ddp, [batch, batch]) else None
    return points


def copy_shards(ddp: nn.Module) -> torch.Tensor:
    """Return a copy of all gradient shards of this rank."""
    return torch.cat([buffer.grad_data.detach().double().flatten() for buffer in ddp.grad_buffers])


@returns(lambda job: dict.fromkeys(("largest", "before", "after", "lowest", "highest"), float))
def accumulate_many(job: dict) -> dict[str, float]:
    """Accumulate many equal micro-batches, all but the last inside no_sync. Then clip gradients in another model.

    Return the "largest" entry of the shards, and what `clip` returns.
    """
    ddp = wrap(job, m08_zero.Dots([weight.to(device()) for weight in job["weights"]]))
    inputs = [x.to(device()) for x in job["inputs"]]
    with ddp.no_sync():
        for _ in range(job["count"] - 1):
            ddp(inputs).backward()
    with phase("backward"):
        ddp(inputs).backward()
    ddp.finish_grad_sync()
    return {"largest": find_largest(ddp)} | clip(job, inputs)


def clip(job: dict, inputs: list[torch.Tensor]) -> dict[str, float]:
    """Take one step of SGD with lr=1 and gradients that are clipped to a norm of 1, in the dtype of the weights.

    Return the largest entry of the shards "before" and "after" clipping, and the "lowest" and the "highest" weight.
    """
    model = m08_zero.Dots([weight.to(device()) for weight in job["weights"]])
    ddp = wrap(job | {"arguments": job["arguments"] | {"grad_dtype": None}}, model)
    optimizer = student(*job["optimizer_class"])(ddp, torch.optim.SGD, lr=1.0)
    ddp(inputs).backward()
    ddp.finish_grad_sync()
    before = find_largest(ddp)
    optimizer.clip_grad_norm_(1.0)
    after = find_largest(ddp)
    optimizer.step()
    [weight] = (p.detach() for p in model.parameters())
    return {"before": before, "after": after, "lowest": float(weight.min()), "highest": float(weight.max())}


def find_largest(ddp: nn.Module) -> float:
    """Return the largest entry of this rank's gradient shards."""
    return max(float(buffer.grad_data.max()) for buffer in ddp.grad_buffers)


@returns(lambda job: [Maybe(str)] * len(job["values"]))
def refuse(job: dict) -> list[str | None]:
    """Return the type of the exception for each value of max_live_buckets; None if the value is accepted."""
    jobs = [job | {"arguments": {"max_live_buckets": value}} for value in job["values"]]
    return [name_error(wrap, own, m08_zero.build(own)) for own in jobs]
