"""Refuse what is no answer in a graded run: torch's own wrappers, and work in threads that nobody would record."""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, NoReturn

from torch.utils._python_dispatch import TorchDispatchMode

from brigade.ranks.rank.recorder import Recorder

THREAD_STARTS = ("start_new_thread", "start_new", "start_joinable_thread")
OTHER_THREAD = (
    "the threads of a submission must not use tensors or collectives, because only its main thread is recorded"
)


class Apart(TorchDispatchMode):
    """A context manager of a thread, in which operations on tensors fail. `report` tells the parent.

    The modes that count copies and views see only the main thread.
    """

    def __init__(self, report: Callable[[BaseException], None]):
        super().__init__()
        self._report = report

    def refuse(self) -> NoReturn:
        error = RuntimeError(OTHER_THREAD)
        self._report(error)  # the submission may catch the exception, or wait forever for the thread's result
        raise error

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        self.refuse()


def expect_submission(recorder: Recorder, report: Callable[[BaseException], None]) -> None:
    """From now on, only the submission itself may call collectives, and only in threads that it has not started.

    Torch's own wrappers are finished answers to the assignments. On CUDA, autograd runs hooks in a thread of torch.
    """
    current = threading.local()

    def run_apart(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        with Apart(report) as current.apart:
            function(*args, **kwargs)

    def expect_recorded_thread() -> None:
        if hasattr(current, "apart"):
            current.apart.refuse()

    recorder.is_graded, recorder.expect_recorded_thread = True, expect_recorded_thread
    for module, prefix in ((_thread, ""), (threading, "_")):
        for name in THREAD_STARTS:
            if start := getattr(module, prefix + name, None):
                setattr(module, prefix + name, partial(start_apart, start, run_apart))


def start_apart(
    start: Callable[..., Any], run_apart: Callable[..., None], function: Any, *args: Any, **how: Any
) -> Any:
    """Start a thread with a function of `_thread`, which the submission calls with these arguments."""
    return start(partial(run_apart, function), *args, **how)


# Modules of torch that call collectives by themselves. The last one runs backward, and with it C++ code such as DDP's.
ANSWERS = (
    "torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed.optim.", "torch.distributed._composable.",
    "torch.distributed.algorithms.", "torch.autograd.graph.",
)  # fmt: skip


PASSED_ON = ("torch.", "contextlib", "brigade.ranks.rank.")  # modules between a wrapper and the recording group


def refuse_finished_answers() -> None:
    """Raise RuntimeError if torch's own wrapper has called a collective, and the submission has called the wrapper."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (name := frame.f_globals.get("__name__", "")).startswith(PASSED_ON):
        if f"{name}.".startswith(ANSWERS):
            raise RuntimeError(f"{name} is not accepted as an answer; use the collectives of torch.distributed")
        frame = frame.f_back
