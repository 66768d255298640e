"""Module 6: an all-reduce is a reduce-scatter and an all-gather, and several buckets can share one launch.

After the reduce-scatter, each rank has the averages of its own shard, 1/N of every bucket. The all-gather copies all
shards to all ranks. Buckets form groups, and the collectives of a group are *coalesced*, that is, launched as one.

Cost per step: two launches per group instead of one per bucket, and the bytes of one all-reduce. A group is launched
when its last bucket is ready, so large groups need fewer launches but overlap less. The all-gather of a group follows
when half of the next group is ready. It does not have to carry gradients: in module 8, it carries weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d as c10d

from ..m01_naive_ddp.refusals import PartGrad, require_own_memory
from ..m05_grad_buffer.grad_buffer import BufferedDDP, GradBuffer

# torch 2.13 renamed these functions. Modules 10, 11 and 16 import them from here.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class BucketGroup:
    """A group of buckets of one buffer, whose collectives are coalesced.

    `bucket_indices` are indices into `buffer.layout.bucket_ranges`. Each bucket is split into equal shards, and shard r
    belongs to rank r. It works without a wrapper, too, on a `GradBuffer` made with `with_params=True`. Modules 7, 9,
    10 and 16 use the attributes and methods of this class.
    """

    def shards(self, data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (this rank's shard, whole bucket) for each bucket of the group, as views of `data`.

        `data` may be a different tensor in each call, because `GradBuffer.reallocate` replaces the flat tensors.
        """
        rank, size = dist.get_rank(self.process_group), dist.get_world_size(self.process_group)
        ### BEGIN SOLUTION part (a)
        ranges = [self.buffer.layout.bucket_ranges[index] for index in self.bucket_indices]
        buckets = [data[start:end] for start, end in ranges]  # (bucket numel,)
        return [(bucket.chunk(size)[rank], bucket) for bucket in buckets]  # (bucket numel / size,), (bucket numel,)
        ### END SOLUTION

    def __init__(
        self, buffer: GradBuffer, bucket_indices: Sequence[int], process_group: dist.ProcessGroup | None = None
    ):
        self.buffer = buffer
        self.bucket_indices = list(bucket_indices)
        self.process_group = process_group
        self.param_indices = [i for i, bucket in enumerate(buffer.layout.bucket_of) if bucket in self.bucket_indices]
        self.grad_handle: Handle | None = None
        self.param_handle: Handle | None = None
        self.is_reduced = False  # without gather_grads: whether the shards contain averages that no step has used yet

    def start_grad_sync(self) -> None:
        """Start averaging the gradients: reduce-scatter every bucket into this rank's shard, with one launch.

        `finish_grad_sync` only waits, so average here: with `ReduceOp.AVG`, or by dividing before a SUM.
        """
        # In `reduce_scatter(output, input, op, group)`, the output is this rank's shard, and the input is the whole
        # bucket. `finish_grad_sync` waits for the handle.
        ### BEGIN SOLUTION part (b)
        with coalesce(self.process_group) as self.grad_handle:
            for own, bucket in self.shards(self.buffer.grad_data):
                reduce_scatter(own, bucket, dist.ReduceOp.AVG, self.process_group)
        ### END SOLUTION

    def finish_grad_sync(self) -> None:
        """Wait until this rank's shard of each bucket contains averages. The rest of the bucket is undefined."""
        self.grad_handle.wait()

    def start_all_gather(self, data: torch.Tensor) -> Handle:
        """Start the all-gather of the group's buckets in `data`, a flat tensor, with one launch."""
        # In `all_gather(output, input, group)`, the input is this rank's shard, and the output is the whole bucket.
        ### BEGIN SOLUTION part (c)
        with coalesce(self.process_group) as handle:
            for own, bucket in self.shards(data):
                all_gather(bucket, own, self.process_group)
        return handle
        ### END SOLUTION

    def mark_reduced(self, is_reduced: bool) -> None:
        """Set `is_reduced`. While it is True, torch's `clip_grad_norm_` refuses the gradients of the group."""
        if is_reduced != self.is_reduced:
            self.is_reduced = is_reduced
            views = getattr(self.buffer, "views", None)  # module 10's buffer has none
            for i in self.param_indices if views else ():
                views[i].__class__ = PartGrad if is_reduced else Tensor

    def start_param_sync(self) -> None:
        """Start the all-gather of the parameters, after each rank has updated its own shards of them."""
        self.mark_reduced(False)
        self.param_handle = self.start_all_gather(self.buffer.param_data)

    def finish_param_sync(self) -> None:
        """Wait until the parameters of the group are complete. Raise RuntimeError if no all-gather was started."""
        if self.param_handle is None:
            raise RuntimeError("no all-gather of the parameters was started: call start_param_sync first")
        self.param_handle.wait()


class Handle(Protocol):
    """The handle of one coalesced launch. wait() returns when all collectives of the launch are complete."""

    def wait(self) -> None: ...


@contextmanager
def coalesce(process_group: dist.ProcessGroup | None = None) -> Iterator[Handle]:
    """Launch all collectives of the block together, without waiting, when the block ends.

    The block may call all_reduce, reduce_scatter or all_gather on single tensors, not on lists. Raise RuntimeError if
    the calls differ in kind, reduce operation or dtype, or if blocks of one group are nested. After any exception in
    the block, nothing is launched. A refused inner block leaves the outer block as it was. Only this function uses
    torch's private `_coalescing_manager`.
    """
    # The manager keeps the calls in `captured[group]` until the block ends. Each call has an op, a redop and a tensor.
    # The manager compares only the ops. After an exception, it keeps capturing, so later calls would never be launched.
    group = process_group or dist.group.WORLD
    captured = c10d._world.pg_coalesce_state
    ### BEGIN SOLUTION part (d)
    if group in captured:
        raise RuntimeError("coalesce: blocks of one group cannot be nested")
    try:
        with c10d._coalescing_manager(group, async_ops=True) as handle:
            yield handle
            calls = captured[group]
            for what, values in (
                ("operations", [call.op.__name__ for call in calls]),
                ("reduce operations", [call.redop for call in calls]),
                ("dtypes", [call.tensor.dtype for call in calls]),
            ):
                if any(value != values[0] for value in values):
                    raise RuntimeError(f"coalesce: different {what} in one block: {', '.join(map(str, values))}")
    finally:
        captured.pop(group, None)
    ### END SOLUTION


