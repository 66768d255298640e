"""Module 7: the views of buckets and shards, made once.

Module 6 cuts every bucket into all its shards whenever it communicates, and needs one of them. A view costs little, N
views for each bucket, twice a step, cost something: time on the CPU, in the middle of backward. Here each
view that is needed is made at its first use and kept for as long as the flat tensor it was made of is the buffer's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..m05_grad_buffer.grad_buffer import BufferLayout, GradBuffer
from ..m06_coalesced.coalesced import BucketGroup, CoalescedDDP


class ShardCache:
    """The views of one flat tensor of a buffer with this layout, whose buckets are divided among `dp_size` ranks."""

    def __init__(self, layout: BufferLayout, dp_size: int):
        self.layout = layout
        self.dp_size = dp_size
        self.data: torch.Tensor | None = None  # what the views are of
        self.views: dict[tuple[int, int | None], torch.Tensor] = {}

    def view(self, data: torch.Tensor, bucket: int, rank: int | None = None) -> torch.Tensor:
        """The shard of a rank in a bucket of `data`, or the whole bucket for None: the same tensor every time.

        `data` may be another tensor than before: `GradBuffer.reallocate` replaces it.
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
        """As in module 6, for `buffer.grad_data` or `buffer.param_data`, each with views of its own."""
        # TODO: part (b)
        raise NotImplementedError("module 7, part (b)")


class CachedDDP(CoalescedDDP):
    """Module 6's wrapper, with the same arguments, on groups that keep their views."""

    group_class = CachedBucketGroup
