"""The events that a rank reports: their kinds, how to read them, and how to describe what a rank is doing.

An event is a small dict. Every event has `kind`, `time` (seconds of `time.perf_counter`, which all processes of one
machine share), `phase` (what the training loop was doing) and the fields of its kind in `FIELDS`:

    launch   the rank calls a collective of the group `group` of the global ranks `ranks`. `index` numbers its launches
             from 0. `op`, `dtype`, `numel` and `nbytes` describe the full buffer; `parts` is the number of tensors in a
             coalesced call, else 1. `reduce_op`, `root` (a rank in the group) and `sync` are arguments of the call.
             `peer` is the global rank that a send goes to or a receive comes from, or None. `name` is the parameter
             whose memory the call uses, if known, and `memory` is "weight" or "gradient". `line` is the line of the
             submission that made the call, and `caller` the submission's outermost function on the stack, or None.
    call     on CUDA: the rank enters NCCL for launch `index`, which may block until all ranks of the group do so
    called   NCCL has returned from that call
    wait     the rank begins to wait for launch `index`
    complete the rank asks whether launch `index` is complete, and it is; the wait that follows does not block
    done     the rank has the result of launch `index`
    end      launch `index` is complete. On CUDA, `time` is when the kernel was queued; for gloo's reduce_scatter, it is
             when the rank's wait ended. `began` is when the emulated link began to transfer the data.
    race     a tensor of launch `index` was changed between launch and wait (`rank/strict.py`)
    connect  the rank begins to create the process group `group` of the global ranks `ranks`, all of which must do so
    connected  the process group is complete
    phase    the training loop enters this phase
    ready    backward is about to add the gradient of the parameter `name` to its `.grad`
    border   the rank learns the factors of border `number` of batch `batch` of the run, and has computed `values`, some
             of the `numel` entries there (`checks/edge_case_models.py`)
    step     the following events belong to step `step` of the training loop, or to no step if `step` is None

Scenarios add kinds of their own with `note`. The parent validates each event once, when it arrives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

Event = dict[str, Any]

OUTSIDE = "setup"  # the phase of events outside the training loop's phases
OPPOSITES = {"send": "recv", "recv": "send"}  # point-to-point call -> the call that the peer must make
MAX_NUMBER = 1 << 20  # limit for launch and step numbers; a malicious rank could send large ones that collide in dicts

# Ring algorithms, as in nccl-tests/doc/PERFORMANCE.md: (k, v) means k (N - 1) messages one after the other, in
# which each rank sends v (N - 1) / N times the buffer. A broadcast or a reduce passes on the whole buffer in pieces.
RINGS = {"all_reduce": (2, 2), "reduce_scatter": (1, 1), "all_gather": (1, 1)}

MAX_TEXT = 300  # letters of a text about a launch, which feedback shows

TEXT, NUMBER = (str, type(None)), (int, type(None))
COMMON_FIELDS = {"kind": (str,), "time": (float,), "phase": (str,)}
FIELDS: dict[str, dict[str, tuple[type, ...]]] = {
    "launch": {
        "index": (int,), "group": (str,), "ranks": (list,), "op": (str,), "dtype": TEXT, "numel": (int,),
        "nbytes": (int,), "parts": (int,), "reduce_op": TEXT, "root": NUMBER, "sync": (bool,), "peer": NUMBER,
        "name": TEXT, "memory": TEXT, "line": TEXT, "caller": TEXT,
    },
    **dict.fromkeys(("call", "called", "wait", "complete", "done", "end", "race"), {"index": (int,)}),
    "connect": {"group": (str,), "ranks": (list,)},
    "ready": {"name": (str,)},
    "border": {"batch": (int,), "number": (int,), "numel": (int,), "values": (str,)},
    "step": {"step": NUMBER},
}  # fmt: skip
ALL_FIELDS = {kind: COMMON_FIELDS | fields for kind, fields in FIELDS.items()}


def validate(event: Any, num_launches: int) -> None:
    """Raise ValueError unless a recorder could have reported this event after `num_launches` launches of its rank."""
    if type(event) is not dict:
        raise ValueError("an event must be a dict")
    kind = event.get("kind")
    fields = ALL_FIELDS.get(kind, COMMON_FIELDS) if type(kind) is str else COMMON_FIELDS
    for name, types in fields.items():
        if name not in event or type(event[name]) not in types:
            raise ValueError(f"an event needs the field {name}, of type {types[0].__name__}")
        if kind == "launch" and type(event[name]) is str and len(event[name]) > MAX_TEXT:
            raise ValueError(f"the text of the field {name} is too long")
    for number in (event.get("index"), event.get("step")):
        if number is not None and not (type(number) is int and 0 <= number < MAX_NUMBER):
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


# ---- the record of one rank


@dataclass
class Launch:
    """One launch on one rank. `place` and `waits` are positions in the rank's record, and times are in seconds."""

    index: int
    ranks: list[int]  # of the group
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


