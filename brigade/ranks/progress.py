"""What the ranks of a run are doing, from their events: who waits for whom, mismatches and deadlocks."""

from __future__ import annotations

import bisect
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import NamedTuple

from brigade.ranks.events import FIELDS, OPPOSITES, OUTSIDE, Event, describe


class RankRecord:
    """The events and the launches that one rank has reported so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.calls: list[list[Event]] = [[]]  # the events of each call, with launches numbered from 0 in each
        self._num_earlier = 0  # launches of earlier calls
        self._ends: list[int] = []  # the number of launches at the end of each call
        self.launches: list[Event] = []
        self.waiting: Event | None = None  # the launch that the rank waits for or is in, or a "connect" event
        self.queued: dict[int, Event] = {}  # launches on CUDA that the rank has not waited for, by index

    def add(self, event: Event) -> None:
        """Add the rank's next event. Leave it out of its call if it belongs to a launch of an earlier call."""
        self.events.append(event)
        if not self._num_earlier or "index" not in FIELDS.get(event["kind"], ()):
            self.calls[-1].append(event)
        elif event["index"] >= self._num_earlier:
            self.calls[-1].append(event | {"index": event["index"] - self._num_earlier})
        if event["kind"] == "launch":
            self.launches.append(event)
        elif event["kind"] in ("call", "wait"):
            self.waiting = self.launches[event["index"]]
        elif event["kind"] == "connect":
            self.waiting = event
        elif event["kind"] in ("done", "connected"):
            self.waiting = None
            self.queued.pop(event.get("index", -1), None)
        elif event["kind"] == "called":
            self.queued[event["index"]] = launch = self.launches[event["index"]]
            if self.waiting is launch:  # another thread may wait for another launch
                self.waiting = None

    def end_call(self) -> None:
        """Let later events belong to the next call."""
        self.calls.append([])
        self._num_earlier = len(self.launches)
        self._ends.append(self._num_earlier)

    def find_call(self, index: int) -> int:
        """Return the number of the call that made launch `index`."""
        return bisect.bisect_right(self._ends, index)

    def describe_last_launch(self) -> str:
        """Describe the rank's last launch, for example "after all_reduce #3 (fc2.weight, float32, 4096 B)"."""
        return f"after {describe(self.launches[-1])}" if self.launches else "and has launched nothing"

    def describe_activity(self, missing_peers: Sequence[int] = ()) -> str:
        """Describe what the rank is doing, for example "waits in all_reduce #3 (...), which rank 1 never launched".

        `missing_peers` are the ranks that have not launched what this rank waits for.
        """
        names = " and ".join(f"rank {peer}" for peer in missing_peers)
        if self.waiting is None:
            phase = self.events[-1]["phase"] if self.events else OUTSIDE
            return f"is {'busy' if phase == OUTSIDE else f'in {phase}'} {self.describe_last_launch()}"
        if self.waiting["kind"] == "connect":
            text = f"is creating the process group of the ranks {', '.join(map(str, self.waiting['ranks']))}"
            missing = f"which {names} never did"
        else:
            text, opposite = f"waits in {describe(self.waiting)}", OPPOSITES.get(self.waiting["op"])
            missing = f"for which {names} called no {opposite}" if opposite else f"which {names} never launched"
        return f"{text}, {missing}" if names else text


class Mismatch(NamedTuple):
    """Two launches with the same number on two ranks of a group that do not match."""

    rank: int
    launch: Event
    peer: int
    peer_launch: Event


