"""A recording process group that delivers a result only when the caller waits for it.

On a fast machine, a forgotten `wait()` is almost never noticed, because the collective is complete long before its
result is read. In this mode, it is always noticed. A launch works on copies of its inputs and fills its outputs with
NaN. Waiting on the handle of *that* launch (or on its future, asking for its result, or learning that it is complete)
writes the result to the outputs. If a tensor is changed between launch and wait, which is a race on a GPU, an event of
kind "race" is recorded. If its memory is freed, which corrupts memory on a GPU, the wait raises FreedTensorError.

The wait for a send ends only after the peer has posted the matching receive, because gloo carries the messages between
CPUs. Ranks that all send first and receive afterwards therefore deadlock every time, regardless of the message's size.

Tensors must be contiguous, as with NCCL. Gloo alone would accept some other tensors: it would read a transposed tensor
in memory order, and a slice together with its gaps. Tensors must also fit into their storages, which a submission can
resize.

torch DDP does not run in this mode: its C++ reducer may wait in places that Python cannot see.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from brigade.ranks.events import OPPOSITES
from brigade.ranks.rank.memory import list_tensors, uncounted
from brigade.ranks.rank.recorder import Recorder
from brigade.ranks.rank.recording_group import METHODS, RecordedWork, RecordingGroup, find_options

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class FreedTensorError(RuntimeError):
    """The memory of a tensor was freed while a collective used it."""


class StrictGroup(RecordingGroup):
    """Run each collective on copies. `StrictWork` delivers the results."""

    def __init__(self, inner: dist.ProcessGroup, recorder: Recorder, name: str, ranks: list[int]):
        super().__init__(inner, recorder, name, ranks)
        # The handles of messages: if one is freed, gloo loses its message, and the peer waits forever.
        self._messages: list[Any] = []
        torch.futures.wait_all, torch.futures.collect_all = wait_all, collect_all

    def check(self, op: str, received: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        for tensor in [*received, *sent]:
            if is_freed(tensor):
                raise FreedTensorError(
                    f"{op} needs {tensor.nbytes} bytes for a tensor, but the tensor's storage has "
                    f"{tensor.untyped_storage().nbytes()} bytes"
                )
            if not is_contiguous(tensor):
                raise ValueError(
                    f"{op} needs a contiguous tensor, as with NCCL. This tensor has shape {tuple(tensor.shape)} and "
                    f"strides {tensor.stride()}. Pass a contiguous copy, then copy the result back."
                )
        if op == "all_to_all" and any(share_memory(one, other) for one in received for other in sent):
            raise ValueError("all_to_all needs an output that shares no memory with its input, as with NCCL")

    @uncounted
    def call(self, method: str, args: list[Any], kwargs: dict[str, Any], index: int) -> dist.Work | None:
        op, outputs, inputs = METHODS[method]
        if op == "barrier":
            return super().call(method, args, kwargs, index)
        given = list_tensors([args[position] for position in {outputs, inputs} if position is not None])
        targets = [] if outputs is None else list_tensors(args[outputs])
        args = [copy_tensors(arg) if position in (outputs, inputs) else arg for position, arg in enumerate(args)]
        is_root = getattr(find_options(args, kwargs), "rootRank", None) == self.rank()
        if op == "broadcast" and is_root or op == "reduce" and not is_root:
            targets = []  # the root of a broadcast only sends, and only the root of a reduce receives
        for target in targets:
            target.data.fill_(get_filler(target.dtype))
        at_launch = [(tensor.detach().clone(), read_version(tensor)) for tensor in given]
        work = self._perform(method, args, kwargs)
        if op in OPPOSITES:
            self._messages.append(work)
        results = [] if outputs is None or not targets else list_tensors(args[outputs])
        return StrictWork(work, self._recorder, index, given, at_launch, targets, results)

    def _start_coalescing(self, device: torch.device) -> None:
        raise RuntimeError("do not pass a device to the coalescing manager; the process group coalesces by itself")


class StrictWork(RecordedWork):
    """The handle of a launch. The first wait copies the results into the caller's tensors."""

    def __init__(
        self,
        inner: dist.Work,
        recorder: Recorder,
        index: int,
        given: list[torch.Tensor],
        at_launch: list[tuple[torch.Tensor, int]],
        targets: list[torch.Tensor],
        results: list[torch.Tensor],
    ):
        super().__init__(inner, recorder, index)
        self._given = given
        self._at_launch = at_launch
        self._targets = targets
        self._results = results
        self._delivered = False
        self._delivered_to: list[Any] = []
        self._futures: list[StrictFuture] = []  # to be completed when the result is delivered
        self._asked_at = -1  # the recorder's `progress` when `is_completed` answered False

    def wait(self, timeout: timedelta | None = None) -> bool:
        targets = self._targets
        self._deliver(timeout)
        while self._futures:
            self._futures.pop(0).set_result(targets)
        return True

    @uncounted
    def _deliver(self, timeout: timedelta | None) -> None:
        super().wait(timeout)
        if not self._delivered:
            self._delivered = True
            if any(is_freed(tensor) for tensor in self._given):
                raise FreedTensorError("a tensor of this launch was freed between the launch and its wait()")
            if any(has_changed(now, *then) for now, then in zip(self._given, self._at_launch, strict=True)):
                self._recorder.note("race", index=self._index)
            for target, result in zip(self._targets, self._results, strict=True):
                target.data.copy_(result)
            # As with NCCL, a handle does not keep its tensors alive after the wait.
            self._delivered_to = [weakref.ref(target) for target in self._targets]
            self._given, self._at_launch, self._targets, self._results = [], [], [], []

    def _await(self, timeout: timedelta | None) -> None:
        super()._await(timeout)
        if any(tensor.is_cuda for tensor in self._given):
            # Otherwise a rank that waits forever would seem to have its result, and a deadlock would not be detected.
            torch.cuda.current_stream().synchronize()

    def is_completed(self) -> bool:
        """Deliver the result if the launch is complete. To ask again before the next event is to wait."""
        if self._asked_at != self._recorder.progress and not self._delivered and not super().is_completed():
            self._asked_at = self._recorder.progress
            return False
        return self._delivered or self.wait()

    def get_future(self) -> torch.futures.Future:
        if "get_future" not in sys._getframe(1).f_code.co_names:
            raise RuntimeError(
                "torch's C++ code waits for this launch, as in DistributedDataParallel, and the strict mode cannot see "
                "that: use the mode record"
            )
        future = StrictFuture(self.wait, self.is_completed)
        if self._delivered:
            future.set_result([target for reference in self._delivered_to if (target := reference()) is not None])
        else:
            self._futures.append(future)
        return future


