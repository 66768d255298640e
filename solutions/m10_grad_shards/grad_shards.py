"""Module 10: each rank keeps only its own shards of the gradients (ZeRO, stage 2).

After the reduce-scatter of module 8, a rank needs only 1/N of a bucket, but the whole bucket stays in memory. In this
module, a bucket is allocated when its first gradient is ready, and freed when its reduce-scatter is complete. The
averages are then added to a small buffer with this rank's shards. `max_live_buckets` limits how many reduce-scatters
are in flight at the same time.

For P parameters in fp32, a rank keeps 4 P / N bytes of gradients between two steps instead of 4 P, plus a few buckets
during backward. A step has the same launches and bytes as in module 8. Accumulating over M micro-batches needs either M
times as many reduce-scatters, or memory for all gradients (`no_sync`).
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..m05_grad_buffer.grad_buffer import plan_layout
from ..m06_coalesced.coalesced import reduce_scatter
from ..m07_cached_shards.cached_shards import CachedBucketGroup, CachedDDP
from ..m08_zero_optimizer.zero_optimizer import ParamShard, ZeroOptimizer, adopt_weights

DType = torch.dtype | None  # None keeps the parameters' dtype
ProcessGroup = dist.ProcessGroup | None  # None is the default group


class ShardedGradBuffer:
    """The full parameters of one dtype, and this rank's shards of their gradients.

    `param_data`, of shape (layout.numel,), is the same as in module 6. `grad_data`, of shape (layout.numel / N,),
    contains this rank's shard of every bucket, one after the other. `whole[b]`, of shape (bucket numel,), contains the
    gradients of bucket b while the bucket is allocated.
    """

    def get_shard(self, bucket: int) -> Tensor:
        """Return this rank's averaged shard of a bucket: a view of `grad_data`, of shape (bucket numel / N,)."""
        # In `grad_data`, every earlier bucket occupies only 1/N of its full size.
        ### BEGIN SOLUTION part (a)
        begin, end = self.layout.bucket_ranges[bucket]
        return self.grad_data[begin // self.size : end // self.size]
        ### END SOLUTION

    def __init__(self, params: list[nn.Parameter], bucket_numel: int | None, grad_dtype: DType, group: ProcessGroup):
        self.params = list(params)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.layout = plan_layout([p.numel() for p in self.params], bucket_numel, self.size)
        first = self.params[0]
        is_wider = grad_dtype is not None and grad_dtype.itemsize > first.itemsize
        self.grad_dtype = grad_dtype if is_wider else first.dtype
        self.param_data = first.new_zeros(self.layout.numel)
        for p, (begin, end) in zip(self.params, self.layout.param_ranges):
            p.data = self.param_data[begin:end].view(p.shape).copy_(p.data)
            p.has_sharded_grad = True
        self.grad_data = first.new_zeros(self.layout.numel // self.size, dtype=self.grad_dtype)
        self.whole: dict[int, Tensor] = {}

    def get_whole(self, bucket: int) -> Tensor:
        """Return all gradients of a bucket, of shape (bucket numel,). Allocate zeros if the bucket is not allocated."""
        if bucket not in self.whole:
            begin, end = self.layout.bucket_ranges[bucket]
            self.whole[bucket] = self.param_data.new_zeros(end - begin, dtype=self.grad_dtype)
        return self.whole[bucket]

    def accumulate_into_buffer(self, i: int) -> None:
        """Add the gradient of parameter i to its bucket, and free the gradient. A gradient of None counts as zeros."""
        p, bucket = self.params[i], self.layout.bucket_of[i]
        # The bucket starts at layout.bucket_ranges[bucket][0], and the parameter at layout.param_ranges[i][0].
        ### BEGIN SOLUTION part (b)
        if p.grad is not None:
            begin = self.layout.param_ranges[i][0] - self.layout.bucket_ranges[bucket][0]
            self.get_whole(bucket)[begin : begin + p.numel()].view(p.shape).add_(p.grad)
            p.grad = None
        ### END SOLUTION


class ShardedBucket(CachedBucketGroup):
    """A bucket group with one bucket. After its reduce-scatter, only this rank's shard remains."""

    grad_handle: dist.Work | None = None
    averages: Tensor | None = None  # (bucket numel / N,), the output of the running reduce-scatter

    def start_grad_sync(self) -> None:
        """Start the reduce-scatter of the whole bucket into a new tensor with the size of a shard."""
        # Do not reduce into the shard itself, because finish_grad_sync *adds* to it. If this rank has no gradients for
        # the bucket, it contributes zeros.
        ### BEGIN SOLUTION part (c)
        [bucket] = self.bucket_indices
        whole = self.buffer.get_whole(bucket)
        self.averages = torch.empty_like(self.buffer.get_shard(bucket))
        self.grad_handle = reduce_scatter(self.averages, whole, dist.ReduceOp.AVG, self.process_group, async_op=True)
        ### END SOLUTION

    def finish_grad_sync(self) -> None:
        """Wait, add the averages to this rank's shard, and free the bucket. Do nothing if no launch is in flight."""
        ### BEGIN SOLUTION part (d)
        if self.grad_handle is not None:
            self.grad_handle.wait()
            [bucket] = self.bucket_indices
            self.buffer.get_shard(bucket).add_(self.averages)
            del self.buffer.whole[bucket]
            self.grad_handle = self.averages = None
        ### END SOLUTION


class GradShardedDDP(CachedDDP):
    """Like `CachedDDP`, but a rank keeps only its own shards of the gradients, in `grad_buffers[k].grad_data`.

    At most `max_live_buckets` buckets of all dtypes together are live, that is, between launch and wait. You may call
    `finish_grad_sync` after each micro-batch: it adds to the shards. Without it, a second backward raises RuntimeError,
    unless the first was inside `no_sync`. Only `zero_grad` clears the shards, with any `set_to_none`; `step` does not.
    A rank without a backward still calls the finish. If all backward passes were inside `no_sync`, the finish reduces
    their gradients. Use `Zero2Optimizer` with this wrapper, and its `clip_grad_norm_`: torch's would find no gradients,
    and clip nothing. Raise ValueError if `max_live_buckets` is below 1.
    """

    group_class = ShardedBucket

    def __init__(
        self,
        module: nn.Module,
        bucket_numel: int | None = 40_000_000,
        max_live_buckets: int = 2,
        grad_dtype: DType = None,
        process_group: ProcessGroup = None,
    ):
        if max_live_buckets < 1:
            raise ValueError(f"max_live_buckets must be at least 1, but it is {max_live_buckets}")
        super().__init__(module, bucket_numel, 1, grad_dtype, process_group)
        self.max_live_buckets = max_live_buckets
        self.gather_grads = False

    def make_buffer(self, params: list[nn.Parameter], bucket_numel: int | None, grad_dtype: DType):
        """Return the buffer for parameters of one dtype."""
        return ShardedGradBuffer(params, bucket_numel, grad_dtype, self.process_group)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)  # module 5 attaches views here, but this module has none

    def launch(self, index: int) -> None:
        """Start the reduce-scatter of a bucket. If too many buckets are live, finish the oldest one first."""
        group = self.groups[index]
        for i in group.param_indices:  # some gradients may not come from backward
            group.buffer.accumulate_into_buffer(i)
        ### BEGIN SOLUTION part (e)
        if index >= self.max_live_buckets:
            self.groups[index - self.max_live_buckets].finish_grad_sync()
        self.groups[index].start_grad_sync()
        ### END SOLUTION

    def finish_grad_sync(self) -> None:
        """Launch the remaining buckets and wait for all. Then the shards contain the averages, and `p.grad` is None."""
        self.require_same_parameters()
        # Do not call the finish of `CoalescedDDP`: it finishes groups whose buckets stay.
        ### BEGIN SOLUTION part (f)
        self.queue.launch_remaining()
        for group in self.groups:
            group.finish_grad_sync()
        self.queue.reset()
        ### END SOLUTION

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the shards, and the gradients that `no_sync` has accumulated.

        Raise RuntimeError between a backward that has launched buckets and its `finish_grad_sync`.
        """
        if self.queue.next_to_launch > 0:  # finish_grad_sync resets it
            raise RuntimeError("zero_grad while buckets are launched and not finished: call finish_grad_sync first")
        super().zero_grad()
        ### BEGIN SOLUTION part (g)
        for buffer in self.grad_buffers:
            buffer.grad_data.zero_()
            buffer.whole.clear()
        ### END SOLUTION


class Zero2Optimizer(ZeroOptimizer):
    """Like `ZeroOptimizer`, but used with a `GradShardedDDP`."""

    def prepare_grads(self) -> list[Tensor]:
        """Attach gradients and weights to the shards. Return the gradients as views of `grad_data`.

        Raise RuntimeError if a backward came after the last `finish_grad_sync`.
        """
        if any(buffer.whole for buffer in self.ddp.grad_buffers):
            raise RuntimeError("some gradients are not in the shards yet: call finish_grad_sync first")
        for buffer in self.ddp.grad_buffers:
            adopt_weights(buffer)
        return [self.prepare_grad(part) for part in self.param_shards.values()]

    def prepare_grad(self, part: ParamShard) -> Tensor:
        """Attach gradient and weights to the shard of one parameter. Return the gradient as a view of `grad_data`.

        `part.shard.grad` is this view, too. Only a main parameter gets a copy, in fp32.
        """
        buffer, i = self.positions[part.param]
        # `part.buffer_slice` is a range in the whole buffer. Convert it to a range in this rank's shard of the bucket.
        ### BEGIN SOLUTION part (h)
        bucket = buffer.layout.bucket_of[i]
        shard = buffer.get_shard(bucket)
        shard_start = buffer.layout.bucket_ranges[bucket][0] + buffer.rank * len(shard)
        grad = shard[max(0, part.buffer_slice.start - shard_start) :][: part.shard.numel()]
        part.shard.grad = grad.to(part.shard.dtype)
        if not part.is_master:
            part.shard.data = buffer.param_data[part.buffer_slice]
        return grad
        ### END SOLUTION

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradient shards, and what `no_sync` has accumulated, as the wrapper does."""
        self.ddp.zero_grad()


def require_zero2(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Refuse a step of another optimizer. It finds no gradients in the parameters, and would leave them as they are."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    if not isinstance(optimizer, Zero2Optimizer) and any(hasattr(p, "has_sharded_grad") for p in params):
        raise RuntimeError("the gradients of these parameters are kept in shards: use Zero2Optimizer")


register_optimizer_step_pre_hook(require_zero2)
