"""The content witness: whether the collectives of a step carried the gradients of this step.

Other checks judge when a rank launches and what it returns. A rank that learns the averages in another way could let
the launches carry anything. The switch keeps what every launch delivered, and this module compares it with what the
step must produce, which the grader computes in one process. It demands no layout: for each parameter, one of these must
be among the values that the step's launches delivered to the ranks of a group, in any order and with anything else
between them:

| what | so that these styles pass |
|---|---|
| the sum of the ranks' gradients | all-reduce, reduce-scatter and all-gather, reduce and broadcast, hierarchies |
| each rank's own gradients | an all-gather, an all-to-all, broadcasts or messages, with the sum on the ranks |
| for each micro-batch, the sum over the ranks | a reduction after every micro-batch |

Each may be multiplied by a factor of `list_factors`, as with an average, or a division before the sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from brigade.course.checks import edge_case_models
from brigade.course.checks.edge_case_models import OPTIMIZERS, compute_loss, copy_gradients
from brigade.grader.witness.switch import Call
from brigade.ranks.events import Event, follow_steps
from brigade.ranks.ipc.wire import DTYPES
from brigade.ranks.rank.memory import list_tensors
from brigade.ranks.runner.ranks import RankResults

NEEDED = {"model", "sizes", "dtype", "state", "batches", "optimizer", "members"}
OTHER_GRADIENTS = {"poison", "load", "forward"}  # jobs with one of these
PLAIN_RECIPE = {"optimizer", "options", "closure", "zeros", "zero_by_model"}  # one of module 8 that changes no gradient
TOLERANCE = 1e-4  # of a parameter's largest value
HALF_TOLERANCE = 2e-2  # the same, if 16 bits are asked for: see `has_half`
OTHER_NUMBERS = 1000  # of metrics, statistics and padding in the launches of a step


def find_missing_gradient(results: RankResults, jobs: Sequence[Any]) -> str:
    """Return what the launches of a step did not carry although the ranks have its result, or "".

    `results` and `jobs` are those of one call of a scenario of plain training steps. A step is judged unless the ranks
    have returned other average gradients and other weights than a check accepts. So an answer that computes something
    else keeps the points for its launches.
    """
    if results.carried is None or not all(isinstance(job, dict) and job.keys() >= NEEDED for job in jobs):
        return ""
    if any(OTHER_GRADIENTS & job.keys() or job.get("recipe", {}).keys() - PLAIN_RECIPE for job in jobs):
        return ""
    is_evaluated = any(kind == "eval mode" for _, kind in jobs[0].get("visits", ()))  # in the last step
    for members in jobs[0].get("groups") or [jobs[0]["members"]]:
        if len(members) == 1 or max(members) >= len(jobs):
            continue  # the case of a checkpoint may have more members than the run
        delivered = collect(results.events, results.carried, set(members))
        returned = Values(list_tensors([results[rank] for rank in members]))
        *gradients, trained = train([jobs[rank] for rank in members])
        relative = HALF_TOLERANCE if has_half(jobs[0], trained.values()) else TOLERANCE
        is_exact = all(weight.dtype.itemsize > 2 for weight in trained.values())  # also after many steps
        limits = limit_errors(trained, relative)
        is_trained = all(returned.contain(weight.double(), limits[name]) for name, weight in trained.items())
        for step, own in list(enumerate(gradients))[: len(gradients) - is_evaluated]:
            if not (is_trained and (is_exact or step == 0)) and not returned.are_averages(own, relative):
                continue
            launches = f"the launches of step {step} on ranks {', '.join(map(str, members))}"
            values = Values(delivered.get(step, []))
            if name := values.find_absent(own, relative):
                return f"{launches} did not carry the gradients of {name}"
            num_own, num_weights = (sum(map(Tensor.numel, some.values())) for some in (own, trained))
            most = 2 * (num_own + 2 * num_weights) + OTHER_NUMBERS
            if (count := values.count_different()) > most:
                return f"{launches} carried {count} different numbers, and no answer needs more than {most}"
    return ""


def limit_errors(terms: dict[str, Tensor], relative: float) -> dict[str, float]:
    """Return with which error a check may accept a sum of these terms as right, by name: see `expect_equal`."""
    largest = {name: float(each.abs().max()) for name, each in terms.items()}
    return {name: relative * max(own, max(largest.values()) / 10) for name, own in largest.items()}


class Values:
    """The values of some tensors, without their order."""

    def __init__(self, tensors: Iterable[Tensor]):
        real = [torch.view_as_real(tensor) if tensor.is_complex() else tensor for tensor in tensors]
        none = torch.zeros(0, dtype=torch.float64)
        self.sorted = torch.cat([none, *(tensor.flatten().double() for tensor in real)])
        self.sorted.numpy().sort()  # in place, and nine times as fast as torch, which also returns indices

    def count_different(self) -> int:
        """Return the number of different values. NaN, which fills uninitialized memory in some runs, is none."""
        return int((self.sorted.diff() > 0).sum()) + 1

    def find_absent(self, gradients: dict[str, Tensor], relative: float) -> str:
        """Return the first parameter whose gradients, (ranks, micro-batches, *shape), the values lack, or ""."""
        for name, each in gradients.items():
            sums = (each.double().sum(axes) for axes in ((0, 1), 1, 0))
            scaled = (factor * expected for expected in sums for factor in list_factors(len(each)))
            if not any(self.contain(expected, relative * float(expected.abs().max())) for expected in scaled):
                return name
        return ""

    def are_averages(self, gradients: dict[str, Tensor], relative: float) -> bool:
        """Return whether a check may accept some of the values as the averages of all parameters' gradients."""
        own = {name: each.double().sum(1) for name, each in gradients.items()}
        limits = limit_errors(own, relative)
        return all(self.contain(each.mean(0), limits[name]) for name, each in own.items())

    def contain(self, expected: Tensor, limit: float) -> bool:
        """Return whether the values have each expected number with at most this error. Leave out smaller numbers."""
        wanted = expected[expected.abs() > limit]
        places = torch.searchsorted(self.sorted, wanted - limit)
        if not len(wanted):
            return True
        return bool(places.max() < len(self.sorted) and (self.sorted[places] <= wanted + limit).all())


