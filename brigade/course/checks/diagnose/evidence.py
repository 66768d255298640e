"""Find the mistakes that the ranks' records reveal.

Name a mistake only if the evidence rules out equally likely mistakes: a wrong cause is worse than none.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from brigade.ranks.events import (
    Event,
    Launch,
    drop_flags,
    follow_steps,
    is_backward,
    launches,
    list_backward_passes,
    list_ready_gradients,
    list_step_events,
)
from brigade.ranks.progress import make_signature
from brigade.ranks.verdict import join_names

if TYPE_CHECKING:
    from brigade.course.checks.reference import Case

TOO_LARGE = "{} {}× too large, although every reduction has ReduceOp.AVG."
FLAG_IGNORED = (
    "the hook ignores the flag of no_sync, or no_sync does not clear the flag. Inside the block the flag must be "
    "False, and the hook must test it before it counts or launches anything."
)
READ_IN_FORWARD = "the flag of no_sync is read in forward. The hooks must read it, during backward."
INNER_NO_SYNC = "an inner no_sync switches synchronisation on when it ends. It must restore the previous state."
GATHERING = ("state_dict", "full_state_dict")  # methods that look local, but gather shards from every rank


@dataclass(frozen=True)
class Evidence:
    """The evidence in the records of one step. `mistake` describes an error that does not depend on the numbers."""

    mistake: str = ""
    launched: Sequence[Launch] | None = None  # by the compared ranks; None: unknown
    unawaited: Sequence[Launch] = ()  # those whose handles the code did not wait on in their step
    world_size: int | None = None  # of the run; the compared ranks may be only a part of it


def collect_evidence(events: Sequence[Sequence[Event]], case: Case, step: int | None = 0) -> Evidence:
    """Return what the records of the case's group show about a step (None: about all steps)."""
    records = [events[rank] for rank in case.group]
    launched = [launch for record in records for launch in launches(record, step)]
    unawaited = [launch for launch in launched if not launch.sync and step not in launch.wait_steps]
    mistakes = (find_wrong_group(events, case.group), *(find_wrong_launch(record, case, step) for record in records))
    return Evidence(next(filter(None, mistakes), ""), launched, unawaited, case.world_size)


def find_wrong_launch(record: Sequence[Event], case: Case, step: int | None) -> str:
    """Describe a launch that reduces a weight, or that reduces a gradient twice, too early or during a change."""
    launched = [launch for launch in launches(record, step) if launch.phase in ("backward", "finish")]
    if any(launch.op == "all_reduce" and launch.memory == "weight" for launch in launched):
        return "the submission all-reduces the parameter itself. It must all-reduce the gradient, p.grad."
    numels = {name: p.numel() for name, p in case.parameters().items() if p.requires_grad}
    if step is not None and (mistake := find_repeated_reduction(record, step, sum(numels.values()))):
        return mistake
    ready_at = {name: place for place, name in list_ready_gradients(record, step)}
    if sorted(launch.numel for launch in launched) != sorted(numels.values()):
        return ""  # not one launch per parameter
    if any(launch.raced and launch.memory == "gradient" for launch in launched):
        return "a gradient was changed (divided or overwritten) before its handle was waited on."
    for launch in launched:
        names = [name for name, numel in numels.items() if numel == launch.numel]
        if len(names) == 1 and launch.phase == "backward" and launch.place < ready_at.get(names[0], -1):
            return (
                f"the all-reduce of {names[0]} is launched before its gradient is in .grad. A tensor hook "
                "(register_hook) receives the incoming gradient. Use register_post_accumulate_grad_hook, which runs "
                "after accumulation."
            )
    return ""


def find_repeated_reduction(record: Sequence[Event], step: int | None, numel: int | None = None) -> str:
    """Describe a gradient that a step all-reduces again before backward adds to it.

    `numel` is the total number of elements of all gradients.
    """
    reductions = [x for x in select_sync_launches(record, step) if x.op == "all_reduce"]
    has_one_pass = len(list_backward_passes(record, step)) == 1
    if has_one_pass and numel and sum(launch.numel for launch in reductions) == 2 * numel:
        return "every gradient is all-reduced twice in one step."
    readiness: dict[str | None, list[int]] = {}  # the positions at which each gradient became ready
    for place, name in list_ready_gradients(record, step):
        readiness.setdefault(name, []).append(place)
    last: dict[str | None, int] = {}  # the position of the previous all-reduce of each gradient
    for launch in (launch for launch in reductions if launch.memory == "gradient" and launch.name):
        before, places = last.get(launch.name, len(record)), readiness.get(launch.name, [])
        if before < launch.place and bisect_left(places, before) == bisect_left(places, launch.place):
            return f"the gradient of {launch.name} is all-reduced twice in one step."
        last[launch.name] = launch.place
    return ""


