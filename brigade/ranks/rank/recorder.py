"""What a rank records: its launches and waits, when its gradients become ready, and events of a scenario's own kinds.

`brigade/ranks/events.py` lists the kinds of events and their fields. The parent uses it to read the events.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

import torch

from brigade.ranks.borders import draw_halved

SAMPLE = 16  # entries that a rank reports at a border, or a few more


class Recorder:
    """Number the launches of a rank, add times and phases to its events, and pass the events to `sink`.

    `borders` has the seeds of borders by batch, unless a witness has them. Then `witness` is the channel to it.
    """

    def __init__(
        self, sink: Callable[[dict[str, Any]], None], borders: Sequence[Sequence[int]] = (), witness: Any = None
    ):
        # One phase for all threads, because on CUDA, hooks run in autograd's threads. "setup" is `events.OUTSIDE`.
        self.phase = "setup"
        self._sink, self._borders, self._witness = sink, borders, witness
        self.is_graded = False  # whether only the submission may communicate: see `lockdown.expect_submission`
        self.expect_recorded_thread: Callable[[], None] = lambda: None  # raises RuntimeError in any other thread
        self.progress = 0  # events so far, except ends of transfers, which come at any time
        self._launches = 0
        self._lock = threading.RLock()
        self.parameters: dict[str, torch.nn.Parameter] = {}  # whose names are recorded with launches on them
        self._nodes: list[Any] = []  # that accumulate the watched gradients

    def note(self, kind: str, **fields: Any) -> None:
        """Record an event."""
        self.expect_recorded_thread()
        with self._lock:
            self.progress += kind != "end"
            self._sink({"kind": kind, "time": perf_counter(), "phase": self.phase, **fields})

    def launch(self, **fields: Any) -> int:
        """Record a launch and return its number."""
        with self._lock:
            self.note("launch", index=self._launches, **fields)
            self._launches += 1
            return self._launches - 1

    def ask(self, batch: int, number: int, x: torch.Tensor) -> torch.Tensor:
        """Return which entries of `x` at a border are halved, and record that the rank knows it from now on.

        The event has some of the entries, as float32 in hexadecimal.
        """
        values = sample(x).numpy().tobytes().hex()
        self.note("border", batch=batch, number=number, numel=x.numel(), values=values)
        if self._borders:
            return draw_halved(self._borders[batch][number], x.numel())
        return torch.frombuffer(self._witness.receive_answer(), dtype=torch.uint8)

    def watch_gradients(self, module: torch.nn.Module) -> None:
        """In the phase "backward", record an event "ready" just before a gradient of the module is added to `.grad`.

        The hook belongs to the node of the autograd graph, because a wrapper may clear a parameter's own hooks. It runs
        after the parameter's tensor hooks and before its post-accumulate hooks.
        """

        def note_ready(name: str, gradients: Sequence[torch.Tensor | None]) -> None:
            if gradients[0] is not None and self.phase == "backward":
                self.note("ready", name=name)

        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                node = torch.autograd.graph.get_gradient_edge(parameter).node
                self._nodes.append(node)  # keeps it alive, which the parameter does not
                node.register_prehook(functools.partial(note_ready, name))

    def find_owner(self, tensors: list[torch.Tensor]) -> tuple[str | None, str | None]:
        """Return the name of the parameter whose memory a launch uses, and "weight" or "gradient".

        Return (None, None) for a copy, or for several tensors.
        """
        if len(tensors) != 1:
            return None, None
        address, numel = tensors[0].data_ptr(), tensors[0].numel()
        for name, parameter in self.parameters.items():
            if parameter.numel() != numel:
                continue
            if parameter.data_ptr() == address:
                return name, "weight"
            if parameter.grad is not None and parameter.grad.data_ptr() == address:
                return name, "gradient"
        return None, None


def sample(x: torch.Tensor) -> torch.Tensor:
    """Return some entries of a tensor, as float32 on the CPU."""
    return x.flatten()[:: max(1, x.numel() // SAMPLE)].to("cpu", torch.float32)
