"""Reading what a rank recorded: its launches, put together from the events of `recording.py`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]


@dataclass
class Launch:
    """One collective on one rank. `place` and `waits` are positions in the rank's record; times are in seconds."""

    index: int
    op: str
    dtype: str
    numel: int  # elements of the full buffer, all parts together
    nbytes: int
    parts: int  # tensors in a coalesced call, else 1
    sync: bool
    reduce_op: str | None
    name: str | None
    memory: str | None  # of the parameter of that name: its "weight" or its "gradient"
    phase: str
    step: int | None  # of the training loop; None before the first
    place: int
    start: float
    began: float | None = None  # when an emulated link began to carry it
    end: float | None = None
    waits: list[int] = field(default_factory=list)
    wait_phases: list[str] = field(default_factory=list)
    wait_steps: list[int | None] = field(default_factory=list)
    raced: bool = False


class Progress:
    """What each rank of a run has launched and what it waits for, from the events of all ranks."""

    def __init__(self, world_size: int):
        self.launches: list[list[Event]] = [[] for _ in range(world_size)]  # of each rank, in order
        self.waiting: list[Event | None] = [None] * world_size  # the launch that each rank waits for now
        self._sequences: dict[tuple[str, int], list[Event]] = {}  # (group, rank) -> its launches there

    def add(self, rank: int, event: Event) -> None:
        """Take in the next event of a rank."""
        kind, index = event["kind"], event.get("index")
        if kind == "launch":
            self.launches[rank].append(event)
            self._sequences.setdefault((event["group"], rank), []).append(event)
        elif kind == "wait" and isinstance(index, int) and 0 <= index < len(self.launches[rank]):
            self.waiting[rank] = self.launches[rank][index]
        elif kind == "done":
            self.waiting[rank] = None

    def sequence(self, group: str, rank: int) -> list[Event]:
        """Return the launches of a rank in a group, in order."""
        return self._sequences.get((group, rank), [])

    def missing_peers(self, rank: int) -> list[int]:
        """Return the peers that have not launched what this rank waits for.

        Nothing is known of the other side of a send or a receive.
        """
        launch = self.waiting[rank]
        if launch is None or launch["op"] in ("send", "recv"):
            return []
        place = next(i for i, event in enumerate(self.sequence(launch["group"], rank)) if event is launch)
        members = [peer for peer in launch["ranks"] if 0 <= peer < len(self.launches)]
        return [peer for peer in members if len(self.sequence(launch["group"], peer)) <= place]

    def is_deadlocked(self, settled: Collection[int]) -> bool:
        """Whether no rank can go on by itself. `settled` ranks have returned, raised or ended.

        A rank goes on by itself if all its peers have launched what it waits for, because every group completes its
        collectives in order and independently of other groups. Until it goes on, it may launch what others wait for:
        it only lacks processor time. A rank that waits in a send or a receive may go on too.
        """
        unsettled = [rank for rank in range(len(self.launches)) if rank not in settled]
        return bool(unsettled) and all(self.missing_peers(rank) for rank in unsettled)


def launches(events: Sequence[Event], step: int | None = None, *, phase: str | None = None) -> list[Launch]:
    """The launches that carry data, in order: all, or those of one step, or one phase. Barriers carry none."""
    found: dict[int, Launch] = {}
    now = None
    for place, event in enumerate(events):
        kind, index = event.get("kind"), event.get("index")
        if kind == "step":
            now = event.get("step")
        elif kind == "launch":
            fields = ("op", "dtype", "numel", "nbytes", "parts", "sync", "reduce_op", "name", "memory", "phase")
            found[index] = Launch(
                index=index, step=now, place=place, start=event["time"], **{name: event[name] for name in fields}
            )
        elif index in found and kind == "wait":
            found[index].waits.append(place)
            found[index].wait_phases.append(event["phase"])
            found[index].wait_steps.append(now)
        elif index in found and kind == "end":
            found[index].began, found[index].end = event.get("began"), event["time"]
        elif index in found and kind == "race":
            found[index].raced = True
    return [
        launch
        for launch in found.values()
        if launch.op != "barrier" and step in (None, launch.step) and phase in (None, launch.phase)
    ]


def ready(events: Sequence[Event], step: int) -> list[tuple[int, str]]:
    """(position in the record, parameter) for each gradient of a step, in the order in which they became ready."""
    now, found = None, []
    for place, event in enumerate(events):
        if event.get("kind") == "step":
            now = event.get("step")
        elif event.get("kind") == "ready" and now == step:
            found.append((place, event.get("name")))
    return found


def passes(events: Sequence[Event], step: int) -> list[int]:
    """The positions in the record at which the backward passes of a step begin."""
    now, found = None, []
    for place, event in enumerate(events):
        if event.get("kind") == "step":
            now = event.get("step")
        elif event.get("kind") == "phase" and event.get("phase") == "backward" and now == step:
            found.append(place)
    return found


def summary(found: Sequence[Launch], limit: int = 8) -> str:
    """The launches in words, such as: 2 launches (all_reduce of 12 float32, all_reduce of 4 float32)"""
    words = [f"{launch.op} of {launch.numel} {launch.dtype}" for launch in found[:limit]]
    more = [f"and {len(found) - limit} more"] if len(found) > limit else []
    return f"{len(found)} launch{'' if len(found) == 1 else 'es'}" + (f" ({', '.join(words + more)})" if found else "")
