"""Reading what a rank recorded: its launches, put together from the events of `recording.py`."""

from __future__ import annotations

from collections.abc import Sequence
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


def counters(events: Sequence[Event]) -> dict[int, list[dict[str, Any]]]:
    """For each step what the submission's own counters were when it began, and when its last backward was over."""
    now, found = None, {}
    for event in events:
        if event.get("kind") == "step":
            now = event.get("step")
        elif event.get("kind") == "counters" and isinstance(event.get("values"), dict):
            found.setdefault(now, []).append(event["values"])
    return found


def summary(found: Sequence[Launch], limit: int = 8) -> str:
    """The launches in words, such as: 2 launches (all_reduce of 12 float32, all_reduce of 4 float32)"""
    words = [f"{launch.op} of {launch.numel} {launch.dtype}" for launch in found[:limit]]
    more = [f"and {len(found) - limit} more"] if len(found) > limit else []
    return f"{len(found)} launch{'' if len(found) == 1 else 'es'}" + (f" ({', '.join(words + more)})" if found else "")
