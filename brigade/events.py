"""The events that a rank reports: their kinds, how to read them, and how to describe what a rank is doing.

An event is a small dict. Every event has `kind`, `time` (seconds of `time.perf_counter`, which all processes of one
machine share) and `phase` (what the training loop was doing). `rank/recording.py` reports these kinds:

    launch   the rank calls a collective. `index` numbers the launches of the rank from 0. `group` is the name of the
             group, and `ranks` are its global ranks. `op`, `dtype`, `numel` and `nbytes` describe the full buffer;
             `parts` is the number of tensors in a coalesced call, else 1. `reduce_op`, `root` (a rank in the group)
             and `sync` are arguments of the call. `peer` is the global rank that a send goes to or a receive comes
             from; it is None for a receive from any rank and for collectives. `name` is the parameter whose memory the
             call uses, if known, and `memory` is "weight" or "gradient". `line` is the line of the submission that made
             the call. `caller` is the submission's outermost function on the stack, such as "full_state_dict". Both
             are None if the submission is not on the stack.
    wait     the rank begins to wait for launch `index`
    complete the rank asks whether launch `index` is complete, and it is; the wait that follows does not block
    done     the rank has the result of launch `index`
    end      launch `index` is complete. On CUDA, `time` is when the kernel was queued; for gloo's reduce_scatter, it is
             when the rank's wait ended. `began` is when the emulated link began to transfer the data.
    connect  the rank begins to create the process group `group` of the global ranks `ranks`, all of which must do so
    connected  the process group is complete
    phase    the training loop enters this phase
    race     a tensor of launch `index` was changed between launch and wait (`rank/strict.py`)
    ready    backward is about to add the gradient of the parameter `name` to its `.grad`
    border   backward learns the factors of border `number` of batch `batch` of the run (`checks/edge_case_models.py`)
    call     the rank begins the second or a later call of the function given to `run_calls` (`rank/main.py`)
    step     the following events belong to step `step` of the training loop, or to no step if `step` is None

Scenarios add kinds of their own with `note`. The parent process validates each event once, when the event arrives.
All other code may rely on the fields.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

Event = dict[str, Any]
Fields = dict[str, tuple[type, ...]]

OUTSIDE = "setup"  # the phase of events outside the training loop's phases
OPPOSITES = {"send": "recv", "recv": "send"}  # point-to-point call -> the call that the peer must make
MAX_NUMBER = 1 << 20  # limit for launch and step numbers; a malicious rank could send large ones that collide in dicts

COMMON_FIELDS: Fields = {"kind": (str,), "time": (float,), "phase": (str,)}
FIELDS: dict[str, Fields] = {
    "launch": COMMON_FIELDS | {
        "index": (int,), "group": (str,), "ranks": (list,), "op": (str,), "dtype": (str, type(None)), "numel": (int,),
        "nbytes": (int,), "parts": (int,), "reduce_op": (str, type(None)), "root": (int, type(None)), "sync": (bool,),
        "peer": (int, type(None)), "name": (str, type(None)), "memory": (str, type(None)),
        "line": (str, type(None)), "caller": (str, type(None)),
    },
    "wait": COMMON_FIELDS | {"index": (int,)},
    "complete": COMMON_FIELDS | {"index": (int,)},
    "done": COMMON_FIELDS | {"index": (int,)},
    "end": COMMON_FIELDS | {"index": (int,)},
    "race": COMMON_FIELDS | {"index": (int,)},
    "connect": COMMON_FIELDS | {"group": (str,), "ranks": (list,)},
    "ready": COMMON_FIELDS | {"name": (str,)},
    "border": COMMON_FIELDS | {"batch": (int,), "number": (int,)},
    "step": COMMON_FIELDS | {"step": (int, type(None))},
}  # fmt: skip


def validate(event: Any, num_launches: int) -> None:
    """Raise ValueError unless a recorder could have reported this event after `num_launches` launches of its rank."""
    if type(event) is not dict:
        raise ValueError("an event must be a dict")
    kind = event.get("kind")
    fields = FIELDS.get(kind, COMMON_FIELDS) if type(kind) is str else COMMON_FIELDS
    for name, types in fields.items():
        if name not in event or type(event[name]) not in types:
            raise ValueError(f"an event needs the field {name}, of type {types[0].__name__}")
    if not (is_small(event.get("index")) and is_small(event.get("step"))):
        raise ValueError("the number of a launch or a step is too large")
    began = event.get("began")
    if not math.isfinite(event["time"]) or (began is not None and (type(began) is not float or math.isinf(began))):
        raise ValueError("a time is not finite")
    if "ranks" in fields and not all(type(rank) is int for rank in event["ranks"]):
        raise ValueError("the ranks of an event are not numbers")
    if kind == "launch":
        if event["index"] != num_launches:
            raise ValueError("a launch has the wrong number")
    elif "index" in fields and event["index"] >= num_launches:
        raise ValueError("an event belongs to a launch that was not made")


def is_small(number: Any) -> bool:
    """Return whether `number` is None or an integer from 0 to MAX_NUMBER - 1."""
    return number is None or type(number) is int and 0 <= number < MAX_NUMBER


# ---- the record of one rank


@dataclass
class Launch:
    """One launch on one rank. `place` and `waits` are positions in the rank's record, and times are in seconds."""

    index: int
    op: str
    dtype: str
    numel: int  # elements of the full buffer, all parts together
    nbytes: int
    parts: int  # tensors in a coalesced call, else 1
    sync: bool
    reduce_op: str | None
    name: str | None
    memory: str | None  # which memory of the parameter `name`: "weight" or "gradient"
    peer: int | None  # of a send or a receive; None for a receive from any rank, and for a collective
    line: str | None  # line of the submission that made the call, such as "naive_ddp.py:59 in finish_grad_sync"
    phase: str
    step: int | None  # of the training loop; None outside the steps
    place: int
    start: float
    began: float | None = None  # when the emulated link began to transfer the data
    end: float | None = None
    wait_start: float | None = None  # when the rank first began to wait for this launch ...
    wait_end: float | None = None  # ... and when that wait was over
    waits: list[int] = field(default_factory=list)
    wait_phases: list[str] = field(default_factory=list)
    wait_steps: list[int | None] = field(default_factory=list)
    raced: bool = False
    is_polled: bool = False  # whether the rank learnt that the launch was complete before it waited


