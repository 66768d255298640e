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

from brigade import locks
from brigade.recording import METHODS, RecordedWork, Recorder, RecordingGroup, tensors_in

locks.trust(globals())

UNPACED = ("barrier", "send", "recv")

# A real one of these begins when the one before it is complete, which it has long been where the link is slower than
# gloo. Several at once, on the two threads of gloo, were seen to corrupt memory: ranks of module 8 died inside gloo's
# all-gather in 12 of 124 runs of 100 rounds with the quickest links (torch 2.13), and in none of 79 on one thread. The
# cause is unknown. One thread for everything would not do: it cannot keep up with module 3's many small all-reduces.
ONE_AT_A_TIME = ("reduce_scatter", "all_gather")

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

    @property
    def described(self) -> str:
        return f"{1e6 * self.latency_s:.1f} us a message and {8e-9 * self.bytes_per_s:.3g} Gbit/s in each direction"

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

    gloo_threads = 2  # torch's own number
    _previous: PacedWork | None = None  # of ONE_AT_A_TIME

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any], index: int) -> dist.Work | None:
        op, outputs, inputs = METHODS[method]
        if _link is None or op in UNPACED:
            return super().call(method, args, kwargs, index)
        full = [sum(tensor.nbytes for tensor in tensors_in(args[place])) for place in {outputs, inputs}]
        ends_at = occupy(_link.seconds(op, max(full), self.size()))
        if op in ONE_AT_A_TIME and self._previous:
            self._previous.settle()
        work = getattr(self._inner, method)(*args, **kwargs)
        if work is None:
            return None
        paced = PacedWork(work, self._recorder, index, tensors_in(args[outputs]), ends_at)
        if op in ONE_AT_A_TIME:
            self._previous = paced
        return paced


_free_at = 0.0  # when the last launch on this rank's link will be over
_free_lock = threading.Lock()


def occupy(seconds: float) -> float:
    """Puts a launch that takes so long on the link, behind those that are there. Returns when it will be over."""
    global _free_at
    with _free_lock:
        _free_at = max(_free_at, time.perf_counter()) + seconds
        return _free_at


class PacedWork(RecordedWork):
    """The handle of a launch that is over at `ends_at`, or when it is really complete if that is later.

    Whoever waits for it sleeps until then. Only a future needs a thread, for torch DDP waits on futures in C++.
    """

    def __init__(
        self, inner: dist.Work, recorder: Recorder, index: int, outputs: Sequence[torch.Tensor], ends_at: float
    ):
        super().__init__(inner, recorder, index)
        self._outputs = list(outputs)
        self._ends_at = ends_at
        self._settled = self._over = False
        self._lock = threading.Lock()
        self._future: torch.futures.Future | None = None

    def settle(self) -> None:
        """Returns when the real collective is complete."""
        with self._lock:
            self._settle()

    def _settle(self) -> None:
        if not self._settled:
            self._inner.wait()  # once: gloo's reduce-scatter writes its output in here
            self._settled = True

    def _finish(self) -> None:
        """Returns when the launch is over. Raises what its collective does, such as for a peer that has gone."""
        with self._lock:
            if self._over:
                return
            early = time.perf_counter() < self._ends_at
            self._settle()
            now = time.perf_counter()
            time.sleep(max(0.0, self._ends_at - now))
            self._recorder.note("end", index=self._index, time=max(self._ends_at, now) if early else self._ends_at)
            self._over = True

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._recorder.note("wait", index=self._index)
        self._finish()
        self._recorder.note("done", index=self._index)
        return True

    def is_completed(self) -> bool:
        return self._over or (time.perf_counter() >= self._ends_at and self._inner.is_completed())

    def result(self) -> list[torch.Tensor]:
        self.wait()
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        self._recorder.note("wait", index=self._index)
        self._recorder.note("done", index=self._index)
        with self._lock:
            if self._future is None:
                begun: torch.futures.Future = torch.futures.Future()
                # An exception that `then` raises is one in C++ too. That of `set_exception` is not: torch DDP's reducer
                # takes it for tensors, and the process ends.
                self._future = begun.then(self._outcome)
                finishing().put(begun)
        return self._future

    def _outcome(self, _: torch.futures.Future) -> list[torch.Tensor]:
        self._finish()
        return self._outputs


_finishing: queue.SimpleQueue | None = None


def finishing() -> queue.SimpleQueue:
    """Futures that are to be completed one after the other, by a thread; `PacedWork._outcome` waits in it."""
    global _finishing
    if _finishing is None:
        _finishing = queue.SimpleQueue()
        threading.Thread(target=complete, args=(_finishing,), daemon=True).start()
    return _finishing


def complete(futures: queue.SimpleQueue) -> None:
    while True:
        futures.get().set_result(None)
