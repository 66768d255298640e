"""Module 5: gradients that live in one contiguous buffer.

A bucket that is copied together for every step costs two copies of all gradients. Here the gradients lie in one flat
buffer from the start, each parameter's gradient being a view of its piece, so that a bucket is a slice and is reduced
in place. Three things are kept apart: the *plan* (`plan_layout`, a pure function), the *memory* (`GradBuffer`) and the
*communication* (`BufferedDDP`).

Cost per step: the launches and bytes of module 4, and no copies; padding of at most one lcm(N, 128) per bucket. The
buffer can be wider than the parameters: gradients of bf16 parameters then accumulate in fp32, in `parameter.main_grad`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state

Range = tuple[int, int]  # elements start to end of the buffer, end not included


@dataclass(frozen=True)
class BufferLayout:
    """Where everything lies in a buffer of `numel` elements. Entry i belongs to parameter i, or to bucket i."""

    param_ranges: tuple[Range, ...]
    bucket_of: tuple[int, ...]
    bucket_ranges: tuple[Range, ...]
    numel: int


def plan_layout(
    numels: Sequence[int], bucket_numel: int | None, dp_size: int, pad_for_busbw: bool = False
) -> BufferLayout:
    """Places parameters of these sizes from left to right, in the order given, and divides them into buckets.

    A parameter starts at a multiple of 64 elements. A bucket closes once it holds `bucket_numel` elements or more
    (None: there is one bucket), and is padded to end at a multiple of lcm(dp_size, 128), so that it divides equally
    among `dp_size` ranks; with `pad_for_busbw` at a multiple of 2^16 too. The rule is that of Megatron-LM,
    megatron/core/optimizer/param_layout.py.
    """
    # Keep the end of the last parameter and the start of the open bucket; round up where the rule says so.
    ### BEGIN SOLUTION part (a)
    multiple = math.lcm(dp_size, 128, 2**16 if pad_for_busbw else 1)
    param_ranges, bucket_of, bucket_ranges = [], [], []
    bucket_start = end = 0
    for place, numel in enumerate(numels):
        start = round_up(end, 64)
        end = start + numel
        param_ranges.append((start, end))
        bucket_of.append(len(bucket_ranges))
        is_full = bucket_numel is not None and end - bucket_start >= bucket_numel
        if is_full or place == len(numels) - 1:
            end = round_up(end, multiple)
            bucket_ranges.append((bucket_start, end))
            bucket_start = end
    return BufferLayout(tuple(param_ranges), tuple(bucket_of), tuple(bucket_ranges), end)
    ### END SOLUTION


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below the number."""
    return -(-number // multiple) * multiple


class GradBuffer:
    """The memory for the gradients of parameters of one dtype, laid out in the order given; the caller reverses.

    `grad_data`, (layout.numel,), has the dtype `grad_dtype` where that is wider than the parameters', else theirs.
    `views[i]` is the place of parameter i in it, in the parameter's shape. Where the dtypes differ the parameter's
    `main_grad` is that view, else its `grad` is. `with_params` moves the parameters themselves into
    `param_data`, laid out alike; otherwise that is None.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        bucket_numel: int | None,
        dp_size: int,
        grad_dtype: torch.dtype | None = None,
        pad_for_busbw: bool = False,
        with_params: bool = False,
    ):
        self.params = list(params)
        first = self.params[0]
        self.has_main_grad = grad_dtype is not None and grad_dtype.itemsize > first.itemsize
        self.layout = plan_layout([p.numel() for p in self.params], bucket_numel, dp_size, pad_for_busbw)
        self.grad_data = first.new_zeros(self.layout.numel, dtype=grad_dtype if self.has_main_grad else None)
        self.param_data = first.new_zeros(self.layout.numel) if with_params else None
        self.started: set[int] = set()  # main_grads that hold something of the step that is accumulating
        self.point_into_buffer()

    def point_into_buffer(self) -> None:
        """Makes `views`, and has parameters and gradients point into the flat tensors, keeping their values."""
        # A view is a slice of grad_data in the parameter's shape. A gradient that exists already moves into its view
        # (unless that is a main_grad), and with param_data a parameter's data moves into its slice of that.
        ### BEGIN SOLUTION part (b)
        self.views: list[torch.Tensor] = []
        for parameter, (start, end) in zip(self.params, self.layout.param_ranges):
            view = self.grad_data[start:end].view(parameter.shape)
            self.views.append(view)
            if self.has_main_grad:
                parameter.main_grad = view
            elif parameter.grad is not None:
                parameter.grad = view.copy_(parameter.grad)
            if self.param_data is not None:
                parameter.data = self.param_data[start:end].view(parameter.shape).copy_(parameter.data)
        ### END SOLUTION

    def reallocate(self) -> None:
        """Moves the flat tensors to new memory, as offloading and reloading does; values stay what they were."""
        self.grad_data = self.grad_data.clone()
        if self.param_data is not None:
            self.param_data = self.param_data.clone()
        self.point_into_buffer()

    def take_grad(self, i: int) -> None:
        """Makes `views[i]` hold the gradient of parameter i, if it does not yet: None counts as zeros.

        With main_grad, `parameter.grad` is what this backward adds, or, at the first since the last finish, also what
        the optimizer left there, zeros in most cases.
        """
        # Where the view is the gradient there is nothing to do. Else zero, copy or (main_grad) add, and
        # leave parameter.grad as the view, or as None where main_grad has taken it over.
        ### BEGIN SOLUTION part (c)
        parameter, view = self.params[i], self.views[i]
        if parameter.grad is view:
            return
        if self.has_main_grad and i in self.started:
            if parameter.grad is not None:
                view.add_(parameter.grad)
        elif parameter.grad is None:
            view.zero_()
        else:
            view.copy_(parameter.grad)
        self.started.add(i)
        parameter.grad = None if self.has_main_grad else view
        ### END SOLUTION


class Bucket:
    """A slice of a buffer that is all-reduced at once, and how far it is in the current step."""

    def __init__(self, buffer: GradBuffer, index: int):
        self.buffer = buffer
        self.start, self.end = buffer.layout.bucket_ranges[index]
        self.members = [i for i, bucket in enumerate(buffer.layout.bucket_of) if bucket == index]
        self.missing = len(self.members)  # gradients that are not ready yet
        self.handle: dist.Work | None = None


class BufferedDDP(nn.Module):
    """Wraps a model whose gradients lie in `grad_buffers`, one for each parameter dtype, and are reduced in place.

    `bucket_numel` counts elements. With a `grad_dtype` wider than the parameters', gradients accumulate in
    `parameter.main_grad`, and after the finish `parameter.grad` is a copy of it in the parameter's dtype.
    """

    with_params = False  # module 6 keeps the parameters in buffers too

    def __init__(
        self,
        module: nn.Module,
        bucket_numel: int | None = 40_000_000,
        grad_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__()
        self.module = module
        self.process_group = process_group
        broadcast_module_state(module, process_group)
        self.synchronize = True  # no_sync turns it off
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            by_dtype[parameter.dtype].append(parameter)
        size = dist.get_world_size(process_group)
        self.grad_buffers = [
            GradBuffer(params, bucket_numel, size, grad_dtype, with_params=self.with_params)
            for params in by_dtype.values()
        ]
        self.buckets = self.make_buckets()
        self.launched = 0  # buckets 0 to launched - 1 are under way
        for bucket in self.buckets:
            for i in bucket.members:
                bucket.buffer.params[i].register_post_accumulate_grad_hook(
                    lambda _, bucket=bucket, i=i: self.mark_ready(bucket, i)
                )

    def make_buckets(self) -> list[Bucket]:
        """What is counted and launched at once, in the order of the launches."""
        return [Bucket(b, index) for b in self.grad_buffers for index in range(len(b.layout.bucket_ranges))]

    def forward(self, *args, **kwargs):
        # Autograd adds to a gradient that exists, in place: so let those that zero_grad removed be the views again.
        ### BEGIN SOLUTION part (d)
        if torch.is_grad_enabled():
            for buffer in self.grad_buffers:
                for i, parameter in enumerate(buffer.params):
                    if parameter.grad is None and not buffer.has_main_grad:
                        buffer.take_grad(i)
        ### END SOLUTION
        return self.module(*args, **kwargs)

    def mark_ready(self, bucket: Bucket, i: int) -> None:
        """Runs in backward when parameter i of the bucket's buffer has its gradient."""
        # Take the gradient; then, unless inside no_sync, count and launch in the order of the buckets, as in module 4.
        ### BEGIN SOLUTION part (e)
        bucket.buffer.take_grad(i)
        if not self.synchronize:
            return
        bucket.missing -= 1
        while self.launched < len(self.buckets) and self.buckets[self.launched].missing == 0:
            self.launch_next()
        ### END SOLUTION

    def launch_next(self) -> None:
        """Starts the all-reduce of the next bucket's slice, in place and without waiting."""
        # It is self.buckets[self.launched]. Keep the handle in it; it is launched from now on.
        ### BEGIN SOLUTION part (f)
        bucket = self.buckets[self.launched]
        self.launched += 1
        data = bucket.buffer.grad_data[bucket.start : bucket.end]
        bucket.handle = dist.all_reduce(data, dist.ReduceOp.AVG, self.process_group, async_op=True)
        ### END SOLUTION

    def finish_grad_sync(self) -> None:
        """Launches the buckets that never became complete, waits for all; then each gradient is the average."""
        # A gradient that never came has to be taken too. With main_grad, parameter.grad is made from it at the end.
        ### BEGIN SOLUTION part (g)
        for bucket in self.buckets[self.launched :]:
            for i in bucket.members:
                bucket.buffer.take_grad(i)
            self.launch_next()
        for bucket in self.buckets:
            bucket.handle.wait()
            bucket.missing = len(bucket.members)
        self.launched = 0
        for buffer in self.grad_buffers:
            buffer.started.clear()
            if buffer.has_main_grad:
                for parameter in buffer.params:
                    parameter.grad = parameter.main_grad.to(parameter.dtype)
        ### END SOLUTION

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block accumulate gradients without any communication."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before
