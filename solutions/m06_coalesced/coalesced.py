"""Module 6: an all-reduce is a reduce-scatter and an all-gather, and several buckets can be one launch.

After the reduce-scatter each rank has the averages of its own 1/N of every bucket, its shard; the all-gather brings
the shards of all ranks together. Buckets are joined into groups. The collectives of a group are *coalesced*: called one
by one, launched as one.

Cost per step: two launches for each group instead of one for each bucket, and the bytes of one all-reduce. A group is
launched when its last bucket is ready, so large groups have fewer launches and less overlap; its gather follows when
half of the next group is ready. The second half need not carry gradients: module 8 lets it carry weights.
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
    """What `coalesce` gives; wait() returns when all collectives of the block are complete."""

    def wait(self) -> None: ...


@contextmanager
def coalesce(process_group: dist.ProcessGroup | None = None) -> Iterator[Handle]:
    """The collectives that are called in the block are launched as one when it ends, without waiting.

    They are all_reduce, reduce_scatter or all_gather of whole tensors: all of one kind, one reduce operation and one
    dtype. RuntimeError otherwise, and when blocks of one group are nested. Then, and after any exception in
    the block, nothing is launched. This is the only place that uses torch's private `_coalescing_manager`.
    """
    # The manager keeps the calls in `captured[group]` until the block ends: each has an op, a redop and a tensor. It
    # compares too little, and after an exception it goes on capturing: what it would capture then never happens.
    group = process_group or dist.group.WORLD
    captured = c10d._world.pg_coalesce_state
    ### BEGIN SOLUTION part (a)
    if group in captured:
        raise RuntimeError("coalesce: this group is coalescing already, and blocks cannot be nested")
    try:
        with c10d._coalescing_manager(group, async_ops=True) as handle:
            yield handle
            calls = captured[group]
            for what, found in (
                ("operations", [call.op.__name__ for call in calls]),
                ("reduce operations", [call.redop for call in calls]),
                ("dtypes", [call.tensor.dtype for call in calls]),
            ):
                if any(value != found[0] for value in found):
                    raise RuntimeError(f"coalesce: different {what} in one block: {', '.join(map(str, found))}")
    finally:
        captured.pop(group, None)
    ### END SOLUTION


class BucketGroup:
    """Buckets of one buffer whose collectives are coalesced, and how far they are in the current step.

    `bucket_indices` are positions in `buffer.layout.bucket_ranges`. Each bucket is divided into equal shards, shard r
    being rank r's.
    """

    def __init__(
        self, buffer: GradBuffer, bucket_indices: Sequence[int], process_group: dist.ProcessGroup | None = None
    ):
        self.buffer = buffer
        self.bucket_indices = list(bucket_indices)
        self.process_group = process_group
        self.members = [i for i, bucket in enumerate(buffer.layout.bucket_of) if bucket in self.bucket_indices]
        self.missing = len(self.members)  # gradients that are not ready yet
        self.grad_handle: Handle | None = None
        self.param_handle: Handle | None = None

    def shards(self, data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each bucket of the group its own shard and the whole, as views of one of the buffer's flat tensors."""
        rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        ### BEGIN SOLUTION part (b)
        ranges = [self.buffer.layout.bucket_ranges[index] for index in self.bucket_indices]
        buckets = [data[start:end] for start, end in ranges]
        return [(bucket.chunk(size)[rank], bucket) for bucket in buckets]
        ### END SOLUTION

    def start_grad_sync(self) -> None:
        """Starts to average the gradients: one launch, a reduce-scatter of every bucket into its own shard."""
        # In a `coalesce` block call `reduce_scatter` for each of the `shards`, and keep the handle for the finish.
        ### BEGIN SOLUTION part (c)
        with coalesce(self.process_group) as self.grad_handle:
            for own, bucket in self.shards(self.buffer.grad_data):
                reduce_scatter(own, bucket, dist.ReduceOp.AVG, self.process_group)
        ### END SOLUTION

    def finish_grad_sync(self) -> None:
        """Waits; then the own shard of each bucket is the average. What the others hold means nothing."""
        self.grad_handle.wait()

    def start_gather(self, data: torch.Tensor) -> Handle:
        """Starts to complete the buckets of a flat tensor from all ranks' shards: one launch."""
        # The same with `all_gather`: the whole is its output, the own shard its input.
        ### BEGIN SOLUTION part (d)
        with coalesce(self.process_group) as handle:
            for own, bucket in self.shards(data):
                all_gather(bucket, own, self.process_group)
        return handle
        ### END SOLUTION

    def start_param_sync(self) -> None:
        """Starts to gather the parameters, of which each rank has its own shards right."""
        self.param_handle = self.start_gather(self.buffer.param_data)

    def finish_param_sync(self) -> None:
        """Waits; then the parameters of the group are complete."""
        self.param_handle.wait()