def find_skipped_call(events: Sequence[Sequence[Event]], kind: str) -> str:
    """Describe a state_dict that only some ranks have called, in a run that ended in a deadlock or a mismatch.

    Compare its first launch with the launches of the same number on the other ranks of the group. In a mismatch, a rank
    without such a launch may only be slower. Earlier launches must not differ. If a rank is still in the optimizer's
    step, the ranks that call the method may have skipped a launch there.
    """
    groups = {event["group"]: event["ranks"] for own in events for event in own if event["kind"] == "launch"}
    by_group: list[dict[str, list[tuple[Event, int | None]]]] = [{} for _ in events]  # the launches of each rank
    for record, own in zip(by_group, events, strict=True):
        for _, step, event in follow_steps(own):
            if event.get("op"):
                record.setdefault(event["group"], []).append((event, step))
    for group, ranks in groups.items():
        launched = [by_group[rank].get(group, []) for rank in ranks]
        numbers = [n for own in launched for n, (launch, _) in enumerate(own) if launch["caller"] in GATHERING]
        first = min(numbers, default=0)
        found = {rank: own[first] for rank, own in zip(ranks, launched, strict=True) if first < len(own)}
        method, step = next(((e["caller"], s) for e, s in found.values() if e["caller"] in GATHERING), ("", None))
        others = {rank: (launch["phase"], s) for rank, (launch, s) in found.items() if launch["caller"] != method}
        absent = [rank for rank in ranks if rank in others or rank not in found and kind == "deadlock"]
        count = min(first, *map(len, launched))
        before = zip(*(own[:count] for own in launched), strict=True)
        is_equal = all(len({make_signature(launch) for launch, _ in same}) == 1 for same in before)
        if method and absent and is_equal and ("step", step) not in others.values():
            return (
                f"{method} is collective, because it gathers shards from every rank, but {format_ranks(absent)} did "
                "not launch its collectives. Every rank must call the method and launch all its collectives."
            )
    return ""


def find_unreduced(events: Sequence[Sequence[Event]], case: Case, padded: int = 0) -> str:
    """Describe the first step if its launches carry fewer elements than all gradients, which take `padded` in buffers.

    Return "" if they carry all or nothing.
    """
    numel = padded or sum(parameter.numel() for parameter in case.parameters().values() if parameter.requires_grad)
    for rank in case.group:
        carried = sum(x.numel for x in select_sync_launches(events[rank], 0) if x.op != "all_gather")
        if 0 < carried < numel:
            what = "buffers" if padded else "gradients"
            return f"the step reduces only {carried} elements, but all {what} together have {numel}."
    return ""


def is_averaged(launched: Sequence[Launch]) -> bool:
    """Return whether all of these launches that reduce have ReduceOp.AVG, so that no sum lacks its division."""
    return {launch.reduce_op for launch in drop_flags(launched)} - {None} == {"AVG"}


def find_leftover(events: Sequence[Event], failed_step: int | None = None) -> str:
    """Describe the first launch of step 0 that a later step did not make in the same way; "" if there is none.

    Steps do the same work unless they are "unsynced". If the record ends within a step, because the rank failed,
    compare only with the launches of step 0 up to that point. If step 0 has failed already, no state is left over.
    """
    if failed_step == 0:
        return ""
    steps = [event["step"] for event in events if event["kind"] == "step" and not event.get("unsynced")]
    progress, launched = StepProgress(events), select_sync_launches(events, None)
    made: dict[int | None, list[tuple[str, tuple[bool, int]]]] = {}
    for launch in launched:
        if launch.step in progress.begins:
            made.setdefault(launch.step, []).append((launch.op, progress.measure(launch.step, launch.place)))
    for step in dict.fromkeys(steps[1:]):
        first, again = made.get(steps[0], []), made.get(step, [])
        reached = progress.measure(step, len(events)) if step == steps[-1] else (True, math.inf)
        due = [(op, moment) for op, moment in first if moment < reached]
        for number, (before, now) in enumerate(itertools.zip_longest(due, again[: len(due)])):
            if now != before:
                return (
                    f"state from the previous step was not reset: in step {step}, launch {number} was "
                    f"{describe_moment(now)}, but in step 0 it was {describe_moment(before)}. finish_grad_sync must "
                    "reset this state."
                )
    return ""


