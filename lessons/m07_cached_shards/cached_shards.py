"""Module 7: the views of buckets and shards, created once.

Module 6 cuts every bucket into all its shards whenever it communicates, although it needs only one of them. A view is
cheap, but N views per bucket, twice per step, take CPU time in the middle of backward. Here each view that is needed is
created at its first use. It is kept as long as the buffer keeps the flat tensor that it is a view of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..m05_grad_buffer.grad_buffer import BufferLayout, GradBuffer
from ..m06_coalesced.coalesced import BucketGroup, CoalescedDDP


class ShardCache:
    """The views of one flat tensor with this layout, whose buckets are divided among `dp_size` ranks."""

    def __init__(self, layout: BufferLayout, dp_size: int):
        self.layout = layout
        self.dp_size = dp_size
        self.data: torch.Tensor | None = None  # (layout.numel,): what the views show
        self.views: dict[tuple[int, int | None], torch.Tensor] = {}

    def view(self, data: torch.Tensor, bucket: int, rank: int | None = None) -> torch.Tensor:
        """Return a rank's shard of a bucket of `data`, or the whole bucket for None: the same tensor every time.

        `data` may be a different tensor than before, because `GradBuffer.reallocate` replaces it.
        """
        # TODO: part (a)
        raise NotImplementedError("module 7, part (a)")


class CachedBucketGroup(BucketGroup):
    """A group of buckets that keeps its views."""

    def __init__(
        self, buffer: GradBuffer, bucket_indices: Sequence[int], process_group: dist.ProcessGroup | None = None
    ):
        super().__init__(buffer, bucket_indices, process_group)
        self.rank = dist.get_rank(process_group)
        size = dist.get_world_size(process_group)
        self.grad_cache = ShardCache(buffer.layout, size)
        self.param_cache = ShardCache(buffer.layout, size)

    def shards(self, data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what module 6 does, for `buffer.grad_data` or `buffer.param_data`. Each has its own cached views."""
        # TODO: part (b)
        raise NotImplementedError("module 7, part (b)")


class CachedDDP(CoalescedDDP):
    """Like `CoalescedDDP`, with the same arguments, but its groups keep their views."""

    group_class = CachedBucketGroup