class Progress:
    """The launches of the ranks of a run so far. They determine which ranks wait for which others."""

    def __init__(self, world_size: int):
        self.ranks = [RankRecord() for _ in range(world_size)]
        # By group and rank: the collectives, the "connect" events, the sends to each peer and the receives from it.
        self._series: dict[tuple, list[Event]] = {}
        self._numbers: dict[int, int] = {}  # the position in its series of each launch, by the id of the event
        self.mismatch: Mismatch | None = None  # the first one

    def add(self, rank: int, event: Event) -> None:
        """Add the next event of a rank."""
        self.ranks[rank].add(event)
        if event["kind"] in ("launch", "connect"):
            series = self._series.setdefault(make_key(rank, event), [])
            self._numbers[id(event)] = len(series)
            series.append(event)
            self.mismatch = self.mismatch or self._find_mismatch(rank, event)

    def describe_activity(self, rank: int, settled: Collection[int] = ()) -> str:
        """Describe what a rank is doing and, if it waits for a message, what its peer waits for instead.

        Name the launch that makes it impossible for the rank to finish: see `find_lost_launch`.
        """
        missing = self.find_missing_peers(rank)
        text = self.ranks[rank].describe_activity(missing)
        if lost := self.find_lost_launch(rank, settled):
            peers = [peer for peer in self._find_peers_without(rank, lost) if peer in settled]
            names = " and ".join(f"rank {peer}" for peer in peers)
            return f"{text}, but {names} never launched {describe(lost)}"
        other = self.ranks[missing[0]].waiting if missing else None
        own = self.ranks[rank].waiting or {}
        if other and other["kind"] == "launch" and own.get("op", "") in OPPOSITES:
            text += f" because it waits in {describe(other, with_data=False)}"
        return text

    def find_missing_peers(self, rank: int) -> list[int]:
        """Return the peers that have not launched what this rank waits for, or not begun to create its new group.

        With gloo, a send ends when the peer receives. Tags are not compared. A receive from any rank may match any
        send, so nobody is missing then. A run that hangs in this way ends only at the deadline.
        """
        launch = self.ranks[rank].waiting
        return self._find_peers_without(rank, launch) if launch else []

    def find_lost_launch(self, rank: int, settled: Collection[int]) -> Event | None:
        """Return the first launch on CUDA that can never complete, if the rank does not wait for a launch.

        A peer in `settled` has not launched it. Its kernel waits on the GPU, so the rank never ends, and CUDA may block
        the rank before it reaches a wait: to load a kernel that is used for the first time, or to allocate memory.
        """
        record = self.ranks[rank]
        if record.waiting or rank in settled:
            return None
        lost = (one for one in record.queued.values() if {*self._find_peers_without(rank, one)} & {*settled})
        return next(lost, None)

    def _find_peers_without(self, rank: int, launch: Event) -> list[int]:
        """Return the peers that have not launched their part of a launch of this rank."""
        group, op, peer = launch["group"], launch.get("op"), launch.get("peer")
        if op not in OPPOSITES:
            keys = {peer: make_key(peer, launch) for peer in launch["ranks"] if 0 <= peer < len(self.ranks)}
        elif peer is None or not 0 <= peer < len(self.ranks) or (group, peer, "recv", None) in self._series:
            return []
        else:
            keys = {peer: (group, peer, OPPOSITES[op], rank)}
        number = self._numbers[id(launch)]
        return [peer for peer, key in keys.items() if len(self._series.get(key, ())) <= number]

    def is_deadlocked(self, settled: Collection[int]) -> bool:
        """Return whether no rank can continue by itself. `settled` contains the ranks that have finished or failed.

        A rank can continue if all its peers have launched what it waits for, because every group completes its
        collectives in order and independently of other groups. Such a rank only needs processor time, and may still
        launch what others wait for.
        """
        unsettled = [rank for rank in range(len(self.ranks)) if rank not in settled]
        return bool(unsettled) and all(
            self.find_missing_peers(rank) or self.find_lost_launch(rank, settled) for rank in unsettled
        )

    def find_unequal_message(self) -> Mismatch | None:
        """Return the first message whose receiver expects a different length, or None. Tags are not compared."""
        for (group, rank, op, peer), sent in self._series.items():
            received = self._series.get((group, peer, "recv", rank), ()) if op == "send" else ()
            for send, recv in zip_longest(sent, received):  # one of them may have launched fewer
                if send and recv and send["nbytes"] != recv["nbytes"]:
                    return Mismatch(peer, recv, rank, send)
        return None

    def _find_mismatch(self, rank: int, launch: Event) -> Mismatch | None:
        """Return the first mismatch between a rank's last launch and a peer's launch with the same number, or None."""
        if launch.get("op") in (None, *OPPOSITES):
            return None
        number = len(self._series[make_key(rank, launch)]) - 1
        for peer in range(len(self.ranks)):
            launched = self._series.get(make_key(peer, launch), ())
            if len(launched) > number and make_signature(launched[number]) != make_signature(launch):
                return Mismatch(rank, launch, peer, launched[number])
        return None


def make_key(rank: int, launch: Event) -> tuple:
    """Return what identifies the series of a launch, or of a "connect" event, on a rank."""
    op = launch.get("op")
    return (launch["group"], rank, *((op, launch["peer"]) if op in OPPOSITES else (launch["kind"], None)))


def make_signature(launch: Event) -> tuple:
    """Return the fields of a launch that must be equal on all ranks. In a gather, the root may have other sizes."""
    if launch["op"] in ("gather", "scatter", "all_to_all"):
        return (launch["op"], launch["root"])
    return tuple(launch[name] for name in ("op", "dtype", "numel", "reduce_op", "root"))
