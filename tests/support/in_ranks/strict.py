"""Functions for `test_strict.py`: who gets a result, and when."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager

from brigade.ranks.rank import recording
from brigade.ranks.rank.memory import LiveMemory


def deliver(how: str) -> dict[str, Any]:
    """Launch two all-reduces and wait on the second. Then get the result of the first in the given way."""
    first, second = torch.ones(3), torch.ones(2)
    one, two = dist.all_reduce(first, async_op=True), dist.all_reduce(second, async_op=True)
    two.wait()
    before = [first.clone(), second.clone()]
    answer = {
        "wait with a timeout": lambda: one.wait(timedelta(seconds=5)),
        "result": one.result,
        "is_completed": one.is_completed,
        "then": lambda: one.get_future().then(lambda future: future.value()).wait(),
        "collect_all": lambda: torch.futures.collect_all([one.get_future()]).wait()[0].value(),
        "done": lambda: (future := one.get_future()).done() or future.done(),
        "synchronize": one.synchronize,
    }[how]()
    after = [first.clone(), second.clone()]
    first.fill_(7.0)
    one.wait()  # delivers once: what was written since then stays
    return {"before": before, "after": after, "answer": answer, "later": first}


def poll() -> list[bool]:
    """Ask whether a reduce-scatter is complete: once, and three times after another event. Gloo always says no."""
    handle = dist.reduce_scatter_tensor(torch.empty(1), torch.ones(dist.get_world_size()), async_op=True)
    answers = [handle.is_completed()]
    recording.note("other")
    return answers + [handle.is_completed() for _ in range(3)]


def change(where: str) -> dict[str, Any]:
    """Change or read the tensors of an all-gather or all-reduce between its launch and its wait."""
    x = torch.arange(4.0)
    output = torch.zeros(4 * dist.get_world_size())
    if where in ("input", "output", "reading"):
        handle = dist.all_gather_into_tensor(output, x, async_op=True)
    else:
        handle = dist.all_reduce(x, async_op=True)
    if where == "input":
        x[1] += 1
    elif where == "output":
        output.zero_()
    elif where == "reduced":
        x /= 2
    elif where == "data":
        x.data[0] = 5.0
    elif where == "reading":
        (x.sum() + output.sum()).item()
    handle.wait()
    x += 1  # afterwards it is nobody's business
    handle.wait()
    return {"input": x, "output": output}


def count_around_an_all_gather(numel: int) -> dict[str, int]:
    """Return the bytes alive after the launch of an all-gather, after its wait, and after its output is dropped."""
    shard = torch.ones(numel)
    with LiveMemory([shard]) as memory:
        full = torch.empty(numel * dist.get_world_size())
        handle = dist.all_gather_into_tensor(full, shard, async_op=True)
        launched = memory.total()
        handle.wait()
        waited = memory.total()
        assert torch.equal(handle.result()[0], full)
        del full
        return {"launched": launched, "waited": waited, "dropped": memory.total()}


def free_in_flight(which: str) -> None:
    """Free a tensor of an all-gather before its wait."""
    shard, full = torch.ones(4), torch.empty(4 * dist.get_world_size())
    handle = dist.all_gather_into_tensor(full, shard, async_op=True)
    {"input": shard, "output": full}[which].untyped_storage().resize_(0)
    handle.wait()


def reduce_channels_last() -> list[float]:
    """All-reduce a batch of images and a batch of videos in a channels-last memory format."""
    images = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    videos = torch.ones(2, 3, 4, 5, 6).to(memory_format=torch.channels_last_3d)
    for tensor in (images, videos):
        assert not tensor.is_contiguous()
        dist.all_reduce(tensor)
    return [images.mean().item(), videos.mean().item()]


def call_wrongly(how: str) -> None:
    """Make a call that NCCL would refuse."""
    both = torch.ones(4, 6)
    if how == "all_reduce":
        dist.all_reduce(both.T)
    elif how == "send":
        dist.send(both[:, ::2], 1 - dist.get_rank())
    elif how == "all_to_all":
        dist.all_to_all_single(both[1:3], both[:2])
    else:
        with coalescing_manager(device=torch.device("cpu")):
            dist.all_reduce(both)
