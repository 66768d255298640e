"""The functions that ranks run in the experiments of `claimed.py`."""

from __future__ import annotations

import statistics
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from brigade.checks.tiny_lm import language_loss, make_tiny_lm
from brigade.rank import recording
from brigade.rank.api import student

# torch 2.13 renamed these functions.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def time_copies(rounds: int) -> list[float]:
    """Return the duration of each round in ms.

    A round copies TinyLM's gradients into one tensor and back, as in module 2.
    """
    gradients = [torch.ones_like(parameter) for parameter in make_tiny_lm().parameters()]
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        for gradient, piece in zip(gradients, flat.split([gradient.numel() for gradient in gradients])):
            gradient.copy_(piece.view(gradient.shape))
        times.append(1e3 * (time.perf_counter() - start))
    return times


def count_unfinished(attempts: int) -> int:
    """Return how often a large all-reduce is incomplete after the wait for a small one, which was launched later.

    The group has torch's default options, so it runs collectives on two threads. Our ranks' own groups use one thread.
    """
    store = dist.FileStore("torch's own group", dist.get_world_size())  # in the directory of the run
    group = dist.ProcessGroupGloo(store, dist.get_rank(), dist.get_world_size(), timedelta(seconds=60))
    count = 0
    for _ in range(attempts):
        first = group.allreduce([torch.ones(4_000_000)])
        last = group.allreduce([torch.ones(1)])
        last.wait()
        count += not first.is_completed()
        first.wait()
    return count


def try_lengths(numels: list[int]) -> list[dict]:
    """Return whether tensors of these lengths can be all-reduced, and whether they can be reduce-scattered equally.

    `numels` are the lengths in elements. The result contains a dict for each length.
    """
    results = []
    for numel in numels:
        whole = torch.ones(numel)
        dist.all_reduce(whole)
        reduced = bool((whole == dist.get_world_size()).all())
        try:
            reduce_scatter(torch.empty(numel // dist.get_world_size()), whole)
            scattered = True
        except (RuntimeError, ValueError):
            scattered = False
        results.append({"reduced": reduced, "scattered": scattered})
    return results


def run_grouped_step(wrapper: str, buckets_per_group: int | None) -> None:
    """Run a step of module 6's or 7's wrapper with 22 buckets. Record an event "ready" when a gradient is ready."""
    model = make_tiny_lm()
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: recording.note("ready", name=name))
    package = "m06_coalesced" if wrapper == "CoalescedDDP" else "m07_cached_shards"
    ddp = student(package, wrapper)(model, bucket_numel=32_000, buckets_per_group=buckets_per_group)
    ddp.gather_grads = False
    tokens = torch.randint(256, (2, 16))
    recording.note("step", step=0)
    language_loss(ddp(tokens), tokens).backward()
    ddp.finish_grad_sync()


def reduce_twenty_times() -> dict[str, float]:
    """All-reduce the number 1 twenty times, one by one and in one coalesced block. Return both results."""
    one_by_one, coalesced = torch.ones(1), torch.ones(1)
    for _ in range(20):
        dist.all_reduce(one_by_one)
    with _coalescing_manager():
        for _ in range(20):
            dist.all_reduce(coalesced)
    return {"one by one": one_by_one.item(), "coalesced": coalesced.item()}


def gather_one_shard() -> dict[str, list[int]]:
    """Gather two buckets of one element per rank as an article does: with the first bucket's shard for both buckets."""
    rank = dist.get_rank()
    first, second = torch.zeros(2), torch.zeros(2)
    first[rank], second[rank] = rank, 2 + rank
    shard = first[rank : rank + 1]
    with _coalescing_manager(async_ops=True) as handle:  # the article keeps no handle
        for whole in (first, second):
            all_gather(whole, shard, async_op=True)
    handle.wait()
    return {"first": first.int().tolist(), "second": second.int().tolist()}


def count_torch_ddp_copies() -> dict[str, int]:
    """Return the bytes that torch DDP copies into its buckets during backward, after each form of `zero_grad`.

    The gradients are views of the buckets.
    """
    copied = {}
    for name, set_to_none in (("to none", True), ("to zero", False)):
        model = make_tiny_lm()
        ddp = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True)
        tokens = torch.randint(256, (2, 16))
        for _ in range(4):  # DDP rebuilds its buckets after the first step
            model.zero_grad(set_to_none=set_to_none)
            loss = language_loss(ddp(tokens), tokens)
            with BucketLedger() as ledger:
                loss.backward()
        copied[name] = ledger.copied
    return copied


class BucketLedger(TorchDispatchMode):
    """A context manager that counts the bytes that torch DDP's reducer copies into its buckets.

    The operation that copies the gradients also divides them by N.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copied = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.mul.out and result.data_ptr() != args[0].data_ptr():
            self.copied += result.nbytes
        return result


def run_ring(whole: Tensor, phases: int) -> None:
    """Perform a reduce-scatter (one phase) or an all-reduce (two phases) between neighbours in a ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = list(whole.chunk(size))
    for step in range(phases * (size - 1)):
        sending = dist.isend(chunks[(rank - step) % size], (rank + 1) % size)
        received, chunk = torch.empty_like(chunks[0]), chunks[(rank - step - 1) % size]
        dist.recv(received, (rank - 1) % size)
        sending.wait()
        if step < size - 1:
            chunk += received
        else:
            chunk.copy_(received)


def count_ring_bytes() -> list[float]:
    """Return the bytes that this process sends in a ring's reduce-scatter and all-reduce, per byte of the tensor.

    This works only on Linux, which counts the bytes that a process writes.
    """

    def count_written_bytes() -> int:
        return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["wchar"])

    tensors = [torch.ones(96_000) for _ in range(20)]
    marks = [count_written_bytes()]
    for phases in (1, 2):
        for tensor in tensors:
            run_ring(tensor, phases)
        marks.append(count_written_bytes())
    nbytes = sum(tensor.nbytes for tensor in tensors)
    return [(after - before) / nbytes for before, after in zip(marks, marks[1:])]


def summarize(values: list[float], digits: int = 1) -> str:
    """Return the median and the quartiles as text, such as: 12.3 (11.9 to 13.0)"""
    lower, middle, upper = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({lower:.{digits}f} to {upper:.{digits}f})"
