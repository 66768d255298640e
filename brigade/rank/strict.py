"""A recording process group that gives a result only to whoever waited for it.

On a quick machine a forgotten `wait()` goes unnoticed almost every time: the collective is long finished
when the result is read. Here it shows every time. A launch works on a copy of its inputs and fills its
outputs with NaN; waiting on *that* launch's handle (or asking for its future, its result, or whether it is
complete) puts its own result there and no other's. A tensor that was changed between launch and wait, which on
a GPU is a race, is noted as an event of kind "race".

torch DDP is not run in this mode: its C++ reducer may wait in places that Python cannot see.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from brigade.rank import locks
from brigade.rank.locks import hidden_attribute, private
from brigade.rank.recording import METHODS, RecordedWork, Recorder, RecordingGroup, find_options, list_tensors

locks.trust(globals())


class StrictGroup(RecordingGroup):
    """Launches on copies; `StrictWork` delivers."""

    @private
    def call(self, method: str, args: list[Any], kwargs: dict[str, Any], index: int) -> dist.Work | None:
        op, outputs, inputs = METHODS[method]
        if op in ("barrier", "send", "recv"):
            return super().call(method, args, kwargs, index)
        places = {outputs, inputs}
        given = {place: args[place] for place in places}
        copies = {place: copy_tensors(value) for place, value in given.items()}
        for tensor, copy in zip(list_tensors(list(given.values())), list_tensors(list(copies.values()))):
            if tensor.stride() != copy.stride():
                # gloo would take the memory that follows the first entry, whatever belongs there.
                raise ValueError(f"{op} needs a tensor without gaps in memory; this one has strides {tensor.stride()}")
        for place, copy in copies.items():
            args[place] = copy
        targets = list_tensors(given[outputs])
        options = find_options(args, kwargs)
        if op == "broadcast" and options.rootRank == self.rank():
            targets = []  # the root only sends
        if op == "reduce" and options.rootRank != self.rank():
            targets = []  # only the root receives
        for target in targets:
            target.data.fill_(get_filler(target.dtype))
        work = self._perform(method, args, kwargs)
        self._note_end(work, index)
        given_tensors = [tensor for place in places for tensor in list_tensors(given[place])]
        results = list_tensors(copies[outputs]) if targets else []
        return StrictWork(work, self._recorder, index, given_tensors, targets, results)

    def _start_coalescing(self, device: torch.device) -> None:
        raise RuntimeError("pass no device to the coalescing manager: the process group coalesces by itself")


class StrictWork(RecordedWork):
    """Copies the results into the caller's tensors when it is first waited on."""

    _given, _at_launch, _targets, _results, _delivered = (
        hidden_attribute(),
        hidden_attribute(),
        hidden_attribute(),
        hidden_attribute(),
        hidden_attribute(),
    )

    def __init__(
        self,
        inner: dist.Work,
        recorder: Recorder,
        index: int,
        given: list[torch.Tensor],
        targets: list[torch.Tensor],
        results: list[torch.Tensor],
    ):
        super().__init__(inner, recorder, index)
        self._given = given
        self._at_launch = [(tensor.detach().clone(), read_version(tensor)) for tensor in given]
        self._targets = targets
        self._results = results
        self._delivered = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        super().wait(timeout)
        if not self._delivered:
            self._delivered = True
            if any(has_changed(now, *then) for now, then in zip(self._given, self._at_launch)):
                self._recorder.note("race", index=self._index)
            for target, result in zip(self._targets, self._results):
                target.data.copy_(result)
            self._given, self._at_launch, self._results = [], [], []
        return True

    @private
    def _await(self, timeout: timedelta | None) -> None:
        super()._await(timeout)
        if any(tensor.is_cuda for tensor in self._given):
            # Else a rank that waits for ever would seem to have what it waits for, and a deadlock to be none.
            torch.cuda.current_stream().synchronize()

    def is_completed(self) -> bool:
        return self.wait()

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._targets

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._targets)
        return future


def copy_tensors(value: Any) -> Any:
    """The same structure of lists with every tensor copied, strides kept."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return [copy_tensors(item) for item in value]


def get_filler(dtype: torch.dtype) -> Any:
    """What stands in a result that nobody has waited for."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype == torch.bool else torch.iinfo(dtype).min


def read_version(tensor: torch.Tensor) -> int:
    """How often autograd has seen the tensor change; 0 for a view, which shares the count of all its base's views."""
    return 0 if tensor._is_view() or tensor.is_inference() else tensor._version


def has_changed(now: torch.Tensor, then: torch.Tensor, then_version: int) -> bool:
    """Whether the tensor was written to. NaN is equal to NaN, so that only its version tells of NaN / 2."""
    value = now.detach()
    return read_version(now) != then_version or not bool(((value == then) | ((value != value) & (then != then))).all())
