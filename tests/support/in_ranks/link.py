"""Functions for `test_emulated_link.py`."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from brigade.lab import emulated_link
from brigade.ranks.rank.api import student
from in_ranks.collectives import every_collective  # noqa: F401


def on_link(latency_s: float, bytes_per_s: float, name: str, *args: Any) -> Any:
    """Call another function that this file defines or imports on an emulated link."""
    emulated_link.use(emulated_link.Link(latency_s, bytes_per_s))
    return globals()[name](*args)


def on_two_links(fields: dict[str, Any]) -> None:
    """Launch in the groups of a grid of two nodes with two ranks, at the same time, and wait for everything."""
    emulated_link.use(emulated_link.read_link(fields))
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    own = [group for group in groups if group != dist.GroupMember.NON_GROUP_MEMBER]
    for _ in range(3):
        for handle in [launch_in(group) for group in own]:
            handle.wait()
    dist.all_reduce(torch.ones(8))


def timed(call: Callable[[], Any]) -> float:
    """Return the duration of a call in seconds. All ranks start it together."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def wait_for_the_link(count: int) -> dict[str, float]:
    """Return durations in seconds: of one collective, of `count` collectives launched at once, and in a sub-group.

    Also return how often the rank paused while it waited for the first one, after all ranks had launched it.
    """
    x = torch.ones(4)
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        time.sleep(seconds)

    emulated_link.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=pause)
    one = timed(lambda: dist.all_reduce(x))
    emulated_link.time = time

    def launch_all() -> None:
        for handle in [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(count)]:
            handle.wait()

    def launch_and_work() -> None:
        """The link carries a collective while the rank works; otherwise, this never ends."""
        handle = dist.all_reduce(x, async_op=True)
        while not handle.is_completed():
            pass
        handle.wait()

    launch_and_work()
    subgroup = dist.new_group([0, 1])
    return {
        "one": one,
        "pauses": sum(seconds != emulated_link.LOOK_S for seconds in pauses),
        "all": timed(launch_all),
        "subgroup": timed(lambda: dist.all_reduce(x, group=subgroup)),
    }


def train_with_a_late_rank(late: int, late_s: float, ranks: list[int] | None) -> None:
    """Take three steps with a model of 8 parameters. Rank `late` sleeps before and during each backward.

    All ranks train with torch DDP. If `ranks` is given, only these ranks train, in their own group and with module 3's
    wrapper. After each of their steps, all ranks all-reduce a tensor.
    """
    group = dist.new_group(ranks) if ranks else None
    trains = ranks is None or dist.get_rank() in ranks
    if trains:
        model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])
        torchs = partial(nn.parallel.DistributedDataParallel, bucket_cap_mb=0.006)
        ddp = (student("m03_overlapped_ddp", "OverlappedDDP") if ranks else torchs)(model, process_group=group)
    is_late = dist.get_rank() == late
    for _ in range(3):
        if trains:
            hidden = ddp(torch.ones(2, 32))
            hidden.register_hook(lambda _: time.sleep(late_s if is_late else 0.0))
            model[1].weight.register_hook(lambda _: time.sleep(late_s / 2 if is_late else 0.0))
            hidden.sum().backward()
        if trains and ranks:
            ddp.finish_grad_sync()
        if ranks:
            dist.all_reduce(torch.ones(8))


def launch_in_two_groups() -> None:
    """Launch on rank 0 in a group with rank 1, then in a group with rank 2.

    Rank 1 launches after rank 2 has finished.
    """
    groups = [dist.new_group([0, 1]), dist.new_group([0, 2])]
    rank = dist.get_rank()
    for _ in range(3):
        if rank == 0:
            first = launch_in(groups[0])
        if rank != 1:
            launch_in(groups[1]).wait()
        dist.barrier()
        if rank == 1:
            first = launch_in(groups[0])
        if rank != 2:
            first.wait()


def launch_in(group: dist.ProcessGroup) -> dist.Work:
    return dist.all_reduce(torch.ones(8), group=group, async_op=True)


def launch_without_rank_1() -> None:
    """Broadcast from rank 0 to a rank that never takes part."""
    if dist.get_rank() == 0:
        dist.broadcast(torch.ones(4), 0)
    else:
        signal.pause()


def train_ddp_with_a_peer_that_ends() -> None:
    """Train with torch DDP. Rank 1 ends after its first backward."""
    ddp = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    for _ in range(3):
        ddp(torch.ones(2, 8)).sum().backward()
        if dist.get_rank() == 1:
            os._exit(0)
