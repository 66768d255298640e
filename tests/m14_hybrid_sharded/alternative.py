"""Module 14 in another style: sums that are divided late, a queue of handles, and a context manager class."""

import contextlib
from collections import deque, namedtuple

import torch.distributed as dist

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m11_fully_sharded.fully_sharded import FullyShardedDDP

Traffic = namedtuple("Traffic", "inner outer")


def plan_grid(world_size, shard_size):
    if shard_size <= 0:
        raise ValueError("a shard group needs a rank")
    replicas, rest = divmod(world_size, shard_size)
    if rest:
        raise ValueError("the last shard group is too short")
    nodes = [[node * shard_size + place for place in range(shard_size)] for node in range(replicas)]
    return nodes, [[node * shard_size + place for node in range(replicas)] for place in range(shard_size)]


def make_groups(world_size, shard_size):
    nodes, columns = plan_grid(world_size, shard_size)
    groups = [dist.new_group(ranks) for ranks in nodes + columns]
    rank = dist.get_rank()
    return groups[rank // shard_size], groups[len(nodes) + rank % shard_size]


def plan_traffic(numel, replicas, shards, micro_batches, itemsize=4):
    shard = numel * itemsize / shards
    return Traffic(shard * (shards - 1) * (2 + 1) * micro_batches, (shard - shard / replicas) * 2)


class HybridShardedDDP(FullyShardedDDP):
    def __init__(self, module, unit_types, shard_group, replica_group, reshard_after_forward=True, prefetch=1):
        broadcast_module_state(module, shard_group)
        broadcast_module_state(module, replica_group)
        super().__init__(module, unit_types, reshard_after_forward, prefetch, shard_group)
        self.columns, self.num_replicas = replica_group, dist.get_world_size(replica_group)
        self.depth, self.queue = 0, deque()

    def shard_reduced(self, shard):
        if self.depth or self.num_replicas == 1:
            return
        if any(other is shard for other, _ in self.queue):
            raise RuntimeError("one synchronising backward per finish")
        if len(self.queue) > 1:
            self.settle()
        self.queue.append((shard, dist.all_reduce(shard.grad, group=self.columns, async_op=True)))

    def settle(self):
        shard, work = self.queue.popleft()
        work.wait()
        shard.grad.div_(self.num_replicas)

    def finish_grad_sync(self):
        super().finish_grad_sync()
        while self.queue:
            self.settle()

    @contextlib.contextmanager
    def no_replica_sync(self):
        with contextlib.ExitStack() as stack:
            self.depth += 1
            stack.callback(setattr, self, "depth", self.depth - 1)
            yield
