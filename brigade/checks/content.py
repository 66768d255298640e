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
from typing import Any

import torch
from torch import Tensor

from brigade.checks import edge_case_models
from brigade.checks.edge_case_models import OPTIMIZERS, compute_loss, copy_gradients
from brigade.events import Event, follow_steps
from brigade.ipc.wire import DTYPES
from brigade.rank.memory import list_tensors
from brigade.runner.ranks import RankResults
from brigade.switch.switch import Call

NEEDED = {"model", "sizes", "dtype", "state", "batches", "optimizer", "members"}
OTHER_GRADIENTS = {"poison", "load", "forward", "loss_scale"}  # jobs with one of these, or a recipe with one
TOLERANCE = 1e-4  # of a parameter's largest value
HALF_TOLERANCE = 2e-2  # the same, if 16 bits are asked for: see `has_half`
OTHER_NUMBERS = 1000  # of metrics, statistics and padding in the launches of a step
EXACT = {torch.float64: 1e-7, torch.float32: TOLERANCE}  # checks accept less than this as right


def find_missing_gradient(results: RankResults, jobs: Sequence[Any]) -> str:
    """Return what the launches of a step did not carry although the ranks have its result, or "".

    `results` and `jobs` are those of one call of a scenario of plain training steps. A step is judged only if the ranks
    have returned its average gradients, or the weights after all steps. So an answer that computes something else keeps
    the points for its launches.
    """
    if not any(results.carried) or not all(isinstance(job, dict) and job.keys() >= NEEDED for job in jobs):
        return ""
    if any(OTHER_GRADIENTS & {*job, *job.get("recipe", ())} for job in jobs):
        return ""
    is_evaluated = any(kind == "eval mode" for _, kind in jobs[0].get("visits", ()))  # in the last step
    for members in jobs[0].get("groups") or [jobs[0]["members"]]:
        if len(members) == 1 or max(members) >= len(jobs):
            continue  # the case of a checkpoint may have more members than the run
        delivered = collect(results.events, results.carried, set(members))
        returned = Values(list_tensors([results[rank] for rank in members]))
        *gradients, trained = train([jobs[rank] for rank in members])
        relative = HALF_TOLERANCE if has_half(jobs[0], trained.values()) else TOLERANCE
        is_trained = returned.are_known(trained) and all(weight.dtype in EXACT for weight in trained.values())
        for step, own in list(enumerate(gradients))[: len(gradients) - is_evaluated]:
            is_known = is_trained or returned.are_known({n: each.mean(0).sum(0) for n, each in own.items()})
            if step not in delivered or not is_known:
                continue
            launches = f"the launches of step {step} on ranks {', '.join(map(str, members))}"
            values = Values(delivered[step])
            if name := values.find_absent(own, relative):
                return f"{launches} did not carry the gradients of {name}"
            num_own, num_weights = (sum(map(Tensor.numel, some.values())) for some in (own, trained))
            most = 2 * (num_own + 2 * num_weights) + OTHER_NUMBERS
            if (count := values.count_different()) > most:
                return f"{launches} carried {count} different numbers, and no answer needs more than {most}"
    return ""


class Values:
    """The values of some tensors, without their order."""

    def __init__(self, tensors: Iterable[Tensor]):
        parts = [tensor.flatten() for tensor in tensors if tensor.dtype.is_floating_point]
        none = torch.zeros(0, dtype=torch.float64)
        self.sorted = torch.cat([none, *(part.double() for part in parts)])
        self.sorted.numpy().sort()  # in place, and nine times as fast as torch, which also returns indices

    def count_different(self) -> int:
        """Return the number of different values. NaN, which fills uninitialized memory in some runs, is none."""
        return int((self.sorted.diff() > 0).sum()) + 1

    def find_absent(self, gradients: dict[str, Tensor], relative: float) -> str:
        """Return the first parameter whose gradients, (ranks, micro-batches, *shape), the values lack, or ""."""
        for name, each in gradients.items():
            sums = each.double().sum((0, 1)), each.double().sum(1), each.double().sum(0)
            scaled = (factor * expected for expected in sums for factor in list_factors(len(each)))
            if not any(self.contain(expected, relative) for expected in scaled):
                return name
        return ""

    def are_known(self, expected: dict[str, Tensor]) -> bool:
        """Return whether the values of all of these tensors are among the values."""
        return all(self.contain(each.double(), EXACT.get(each.dtype, HALF_TOLERANCE)) for each in expected.values())

    def contain(self, expected: Tensor, relative: float) -> bool:
        """Return whether each expected number that is not about zero is among the values."""
        tolerance = relative * expected.abs().max()
        wanted = expected[expected.abs() > tolerance]
        places = torch.searchsorted(self.sorted, wanted - tolerance)
        if not len(wanted):
            return True
        return bool(places.max() < len(self.sorted) and (self.sorted[places] <= wanted + tolerance).all())


def collect(
    events: Sequence[Sequence[Event]], carried: Sequence[Sequence[Call]], members: set[int]
) -> dict[int | None, list[Tensor]]:
    """Return what launches inside a group delivered, flat tensors, by the step in which they were launched."""
    delivered: dict[int | None, list[Tensor]] = {}
    known: set[tuple[int | None, int]] = set()  # steps and results that several ranks share
    for rank in members:
        for event in events[rank]:
            if event["kind"] == "step":  # in some, nothing may be launched
                delivered.setdefault(event["step"], [])
        for _, step, event in follow_steps(events[rank]):
            if event["kind"] == "launch" and step is not None:
                call = carried[rank][event["index"]]
                is_new = (step, id(call.carried)) not in known
                if call.carried and call.dtype and is_new and members.issuperset(call.ranks):
                    known.add((step, id(call.carried)))
                    delivered[step].append(torch.frombuffer(bytearray(call.carried), dtype=DTYPES[call.dtype]))
    return delivered


def train(jobs: Sequence[dict[str, Any]]) -> Iterator[dict[str, Tensor]]:
    """Train in one process on all batches. Yield each step's gradients and, at the end, the weights.

    Gradients have the shape (ranks, micro-batches, *shape of the parameter), with zeros where there is no gradient.
    """
    job = jobs[0]
    model = edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"])
    optimizer = OPTIMIZERS[job["optimizer"]]([p for p in model.parameters() if p.requires_grad])
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
