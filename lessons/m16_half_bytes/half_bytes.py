"""Module 16: 16 bits on the wire, 32 in the sum.

A reduce-scatter in bfloat16 adds in bfloat16: every partial sum is rounded, and the error grows with the number of
ranks. An all-to-all does not add. It brings all ranks' values of this rank's part here, and this rank adds them in
float32. Each value is rounded once, on its way, so the error does not grow.

Cost per bucket of n elements on N ranks: one all-to-all that sends 2n(N-1)/N bytes, half of what a reduce-scatter in
float32 sends, and 4n bytes of scratch until the wait. The gathered averages take half the bytes, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..m06_coalesced.coalesced import Handle, all_gather, coalesce
from ..m07_cached_shards.cached_shards import CachedBucketGroup, CachedDDP


def start_reduce_scatter(
    output: Tensor,
    input: Tensor,
    process_group: dist.ProcessGroup | None = None,
    wire_dtype: torch.dtype = torch.bfloat16,
) -> Reduction | Copy:
    """Start averaging `input` over the group, with one all-to-all in `wire_dtype`, and return its handle at once.

    `input`, (numel,), and `output`, (numel / N,), are contiguous and float32, and N divides numel. `handle.wait()`
    writes rank r's part r of the average to `output`, which may be a view of that part of `input`. Until then `output`
    keeps its values, and `input` always does, except where `output` is a part of it. `wire_dtype` has 16 bits. Several
    reductions may be in flight, awaited in any order, so each needs scratch memory of its own.
    """
    # With one rank, or if numel is 0, return a Copy. Otherwise, use dist.all_to_all_single(received, sent, group=...,
    # async_op=True).
    # TODO: part (a)
    raise NotImplementedError("module 16, part (a)")


class Work(Protocol):
    """The handle that torch returns for a collective with `async_op=True`."""

    def wait(self) -> bool: ...


class Reduction:
    """The handle of one `start_reduce_scatter`. It keeps the scratch memory alive until `wait`."""

    def __init__(self, output: Tensor, sent: Tensor, received: Tensor, exchange: Work):
        self.output = output  # (numel / N,), float32
        self.sent: Tensor | None = sent  # (numel,), in wire_dtype
        self.received: Tensor | None = received  # (numel,), in wire_dtype; part r comes from rank r
        self.exchange = exchange

    def wait(self) -> None:
        """Wait for the all-to-all, and write this rank's part of the average to `output`.

        Add in float32, divide the sum, and do not round it again. Then drop the scratch memory, and `exchange`, which
        refers to it, even if the caller keeps this handle. A second call changes nothing, although `output` may contain
        other values by then.
        """
        # The number of ranks is received.numel() // output.numel().
        # TODO: part (b)
        raise NotImplementedError("module 16, part (b)")


class Copy:
    """The handle of a reduction in a group of one rank, or of no elements.

    `wait` copies the float32 values, once, without rounding.
    """

    def __init__(self, output: Tensor, values: Tensor):
        self.output = output
        self.values: Tensor | None = values

    def wait(self) -> None:
        if self.values is not None:
            self.output.copy_(self.values)
        self.values = None


class Gather:
    """The handle of an all-gather of averages in bfloat16. `wait` writes them to the float32 buckets."""

    def __init__(self, handle: Handle, buckets: Sequence[Tensor], sent: list[Tensor], received: list[Tensor]):
        self.handle, self.buckets, self.sent, self.received = handle, buckets, sent, received

    def wait(self) -> None:
        self.handle.wait()
        for bucket, values in zip(self.buckets, self.received):
            bucket.copy_(values)


class HalfBytesGroup(CachedBucketGroup):
    """Like `CachedBucketGroup`, but gradients travel in bfloat16. The parameters still travel in float32.

    Between two steps, a group keeps no scratch memory.
    """

    def start_grad_sync(self) -> None:
        """Start averaging the gradients: one `start_reduce_scatter` per bucket. Keep the handles in `reductions`."""
        # `self.shards(self.buffer.grad_data)` returns (this rank's shard, whole bucket) for each bucket.
        # TODO: part (c)
        raise NotImplementedError("module 16, part (c)")

    def finish_grad_sync(self) -> None:
        """Wait until this rank's shard of each bucket contains averages. It may be called more than once per step."""
        for reduction in self.reductions:
            reduction.wait()

    def start_all_gather(self, data: Tensor) -> Handle:
        """Start the all-gather of the group's buckets in `data`: `buffer.grad_data` or `buffer.param_data`.

        The averages of the gradients travel in bfloat16, and afterwards all ranks have the same bits in the buckets.
        """
        # For the parameters, use module 6's method. For the gradients, gather bfloat16 copies in a `coalesce` block, as
        # module 6 does with `all_gather(whole, own, group)`, and return a Gather.
        # TODO: part (d)
        raise NotImplementedError("module 16, part (d)")


class HalfBytesDDP(CachedDDP):
    """Like `CachedDDP`, but the gradients travel in bfloat16. They are accumulated and summed in float32.

    With `gather_grads`, the averages are rounded to bfloat16 once more, to the same bits on all ranks. Under
    `ZeroOptimizer` they are not, and the weights travel in float32. In a group of one rank, it may round or not.
    Raise ValueError if a trainable parameter is not float32.
    """

    group_class = HalfBytesGroup

    def __init__(
        self,
        module: nn.Module,
        bucket_numel: int | None = 40_000_000,
        buckets_per_group: int | None = 1,
        process_group: dist.ProcessGroup | None = None,
    ):
        # CachedDDP's constructor also has the argument grad_dtype.
        # TODO: part (e)
        raise NotImplementedError("module 16, part (e)")


class ErrorFeedback:
    """Round a tensor to bfloat16 in every step, and add what was lost to the next step's values.

    `error`, float32 and (numel,), is what the last rounding has lost, and zero at first. The first call moves it to the
    device of the values.
    """

    def __init__(self, numel: int):
        self.error = torch.zeros(numel)

    def compress(self, values: Tensor) -> Tensor:
        """Return a new tensor, `values` + `error` rounded to bfloat16. `values`, (numel,), float32, does not change."""
        # TODO: part (f)
        raise NotImplementedError("module 16, part (f)")