LAUNCH_FIELDS = (
    "index", "op", "dtype", "numel", "nbytes", "parts", "sync", "reduce_op", "name", "memory", "peer", "line",
    "phase",
)  # fmt: skip


def launches(events: Sequence[Event], step: int | None = None, *, phase: str | None = None) -> list[Launch]:
    """Return the launches in order, without barriers: all, or only those of one step or one phase."""
    by_index: dict[int, Launch] = {}
    current_step = None
    for place, event in enumerate(events):
        kind, launch = event["kind"], by_index.get(event.get("index"))
        if kind == "step":
            current_step = event["step"]
        elif kind == "launch":
            fields = {name: event[name] for name in LAUNCH_FIELDS}
            by_index[event["index"]] = Launch(step=current_step, place=place, start=event["time"], **fields)
        elif launch is None:
            continue
        elif kind == "complete":
            launch.is_polled = not launch.waits
        elif kind == "wait":
            launch.wait_start = event["time"] if launch.wait_start is None else launch.wait_start
            launch.waits.append(place)
            launch.wait_phases.append(event["phase"])
            launch.wait_steps.append(current_step)
        elif kind == "done":
            launch.wait_end = event["time"] if launch.wait_end is None else launch.wait_end
        elif kind == "end":
            launch.began, launch.end = event.get("began"), event["time"]
        elif kind == "race":
            launch.raced = True
    return [
        launch
        for launch in by_index.values()
        if launch.op != "barrier" and step in (None, launch.step) and phase in (None, launch.phase)
    ]


def split_calls(events: Sequence[Event], num_calls: int) -> list[list[Event]]:
    """Return the events of each of the `num_calls` calls of a run, with launches numbered from 0 in each call.

    An `end` event belongs to the call that made the launch, even if it arrives during a later call. A `wait`, `done` or
    `race` event that arrives in a later call is dropped.
    """
    if num_calls == 1:
        return [list(events)]
    events_by_call: list[list[Event]] = [[]]
    starts = [0]  # the index of each call's first launch
    num_launches = 0
    for event in events:
        if event["kind"] == "call" and len(events_by_call) < num_calls:
            events_by_call.append([])
            starts.append(num_launches)
            continue
        num_launches += event["kind"] == "launch"
        current = call_index = len(events_by_call) - 1
        if "index" in FIELDS.get(event["kind"], ()):
            call_index = bisect_right(starts, event["index"]) - 1
            event = event | {"index": event["index"] - starts[call_index]}
        if call_index == current or event["kind"] == "end":
            events_by_call[call_index].append(event)
    return events_by_call + [[] for _ in range(num_calls - len(events_by_call))]


def list_ready_gradients(events: Sequence[Event], step: int) -> list[tuple[int, str]]:
    """Return (position in the record, parameter) for each gradient of a step, in the order of readiness."""
    return [(place, event["name"]) for place, event in _events_of_step(events, step) if event["kind"] == "ready"]


