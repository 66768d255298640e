"""Module 6: an all-reduce is a reduce-scatter and an all-gather, and several buckets can share one launch.

After the reduce-scatter each rank has the averages of its own 1/N of every bucket, its shard. The all-gather brings the
shards of all ranks together. Buckets form groups; the collectives of a group are *coalesced*: launched as one.

Cost per step: two launches per group instead of one per bucket, and the bytes of one all-reduce. A group is launched
when its last bucket is ready, so large groups mean fewer launches and less overlap. Its all-gather follows when half of
the next group is ready. The second half does not have to carry gradients: module 8 lets it carry weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d as c10d

from ..m05_grad_buffer.grad_buffer import BufferedDDP, GradBuffer

# torch 2.13 gave these new names.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Handle(Protocol):
    """What `coalesce` gives. wait() returns when all collectives of the block are complete."""

    def wait(self) -> None: ...


@contextmanager
def coalesce(process_group: dist.ProcessGroup | None = None) -> Iterator[Handle]:
    """Launch the collectives that are called in the block as one when the block ends, without waiting.

    They are all_reduce, reduce_scatter or all_gather of whole tensors: all of one kind, one reduce operation and one
    dtype. Raise RuntimeError otherwise, and when blocks of one group are nested. Then, and after any exception in the
    block, nothing is launched. Only this function uses torch's private `_coalescing_manager`.
    """
    # The manager keeps the calls in `captured[group]` until the block ends. Each has an op, a redop and a tensor. The
    # manager compares too little, and after an exception it keeps capturing: later calls would never be launched.
    group = process_group or dist.group.WORLD
    captured = c10d._world.pg_coalesce_state
    # TODO: part (a)
    raise NotImplementedError("module 6, part (a)")


class BucketGroup:
    """Buckets of one buffer whose collectives are coalesced. `bucket_indices` index `buffer.layout.bucket_ranges`.

    Each bucket is divided into equal shards; shard r belongs to rank r.
    """

    def __init__(
        self, buffer: GradBuffer, bucket_indices: Sequence[int], process_group: dist.ProcessGroup | None = None
    ):
        self.buffer = buffer
        self.bucket_indices = list(bucket_indices)
        self.process_group = process_group
        self.param_indices = [i for i, bucket in enumerate(buffer.layout.bucket_of) if bucket in self.bucket_indices]
        self.grad_handle: Handle | None = None
        self.param_handle: Handle | None = None

    def shards(self, data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (own shard, whole bucket) for each bucket of the group, as views of a flat tensor of the buffer."""
        rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        # TODO: part (b)
        raise NotImplementedError("module 6, part (b)")

    def start_grad_sync(self) -> None:
        """Start to average the gradients: one launch, which reduce-scatters every bucket into its own shard."""
        # Call `reduce_scatter` for each of the `shards` in a `coalesce` block. Keep its handle.
        # TODO: part (c)
        raise NotImplementedError("module 6, part (c)")

    def finish_grad_sync(self) -> None:
        """Wait. Then this rank's shard of each bucket is the average, and the rest of the bucket means nothing."""
        self.grad_handle.wait()

    def start_all_gather(self, data: torch.Tensor) -> Handle:
        """Start to complete the buckets of a flat tensor from the shards of all ranks: one launch."""
        # Do the same with `all_gather`: its output is the whole bucket, its input the own shard.
        # TODO: part (d)
        raise NotImplementedError("module 6, part (d)")

    def start_param_sync(self) -> None:
        """Start to gather the parameters, of which each rank has updated its own shards."""
        self.param_handle = self.start_all_gather(self.buffer.param_data)

    def finish_param_sync(self) -> None:
        """Wait. Then the parameters of the group are complete."""
        self.param_handle.wait()


class CoalescedDDP(BufferedDDP):
    """Like `BufferedDDP`, but the parameters live in the buffers too, and buckets are launched in `groups`.

    `buckets_per_group=None` makes one group of each buffer. With `gather_grads` all gradients are averages after the
    finish, so that any optimizer works. Without it only this rank's shards are, for an optimizer that steps on shards
    and then calls `start_param_sync` and `finish_param_sync`.
    """

    group_class = BucketGroup  # module 7 has another one

    def __init__(
        self,
        module: nn.Module,
        bucket_numel: int | None = 40_000_000,
        buckets_per_group: int | None = 1,
        grad_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        self.buckets_per_group = buckets_per_group
        self.gather_grads = True
        self.gathers: list[Handle] = []  # all-gathers of groups 0 to len(gathers) - 1, which are launched
        super().__init__(module, bucket_numel, grad_dtype, process_group)

    def make_buffer(self, params: list[nn.Parameter], bucket_numel: int | None, grad_dtype: torch.dtype | None):
        """Return the buffer for parameters of one dtype, with the parameters in it."""
        size = dist.get_world_size(self.process_group)
        return GradBuffer(params, bucket_numel, size, grad_dtype, with_params=True)

    def make_units(self) -> list[BucketGroup]:
        """Return the groups, in launch order: consecutive buckets of one buffer."""
        # Make each one with self.group_class.
        # TODO: part (e)
        raise NotImplementedError("module 6, part (e)")

    @property
    def groups(self) -> list[BucketGroup]:
        """What `BufferedDDP` counts and launches at once."""
        return self.units

    def launch(self, index: int) -> None:
        """Start the reduce-scatter of a group and, before it, the all-gather of the group before."""
        if self.gather_grads and len(self.gathers) < index:
            self.launch_next_all_gather()
        super().launch(index)

    def launch_next_all_gather(self) -> None:
        """Wait for the averages of the first group that is not gathered, and start to complete them on all ranks."""
        group = self.groups[len(self.gathers)]
        group.finish_grad_sync()
        self.gathers.append(group.start_all_gather(group.buffer.grad_data))

    def mark_ready(self, index: int, i: int) -> None:
        """Take the gradient of parameter i, which belongs to group `index`. The backward hook calls this method."""
        super().mark_ready(index, i)
        # Now everything is launched that is complete. With `gather_grads`: when half of the gradients of the next group
        # are ready, the group before it has had time to be reduced. Gather it.
        # TODO: part (f)
        raise NotImplementedError("module 6, part (f)")

    def finish_grad_sync(self) -> None:
        """Launch the groups that never became complete and wait for all. Gather the averages if `gather_grads`."""
        # A gradient that never came must be in the buffer too. The last group is not gathered yet. Nothing of this step
        # may be left at the end.
        # TODO: part (g)
        raise NotImplementedError("module 6, part (g)")
        for buffer in self.grad_buffers:
            buffer.finish_accumulation(self.gather_grads)

    def start_param_sync(self) -> None:
        """Start to complete the parameters of all groups from the shards of all ranks."""
        for group in self.groups:
            group.start_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until all parameters are complete."""
        for group in self.groups:
            group.finish_param_sync()
