"""Module 7: the views of buckets and shards, created once.

Module 6 cuts every bucket into all its shards whenever it communicates, although it needs only one of them. One view is
cheap, but N views per bucket, twice per step, take CPU time in the middle of backward. Here each view is created when
it is first needed. It is kept as long as the buffer keeps the flat tensor behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..m05_grad_buffer.grad_buffer import BufferLayout, GradBuffer
from ..m06_coalesced.coalesced import BucketGroup, CoalescedDDP


class ShardCache:
    """Create and keep views of one flat tensor with this layout, whose buckets `dp_size` ranks share."""

    def __init__(self, layout: BufferLayout, dp_size: int):
        self.layout = layout
        self.dp_size = dp_size
        self.data: torch.Tensor | None = None  # (layout.numel,), which the views belong to
        self.views: dict[tuple[int, int | None], torch.Tensor] = {}

    def view(self, data: torch.Tensor, bucket: int, rank: int | None = None) -> torch.Tensor:
        """Return a rank's shard of a bucket of `data`, or the whole bucket for None. Create each view only once.

        `data` may be another tensor than before, because `GradBuffer.reallocate` replaces it.
        """
        ### BEGIN SOLUTION part (a)
        if data is not self.data:
            self.data = data
            self.views.clear()
        if (bucket, rank) not in self.views:
            start, end = self.layout.bucket_ranges[bucket]
            if rank is not None:
                length = (end - start) // self.dp_size
                start += rank * length
                end = start + length
            self.views[bucket, rank] = data[start:end]  # (bucket numel,) or (bucket numel / dp_size,)
        return self.views[bucket, rank]
        ### END SOLUTION


class CachedBucketGroup(BucketGroup):
    """Like `BucketGroup`, but it keeps its views."""

    def __init__(
        self, buffer: GradBuffer, bucket_indices: Sequence[int], process_group: dist.ProcessGroup | None = None
    ):
        super().__init__(buffer, bucket_indices, process_group)
        self.rank = dist.get_rank(process_group)
        size = dist.get_world_size(process_group)
        self.grad_cache = ShardCache(buffer.layout, size)
        self.param_cache = ShardCache(buffer.layout, size)

    def shards(self, data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the same pairs as module 6, for `buffer.grad_data` or `buffer.param_data`."""
        ### BEGIN SOLUTION part (b)
        cache = self.grad_cache if data is self.buffer.grad_data else self.param_cache
        return [(cache.view(data, bucket, self.rank), cache.view(data, bucket)) for bucket in self.bucket_indices]
        ### END SOLUTION


class CachedDDP(CoalescedDDP):
    """Like `CoalescedDDP`, with the same arguments, but its groups keep their views."""

    group_class = CachedBucketGroup