def list_backward_passes(events: Sequence[Event], step: int) -> list[int]:
    """Return the positions in the record at which the backward passes of a step begin."""
    in_step = _events_of_step(events, step)
    return [place for place, event in in_step if event["kind"] == "phase" and event["phase"] == "backward"]


def _events_of_step(events: Sequence[Event], step: int) -> list[tuple[int, Event]]:
    """Return the events of one step, with their positions in the record."""
    current_step, in_step = None, []
    for place, event in enumerate(events):
        if event["kind"] == "step":
            current_step = event["step"]
        elif current_step == step:
            in_step.append((place, event))
    return in_step


def summarize(launched: Sequence[Launch], limit: int = 8) -> str:
    """Describe launches, for example "2 launches (all_reduce of 12 float32, all_reduce of 4 float32)"."""
    words = [f"{launch.op} of {launch.numel} {launch.dtype}" for launch in launched[:limit]]
    if len(launched) > limit:
        words.append(f"and {len(launched) - limit} more")
    count = f"{len(launched) or 'no'} launch{'' if len(launched) == 1 else 'es'}"
    return f"{count} ({', '.join(words)})" if words else count


def describe(launch: Event) -> str:
    """Describe a launch.

    Examples: "all_reduce #3 (fc2.weight, float32, 4096 B)" and "send #0 to rank 1 (float32, 12 B)".
    """
    if launch["op"] == "barrier":
        return f"barrier #{launch['index']}"
    name = f"{launch['name']}, " if launch["name"] else ""
    return f"{describe_call(launch)} ({name}{launch['dtype']}, {launch['nbytes']} B)"


def describe_with_line(launch: Event) -> str:
    """Describe a launch, with the line of the submission that made the call, if this line is known."""
    return describe(launch) + (f" at {launch['line']}" if launch["line"] else "")


def describe_call(launch: Event) -> str:
    """Describe a launch without its data, for example "recv #2 from rank 0"."""
    peer = ""
    if launch["op"] in OPPOSITES:
        peer = (" to " if launch["op"] == "send" else " from ") + (
            "any rank" if launch["peer"] is None else f"rank {launch['peer']}"
        )
    return f"{launch['op']} #{launch['index']}{peer}"


# ---- what the ranks of a run are doing