class StrictFuture(torch.futures.Future):
    """A future that is completed, with its callbacks, in the thread that waits for it or for its handle."""

    def __init__(self, complete: Callable[[], Any], is_complete: Callable[[], bool]):
        super().__init__()
        self._complete, self._is_complete = complete, is_complete

    def done(self) -> bool:
        return super().done() or self._is_complete()

    def wait(self) -> Any:
        if not super().done():
            self._complete()
        return super().wait()

    def then(self, callback: Callable[[torch.futures.Future], Any]) -> torch.futures.Future:
        following = StrictFuture(self.wait, self.done)

        def call(_: torch.futures.Future) -> None:
            try:
                following.set_result(callback(self))
            except BaseException as exception:
                following.set_exception(exception)

        self.add_done_callback(call)
        return following


def wait_all(futures: list[torch.futures.Future]) -> list[Any]:
    """Do what torch's function does, without waiting in C++ for another thread."""
    return [future.wait() for future in futures]


def collect_all(futures: list[torch.futures.Future]) -> torch.futures.Future:
    """Do what torch's function does, without waiting in C++ for another thread."""

    def complete() -> bool:
        wait_all(futures)
        future.set_result(futures)
        return True

    future = StrictFuture(complete, lambda: all(each.done() for each in futures) and complete())
    return future


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Return whether torch's NCCL backend accepts the tensor, which must be contiguous (channels_last also counts).

    See check_gpu_single_tensor in torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp. For a send or a receive, NCCL's
    backend only warns, but gloo raises an exception.
    """
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(tensor.dim(), torch.contiguous_format)
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=channels_last)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two contiguous tensors have a byte in common."""
    first, last = sorted((one, other), key=lambda tensor: tensor.data_ptr())
    return last.data_ptr() < first.data_ptr() + first.nbytes and last.nbytes > 0


def copy_tensors(value: Any) -> Any:
    """Copy a tensor, or all tensors in nested lists. Each copy has the strides of its original."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [copy_tensors(item) for item in value]


def get_filler(dtype: torch.dtype) -> Any:
    """Return the value that an output contains until the wait."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def is_freed(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a tensor has become too small for it."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    needed = (tensor.storage_offset() + span) * tensor.element_size() if tensor.numel() else 0
    return tensor.untyped_storage().nbytes() < needed


def read_version(tensor: torch.Tensor) -> int:
    """Return the version counter of a tensor, or 0 for a view, which shares its counter with other views."""
    return 0 if tensor._is_view() or tensor.is_inference() else tensor._version


def has_changed(now: torch.Tensor, then: torch.Tensor, then_version: int) -> bool:
    """Return whether the tensor has been written to. Its bits are compared, and only its version reveals NaN / 2."""
    return read_version(now) != then_version or not torch.equal(view_bits(now.detach()), view_bits(then))


def view_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of a tensor's memory as integers, so that NaN is equal to itself."""
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    return real.view(INTEGERS[real.element_size()])
