"""Refuse what is no answer in a graded run: torch's own wrappers, and threads that nobody would record."""

from __future__ import annotations

import _thread
import sys
import threading
from types import FrameType
from typing import Any

from brigade.rank.recorder import Recorder

THREAD_STARTS = ("start_new_thread", "start_new", "start_joinable_thread")


def expect_submission(recorder: Recorder) -> None:
    """From now on, only the submission itself may call collectives, and only in the main thread.

    Torch's own wrappers are finished answers to the assignments. The modes that count copies and views see one thread.
    """
    recorder.is_graded = True
    for module, prefix in ((_thread, ""), (threading, "_")):
        for name in THREAD_STARTS:
            if hasattr(module, prefix + name):
                setattr(module, prefix + name, refuse_thread)


def refuse_thread(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError("submissions must not start threads, because only the main thread is recorded")


# Modules of torch that call collectives by themselves. The last one runs backward, and with it C++ code such as DDP's.
ANSWERS = (
    "torch.nn.parallel.", "torch.distributed.fsdp.", "torch.distributed.optim.", "torch.distributed._composable.",
    "torch.distributed.algorithms.", "torch.autograd.graph.",
)  # fmt: skip


def refuse_finished_answers() -> None:
    """Raise RuntimeError if torch's own wrapper has called a collective, and the submission has called the wrapper."""
    frame: FrameType | None = sys._getframe(1)
    while frame and (name := frame.f_globals.get("__name__", "")).startswith(("torch.", "contextlib", "brigade.rank.")):
        if f"{name}.".startswith(ANSWERS):
            raise RuntimeError(f"{name} is not accepted as an answer; use the collectives of torch.distributed")
        frame = frame.f_back
