"""A process group that records every collective, and changes nothing else.

In every rank, `RecordingGroup` receives all collective calls and passes them on to gloo or NCCL. The calls come from
the submission (on the default group or on a sub-group that it created) and from torch DDP's C++ reducer.

Student code has access to groups and handles. It could communicate without being recorded, or change the record. In
runs with a witness, the witness therefore does only what the record says (`runner/witness.py`).
"""

from __future__ import annotations

import functools
import os
import sys
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from brigade.ranks.rank.lockdown import refuse_finished_answers
from brigade.ranks.rank.memory import list_tensors, uncounted
from brigade.ranks.rank.recorder import Recorder
from brigade.ranks.texts import PACKAGE

BACKEND = "brigade"  # the name under which the recording group is registered with torch


class RecordedWork(dist.Work):
    """The handle of one launch. It passes all calls on and records waits."""

    def __init__(self, inner: dist.Work, recorder: Recorder, index: int):
        super().__init__()
        self._inner = inner
        self._recorder = recorder
        self._index = index
        self._ends_with_wait = False
        self._is_known = False  # whether the rank has learnt that the launch is complete
        self._follow_end()

    def _follow_end(self) -> None:
        """Record when the launch is complete. Without a future, that is when the first wait ends."""
        try:
            self._inner.get_future().add_done_callback(lambda _: self._recorder.note("end", index=self._index))
        except (RuntimeError, NotImplementedError):  # gloo's reduce_scatter, send and recv have no future
            self._ends_with_wait = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._recorder.note("wait", index=self._index)
        self._await(timeout)
        if self._ends_with_wait:
            self._ends_with_wait = False
            self._recorder.note("end", index=self._index)
        self._recorder.note("done", index=self._index)
        return True

    @uncounted
    def _await(self, timeout: timedelta | None) -> None:
        """Wait until the result is available. On CUDA, make the current stream wait."""
        self._inner.wait(timeout) if timeout else self._inner.wait()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        self._recorder.expect_recorded_thread()
        if not self._is_known and self._inner.is_completed():
            self._is_known = True
            self._recorder.note("complete", index=self._index)
        return self._is_known

    def _source_rank(self) -> int:
        return self._inner._source_rank()  # of a receive from any rank

    def result(self) -> list[torch.Tensor]:
        return self.get_future().wait()

    def get_future(self) -> torch.futures.Future:
        # A future counts as a wait, because its owner may wait on it where we cannot see it, as the reducer does.
        if not self._recorder.is_graded:
            self._recorder.note("wait", index=self._index)
            self._recorder.note("done", index=self._index)
            return self._inner.get_future()
        self.wait()
        future = self._inner.get_future()
        completed: torch.futures.Future = torch.futures.Future()  # its callbacks run in the caller's thread
        completed.set_result(future.wait())
        return completed


class Finished(dist.Work):
    """The handle of a call for which the inner group returned None.

    Since torch 2.8, NCCL's group returns no handle for a call with async_op=False, which runs on the current stream.
    """

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future:
        raise NotImplementedError("a call with async_op=False has no future")


# For each operation: the positions of outputs and inputs in the arguments, and the methods of a process group that
# perform it. A collective whose outputs are its inputs works in place. Torch 2.13 renamed some methods.
OPERATIONS: dict[str, tuple[int | None, int | None, str]] = {
    "all_reduce": (0, 0, "allreduce allreduce_coalesced"),
    "broadcast": (0, 0, "broadcast"),
    "reduce": (0, 0, "reduce"),
    "all_gather": (
        0, 1, "allgather allgather_coalesced _allgather_base allgather_into_tensor_coalesced all_gather_single "
        "all_gather_single_coalesced",
    ),
    "reduce_scatter": (
        0, 1, "reduce_scatter _reduce_scatter_base reduce_scatter_tensor_coalesced reduce_scatter_single "
        "reduce_scatter_single_coalesced",
    ),
    "gather": (0, 1, "gather"),
    "scatter": (0, 1, "scatter"),
    "all_to_all": (0, 1, "alltoall alltoall_base all_to_all_single"),
    "barrier": (None, None, "barrier"),
    "send": (None, 0, "send"),
    "recv": (0, None, "recv recv_anysource"),
}  # fmt: skip
METHODS = {
    method: (op, outputs, inputs) for op, (outputs, inputs, methods) in OPERATIONS.items() for method in methods.split()
}

