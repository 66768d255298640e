"""Module 5: gradients that live in one contiguous buffer.

Module 4 copies every gradient into its bucket and back. In this module, each gradient is a view of one flat buffer from
the start, so a bucket is a slice of the buffer and is reduced in place. The code separates the *plan* (`plan_layout`, a
pure function), the *memory* (`GradBuffer`) and the *communication* (`Bucket` and `BufferedDDP`).

Cost per step: the launches and bytes of module 4, and no copies. The padding adds at most 63 elements before each
parameter, and less than lcm(N, 128) elements at the end of each bucket.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m01_naive_ddp.refusals import CLEARED, SECOND_BACKWARD, Wrapper
from ..m03_overlapped_ddp.overlapped_ddp import GradSyncMixin
from ..m04_bucketed_ddp.bucketed_ddp import LaunchQueue


def plan_layout(
    numels: Sequence[int], bucket_numel: int | None, dp_size: int, pad_for_busbw: bool = False
) -> BufferLayout:
    """Place parameters of these sizes from left to right, in the given order, and assign them to buckets.

    Each parameter starts at a multiple of 64. A bucket closes as soon as it contains at least `bucket_numel` elements.
    With None, there is only one bucket. The end of a bucket is padded to a multiple of lcm(dp_size, 128), so that the
    bucket splits into `dp_size` equal shards. With `pad_for_busbw`, the end is also a multiple of 2^16. An empty list
    gives no buckets. Megatron-LM uses the same rule (megatron/core/optimizer/param_layout.py).
    """
    # TODO: part (a)
    raise NotImplementedError("module 5, part (a)")


@dataclass(frozen=True)
class BufferLayout:
    """A plan for a buffer of `numel` elements. Ranges are half-open: (start, end) in elements."""

    param_ranges: tuple[tuple[int, int], ...]  # the range of parameter i
    bucket_of: tuple[int, ...]  # the bucket of parameter i
    bucket_ranges: tuple[tuple[int, int], ...]  # the range of bucket i, with its padding
    numel: int


def round_up(number: int, multiple: int) -> int:
    """Return `number`, rounded up to a multiple of `multiple`."""
    return -(-number // multiple) * multiple


class GradBuffer:
    """Contiguous gradient memory for parameters of one dtype, laid out in the given order.

    Callers pass the parameters in reverse order. `views[i]` is parameter i's part of `grad_data`, in that parameter's
    shape. It is `parameter.grad` itself or, if `grad_dtype` is wider than the parameter's dtype, `parameter.main_grad`.
    With `with_params`, the parameters are moved into `param_data`, which has the same layout. Modules 6 to 10 use the
    attributes and methods of this class.
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
        numel, dtype = self.layout.numel, grad_dtype if self.has_main_grad else first.dtype
        self.grad_data = first.new_zeros(numel, dtype=dtype)  # (numel,)
        self.param_data = first.new_zeros(numel) if with_params else None  # (numel,)
        self.has_accumulated = [False] * len(self.params)  # whether main_grad contains gradients of this step
        self.attach_views()

    def attach_views(self) -> None:
        """Create `views`, and make gradients and parameters point into the flat tensors. Their values do not change."""
        # An existing gradient moves into its view, except with main_grad. A gradient of None stays None. If there is a
        # param_data, parameter.data moves into it too.
        # TODO: part (b)
        raise NotImplementedError("module 5, part (b)")

    def reallocate(self) -> None:
        """Move the flat tensors to new memory, as offloading and reloading do. Their values do not change."""
        self.grad_data = self.grad_data.clone()
        if self.param_data is not None:
            self.param_data = self.param_data.clone()
        self.attach_views()

    @torch.no_grad()  # with create_graph=True, the buffer would keep the graph of every step
    def accumulate_into_buffer(self, i: int) -> None:
        """Make `views[i]` contain the gradient of parameter i. None counts as zeros. A second call changes nothing."""
        if self.has_main_grad:
            accumulate_main_grad(self, i)
            return
        parameter, view = self.params[i], self.views[i]
        # Afterwards, parameter.grad *is* the view.
        # TODO: part (c)
        raise NotImplementedError("module 5, part (c)")

    def finish_accumulation(self, set_grads: bool = True) -> None:
        """Make main_grad start from zero in the next step.

        With `set_grads`, `parameter.grad` gets a rounded copy. Module 6 calls this method without it: then
        `parameter.grad` stays None.
        """
        if self.has_main_grad:
            finish_main_grads(self, set_grads)


