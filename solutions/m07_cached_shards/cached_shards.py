"""Module 7: create the views of buckets and shards only once.

Module 6 creates its views again whenever it communicates, with `chunk` even those of all shards. One view is cheap, but
N views per bucket, twice per step, take CPU time in the middle of backward. In this module, each view is created when
it is first needed, and kept until the buffer replaces the flat tensor behind it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..m05_grad_buffer.grad_buffer import BufferLayout, GradBuffer
from ..m06_coalesced.coalesced import BucketGroup, CoalescedDDP


class ShardCache:
    """Create and cache views of one flat tensor with the given layout. Each bucket has `dp_size` shards."""

    def __init__(self, layout: BufferLayout, dp_size: int):
        self.layout = layout
        self.dp_size = dp_size
        self.data: torch.Tensor | None = None  # (layout.numel,), the tensor that the views refer to
        self.views: dict[tuple[int, int | None], torch.Tensor] = {}

    def view(self, data: torch.Tensor, bucket: int, rank: int | None = None) -> torch.Tensor:
        """Return a rank's shard of a bucket of `data`, or the whole bucket if `rank` is None. Create each view once.

        `data` may be a different tensor than in earlier calls, because `GradBuffer.reallocate` replaces it.
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
    """Like `BucketGroup`, but with cached views. Modules 10 and 16 inherit from this class."""

    def __init__(
        self, buffer: GradBuffer, bucket_indices: Sequence[int], process_group: dist.ProcessGroup | None = None
    ):
        super().__init__(buffer, bucket_indices, process_group)
        self.rank = dist.get_rank(process_group)
        size = dist.get_world_size(process_group)
        self.grad_cache = ShardCache(buffer.layout, size)
        self.param_cache = ShardCache(buffer.layout, size)

    def shards(self, data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the same pairs as in module 6. `data` is `buffer.grad_data` or `buffer.param_data`."""
        ### BEGIN SOLUTION part (b)
        cache = self.grad_cache if data is self.buffer.grad_data else self.param_cache
        return [(cache.view(data, bucket, self.rank), cache.view(data, bucket)) for bucket in self.bucket_indices]
        ### END SOLUTION


class CachedDDP(CoalescedDDP):
    """Like `CoalescedDDP`, with the same arguments, but its bucket groups cache their views.

    Modules 9, 10 and 16 inherit from this class.
    """

    group_class = CachedBucketGroup
