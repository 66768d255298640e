"""Functions that the ranks run in the checks of module 16."""

from __future__ import annotations

import gc

import torch
import torch.distributed as dist
from torch import nn

from brigade.course.checks.forms import Like, Maybe, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.memory import LiveMemory
from brigade.ranks.rank.recording import phase
from helpers.training import build, create_group, forward_backward, list_steps, name_error, wrap

PACKAGE = "m16_half_bytes"
MARK = 7.0  # what an output contains that nothing has written to


def form_reductions(job: dict) -> list[dict]:
    """Return the form of what `reduce` returns. All groups of a job have the same size."""
    kept, size = dict.fromkeys(("kept_output", "kept_input", "kept_rest", "kept_twice"), bool), len(job["groups"][0])
    return [kept | {"output": Like(given.dtype, (len(given) // size,))} for given in job["tensors"]]


@returns(form_reductions, lambda job: [*range(len(job["tensors"])), *job["order"]])
def reduce(job: dict) -> list[dict]:
    """Start a reduction of each of job["tensors"], a step each, then wait for them in the order job["order"].

    Each has options, and job["views"] says whether its output is a part of the input. Return each output, whether
    output and input kept their values until the wait, whether the input did afterwards, and whether the output did in a
    second wait.
    """
    start, group = student(PACKAGE, "start_reduce_scatter"), create_group(job)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    flights, answers = [], []
    for step, given in enumerate(job["tensors"]):
        recording.note("step", step=step)
        values = given.to(device(), copy=True)
        own = values.chunk(size)[rank]
        output = own if job["views"][step] else torch.full_like(own, MARK)
        before = output.clone()
        with phase("launch"):
            handle = start(output, values, group, **job["options"][step])
        flights.append((values, output, before, handle))
        answers.append({})
    for (values, output, before, _), given, answer in zip(flights, job["tensors"], answers, strict=True):
        answer["kept_output"] = torch.equal(output, before)
        answer["kept_input"] = torch.equal(values.cpu(), given)
    for step in job["order"]:
        recording.note("step", step=step)
        with phase("wait"):
            flights[step][-1].wait()
    each = zip(flights, job["tensors"], job["views"], answers, strict=True)
    for (values, output, before, handle), given, is_view, answer in each:
        answer["output"] = output.clone()
        if is_view:
            values.chunk(size)[rank].copy_(before)
        answer["kept_rest"] = torch.equal(values.cpu(), given)
        output.fill_(MARK)
        with phase("second wait"):
            handle.wait()
        answer["kept_twice"] = bool((output == MARK).all())
    return answers


@returns(lambda job: {"during": int, "after": int, "without": int})
def measure_scratch(job: dict) -> dict[str, int]:
    """Return the bytes that a reduction adds in flight, after its wait while its handle exists, and without it."""
    start, group = student(PACKAGE, "start_reduce_scatter"), create_group(job)
    values = job["values"].to(device(), copy=True)
    output = torch.empty_like(values.chunk(dist.get_world_size(group))[0])
    with LiveMemory([values, output]) as memory:

        def count() -> int:
            gc.collect()
            return memory.count(given=[values, output])["other"]

        handle = start(output, values, group)
        during = count()
        handle.wait()
        dist.barrier(group)  # gloo's thread may hold the tensors of a collective until it has begun the next one
        after = count()
        del handle
        return {"during": during, "after": after, "without": count() if after else 0}


@returns(
    lambda job: Like(torch.float32, (len(range(job["first"], job["numel"] // job["size"], 16)),)),
    lambda job: range(job["count"]),
)
def reduce_many(job: dict) -> torch.Tensor:
    """Make job["count"] large reductions, one after the other. Return every 16th entry of the sum of their outputs.

    All handles exist until the end. job["size"] is the number of ranks.
    """
    start, handles, size = student(PACKAGE, "start_reduce_scatter"), [], job["size"]
    values = torch.empty(job["numel"], device=device())
    output = torch.empty(job["numel"] // size, device=device())
    total = torch.zeros(len(output[job["first"] :: 16]), device=device())
    for number in range(job["count"]):
        recording.note("step", step=number)
        values.copy_(torch.randn(len(values), generator=torch.Generator().manual_seed(job["seed"] + number)))
        handles.append(start(output, values))
        handles[-1].wait()
        total += output[job["first"] :: 16]
    return total


@returns(lambda job: [int] * len(job["batches"]), list_steps)
def measure_kept(job: dict) -> list[int]:
    """Return the bytes that each step adds to the memory of the wrapper, besides its buffers and the gradients."""
    model = build(job)
    kept = []
    with LiveMemory() as memory:
        ddp = wrap(job, model)
        if job["is_zero"]:
            optimizer = student("m08_zero_optimizer", "ZeroOptimizer")(ddp, torch.optim.SGD, lr=0.01)
        else:
            optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)
        known = [*model.parameters(), *(data for b in ddp.grad_buffers for data in (b.grad_data, b.param_data))]
        before = count_others(memory, known)
        for step, [batch] in enumerate(job["batches"]):
            recording.note("step", step=step)
            optimizer.zero_grad()
            forward_backward(ddp, batch)
            with phase("finish"):
                ddp.finish_grad_sync()
            with phase("step"):
                optimizer.step()
            dist.barrier()  # as in `measure_scratch`
            kept.append(count_others(memory, known) - before)
    return kept


def count_others(memory: LiveMemory, known: list[torch.Tensor]) -> int:
    """Return the live bytes that do not belong to these tensors."""
    gc.collect()
    return memory.count(known=known)["other"]


class Mixed(nn.Module):
    """Three linear layers. The dtype of the second one differs from the others'."""

    def __init__(self, dtype: torch.dtype, is_trainable: bool):
        super().__init__()
        self.first = nn.Linear(3, 2)
        self.second = nn.Linear(2, 1, dtype=dtype).requires_grad_(is_trainable)
        self.third = nn.Linear(1, 2)


@returns(lambda job: [Maybe(str)] * len(job["dtypes"]))
def wrap_dtypes(job: dict) -> list[str | None]:
    """Wrap a model for each of job["dtypes"], (dtype, is_trainable). Return the types of the exceptions, or None."""
    models = [Mixed(*arguments).to(device()) for arguments in job["dtypes"]]
    return [name_error(wrap, job, model) for model in models]


def form_compressed(job: dict) -> dict[str, list]:
    """Return the form of what `compress` returns. The check compares dtypes and shapes."""
    count = len(job["values"])
    results = {"rounded": [Like()] * count, "errors": [Like()] * (count + 1)}
    return results | {"lasting": [bool] * count, "kept": [bool] * count}


@returns(form_compressed)
def compress(job: dict) -> dict[str, list]:
    """Compress each of job["values"] with one of two ErrorFeedbacks, alternately. Return copies of all results."""
    both = [student(PACKAGE, "ErrorFeedback")(len(job["values"][0])) for _ in range(2)]
    results = {"rounded": [], "lasting": [], "errors": [both[0].error.clone()], "kept": []}
    for number, values in enumerate(job["values"]):
        given = values.to(device(), copy=True)
        one = both[number % 2]
        results["lasting"].append(one.compress(given))
        results["rounded"].append(results["lasting"][-1].clone())
        results["errors"].append(one.error.clone())
        results["kept"].append(torch.equal(given.cpu(), values))
    pairs = zip(results["lasting"], results["rounded"], strict=True)
    results["lasting"] = [torch.equal(result, before) for result, before in pairs]
    return results
