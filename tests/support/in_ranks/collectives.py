"""Every collective once, for the tests of the three process groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _coalescing_manager as coalescing_manager

from brigade.ranks.rank.recording import phase


def values(dtype: torch.dtype, *shape: int, rank: int | None = None) -> Tensor:
    """Return numbers between -50 and 50 that depend only on the rank and the shape. The tests compute them too."""
    generator = torch.Generator().manual_seed(dist.get_rank() if rank is None else rank)
    return (torch.rand(shape, generator=generator, dtype=torch.float64) * 100 - 50).to(dtype)


def collectives(dtype: torch.dtype) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], list[Tensor]]]:
    """Return by name a collective, its arguments, and this rank's outputs, which are the tensors that it *receives*.

    The root of a broadcast has none.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    group, op = dist.new_group([0, 1]), dist.ReduceOp
    gather, scatter = dist.all_gather_into_tensor, dist.reduce_scatter_tensor

    def own(*shape: int) -> Tensor:
        return values(dtype, *shape)

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    def row(call: Callable[..., Any], *arguments: Any, output: int = 0, receives: bool = True) -> tuple[Any, ...]:
        outputs = arguments[output] if isinstance(arguments[output], list) else [arguments[output]]
        return call, arguments, outputs if receives else []

    gathered, scattered = zeros(world, 4), own(world, 4)
    gathered[rank] = own(4)
    found = {
        "all_reduce": row(dist.all_reduce, own(3, 5)),
        "all_reduce_max": row(partial(dist.all_reduce, op=op.MAX), own(3, 5)),
        "all_reduce_view": row(dist.all_reduce, own(12)[3:7]),
        "all_reduce_in_a_subgroup": row(partial(dist.all_reduce, group=group), own(3, 5)),
        "reduce": row(partial(dist.reduce, dst=1), own(7), receives=rank == 1),
        "broadcast": row(partial(dist.broadcast, src=1), own(7), receives=rank != 1),
        "all_gather": row(dist.all_gather, list(zeros(world, 4)), own(4)),
        "all_gather_into_tensor": row(gather, zeros(world * 4), own(4)),
        "all_gather_in_place": row(gather, gathered.view(-1), gathered[rank]),
        "reduce_scatter": row(dist.reduce_scatter, zeros(4), list(own(world, 4))),
        "reduce_scatter_tensor": row(scatter, zeros(4), own(world * 4)),
        "reduce_scatter_in_place": row(scatter, scattered[rank], scattered.view(-1)),
        "gather": row(
            partial(dist.gather, dst=0),
            own(4),
            list(zeros(world, 4)) if rank == 0 else None,
            output=1,
            receives=rank == 0,
        ),
        "scatter": row(partial(dist.scatter, src=0), zeros(4), list(own(world, 4)) if rank == 0 else None),
        "all_to_all_single": row(dist.all_to_all_single, zeros(world * 2), own(world * 2)),
        "coalesced": row(partial(coalesce, dist.all_reduce), [own(1), own(2), own(3)], [[], [], []]),
        "coalesced_reduce_scatter": row(
            partial(coalesce, scatter), [zeros(1), zeros(2)], [[own(world)], [own(world * 2)]]
        ),
        "coalesced_all_gather": row(partial(coalesce, gather), [zeros(world), zeros(world * 2)], [[own(1)], [own(2)]]),
    }
    if rank > 1:
        found["all_reduce_in_a_subgroup"] = (lambda async_op: None), (), []
    if dtype.is_floating_point:
        found["all_reduce_average"] = row(partial(dist.all_reduce, op=op.AVG), own(3, 5))
    return found


def coalesce(collective: Callable[..., Any], tensors: list[Tensor], others: list[list[Tensor]], async_op: bool) -> Any:
    with coalescing_manager(async_ops=async_op) as manager:
        for tensor, other in zip(tensors, others, strict=True):
            collective(tensor, *other)
    return manager


def every_collective(dtype: torch.dtype, async_op: bool) -> dict[str, Any]:
    """Return this rank's outputs of each collective, before and after the wait (if there is a wait)."""
    found = {}
    for name, (call, arguments, outputs) in collectives(dtype).items():
        with phase(name):
            handle = call(*arguments, async_op=async_op)
            before = [output.clone() for output in outputs]
            if async_op and handle is not None:
                handle.wait()
            found[name] = {"before": before, "after": [output.clone() for output in outputs]}
    return found
