"""Functions that the ranks run in the checks of module 6, apart from plain training."""

import contextlib
import warnings

import torch
import torch.distributed as dist
from torch import nn

from brigade.course.checks.edge_case_models import OPTIMIZERS
from brigade.course.checks.forms import Like, Maybe, returns
from brigade.ranks.rank import recording
from brigade.ranks.rank.api import device, student
from brigade.ranks.rank.recording import phase
from helpers.training import Interruption, build, create_group, forward_backward, like_weights, list_steps, wrap


def call(entry: dict, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Call one collective under the public name entry["function"]. Return the tensor that will contain its result."""
    input_tensor = entry["input"].to(device(), copy=True)
    keywords = {"group": group} | ({"op": getattr(dist.ReduceOp, entry["op"])} if entry["op"] else {})
    tensors = [input_tensor]
    if entry["function"] != "all_reduce":
        tensors.insert(0, input_tensor.new_zeros(entry["output_numel"]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 still has the old names
        getattr(dist, entry["function"])(*tensors, **keywords)
    return tensors[0]


def like_result(entry: dict) -> Like:
    """Return the form of the result of a call."""
    numel = entry["output_numel"]
    return Like(entry["input"].dtype, tuple(entry["input"].shape) if numel is None else (numel,))


@returns(
    lambda job: [[like_result(entry) for entry in block] for block in job["blocks"]],
    lambda job: range(len(job["blocks"])),
)
def run_blocks(job: dict) -> list[list[torch.Tensor]]:
    """Call the collectives of each block inside `coalesce`. Return what their tensors contain after handle.wait()."""
    coalesce = student("m06_coalesced", "coalesce")
    group = create_group(job)
    results = []
    for number, block in enumerate(job["blocks"]):
        recording.note("step", step=number)
        with phase("block"):
            with coalesce(group) as handle:
                tensors = [call(entry, group) for entry in block]
        with phase("wait"):
            handle.wait()
        results.append([tensor.clone() for tensor in tensors])
    return results


def form_refused_blocks(job: dict) -> list:
    """Return the form of what `run_refused_blocks` returns."""
    result = like_result(job["after"])
    block = {"raised": Maybe(str), "unchanged": bool, "alone": result, "again": Maybe(result), "failure": Maybe(str)}
    return [*[block] * len(job["blocks"]), Maybe(result), Maybe(result)]


@returns(form_refused_blocks, lambda job: range(len(job["blocks"])))
def run_refused_blocks(job: dict) -> list[dict]:
    """Run blocks that must end with an exception. Return its type, whether it is the block's own, and later results.

    The first two blocks raise exceptions of their own. From number job["nested"] on, they contain a block.

    The last two elements of the list are the result of a block whose caller catches the refusal of a nested block, and
    the sum of those of a block and of one of another group in it, or None.
    """
    coalesce = student("m06_coalesced", "coalesce")
    with coalesce() as handle:  # a submission that cannot coalesce any calls fails here
        call(job["after"], None)
    handle.wait()
    answers = []
    for number, block in enumerate(job["blocks"]):
        recording.note("step", step=number)
        raised, own = None, {0: Interruption("raised in the block"), 1: KeyboardInterrupt()}.get(number)
        with phase("block"):
            try:
                with coalesce():
                    if number >= job["nested"]:
                        with coalesce(None if number == job["nested"] else dist.group.WORLD):
                            call(block[0], None)
                    for entry in block:
                        call(entry, None)
                    if own:
                        raise own
            except (Exception, KeyboardInterrupt) as error:
                raised = error
        with phase("after"):
            alone = call(job["after"], None)
            try:
                with coalesce() as handle:
                    again = call(job["after"], None)
                handle.wait()
                failure = None
            except Exception as error:
                failure = f"{type(error).__name__}: {error}"
        answers.append(
            {
                "raised": raised and type(raised).__name__,
                "unchanged": raised is own,
                "alone": alone,
                "again": again if failure is None else None,
                "failure": failure,
            }
        )
    try:
        with coalesce() as handle:
            outer = call(job["after"], None)
            with contextlib.suppress(Exception), coalesce():
                pass
        handle.wait()
    except Exception:
        outer = None
    other, both = dist.new_group(), None
    with contextlib.suppress(Exception), coalesce() as handle:
        with coalesce(other) as inner:
            tensors = [call(job["after"], other)]
        tensors.append(call(job["after"], None))
    with contextlib.suppress(Exception):
        handle.wait()
        inner.wait()
        both = sum(tensors)
    return [*answers, outer, both]


def form_synced_groups(job: dict) -> dict:
    """Return the form of what `sync_bucket_groups` returns. The check compares the lengths of the flat tensors."""
    flat = Like(job["params"][0].dtype)
    outcome = {"grad_data": flat, "param_data": flat, "params": job["params"]}
    return outcome | {"moved": outcome}


@returns(form_synced_groups, lambda job: range(4))
def sync_bucket_groups(job: dict) -> dict:
    """Average gradients (step 0) and gather parameters (step 1) in BucketGroups of a buffer without a wrapper.

    Then move the buffer, and do the same again in the other order (steps 2 and 3), so that a group uses the same kind
    of data before and after the move. Return the flat tensors and the parameters afterwards, and the same after the
    move as "moved".
    """
    group = create_group(job)
    params = [nn.Parameter(value.to(device())) for value in job["params"]]
    buffer = student("m05_grad_buffer", "GradBuffer")(
        params, job["bucket_numel"], dist.get_world_size(group), with_params=True
    )
    groups = [
        student("m06_coalesced", "BucketGroup")(buffer, indices, process_group=group) for indices in job["indices"]
    ]
    outcomes = []
    for first, kinds in ((0, ("grad_sync", "param_sync")), (2, ("param_sync", "grad_sync"))):
        if first:
            buffer.reallocate()
        buffer.grad_data.zero_()
        for parameter, (start, end), grad, value in zip(
            params, buffer.layout.param_ranges, job["grads"], job["params"], strict=True
        ):
            buffer.param_data[start:end] = value.flatten().to(device())
            buffer.grad_data[start:end] = grad.flatten().to(device())
            parameter.grad = buffer.grad_data[start:end].view(grad.shape)
        for step, kind in enumerate(kinds, first):
            recording.note("step", step=step)
            with phase("start"):
                for bucket_group in groups:
                    getattr(bucket_group, f"start_{kind}")()
            with phase("wait"):
                for bucket_group in reversed(groups):
                    getattr(bucket_group, f"finish_{kind}")()
        after = {"grad_data": buffer.grad_data.clone(), "param_data": buffer.param_data.clone()}
        outcomes.append(after | {"params": [parameter.detach().clone() for parameter in params]})
    return outcomes[0] | {"moved": outcomes[1]}


@returns(lambda job: {"grad_data": Like(job["dtype"]), "weights": like_weights(job)}, list_steps)
def train_on_shards(job: dict) -> dict:
    """Train without gathered gradients: the optimizer steps on this rank's shards, then parameters are gathered.

    Return the weights, and the flat gradients after the first finish_grad_sync.
    """
    model = build(job)
    ddp = wrap(job, model)
    ddp.gather_grads = False
    rank, size = locate_in_group(job)
    shards = []
    for buffer in ddp.grad_buffers:
        if buffer.param_data is None:
            raise RuntimeError(
                "the grad_buffers of CoalescedDDP have no param_data. Pass with_params=True to each GradBuffer."
            )
        for start, end in buffer.layout.bucket_ranges:
            length = (end - start) // size
            shards.append((buffer, slice(start + rank * length, start + (rank + 1) * length)))
    parameters = [nn.Parameter(buffer.param_data[part].detach()) for buffer, part in shards]
    optimizer = OPTIMIZERS[job["optimizer"]](parameters)
    first = None
    for step, [batch] in enumerate(job["batches"]):
        recording.note("step", step=step)
        model.zero_grad()
        forward_backward(ddp, batch)
        with phase("finish"):
            ddp.finish_grad_sync()
        if first is None:
            first = torch.cat([buffer.grad_data for buffer in ddp.grad_buffers])
        for parameter, (buffer, part) in zip(parameters, shards, strict=True):
            parameter.grad = buffer.grad_data[part].detach()
        with phase("step"):
            optimizer.step()
        with phase("start"):
            ddp.start_param_sync()
        with phase("wait"):
            ddp.finish_param_sync()
    return {"grad_data": first, "weights": {name: p.detach() for name, p in model.named_parameters()}}


train_on_shards.has_plain_steps = True  # brigade/grader/witness/content.py judges what its launches carry
train_on_shards.reports = ("ready",)  # brigade/course/checks/borders.py demands them


def locate_in_group(job: dict) -> tuple[int, int]:
    """Return this rank's index in its group, which is one of job["groups"], and the size of the group."""
    everyone = list(range(dist.get_world_size()))
    ranks = next((ranks for ranks in job.get("groups", []) if dist.get_rank() in ranks), everyone)
    return ranks.index(dist.get_rank()), len(ranks)
