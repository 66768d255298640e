"""A recording process group on which collectives take the time of a given link: an emulator that needs no network.

Every rank has a link of its own, on which its collectives follow each other in the order of their launches. A
collective is performed at once, on gloo, and whoever waits for it is let go when it is complete and the link's time for
it is over, counted from its launch or from the end of the collective before it, whichever is later. Waiting takes no
processor time. Until `use` names a link, and for barriers and point-to-point calls, nothing is delayed.

A rank does not know when its peers launch: one that comes early counts its time from its own launch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from brigade.recording import METHODS, RecordedWork, Recorder, RecordingGroup, tensors_in

UNPACED = ("barrier", "send", "recv")

# (messages that follow each other, for each of the other ranks; how often the whole buffer passes a rank's connection,
# but for 1/N) with ring algorithms, as in nccl-tests/doc/PERFORMANCE.md. A broadcast or a reduce is passed on in small
# pieces, whole.
RINGS = {"all_reduce": (2, 2), "reduce_scatter": (1, 1), "all_gather": (1, 1)}


def sent_bytes(op: str, nbytes: float, world_size: int) -> float:
    """What each rank sends for a collective on a buffer of `nbytes`, on the average and with a ring algorithm."""
    return RINGS.get(op, (1, 1))[1] * (world_size - 1) / world_size * nbytes


@dataclass(frozen=True)
class Link:
    """What connects each rank with the next: seconds for each message, and bytes per second in each direction."""

    latency_s: float
    bytes_per_s: float

    def seconds(self, op: str, nbytes: float, world_size: int) -> float:
        """How long a collective on a buffer of `nbytes` takes, all parts of a coalesced one together."""
        if world_size == 1:
            return 0.0
        messages = RINGS.get(op, (1, 1))[0] * (world_size - 1)
        carried = sent_bytes(op, nbytes, world_size) if op in RINGS else nbytes
        return messages * self.latency_s + carried / self.bytes_per_s


@dataclass(frozen=True)
class Pace:
    """A link relative to computation, so that it means the same on a slow machine and on a quick one.

    An all-reduce of all gradients takes `comm_ratio` times as long as backward alone, and the latency of one
    all-reduce, which comes on top, `latency_ratio` times.
    """

    comm_ratio: float
    latency_ratio: float

    def link(self, backward_s: float, grad_bytes: float, world_size: int) -> Link:
        """The link, once backward has been timed. Needs two ranks or more."""
        messages, _ = RINGS["all_reduce"]
        latency_s = self.latency_ratio * backward_s / (messages * (world_size - 1))
        return Link(latency_s, sent_bytes("all_reduce", grad_bytes, world_size) / (self.comm_ratio * backward_s))


_link: Link | None = None


def use(link: Link | None) -> None:
    """From now on this rank's collectives take the time of `link`; None takes no time."""
    global _link
    _link = link


class PacedGroup(RecordingGroup):
    """Performs every launch at once, and completes it when its time on the link is over."""

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any], index: int) -> dist.Work | None:
        op, outputs, inputs = METHODS[method]
        if _link is None or op in UNPACED:
            return super().call(method, args, kwargs, index)
        full = [sum(tensor.nbytes for tensor in tensors_in(args[place])) for place in {outputs, inputs}]
        seconds = _link.seconds(op, max(full), self.size())
        launched_at = time.perf_counter()
        work = getattr(self._inner, method)(*args, **kwargs)
        if work is None:
            return None
        paced = PacedWork(work, self._recorder, index, tensors_in(args[outputs]))
        traffic().put((paced, launched_at, seconds))
        return paced


class PacedWork(RecordedWork):
    """The handle of a launch that is complete when the link says so."""

    def __init__(self, inner: dist.Work, recorder: Recorder, index: int, outputs: Sequence[torch.Tensor]):
        super().__init__(inner, recorder, index)
        self._outputs = list(outputs)
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._told: torch.futures.Future | None = None  # when it is over; only for those who want a future: they cost
        self._future: torch.futures.Future | None = None

    def carry(self, ends_at: float) -> float:
        """Runs on the link's thread: completes the launch at `ends_at`, or when it is really complete. Returns when."""
        try:
            self._inner.wait()
        except Exception as error:  # such as a peer that has gone: for whoever waits
            self._error = error
        ends_at = time.perf_counter() if self._error else max(ends_at, time.perf_counter())
        time.sleep(max(0.0, ends_at - time.perf_counter()))
        if not self._error:
            self._recorder.note("end", index=self._index)
        with self._lock:
            self._over.set()
        if self._told:
            self._told.set_result(None)
        return ends_at  # not when the sleep was over: that is late each time, and would add up

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._recorder.note("wait", index=self._index)
        self._over.wait()
        if self._error:
            raise self._error
        self._recorder.note("done", index=self._index)
        return True

    def is_completed(self) -> bool:
        return self._over.is_set()

    def is_success(self) -> bool:
        return self._over.is_set() and not self._error

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        self._recorder.note("wait", index=self._index)
        self._recorder.note("done", index=self._index)
        with self._lock:
            if self._future:
                return self._future
            told: torch.futures.Future = torch.futures.Future()
            # An exception that `then` raises is one in C++ too. That of `set_exception` is not: torch DDP's reducer
            # takes it for tensors, and the process ends.
            self._future = told.then(self._outcome)
            if not self._over.is_set():
                self._told = told
                return self._future
        told.set_result(None)
        return self._future

    def _outcome(self, _: torch.futures.Future) -> list[torch.Tensor]:
        if self._error:
            raise self._error
        return self._outputs


_traffic: queue.SimpleQueue | None = None


def traffic() -> queue.SimpleQueue:
    """What is on this rank's link: (handle, when it was launched, seconds that it takes), completed by a thread."""
    global _traffic
    if _traffic is None:
        _traffic = queue.SimpleQueue()
        threading.Thread(target=complete, args=(_traffic,), daemon=True).start()
    return _traffic


def complete(launched: queue.SimpleQueue) -> None:
    free_at = 0.0
    while True:
        work, launched_at, seconds = launched.get()
        free_at = work.carry(max(free_at, launched_at) + seconds)
