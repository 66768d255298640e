"""What scenarios record: the phases of a step, the names of parameters, and events of their own kinds.

The events go to the recorder of this rank, which also has the launches. Outside a rank, these functions have no effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from brigade.ranks.rank.recorder import Recorder

_recorder = Recorder(lambda event: None)  # outside a rank, nobody listens


def install(recorder: Recorder) -> None:
    """Make `recorder` the one of this process, which is one rank of one run."""
    global _recorder
    _recorder = recorder


def ask(batch: int, number: int, x: torch.Tensor) -> torch.Tensor:
    """Return which entries of `x` at a border are halved: see `Recorder.ask`."""
    return _recorder.ask(batch, number, x)


def note(kind: str, **fields: Any) -> None:
    """Record an event of a scenario's own kind."""
    _recorder.note(kind, **fields)


def name_parameters(module: torch.nn.Module) -> None:
    """Record later launches on a parameter of `module`, or on its current gradient, with the parameter's name."""
    _recorder.parameters = dict(module.named_parameters())


def watch_gradients(module: torch.nn.Module) -> None:
    """From now on, record when gradients of `module` become ready: see `Recorder.watch_gradients`."""
    _recorder.watch_gradients(module)


def follow_backward(output: torch.Tensor) -> None:
    """Record the phase "backward", with "ready" events, in any backward through `output`."""
    recorder = _recorder

    def note_start(_: Sequence[torch.Tensor | None]) -> None:
        if recorder.phase != "backward":  # a backward may pass several outputs
            before, recorder.phase = recorder.phase, "backward"
            recorder.note("phase")
            torch.autograd.Variable._execution_engine.queue_callback(lambda: setattr(recorder, "phase", before))

    if output.grad_fn is not None:
        output.grad_fn.register_prehook(note_start)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """Record events in the block with this phase: "construct", "forward", "backward", "finish" or "step"."""
    recorder = _recorder
    before, recorder.phase = recorder.phase, name
    recorder.note("phase")  # in case the phase hangs before it records another event
    try:
        yield
    finally:
        recorder.phase = before
