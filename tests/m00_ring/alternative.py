"""Module 0 in another style: chunks as slices, messages as one batch, and a reduce-scatter that counts downwards."""

import torch
import torch.distributed as dist
from torch.distributed import P2POp


def shard_batch(batch, rank, world_size):
    if batch.shape[0] % world_size != 0:
        raise ValueError(f"{batch.shape[0]} rows, {world_size} ranks, {batch.shape[0] % world_size} left over")
    return batch.view(world_size, -1, *batch.shape[1:])[rank]


def all_reduce_via_root(tensor, process_group=None):
    if not tensor.is_contiguous():
        raise ValueError("the tensor is not contiguous")
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    if rank:
        work = dist.isend(tensor.clone(), group=process_group, group_dst=0)
        work.wait()
        dist.irecv(tensor, group=process_group, group_src=0).wait()
        return tensor
    others = [torch.empty_like(tensor) for _ in range(1, size)]
    for work in [dist.irecv(other, group=process_group, group_src=i + 1) for i, other in enumerate(others)]:
        work.wait()
    for other in others:
        tensor.add_(other)
    for work in [dist.isend(tensor, group=process_group, group_dst=peer) for peer in range(1, size)]:
        work.wait()
    return tensor


class Ring:
    """The chunks of a tensor and the neighbours of this rank."""

    def __init__(self, tensor, group):
        if not tensor.is_contiguous():
            raise ValueError("the tensor is not contiguous")
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.flat = tensor.flatten()
        short, longer = divmod(tensor.numel(), self.size)
        self.starts = [short * r + min(r, longer) for r in range(self.size + 1)]

    def chunk(self, number):
        number %= self.size
        return self.flat[self.starts[number] : self.starts[number + 1]]

    def pass_on(self, outgoing, incoming):
        """Both at once. Empty chunks are not sent."""
        ops = []
        if outgoing.numel():
            ops.append(P2POp(dist.isend, outgoing, group=self.group, group_peer=(self.rank + 1) % self.size))
        if incoming.numel():
            ops.append(P2POp(dist.irecv, incoming, group=self.group, group_peer=(self.rank - 1) % self.size))
        for work in dist.batch_isend_irecv(ops) if ops else []:
            work.wait()


def ring_reduce_scatter(tensor, process_group=None):
    ring = Ring(tensor, process_group)
    for distance in range(1, ring.size):
        target = ring.chunk(ring.rank - distance - 1)
        incoming = torch.empty_like(target)
        ring.pass_on(ring.chunk(ring.rank - distance), incoming)
        target += incoming
    return ring.chunk(ring.rank)


def ring_all_gather(tensor, process_group=None):
    ring = Ring(tensor, process_group)
    for number in range(ring.rank, ring.rank - ring.size + 1, -1):
        ring.pass_on(ring.chunk(number), ring.chunk(number - 1))
    return tensor


def ring_all_reduce(tensor, process_group=None):
    ring_reduce_scatter(tensor, process_group)
    return ring_all_gather(tensor, process_group)