class CoalescedDDP(BufferedDDP):
    """Like `BufferedDDP`, but the parameters live in the buffers too, and buckets are launched in `groups`.

    `buckets_per_group=None` makes one group of each buffer. With `gather_grads`, all gradients are averages after
    `finish_grad_sync`, so any optimizer works. Without it, only this rank's shards are averages. The optimizer then
    steps on shards and calls `start_param_sync` and `finish_param_sync`. Modules 7 to 10 and 16 use `groups`,
    `group_class`, `gather_grads` and `queue`.
    """

    group_class = BucketGroup  # module 7 replaces this class

    def __init__(
        self,
        module: nn.Module,
        bucket_numel: int | None = 40_000_000,
        buckets_per_group: int | None = 1,
        grad_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        require_own_memory(module.parameters())
        self.buckets_per_group = buckets_per_group
        self.gather_grads = True
        self.gathers: list[Handle] = []  # handles of the all-gathers launched so far, of groups 0, 1, ...
        super().__init__(module, bucket_numel, grad_dtype, process_group)

    def make_buffer(self, params: list[nn.Parameter], bucket_numel: int | None, grad_dtype: torch.dtype | None):
        """Return the buffer for parameters of one dtype, which also contains the parameters."""
        size = dist.get_world_size(self.process_group)
        return GradBuffer(params, bucket_numel, size, grad_dtype, with_params=True)

    def make_units(self) -> list[BucketGroup]:
        """Return the groups, in launch order: consecutive buckets of one buffer."""
        # Make each group with self.group_class.
        ### BEGIN SOLUTION part (e)
        groups = []
        for buffer in self.grad_buffers:
            indices = range(len(buffer.layout.bucket_ranges))
            length = self.buckets_per_group or len(indices)
            for first in range(0, len(indices), length):
                groups.append(self.group_class(buffer, indices[first : first + length], self.process_group))
        return groups
        ### END SOLUTION

    @property
    def groups(self) -> list[BucketGroup]:
        """Return the groups: the units that `BufferedDDP` launches."""
        return self.units

    def launch(self, index: int) -> None:
        """Start the reduce-scatter of a group, after the all-gather of the previous group."""
        if self.gather_grads and len(self.gathers) < index:
            self.launch_next_all_gather()
        super().launch(index)

    def launch_next_all_gather(self) -> None:
        """Wait for the reduce-scatter of the first group that has not been gathered yet, then start its all-gather."""
        group = self.groups[len(self.gathers)]
        group.finish_grad_sync()
        self.gathers.append(group.start_all_gather(group.buffer.grad_data))

    def finish_grad_sync(self) -> None:
        """Launch the remaining groups and wait for all groups. With `gather_grads`, all-gather the averages.

        Without `gather_grads`, call `start_param_sync` or `zero_grad` before the next backward.
        """
        self.require_same_gradients()
        self.require_unreduced(*self.groups)
        # The last group has not been gathered yet. At the end, keep no state of this step.
        ### BEGIN SOLUTION part (f)
        self.queue.launch_remaining()
        if self.gather_grads:
            while len(self.gathers) < len(self.groups):
                self.launch_next_all_gather()
            for handle in self.gathers:
                handle.wait()
        else:
            for group in self.groups:
                group.finish_grad_sync()
        self.queue.reset()
        self.gathers.clear()
        ### END SOLUTION
        for buffer in self.grad_buffers:
            buffer.finish_accumulation(self.gather_grads)
        for group in self.groups:
            group.mark_reduced(not self.gather_grads)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, even if no step has used them."""
        for group in self.groups:
            group.mark_reduced(False)
        super().zero_grad(set_to_none)

    def mark_ready(self, index: int, i: int) -> None:
        """Accumulate the gradient of parameter i, which belongs to group `index`. The backward hook calls this."""
        self.require_unreduced(self.groups[index])
        super().mark_ready(index, i)
        if self.gather_grads:
            # By now, all complete groups have been launched. The gradient that makes half of the next group ready also
            # launches the previous group's all-gather, if that group's reduce-scatter was launched in an earlier hook.
            ### BEGIN SOLUTION part (g)
            is_next = index == self.queue.next_to_launch  # then this hook has launched nothing
            is_half = self.queue.num_pending[index] == len(self.groups[index].param_indices) // 2
            if is_next and is_half and len(self.gathers) < index:
                self.launch_next_all_gather()
            ### END SOLUTION

    def require_unreduced(self, *groups: BucketGroup) -> None:
        """Raise RuntimeError if a backward or a finish would change averages that no step has used yet."""
        if any(group.is_reduced for group in groups):
            raise RuntimeError("the gradients of this step are already averages: call step or zero_grad first")

    def start_param_sync(self) -> None:
        """Start the all-gather of the parameters of all groups."""
        for group in self.groups:
            group.start_param_sync()

    def finish_param_sync(self) -> None:
        """Wait until all parameters are complete."""
        for group in self.groups:
            group.finish_param_sync()