class RankRecord:
    """The events and the launches that one rank has reported so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.launches: list[Event] = []
        self.waiting: Event | None = None  # the launch that the rank is waiting for
        self.connecting: Event | None = None  # the "connect" event of the process group that the rank is creating
        self.groups: set[str] = set()  # the names of the process groups that the rank has begun to create
        self.num_borders = 0

    def add(self, event: Event) -> None:
        """Add the rank's next event."""
        self.events.append(event)
        self.num_borders += event["kind"] == "border"
        if event["kind"] == "launch":
            self.launches.append(event)
        elif event["kind"] == "wait":
            self.waiting = self.launches[event["index"]]
        elif event["kind"] == "done":
            self.waiting = None
        elif event["kind"] == "connect":
            self.connecting = event
            self.groups.add(event["group"])
        elif event["kind"] == "connected":
            self.connecting = None

    def describe_last_launch(self) -> str:
        """Describe the rank's last launch, for example "after all_reduce #3 (fc2.weight, float32, 4096 B)"."""
        return f"after {describe(self.launches[-1])}" if self.launches else "and has launched nothing"

    def describe_activity(self, missing_peers: Sequence[int] = ()) -> str:
        """Describe what the rank is doing.

        For example: "waits in all_reduce #3 (float32, 4096 B), which rank 1 never launched". `missing_peers` are the
        ranks that have not launched the collective that this rank waits for.
        """
        names = " and ".join(f"rank {peer}" for peer in missing_peers)
        if self.connecting:
            ranks = ", ".join(map(str, self.connecting["ranks"]))
            return f"is creating the process group of the ranks {ranks}" + (
                f", which {names} never did" if names else ""
            )
        if self.waiting:
            opposite = OPPOSITES.get(self.waiting["op"])
            missing = f"for which {names} called no {opposite}" if opposite else f"which {names} never launched"
            return f"waits in {describe(self.waiting)}" + (f", {missing}" if names else "")
        phase = self.events[-1]["phase"] if self.events else OUTSIDE
        return (
            f"is busy {self.describe_last_launch()}"
            if phase == OUTSIDE
            else f"is in {phase} {self.describe_last_launch()}"
        )


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
        self._collectives: dict[tuple[str, int], list[Event]] = {}  # (group, rank) -> the rank's launches in it
        self._messages: dict[tuple[str, int, str, int | None], list[Event]] = {}  # (group, rank, op, peer) -> launches

    def add(self, rank: int, event: Event) -> None:
        """Add the next event of a rank."""
        self.ranks[rank].add(event)
        if event["kind"] != "launch":
            return
        if event["op"] in OPPOSITES:
            self._messages.setdefault((event["group"], rank, event["op"], event["peer"]), []).append(event)
        else:
            self._collectives.setdefault((event["group"], rank), []).append(event)

    def list_collectives(self, group: str, rank: int) -> list[Event]:
        """Return the collectives that a rank has launched in a group, in order."""
        return self._collectives.get((group, rank), [])

    def describe_activity(self, rank: int) -> str:
        """Describe what a rank is doing: see `RankRecord.describe_activity`.

        If the rank waits for a message, the text also says what its peer waits for instead.
        """
        missing = self.find_missing_peers(rank)
        text = self.ranks[rank].describe_activity(missing)
        own = self.ranks[rank].waiting
        if missing and own and own["op"] in OPPOSITES and (other := self.ranks[missing[0]].waiting):
            text += f" because it waits in {describe_call(other)}"
        return text

    def find_missing_peers(self, rank: int) -> list[int]:
        """Return the peers that have not launched what this rank waits for, or not begun to create its new group."""
        connecting, launch = self.ranks[rank].connecting, self.ranks[rank].waiting
        if connecting:
            return [
                peer
                for peer in connecting["ranks"]
                if 0 <= peer < len(self.ranks) and connecting["group"] not in self.ranks[peer].groups
            ]
        if launch is None:
            return []
        group = launch["group"]
        if launch["op"] in OPPOSITES:
            return [] if self._is_answered(rank, launch) else [launch["peer"]]
        number = find_position(launch, self.list_collectives(group, rank))
        members = [peer for peer in launch["ranks"] if 0 <= peer < len(self.ranks)]
        return [peer for peer in members if len(self.list_collectives(group, peer)) <= number]

    def _is_answered(self, rank: int, launch: Event) -> bool:
        """Return whether the peer has made, or may have made, the call that matches a send or a receive.

        With gloo, a send ends when the peer receives. Tags are not compared. A receive from any rank may match any
        send. If there is such a receive, return True. A run that hangs then ends only at the deadline.
        """
        group, op, peer = launch["group"], launch["op"], launch["peer"]
        if peer is None or not 0 <= peer < len(self.ranks) or (group, peer, "recv", None) in self._messages:
            return True
        number = find_position(launch, self._messages[group, rank, op, peer])
        return len(self._messages.get((group, peer, OPPOSITES[op], rank), ())) > number

    def is_deadlocked(self, settled: Collection[int]) -> bool:
        """Return whether no rank can continue by itself. `settled` contains the ranks that have finished or failed.

        A rank can continue if all its peers have launched what it waits for, because every group completes its
        collectives in order and independently of other groups. Such a rank only needs processor time, and may still
        launch what others wait for.
        """
        unsettled = [rank for rank in range(len(self.ranks)) if rank not in settled]
        return bool(unsettled) and all(self.find_missing_peers(rank) for rank in unsettled)

    def find_unequal_message(self) -> Mismatch | None:
        """Return the first message whose receiver expects a different length, or None if there is none.

        Tags are not compared.
        """
        for (group, rank, op, peer), sent in self._messages.items():
            received = self._messages.get((group, peer, "recv", rank), []) if op == "send" else []
            for send, recv in zip(sent, received):
                if send["nbytes"] != recv["nbytes"]:
                    return Mismatch(peer, recv, rank, send)
        return None

    def find_mismatch(self, rank: int) -> Mismatch | None:
        """Return the first mismatch between a rank's last launch and a peer's launch with the same number, or None."""
        launch = self.ranks[rank].launches[-1]
        if launch["op"] in OPPOSITES:
            return None
        number = len(self.list_collectives(launch["group"], rank)) - 1
        for peer in range(len(self.ranks)):
            launched = self.list_collectives(launch["group"], peer)
            if len(launched) > number and make_signature(launched[number]) != make_signature(launch):
                return Mismatch(rank, launch, peer, launched[number])
        return None


def find_position(launch: Event, launched: Sequence[Event]) -> int:
    """Return the position of this launch in `launched`, compared by identity."""
    return next(i for i, other in enumerate(launched) if other is launch)


def make_signature(launch: Event) -> tuple:
    """Return the fields of a launch that must be equal on all ranks. In a gather, the root may have other sizes."""
    if launch["op"] in ("gather", "scatter", "all_to_all"):
        return (launch["op"], launch["root"])
    return tuple(launch[name] for name in ("op", "dtype", "numel", "reduce_op", "root"))