def collect(
    events: Sequence[Sequence[Event]], carried: Sequence[Sequence[Call]], members: set[int]
) -> dict[int | None, list[Tensor]]:
    """Return what launches inside a group delivered, flat tensors, by the step in which they were launched."""
    delivered: dict[int | None, list[Tensor]] = {}
    known: set[tuple[int | None, int]] = set()  # steps and results that several ranks share
    for rank in members:
        for _, step, event in follow_steps(events[rank]):
            if event["kind"] == "launch" and step is not None:
                call = carried[rank][event["index"]]
                is_new = (step, id(call.carried)) not in known
                dtype = DTYPES[call.dtype] if call.dtype else torch.bool
                is_inexact = dtype.is_floating_point or dtype.is_complex
                if call.carried and is_inexact and is_new and members.issuperset(call.ranks):
                    known.add((step, id(call.carried)))
                    delivered.setdefault(step, []).append(torch.frombuffer(bytearray(call.carried), dtype=dtype))
    return delivered


def train(jobs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
    """Train in one process on all batches. Yield each step's gradients and, at the end, the weights.

    Gradients have the shape (ranks, micro-batches, *shape of the parameter), with zeros where there is no gradient.
    """
    job = jobs[0]
    model = edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"])
    recipe = job.get("recipe")
    make = (
        partial(getattr(torch.optim, recipe["optimizer"]), **recipe["options"])
        if recipe
        else OPTIMIZERS[job["optimizer"]]
    )
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    for step in range(len(job["batches"])):
        each: dict[str, list[Tensor]] = {}  # of all ranks and micro-batches, one after the other
        num_batches = max(len(own["batches"][step]) for own in jobs)
        for own in jobs:
            for number in range(num_batches):
                model.zero_grad()
                if number < len(own["batches"][step]):
                    compute_loss(model, own["batches"][step][number]).backward()
                for name, gradient in copy_gradients(model).items():
                    each.setdefault(name, []).append(gradient if gradient is not None else torch.zeros(()))
        whole = {name: torch.stack(torch.broadcast_tensors(*parts)) for name, parts in each.items()}
        yield {name: gradients.unflatten(0, (len(jobs), -1)) for name, gradients in whole.items()}
        for name, gradients in whole.items():
            parameter = model.get_parameter(name)
            parameter.grad = (gradients.sum(0) / len(jobs)).to(parameter.dtype).expand(parameter.shape)
        optimizer.step()
    yield {name: parameter.detach() for name, parameter in model.named_parameters()}


def has_half(job: dict[str, Any], weights: Iterable[Tensor]) -> bool:
    """Return whether weights, an argument of the wrapper or the job's `wire` have 16 bits.

    What is launched does not count.
    """
    options = [*job.get("arguments", {}).values(), job.get("wire")]
    options = [value for value in options if isinstance(value, torch.dtype)]
    return any(dtype.itemsize == 2 for dtype in (*options, *(weight.dtype for weight in weights)))


def list_factors(num_ranks: int) -> tuple[float, ...]:
    """Return the factors of a sum, of an average, and of a division by the root before and after."""
    return 1.0, 1 / num_ranks, num_ranks**-0.5