class Bucket:
    """One bucket of a buffer: a slice that is all-reduced by one collective."""

    def __init__(self, buffer: GradBuffer, index: int, process_group: dist.ProcessGroup | None):
        self.buffer = buffer
        self.process_group = process_group
        self.start, self.end = buffer.layout.bucket_ranges[index]
        self.param_indices = [i for i, bucket in enumerate(buffer.layout.bucket_of) if bucket == index]
        self.handle: dist.Work | None = None

    def start_grad_sync(self) -> None:
        """Start the all-reduce of the slice, in place and without waiting."""
        # TODO: part (d)
        raise NotImplementedError("module 5, part (d)")

    def finish_grad_sync(self) -> None:
        """Wait for the all-reduce."""
        self.handle.wait()


class BufferedDDP(GradSyncMixin, Wrapper):
    """Wrap a model, keep its gradients in `grad_buffers` (one per parameter dtype), and reduce them in place.

    `bucket_numel` is a number of elements. If `grad_dtype` is wider than the dtype of the parameters, gradients
    accumulate in `grad_dtype`, and only `finish_grad_sync` makes them start from zero again. Modules 6 to 10 inherit
    from this class and override its methods, so keep their names.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_numel: int | None = 40_000_000,
        grad_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(module, process_group)
        broadcast_module_state(module, process_group)
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in reversed([p for p in module.parameters() if p.requires_grad]):
            by_dtype[parameter.dtype].append(parameter)
        self.grad_buffers = [self.make_buffer(params, bucket_numel, grad_dtype) for params in by_dtype.values()]
        self.units = self.make_units()
        self.queue = LaunchQueue([len(unit.param_indices) for unit in self.units], self.launch)
        for index, unit in enumerate(self.units):
            for i in unit.param_indices:
                self.register_grad_hook(unit.buffer.params[i], lambda _, index=index, i=i: self.mark_ready(index, i))
        self.launch_all_in_backward()
        self.mark_parameters()

    def make_buffer(self, params: list[nn.Parameter], bucket_numel: int | None, grad_dtype: torch.dtype | None):
        """Return the buffer for parameters of one dtype."""
        return GradBuffer(params, bucket_numel, dist.get_world_size(self.process_group), grad_dtype)

    def make_units(self) -> list[Bucket]:
        """Return the units of the queue, in launch order: buckets here, and groups of buckets in module 6."""
        return [Bucket(b, i, self.process_group) for b in self.grad_buffers for i in range(len(b.layout.bucket_ranges))]

    def forward(self, *args, **kwargs):
        # Autograd adds to an existing gradient in place. So attach the views that zero_grad has removed.
        # TODO: part (e)
        raise NotImplementedError("module 5, part (e)")
        return self.module(*args, **kwargs)

    def mark_ready(self, index: int, i: int) -> None:
        """Accumulate the gradient of parameter i, which belongs to unit `index`. The backward hook calls this.

        Raise RuntimeError, and change nothing, if the unit is already complete, also inside `no_sync`: then a second
        backward came before `finish_grad_sync`.
        """
        # A gradient of a backward inside no_sync is in the buffer afterwards, but does not count.
        # TODO: part (f)
        raise NotImplementedError("module 5, part (f)")

    def launch(self, index: int) -> None:
        """Start the communication of a unit. The queue calls this method."""
        unit = self.units[index]
        for i in unit.param_indices:  # some gradients may never have arrived, but their views must be correct
            unit.buffer.accumulate_into_buffer(i)
        unit.start_grad_sync()

    def require_same_gradients(self) -> None:
        """Raise RuntimeError if the parameters, or gradients that are launched, are not those of the step."""
        self.require_same_parameters()
        ready = self.in_backward | self.in_last_backward
        for unit in self.units[: self.queue.next_to_launch]:
            params, views = unit.buffer.params, unit.buffer.views
            arrived = [i for i in unit.param_indices if params[i] in ready and not unit.buffer.has_main_grad]
            if any(params[i].grad is not views[i] for i in arrived):
                raise RuntimeError(CLEARED)

    def finish_grad_sync(self) -> None:
        """Launch the remaining units and wait for all units. Afterwards, each gradient is the average."""
        self.require_same_gradients()
        # TODO: part (g)
        raise NotImplementedError("module 5, part (g)")


# ---- a buffer whose grad_dtype is wider than the dtype of its parameters


def accumulate_main_grad(buffer: GradBuffer, i: int) -> None:
    """Move the gradient of parameter i to its main_grad, where a step's gradients add up, starting from zero."""
    parameter, view = buffer.params[i], buffer.views[i]
    # TODO: part (h)
    raise NotImplementedError("module 5, part (h)")


def finish_main_grads(buffer: GradBuffer, set_grads: bool) -> None:
    """Make every main_grad start from zero in the next step. With `set_grads`, set `parameter.grad`."""
    # TODO: part (i)
    raise NotImplementedError("module 5, part (i)")
