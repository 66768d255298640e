"""The mistake behind a wrong result, where the ranks' record gives it away.

One is said only where the evidence excludes the others that are as likely: a wrong cause costs more than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brigade.events import Event, Launch, counters, launches, passes, ready

if TYPE_CHECKING:
    from brigade.checks.reference import Case


@dataclass(frozen=True)
class Evidence:
    """What the ranks' record of one step shows. `mistake` is wrong whatever the numbers are."""

    mistake: str = ""
    averaged: bool = False  # some collective's reduce op is AVG
    synchronous: bool = False  # one was called without async_op=True, and returned None
    forgotten: int | None = None  # handles that nobody waited on in their step; None: not known


def of_record(events: Sequence[Sequence[Event]] | None, case: Case, step: int | None = 0) -> Evidence:
    """What is known of a step (None: of all) from what the ranks of the case's group recorded."""
    if not events:
        return Evidence()
    mine = [events[rank] for rank in case.group]
    found = [launch for record in mine for launch in launches(record, step)]
    known = (wrong_group(events, case.group), *(misplaced(record, case, step) for record in mine))
    mistake = next(filter(None, known), "")
    return Evidence(
        mistake,
        any(launch.reduce_op == "AVG" for launch in found),
        any(launch.sync and launch.phase != "construct" for launch in found),
        sum(step not in launch.wait_steps for launch in found if not launch.sync),
    )


def misplaced(record: Sequence[Event], case: Case, step: int) -> str:
    """Whether weights are reduced, gradients before they are in `.grad`, or gradients that are changed meanwhile."""
    found = [launch for launch in launches(record, step) if launch.phase in ("backward", "finish")]
    if any(launch.op == "all_reduce" and launch.memory == "weight" for launch in found):
        return "the parameter itself is all-reduced, not its gradient: p.grad?"
    numels = {name: p.numel() for name, p in case.parameters().items() if p.requires_grad}
    complete = {name: place for place, name in ready(record, step)}
    if sorted(launch.numel for launch in found) != sorted(numels.values()):
        return ""  # not one launch for each
    if any(launch.raced and launch.memory == "gradient" for launch in found):
        return "a gradient was changed before its handle was waited on: divided, or overwritten?"
    for launch in found:
        names = [name for name, numel in numels.items() if numel == launch.numel]
        if len(names) == 1 and launch.phase == "backward" and launch.place < complete.get(names[0], -1):
            return (
                f"{names[0]} is all-reduced before its gradient is in .grad: a tensor's hook (register_hook) gets the "
                "incoming gradient, register_post_accumulate_grad_hook runs when it has been added"
            )
    return ""


def left_over(events: Sequence[Event]) -> str:
    """The counter of the submission that a step did not leave as the first one found it, or nothing."""
    noted = counters(events)
    first = noted[0][0] if noted.get(0) else {}
    for step, [begin, *_] in noted.items():
        for name, value in begin.items():
            before = first.get(name)
            if isinstance(value, list) and isinstance(before, list) and len(value) == len(before):
                place = next((i for i, pair in enumerate(zip(value, before)) if pair[0] != pair[1]), 0)
                name, value, before = f"{name}[{place}]", value[place], before[place]
            if before is not None and value != before:
                return (
                    f"something of the step before is left over: {name} is {value} when step {step} begins, and was "
                    f"{before} when step 0 began?"
                )
    return ""


def miscounted(events: Sequence[Event], step: int, unit: str = "bucket", otherwise: str = "") -> str:
    """What the submission's counters say of launches that came at the wrong time in this step, or `otherwise`."""
    noted = counters(events).get(step, [])
    if cause := left_over(events):
        return cause
    if len(noted) < 2 or "missing" not in noted[0] or len(noted[0]["missing"]) != len(noted[1].get("missing", [])):
        return otherwise
    members = noted[0]["missing"]
    counted = [before - after for before, after in zip(members, noted[1]["missing"])]
    full = [place for place, count in enumerate(counted) if count > members[place]]
    if len(members) > 1 and len(full) == 1 and sum(map(bool, counted)) == 1:
        return (
            f"all {counted[full[0]]} gradients were counted in {unit} {full[0]}, of {members[full[0]]} parameters: "
            "mark_ready is always called with the same one? What does a lambda in a loop remember of the loop?"
        )
    if full and len(passes(events, step)) > 1:
        return f"gradients that become ready inside no_sync are counted too, {counted} of {members} by {unit}?"
    if not any(counted):
        return "no gradient was counted in backward: is mark_ready called by a hook, and does it count?"
    return otherwise


def launched_in_no_sync(events: Sequence[Event], step: int) -> list[Launch]:
    """The launches of a step before its last backward pass began; all others are inside no_sync."""
    begins = passes(events, step)
    return [launch for launch in launches(events, step) if len(begins) > 1 and launch.place < begins[-1]]


def wrong_group(events: Sequence[Sequence[Event]], group: Sequence[int]) -> str:
    """Says so where what a rank launches in backward or at the finish is not on the group of these ranks."""
    for rank in group if events else []:
        found = [event for event in events[rank] if event["kind"] == "launch"]
        others = [e["ranks"] for e in found if e["phase"] in ("backward", "finish") and e["ranks"] != group]
        if others:
            where = f"the group of ranks {listing(others[0])}, not on that of {listing(group)}"
            return f"rank {rank} launched on {where}: group=self.process_group?"
    return ""


def listing(names: Sequence[Any], limit: int = 4) -> str:
    names = [str(name) for name in names]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
