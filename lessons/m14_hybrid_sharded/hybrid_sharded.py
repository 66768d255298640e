"""Module 14: hybrid sharding (torch calls it HSDP): weights in shards inside a node, and a replica in every node.

R nodes of S ranks form a grid. The S ranks of a node are a *shard group*. They keep weights, gradients and optimizer
state in shards, as in module 11. The R ranks that have the same shard, one in each node, are a *replica group*.

Cost per step, with P bytes of weights: each rank sends 3 P (S - 1) / S bytes inside its node for each micro-batch, and
2 (R - 1) / R * P / S bytes to other nodes, once per step. Memory for weights: P / S bytes of shards, instead of
P / (R S), the full root, and `prefetch` + 1 full units.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m01_naive_ddp.refusals import SECOND_BACKWARD, require_supported
from ..m11_fully_sharded.fully_sharded import FullyShardedDDP
from ..m11_fully_sharded.plan import UnitTypes


class Traffic(NamedTuple):
    """Bytes that a rank sends per step."""

    inner: float  # inside its node
    outer: float  # to other nodes


def plan_grid(world_size: int, shard_size: int) -> tuple[list[list[int]], list[list[int]]]:
    """Return the ranks of all shard groups, and the ranks of all replica groups.

    A shard group consists of `shard_size` consecutive ranks. A replica group has the ranks with the same place in their
    shard groups. Raise ValueError if `shard_size` is less than 1 or does not divide `world_size`.
    """
    # TODO: part (a)
    raise NotImplementedError("module 14, part (a)")


def make_groups(world_size: int, shard_size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Create all groups of the grid. Return this rank's shard group and replica group.

    All ranks of the world must call this, because they create every group together.
    """
    own = []
    for groups in plan_grid(world_size, shard_size):
        created = [(ranks, dist.new_group(ranks)) for ranks in groups]
        own.append(next(group for ranks, group in created if dist.get_rank() in ranks))
    return own[0], own[1]


def plan_traffic(numel: int, replicas: int, shards: int, micro_batches: int, itemsize: int = 4) -> Traffic:
    """Return the bytes that a rank sends per step, for a model of `numel` weights, without padding.

    All collectives are rings. Each micro-batch gathers all weights twice and reduces their gradients inside the node.
    All micro-batches except the last are inside `no_replica_sync`.
    """
    # TODO: part (b)
    raise NotImplementedError("module 14, part (b)")


class HybridShardedDDP(FullyShardedDDP):
    """Module 11's wrapper on each shard group, with gradients that are averaged over the replica groups, too.

    Everything is as in module 11, with the shard group as `process_group`, except that weights and buffers come from
    the first rank of the grid, and that after the finish, gradients are averages over all ranks of the grid.

    After construction, the replica group carries one all-reduce for each trainable flat shard, of the shard's gradient,
    in the order of the reduce-scatters, and nothing else. If it has one rank, it carries nothing. Unit i's all-reduce
    is launched after its reduce-scatter has been awaited and, for i >= 3, before unit i - 2's first gradient. It is
    awaited after unit i - 2's last gradient, at the latest in the finish.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_types: UnitTypes,
        shard_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
    ):
        ranks = [set(dist.get_process_group_ranks(group)) for group in (shard_group, replica_group)]
        if ranks[0] & ranks[1] != {dist.get_rank()}:
            raise ValueError(f"this is no grid: a shard group of {ranks[0]}, and a replica group of {ranks[1]}")
        require_supported(module)
        # Make all ranks of the grid start with the weights and buffers of its first rank. Module 11's constructor makes
        # the ranks of the shard group equal, and frees the weights.
        # TODO: part (c)
        raise NotImplementedError("module 14, part (c)")
        super().__init__(module, unit_types, reshard_after_forward, prefetch, process_group=shard_group)
        self.replica_group = replica_group
        self.require_replica_sync = True  # whether gradients are averaged across nodes
        self.in_flight: dict[nn.Parameter, dist.Work] = {}  # the all-reduces across nodes, by shard

    def shard_reduced(self, shard: nn.Parameter) -> None:
        """Start to average `shard.grad` over the replica group, without waiting. Module 11 calls this method.

        `shard.grad` contains the average over the shard group, which module 11 has just added to what was there. Raise
        RuntimeError if the shard's all-reduce of this step is already launched.
        """
        if shard in self.in_flight:
            raise RuntimeError(SECOND_BACKWARD)
        # TODO: part (d)
        raise NotImplementedError("module 14, part (d)")

    def finish_grad_sync(self) -> None:
        """Complete the gradients of `shards()`, inside the node and across nodes."""
        # TODO: part (e)
        raise NotImplementedError("module 14, part (e)")

    @contextmanager
    def no_replica_sync(self) -> Iterator[None]:
        """Let backward and finish in the block average gradients inside the node only, and add them to `shard.grad`.

        A backward and its finish are both inside or both outside. The next ones outside average the sum across nodes,
        once. Blocks may be nested and may contain `no_sync`. The end of a block restores the previous state, even after
        an exception.
        """
        # TODO: part (f)
        raise NotImplementedError("module 14, part (f)")
