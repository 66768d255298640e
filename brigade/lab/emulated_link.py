"""A recording process group whose collectives take as long as on an emulated link. It needs no network.

Every rank has one link, which sends and receives at the same time; if there are nodes, it has one to the ranks of its
node and one to other nodes. A collective occupies the links of all ranks of its group in both directions. It starts
when the last of these ranks has launched it and their links are free, and ends latency + bytes / bandwidth later, on
every rank at the same time. A message occupies the sender's link in one direction and the receiver's link in the
other, once both ranks have launched it. The launches on a link run in the order in which the last rank of each launch
called it.

The real collective runs on gloo as soon as all ranks have launched it, and a reduce-scatter without gloo's detour
(`ReduceScatterWork`). A rank that waits for it sleeps until the modelled end, so that it takes no processor time. If
gloo needs longer than the model says, the collective ends when gloo has finished. Barriers and receives from any rank
are not delayed. Nothing is delayed before `use` names a link.

The last rank to launch a collective computes when it starts and ends, and writes these times to memory that all ranks
of the run share (`SharedLaunches`). This needs one clock: `time.perf_counter` reads the same clock in all processes of
a machine, on Linux and on macOS. Ranks on several machines have no common clock, so `torchrun.py` refuses a link there.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from brigade.ranks.events import OPPOSITES, RINGS, count_sent_bytes
from brigade.ranks.rank.memory import list_tensors
from brigade.ranks.rank.recorder import Recorder
from brigade.ranks.rank.recording_group import METHODS, RecordedWork, RecordingGroup, find_options

MAX_LAUNCHES = 2**20  # of one group in one run. The file has room for this many; unused room takes no disk space.
LOOK_S = 1e-4  # pause between two checks for the launch of the last rank
BLOCKED_S = 1e-3  # waiting for a collective that gloo has finished takes less time than this


def spans_nodes(ranks: Collection[int], node_size: int) -> bool:
    """Return whether the ranks are in several nodes of `node_size` consecutive ranks."""
    return min(ranks) // node_size < max(ranks) // node_size


@dataclass(frozen=True)
class Link:
    """The connection from each rank to the next: seconds per message, and bytes per second in each direction.

    If there is an `outer` link, it connects the nodes, which consist of `node_size` consecutive ranks, and this link
    connects the ranks of a node. A ring over several nodes has messages of both kinds. Each rank has a network card,
    and a group uses `cards` of those of its ranks in a node at the same time: NCCL has a ring for each card.
    """

    latency_s: float
    bytes_per_s: float
    outer: Link | None = None
    node_size: int = 1
    cards: int = 1

    def count_nodes(self, ranks: Collection[int]) -> int:
        """Return the number of nodes of these ranks (1 if there is no outer link)."""
        return len({rank // self.node_size for rank in ranks}) if self.outer else 1

    @property
    def description(self) -> str:
        """The link in words."""
        text = f"{1e6 * self.latency_s:.1f} µs per message and {8e-9 * self.bytes_per_s:.3g} Gbit/s in each direction"
        return text + (f" inside a node, and {self.outer.description} between nodes" if self.outer else "")

    def seconds(self, op: str, nbytes: float, num_ranks: int, num_nodes: int = 1) -> float:
        """Return how many seconds a collective, or a message between two ranks, takes.

        `nbytes` counts the full buffer, all parts together. The ranks are in `num_nodes` nodes, equally many in each.
        """
        if num_ranks == 1:
            return 0.0
        rounds = RINGS.get(op, (1, 1))[0]
        wire_bytes = count_sent_bytes(op, nbytes, num_ranks) if op in RINGS else nbytes
        if num_nodes == 1 or self.outer is None:
            return rounds * (num_ranks - 1) * self.latency_s + wire_bytes / self.bytes_per_s
        between = rounds * (num_nodes - 1)
        latency_s = (rounds * (num_ranks - 1) - between) * self.latency_s + between * self.outer.latency_s
        bytes_per_s = self.outer.bytes_per_s * min(self.cards, num_ranks // num_nodes)
        if num_ranks > num_nodes:
            bytes_per_s = min(bytes_per_s, self.bytes_per_s)
        return latency_s + wire_bytes / bytes_per_s


@dataclass(frozen=True)
class Pace:
    """A link relative to computation, so that it has the same effect on slow and on fast machines.

    An all-reduce of all gradients takes `comm_ratio` times as long as backward alone. Each all-reduce also has a
    latency, which is `latency_ratio` times as long as backward. If there are nodes of `node_size` ranks, this describes
    an all-reduce inside a node (of two ranks, if `node_size` is 1), and the link between nodes is `slowdown` times
    slower.
    """

    comm_ratio: float
    latency_ratio: float
    node_size: int | None = None
    slowdown: float = 1.0

    def link(self, backward_s: float, grad_bytes: float, world_size: int) -> Link:
        """Return the link for a measured backward of `backward_s` seconds. `world_size` must be at least 2."""
        messages, _ = RINGS["all_reduce"]
        ranks = max(2, self.node_size) if self.node_size else world_size
        latency_s = self.latency_ratio * backward_s / (messages * (ranks - 1))
        link = Link(latency_s, count_sent_bytes("all_reduce", grad_bytes, ranks) / (self.comm_ratio * backward_s))
        if not self.node_size:
            return link
        outer = Link(link.latency_s * self.slowdown, link.bytes_per_s / self.slowdown)
        return replace(link, outer=outer, node_size=self.node_size)


def read_link(fields: dict[str, Any] | None) -> Link | None:
    """Return the link with these fields, as `dataclasses.asdict` returns them."""
    return None if fields is None else Link(**fields | {"outer": read_link(fields.get("outer"))})


_link: Link | None = None


def use(link: Link | None) -> None:
    """Emulate `link` for this rank's collectives from now on. With None, no link is emulated.

    All ranks must call this with the same link, between the same two collectives.
    """
    global _link
    _link = link


class SharedLaunches:
    """Information about launches, which all ranks of a run share in memory-mapped files of one directory."""

    def __init__(self, directory: str | os.PathLike, world_size: int):
        self._directory = Path(directory)
        self.thread_lock = threading.Lock()  # between the threads of this rank; the lock of the file is between ranks
        self.lock_file = os.open(self._directory / "link-lock", os.O_RDWR | os.O_CREAT, 0o600)
        self.world_size = world_size
        self.free_at = self.map("link-free", 4 * world_size)  # for each direction, the time at which the link is free

    def map(self, name: str, count: int) -> memoryview[float]:
        """Map the file with this name as `count` numbers, initially 0, which all ranks that map it share."""
        file = os.open(self._directory / name, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(file, 8 * count)  # has no effect if another rank has done this
            return memoryview(mmap.mmap(file, 8 * count)).cast("d")
        finally:
            os.close(file)


_shared: SharedLaunches | None = None


class LaunchSeries:
    """The collectives of one group, or the messages from one rank to another, in shared memory.

    All ranks that take part number the launches from 0 in the same way.
    """

    def __init__(self, name: str, senders: Sequence[int], receivers: Sequence[int]):
        self._senders, self._receivers = senders, receivers
        self._ranks = {*senders, *receivers}
        # For each launch: the number of ranks that have called it, its start and its end.
        if _shared is None:
            raise RuntimeError("call EmulatedLinkGroup.prepare before the first group is created")
        self._shared = _shared
        self._numbers = _shared.map(f"launches-{name}", 3 * MAX_LAUNCHES)
        self._count = 0

    def add(self, network: Link, op: str, nbytes: float) -> int:
        """Tell the other ranks that this rank calls the next launch. Return its number."""
        with self._shared.thread_lock:
            fcntl.flock(self._shared.lock_file, fcntl.LOCK_EX)
            try:
                number = self._count
                if number == MAX_LAUNCHES:
                    raise RuntimeError(f"the emulated link has room for only {MAX_LAUNCHES} launches of a group")
                self._count += 1
                self._numbers[3 * number] += 1
                if self._numbers[3 * number] == len(self._ranks):
                    self._reserve(number, network, op, nbytes)
            finally:
                fcntl.flock(self._shared.lock_file, fcntl.LOCK_UN)
        return number

    def _reserve(self, number: int, network: Link, op: str, nbytes: float) -> None:
        """Reserve the links for a launch that all its ranks have called, in the directions in which it carries data."""
        num_nodes = network.count_nodes(self._ranks)
        world_size, free_at = self._shared.world_size, self._shared.free_at
        first = 2 * world_size if num_nodes > 1 else 0
        directions = [first + rank for rank in self._senders]
        directions += [first + world_size + rank for rank in self._receivers]
        start = max(time.perf_counter(), *(free_at[direction] for direction in directions))
        end = start + network.seconds(op, nbytes, len(self._ranks), num_nodes)
        for direction in directions:
            free_at[direction] = end
        self._numbers[3 * number + 1] = start
        self._numbers[3 * number + 2] = end  # written last: a rank that sees the end can read the start

    def get_times(self, number: int) -> tuple[float, float] | None:
        """Return the start and end times of a launch, or None until every rank has launched it."""
        end = self._numbers[3 * number + 2]
        return (self._numbers[3 * number + 1], end) if end else None


SUMS = {dist.ReduceOp.SUM: torch.sum, dist.ReduceOp.AVG: torch.mean}


class ReduceScatterWork(dist.Work):
    """The handle of a reduce-scatter in which each rank receives its own part from every rank, and adds these parts up.

    Gloo's own reduce-scatter is an all-reduce of a copy. It would take processor time from the computation that it
    overlaps with, which an all-reduce of the same gradients would not take.
    """

    def __init__(self, group: dist.ProcessGroup, outputs: list[torch.Tensor], inputs: list[torch.Tensor], add: Any):
        super().__init__()
        self._add, self._outputs = add, outputs
        self._parts = [output.new_empty(group.size(), *output.shape) for output in outputs]  # from each rank
        self._exchanges = [
            dist.all_to_all_single(parts.view_as(tensor), tensor, group=group, async_op=True)
            for parts, tensor in zip(self._parts, inputs, strict=True)
        ]

    def wait(self, timeout: timedelta | None = None) -> bool:
        for exchange, parts, output in zip(self._exchanges, self._parts, self._outputs, strict=True):
            exchange.wait()
            self._add(parts, 0, out=output)
        return True


class EmulatedLinkGroup(RecordingGroup):
    """Perform each launch as soon as all ranks have called it, and complete it at its modelled end.

    Gloo has one thread per group, as in other modes. It performs the collectives in order, as the link does. Each
    real collective takes less time than on any link that is worth emulating, so gloo keeps up.
    """

    is_timed = True

    @classmethod
    def prepare(cls, directory: str, world_size: int) -> None:
        """Share launches with the other ranks through files of `directory`."""
        global _shared
        _shared = SharedLaunches(directory, world_size)

    def __init__(self, inner: dist.ProcessGroup, recorder: Recorder, name: str, ranks: list[int]):
        super().__init__(inner, recorder, name, ranks)
        own_name = f"{name}-{'-'.join(map(str, ranks))}"
        self._collectives = LaunchSeries(own_name, ranks, ranks)
        self._message_series: dict[tuple[int, int], LaunchSeries] = {}  # by sender and receiver

    def call(self, method: str, args: list[Any], kwargs: dict[str, Any], index: int) -> dist.Work | None:
        op, outputs, inputs = METHODS[method]
        if _link is None or op == "barrier" or method == "recv_anysource":
            return super().call(method, args, kwargs, index)
        nbytes = max(sum(tensor.nbytes for tensor in list_tensors(args[i])) for i in {outputs, inputs} if i is not None)
        series = self._find_messages(op, args[1]) if op in OPPOSITES else self._collectives
        number = series.add(_link, op, nbytes)
        results, sent = ([] if place is None else list_tensors(args[place]) for place in (outputs, inputs))
        add = SUMS.get(find_options(args, kwargs).reduceOp.op) if op == "reduce_scatter" else None
        if add and len(results) == len(sent):
            work = ReduceScatterWork(self._inner, results, sent, add)
        else:
            work = getattr(self._inner, method)(*args, **kwargs)
        return EmulatedLinkWork(work, self._recorder, index, results, series, number)

    def _find_messages(self, op: str, peer: int) -> LaunchSeries:
        """Return the series of messages to or from a rank of the group."""
        sender, receiver = (self.rank(), peer) if op == "send" else (peer, self.rank())
        if (sender, receiver) not in self._message_series:
            ranks = self._ranks[sender], self._ranks[receiver]
            name = f"{self._name}-{ranks[0]}-to-{ranks[1]}"
            self._message_series[sender, receiver] = LaunchSeries(name, ranks[:1], ranks[1:])
        return self._message_series[sender, receiver]


_completer = ThreadPoolExecutor(max_workers=1)  # completes futures in order, each as soon as its launch is complete


class EmulatedLinkWork(RecordedWork):
    """The handle of a launch on the emulated link.

    The launch is complete at its modelled end, or when gloo has finished if that is later. A rank that waits for it
    sleeps until then. Only futures need a thread, because torch DDP waits on futures in C++.
    """

    def __init__(
        self,
        inner: dist.Work,
        recorder: Recorder,
        index: int,
        outputs: Sequence[torch.Tensor],
        launches: LaunchSeries,
        number: int,
    ):
        super().__init__(inner, recorder, index)
        self._outputs = list(outputs)
        self._launches = launches
        self._number = number
        self._is_over = False
        self._lock = threading.Lock()
        self._future: torch.futures.Future | None = None

    def _follow_end(self) -> None:
        """Do nothing: `_await` records the modelled end."""

    def _await(self, timeout: timedelta | None) -> None:
        """Wait until the launch is complete. Raise the exception of its collective, for example if a peer has ended."""
        with self._lock:
            if self._is_over:
                return
            began = time.perf_counter()
            self._inner.wait()  # only once, because a reduce-scatter writes its output in this call
            # Most collectives are complete only after all ranks have launched them. The root of a broadcast
            # finishes its part earlier, and so do the ranks that only send in a reduce.
            while (times := self._launches.get_times(self._number)) is None:
                time.sleep(LOOK_S)
            now = time.perf_counter()
            start, end = times
            time.sleep(max(0.0, end - now))
            has_waited = began < end or now - began > BLOCKED_S  # otherwise gloo finished earlier, at an unknown time
            self._recorder.note("end", index=self._index, began=start, time=max(end, now) if has_waited else end)
            self._is_over = True

    def is_completed(self) -> bool:
        times = self._launches.get_times(self._number)
        return self._is_over or (times is not None and time.perf_counter() >= times[1] and self._inner.is_completed())

    def get_future(self) -> torch.futures.Future:
        self._recorder.note("wait", index=self._index)
        self._recorder.note("done", index=self._index)
        with self._lock:
            if self._future is None:
                begun: torch.futures.Future = torch.futures.Future()
                # If `then` raises, C++ sees an exception. After `set_exception`, torch DDP's reducer would treat
                # the exception as tensors, and the process would abort.
                self._future = begun.then(self._await_and_return)
                _completer.submit(begun.set_result, None)
        return self._future

    def _await_and_return(self, _: torch.futures.Future) -> list[torch.Tensor]:
        self._await(None)
        return self._outputs
