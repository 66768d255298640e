"""Functions for `test_recording.py`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed import all_reduce as imported_by_another_name

from brigade.ranks.rank import recording
from brigade.ranks.rank.recording import phase
from brigade.ranks.rank.recording_group import RecordingGroup
from in_ranks.collectives import every_collective


def recorded_calls(async_op: bool) -> None:
    """Call every kind of collective once, in a phase with its name."""
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.arange(4.0)
    first, last = 0, world - 1
    every_collective(torch.float32, async_op)
    with phase("by another name"):
        imported_by_another_name(x.bfloat16(), op=dist.ReduceOp.MAX)
    for name, outer in (("all_gather_single", 4 * world), ("reduce_scatter_single", 4)):
        if hasattr(dist, name):  # since torch 2.13
            with phase(name):
                getattr(dist, name)(torch.ones(outer), torch.ones(16 * world // outer))
    with phase("barrier"):
        dist.barrier()
    with phase("send and recv"):
        if rank == first:
            dist.send(x, last)
        elif rank == last:
            dist.recv(torch.empty(4), first)
    with phase("recv from anyone"):
        if rank == first:
            dist.send(x, last)
        elif rank == last:
            assert dist.recv(torch.empty(4)) == first
    with phase("functional all_reduce"):
        functional.all_reduce(x, "sum", dist.group.WORLD).sum().item()
    with phase("functional broadcast"):
        functional.broadcast(x, last, dist.group.WORLD).sum().item()


def recorded_subgroups() -> dict[str, Any]:
    """Call an all-reduce and a broadcast in groups that are created in several ways. Each phase names the way."""
    from torch.distributed.distributed_c10d import new_group as imported_new_group

    rank = dist.get_rank()
    groups = {
        "plain": dist.new_group([0, 2]),
        "with a backend": dist.new_group([2, 0], backend="gloo"),
        "backend by position": imported_new_group([0, 2], timedelta(seconds=30), "gloo"),
    }
    sums = {}
    for name, group in groups.items():
        if rank != 1:
            x = torch.tensor([rank + 1.0])
            with phase(name):
                dist.all_reduce(x, group=group)
                dist.broadcast(torch.ones(5), src=2, group=group)
            sums[name] = x.item()
    return {"sums": sums, "backends": sorted({dist.get_backend(), dist.get_backend(dist.group.WORLD)})}


def readiness(how: str) -> None:
    """Run two backward passes of a watched model, whose hooks record events. `how` is the preparation of each pass."""
    model = nn.Linear(3, 2)
    recording.watch_gradients(model)
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda _, name=name: recording.note("tensor hook", name=name))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: recording.note("post hook", name=name))
    buffer = torch.zeros(2, 8)  # a row for each parameter
    for _ in range(2):
        for parameter, memory in zip(model.parameters(), buffer, strict=True):
            if how == "None":
                parameter.grad = None
            elif how == "views":
                parameter.grad = memory[: parameter.numel()].view(parameter.shape)
            elif how == "moved":
                parameter.data = parameter.data.clone()
        loss = (torch.ones(1, 3) @ model.weight.T if how == "unused bias" else model(torch.ones(1, 3))).sum()
        with phase("backward"):
            loss.backward()


def train_ddp() -> dict[str, Tensor]:
    """Take four steps with torch DDP and several buckets (the first one has 1 MiB). Return the weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 800), nn.BatchNorm1d(800), nn.Tanh(), nn.Linear(800, 400), nn.Linear(400, 9))
    ddp = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        optimizer.zero_grad()
        with phase("forward"):
            loss = ddp(torch.randn(8, 30, generator=generator)).square().mean()
        with phase("backward"):
            loss.backward()
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_ddp_twice() -> list[dict[str, Tensor]]:
    """Train with the recording group, then with plain gloo in the same process. Return the weights of both."""
    rank, world = dist.get_rank(), dist.get_world_size()
    recorded = train_ddp()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore("plain", world), rank=rank, world_size=world)
    assert not isinstance(dist.group.WORLD, RecordingGroup)
    return [recorded, train_ddp()]