class CoalescedDDP(BufferedDDP):
    """Module 5's wrapper, but that its parameters lie in `grad_buffers` too, and its buckets are launched in `groups`.

    `bucket_numel` counts elements; `buckets_per_group` None makes one group of each buffer; `grad_dtype` is module 5's.
    With `gather_grads` all gradients are averages after the finish, so that any optimizer works; without it the own
    shards are, and nothing else: for an optimizer that steps on shards and then calls `start_param_sync` and
    `finish_param_sync`.
    """

    with_params = True
    group_class = BucketGroup  # module 7 has another

    def __init__(
        self,
        module: nn.Module,
        bucket_numel: int | None = 40_000_000,
        buckets_per_group: int | None = 1,
        grad_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        self.buckets_per_group = buckets_per_group
        super().__init__(module, bucket_numel, grad_dtype, process_group)  # calls make_buckets
        self.groups = self.buckets  # so module 5 counts and launches groups
        self.gather_grads = True
        self.gathers: list[Handle] = []  # of groups 0 to len(gathers) - 1, which have their averages

    def make_buckets(self) -> list[BucketGroup]:
        """Groups of consecutive buckets, in the order of the buffers; a group has buckets of one buffer only."""
        # Make each one with self.group_class.
        ### BEGIN SOLUTION part (e)
        groups = []
        for buffer in self.grad_buffers:
            indices = range(len(buffer.layout.bucket_ranges))
            length = self.buckets_per_group or len(indices)
            for first in range(0, len(indices), length):
                groups.append(self.group_class(buffer, indices[first : first + length], self.process_group))
        return groups
        ### END SOLUTION

    def launch_next(self) -> None:
        """Starts the next group, and before it, on every rank, the gather of the group before."""
        if self.gather_grads and len(self.gathers) < self.launched:
            self.gather_next()
        self.groups[self.launched].start_grad_sync()
        self.launched += 1

    def gather_next(self) -> None:
        """Waits for the first group that is not gathered, and starts to complete its averages on all ranks."""
        group = self.groups[len(self.gathers)]
        group.finish_grad_sync()
        self.gathers.append(group.start_gather(group.buffer.grad_data))

    def mark_ready(self, group: BucketGroup, i: int) -> None:
        """Runs in backward when parameter i of the group's buffer has its gradient."""
        super().mark_ready(group, i)
        # That launched what is complete. And with `gather_grads`: when half of the gradients of the next group are
        # ready, the group before it has had time to be reduced. Gather it.
        ### BEGIN SOLUTION part (f)
        if self.gather_grads and len(self.gathers) < self.launched < len(self.groups):
            coming = self.groups[self.launched]
            if 2 * coming.missing <= len(coming.members):
                self.gather_next()
        ### END SOLUTION

    def finish_grad_sync(self) -> None:
        """Starts the groups that never became complete and waits for all; gathers the averages if `gather_grads`."""
        # A gradient that never came has to be taken too. The last group is not gathered yet. At the end nothing of this
        # step may be left. With main_grad, parameter.grad is made from it, unless only the own shards are averages.
        ### BEGIN SOLUTION part (g)
        for group in self.groups[self.launched :]:
            for i in group.members:
                group.buffer.take_grad(i)
            self.launch_next()
        if self.gather_grads:
            while len(self.gathers) < len(self.groups):
                self.gather_next()
            for handle in self.gathers:
                handle.wait()
        else:
            for group in self.groups:
                group.finish_grad_sync()
        for group in self.groups:
            group.missing = len(group.members)
        self.launched, self.gathers = 0, []
        ### END SOLUTION
        for buffer in self.grad_buffers:
            buffer.started.clear()
            if buffer.has_main_grad and self.gather_grads:
                for parameter in buffer.params:
                    parameter.grad = parameter.main_grad.to(parameter.dtype)

    def start_param_sync(self) -> None:
        """Starts to complete the parameters of all groups from the ranks' shards."""
        for group in self.groups:
            group.start_param_sync()

    def finish_param_sync(self) -> None:
        """Waits until all parameters are complete."""
        for group in self.groups:
            group.finish_param_sync()