# These also accept a single tensor. If a submission calls them without options, they use the default ones.
DEFAULTS = {"allreduce": dist.AllreduceOptions, "broadcast": dist.BroadcastOptions, "reduce": dist.ReduceOptions}


class RecordingGroup(dist.ProcessGroup):
    """Record every collective and pass it on to `inner`, a complete process group.

    Subclasses override `call` to handle the tensors in another way, and `check` to refuse some.
    """

    is_timed = False  # whether a collective must interrupt the computation

    @classmethod
    def prepare(cls, directory: str, world_size: int) -> None:
        """Do what a rank must do in the directory of the run before its first group is created."""

    def __init__(self, inner: dist.ProcessGroup, recorder: Recorder, name: str, ranks: list[int]):
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._recorder = recorder
        self._name = name
        self._ranks = ranks

    def check(self, op: str, received: list[torch.Tensor], sent: list[torch.Tensor]) -> None:
        """Raise an exception if these tensors cannot be used. Then the launch is neither recorded nor made."""

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any], index: int) -> dist.Work | None:
        """Perform launch `index` and return its handle."""
        return RecordedWork(self._perform(method, args, kwargs), self._recorder, index)

    @uncounted  # gloo's reduce-scatter copies its input
    def _perform(self, method: str, args: list[Any], kwargs: dict[str, Any]) -> dist.Work:
        work = getattr(self._inner, method)(*args, **kwargs)
        return Finished() if work is None else work

    def _launch(self, method: str, *arguments: Any, **kwargs: Any) -> dist.Work | None:
        args = list(arguments)
        op, outputs, inputs = METHODS[method]
        if self._recorder.is_graded:
            refuse_finished_answers()
        if method in DEFAULTS and isinstance(args[0], torch.Tensor):
            args[0] = [args[0]]
        if len(args) == 1 and method in DEFAULTS and "opts" not in kwargs:
            args.append(DEFAULTS[method]())
        options = find_options(args, kwargs)
        received, sent = ([] if place is None else list_tensors(args[place]) for place in (outputs, inputs))
        self.check(op, received, sent)
        full = received or sent if op in ("all_gather", "gather") else sent or received  # the larger side
        reduce_op = getattr(options, "reduceOp", None)
        name, memory = self._recorder.find_owner(full)
        line, caller = find_callers()
        index = self._recorder.launch(
            group=self._name,
            ranks=self._ranks,
            op=op,
            dtype=str(full[0].dtype).removeprefix("torch.") if full else None,
            numel=sum(t.numel() for t in full),
            nbytes=sum(t.nbytes for t in full),
            parts=len(sent) if "coalesced" in method else 1,
            reduce_op=None if reduce_op is None else str(reduce_op.op).rpartition(".")[2],
            root=getattr(options, "rootRank", None),
            peer=self._ranks[args[1]] if method in ("send", "recv") else None,
            sync=not getattr(options, "asyncOp", True),
            name=name,
            memory=memory,
            line=line,
            caller=caller,
        )
        if not any(tensor.is_cuda for tensor in [*received, *sent]):
            return self.call(method, args, kwargs, index)
        # NCCL connects ranks in the first call of some kinds, such as all_to_all, and blocks the CPU until it has.
        self._recorder.note("call", index=index)
        try:
            return self.call(method, args, kwargs, index)
        finally:
            self._recorder.note("called", index=index)

    def _start_coalescing(self, device: torch.device) -> None:
        self._inner._start_coalescing(device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        return self._inner._end_coalescing(device)

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def supports_splitting(self) -> bool:
        return False


for _method in METHODS:
    setattr(RecordingGroup, _method, functools.partialmethod(RecordingGroup._launch, _method))


def find_callers() -> tuple[str | None, str | None]:
    """Return the innermost line of the submission on the stack, and the name of the submission's outermost function.

    For example: "coalesced.py:59 in all_gather", "full_state_dict". Both are None if the submission is not on the
    stack, for example when torch DDP's reducer launches a collective.
    """
    line = caller = None
    frame: FrameType | None = sys._getframe(1)
    while frame:
        if frame.f_globals.get("__name__", "").startswith(f"{PACKAGE}."):
            caller = frame.f_code.co_name
            line = line or f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno} in {caller}"
        frame = frame.f_back
    return line, caller


def find_options(args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Return the options object of a collective, such as `AllreduceOptions`, or None."""
    return next((arg for arg in args if hasattr(arg, "timeout")), kwargs.get("opts"))