def explain_refusal(events: Sequence[Event]) -> str:
    """Explain why the submission's own `raise` refuses a gradient of a step that has one synchronising backward.

    The record ends with the refusal.
    """
    steps = [None, *(event["step"] for event in events if event["kind"] == "step")]
    phase = [event["phase"] for event in events if event["kind"] != "end"][-1:]  # another thread records an "end"
    if phase != ["backward"]:
        return ""
    launched = launches(events, steps[-1], phase="backward")
    passes = list_backward_passes(events, steps[-1])
    ready = [name for place, name in list_ready_gradients(events, steps[-1]) if place > passes[-1]]
    if not launched and len(ready) > 1:
        return (
            "gradients are counted for the wrong bucket. A lambda in a loop sees the last value of the loop variable, "
            "so every hook counts for the last bucket."
        )
    if not launched and len(passes) > 1:
        return "gradients that become ready inside no_sync are counted too."
    if not launched and len(steps) > 2:
        phases = {launch.phase for launch in launches(events, steps[-2])}
        method = "zero_grad" if phases == {"clip"} else "step" if phases <= {"clip", "step"} else "finish_grad_sync"
        return f"{method} did not reset the state of step {steps[-2]}, so step {steps[-1]} refuses its first gradient."
    if not launched:
        return "the hook refuses the first gradient of all."
    finishes = [place for place, event in list_step_events(events, steps[-1]) if event.get("phase") == "finish"]
    if any(launched[0].place < place < passes[-1] for place in finishes):
        return "after finish_grad_sync, state is left that makes the wrapper refuse the next backward of the same step."
    if launched[0].place < passes[-1]:  # all passes before the last are inside no_sync
        last = next((event for event in reversed(events) if event["kind"] == "step"), {})  # scenarios may lack steps
        num_passes = Counter(step for _, step, event in follow_steps(events) if is_backward(event))
        if last.get("unsynced") and any(num_passes[step] > 1 for step in steps[1:-1]):
            return READ_IN_FORWARD  # earlier steps were not refused: their forwards were inside no_sync, too
        return explain_inside(passes[1], launched)
    is_same = launched[-1].name == ready[-1]
    return "the hook runs twice for one gradient: it is registered twice." if is_same else ""


def explain_inside(inner_ends_at: int, early: Sequence[Launch]) -> str:
    """Explain why backward passes inside no_sync launch. The inner block has ended at a position in the record."""
    return FLAG_IGNORED if early[0].place < inner_ends_at else INNER_NO_SYNC


def select_sync_launches(events: Sequence[Event], step: int | None) -> list[Launch]:
    """Return the launches of a step that synchronise gradients: those during backward and finish_grad_sync."""
    return [x for x in launches(events, step) if x.phase == "backward" or x.phase.startswith("finish")]


class StepProgress:
    """How far the steps of a record were at a position in it. A record can have thousands of steps."""

    def __init__(self, events: Sequence[Event]):
        self.begins: dict[int | None, int] = {}  # the position of the first event of each step
        self._ready: dict[int | None, list[int]] = {}  # the positions at which gradients of a step became ready
        self._finishes = [place for place, event in enumerate(events) if event.get("phase", "").startswith("finish")]
        for place, event in enumerate(events):
            if event["kind"] == "step":
                self.begins.setdefault(event["step"], place)
        for place, step, event in follow_steps(events):
            if event["kind"] == "ready":
                self._ready.setdefault(step, []).append(place)

    def measure(self, step: int | None, place: int) -> tuple[bool, int]:
        """Return whether finish_grad_sync of a step had begun at `place`, and the number of ready gradients."""
        finishes, begin = self._finishes, self.begins[step]
        is_over = bisect_left(finishes, begin) < bisect_left(finishes, place)
        return is_over, bisect_left(self._ready.get(step, []), place)


def describe_moment(launch: tuple[str, tuple[bool, int]] | None) -> str:
    """Describe an operation and the progress of its step, for example "all_reduce when 2 gradients were ready"."""
    if launch is None:
        return "missing"
    op, (is_over, count) = launch
    return f"{op} in finish_grad_sync" if is_over else f"{op} when {count} gradients were ready"


def find_no_sync_launches(events: Sequence[Event], step: int) -> list[Launch]:
    """Return the launches before the last backward pass of a step. The earlier passes are inside no_sync."""
    begins = list_backward_passes(events, step)
    return [launch for launch in launches(events, step) if len(begins) > 1 and launch.place < begins[-1]]


def find_wrong_group(events: Sequence[Sequence[Event]], group: Sequence[int], ops: Sequence[str] = ()) -> str:
    """Describe a launch in another group than `group`: of `ops`, or of any during backward or finish_grad_sync."""
    for rank in group if events else []:
        for event in events[rank]:
            is_launch = event["kind"] == "launch" and (event["op"] in ops or event["phase"] in ("backward", "finish"))
            if is_launch and event["ranks"] != group:
                return (
                    f"rank {rank} launched {event['op']} on the group of {format_ranks(event['ranks'])}, but it trains "
                    f"in the group of {format_ranks(group)}. Pass self.process_group to {event['op']}."
                )
    return ""


def format_ranks(ranks: Sequence[int]) -> str:
    """Return text such as "rank 0" or "ranks 1 and 3"."""
    return f"rank{'s' * (len(ranks) > 1)} {join_names(ranks)}"