LAUNCH_FIELDS = (COMMON_FIELDS | FIELDS["launch"]).keys() & Launch.__match_args__


def launches(events: Sequence[Event], step: int | None = None, *, phase: str | None = None) -> list[Launch]:
    """Return the launches in order, without barriers: all, or only those of one step or one phase."""
    by_index: dict[int, Launch] = {}
    for place, current_step, event in follow_steps(events):
        kind, launch = event["kind"], by_index.get(event.get("index", -1))
        if kind == "launch":
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


def drop_flags(launched: Sequence[Launch]) -> list[Launch]:
    """Return the launches of more than 16 elements, and all launches of a step that makes more than 4 smaller ones."""
    flags = Counter(launch.step for launch in launched if launch.numel <= 16)
    return [launch for launch in launched if launch.numel > 16 or flags[launch.step] > 4]


def list_ready_gradients(events: Sequence[Event], step: int | None) -> list[tuple[int, str]]:
    """Return (position in the record, parameter) for each gradient of a step, in the order of readiness."""
    return [(place, event["name"]) for place, event in list_step_events(events, step) if event["kind"] == "ready"]


def find_last_border(events: Sequence[Event], step: int | None) -> int:
    """Return the position in the record of the last border of a step, or -1."""
    return max((place for place, event in list_step_events(events, step) if event["kind"] == "border"), default=-1)


def list_backward_passes(events: Sequence[Event], step: int | None) -> list[int]:
    """Return the positions in the record at which the backward passes of a step begin."""
    return [place for place, event in list_step_events(events, step) if is_backward(event)]


def is_backward(event: Event) -> bool:
    """Return whether an event is the beginning of a backward pass."""
    return event["kind"] == "phase" and event["phase"] == "backward"


def list_step_events(events: Sequence[Event], step: int | None) -> list[tuple[int, Event]]:
    """Return the events of one step, with their positions in the record."""
    return [(place, event) for place, current_step, event in follow_steps(events) if current_step == step]


def follow_steps(events: Sequence[Event]) -> Iterator[tuple[int, int | None, Event]]:
    """Yield each event with its position in the record and its step. Leave out the events of kind "step"."""
    current_step = None
    for place, event in enumerate(events):
        if event["kind"] == "step":
            current_step = event["step"]
        else:
            yield place, current_step, event


def summarize(launched: Sequence[Launch], limit: int = 8) -> str:
    """Describe launches, for example "2 launches (all_reduce of 12 float32, all_reduce of 4 float32)"."""
    words = [f"{launch.op} of {launch.numel} {launch.dtype}" for launch in launched[:limit]]
    if len(launched) > limit:
        words.append(f"and {len(launched) - limit} more")
    count = count_launches(len(launched))
    return f"{count} ({', '.join(words)})" if words else count


def count_launches(count: int) -> str:
    """Return text such as "5 launches"."""
    return f"{count or 'no'} launch{'es' * (count != 1)}"


def describe(launch: Event, with_data: bool = True) -> str:
    """Describe a launch, for example "all_reduce #3 (fc2.weight, float32, 4096 B)", or "recv #2 from rank 0"."""
    peer = "any rank" if launch.get("peer") is None else f"rank {launch['peer']}"
    direction = {"send": f" to {peer}", "recv": f" from {peer}"}.get(launch["op"], "")
    name = f"{launch['name']}, " if launch["name"] else ""
    data = f" ({name}{launch['dtype']}, {launch['nbytes']} B)" if with_data and launch["op"] != "barrier" else ""
    return f"{launch['op']} #{launch['index']}{direction}{data}"


def count_sent_bytes(op: str, nbytes: float, world_size: int) -> float:
    """Return the average bytes that each rank sends for a collective on a buffer of `nbytes` with a ring algorithm."""
    return RINGS.get(op, (1, 1))[1] * (world_size - 1) / world_size * nbytes
