"""Module 0: what an all-reduce does inside.

An all-reduce leaves the sum of the ranks' tensors on every rank. This module builds an all-reduce from messages between
two ranks, in two ways: through a root that adds up all tensors, and around a ring in which all ranks do the same amount
of work.

Cost with N ranks and S bytes: suppose that a message of b bytes takes α + b/β. Through a root, the all-reduce takes
2(N−1)(α + S/β). Around a ring, it takes 2(N−1)(α + S/(Nβ)), and every rank sends 2(N−1)/N · S bytes, which is less than
2S for any N.

Use only `send`, `recv`, `isend`, `irecv` and `batch_isend_irecv`, no collectives and no barriers, and wait for every
handle. All functions work for any group and any world size, 1 included.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def shard_batch(batch: Tensor, rank: int, world_size: int) -> Tensor:
    """Return this rank's rows of a batch: rows rank·n to (rank + 1)·n − 1, where n = len(batch) / world_size.

    Raise ValueError, with the numbers, if the rows cannot be split equally among the ranks.
    """
    # TODO: part (a)
    raise NotImplementedError("module 0, part (a)")


def all_reduce_via_root(tensor: Tensor, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace a contiguous tensor with the sum of the ranks' tensors, on every rank of the group.

    Rank 0 of the group receives all tensors, adds them to its own and sends the sum back. Every other rank sends one
    message and receives one. Raise ValueError if the tensor is not contiguous.
    """
    require_contiguous(tensor)
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    # group_src and group_dst are ranks of the group. A send ends only after the peer has called the matching receive.
    # TODO: part (b)
    raise NotImplementedError("module 0, part (b)")


def shift(outgoing: Tensor, incoming: Tensor, process_group: dist.ProcessGroup | None) -> None:
    """Send `outgoing` to the next rank of the ring and receive `incoming` from the previous rank, at the same time."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    # If every rank first waits in its send, no rank ever receives. Start one of the two transfers without waiting.
    # TODO: part (c)
    raise NotImplementedError("module 0, part (c)")


def ring_reduce_scatter(tensor: Tensor, process_group: dist.ProcessGroup | None = None) -> Tensor:
    """Add up chunk r of all ranks' tensors on rank r, in place. Return that chunk, a view of `tensor`.

    `split_into_chunks` defines the chunks. In each of N−1 steps, a rank sends one chunk to the next rank of the group
    and receives one from the previous rank. Afterwards, the other chunks contain partial sums.
    """
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    chunks = split_into_chunks(tensor, size)
    # A chunk travels around the ring once, and every rank adds its own values to it. Which chunk must this rank send
    # first, so that chunk r ends up on rank r?
    # TODO: part (d)
    raise NotImplementedError("module 0, part (d)")


def ring_all_gather(tensor: Tensor, process_group: dist.ProcessGroup | None = None) -> None:
    """Copy chunk r of rank r's tensor to all ranks, in place, for every r.

    After `ring_reduce_scatter`, this completes the all-reduce. In each of N−1 steps, a rank sends one chunk to the next
    rank of the group and receives one from the previous rank.
    """
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    chunks = split_into_chunks(tensor, size)
    # A chunk that arrives is complete, and replaces yours.
    # TODO: part (e)
    raise NotImplementedError("module 0, part (e)")


def ring_all_reduce(tensor: Tensor, process_group: dist.ProcessGroup | None = None) -> None:
    """Replace a contiguous tensor with the sum of the ranks' tensors, on every rank of the group, in two phases.

    At any time, at most two chunks of memory are in use in addition to the tensor.
    """
    # TODO: part (f)
    raise NotImplementedError("module 0, part (f)")


def split_into_chunks(tensor: Tensor, world_size: int) -> list[Tensor]:
    """Split a contiguous tensor into flat views, one chunk per rank. The first chunks may be one element longer.

    Some chunks are empty if there are fewer elements than ranks; `torch.chunk` would return fewer chunks. An empty
    chunk may be sent or skipped, if both sides do the same. Raise ValueError if the tensor is not contiguous.
    """
    require_contiguous(tensor)
    return list(tensor.view(-1).tensor_split(world_size))


def require_contiguous(tensor: Tensor) -> None:
    """Raise ValueError unless the tensor is contiguous, because a message is one contiguous piece of memory."""
    if not tensor.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} with strides {tensor.stride()} is not contiguous")
