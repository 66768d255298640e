"""The mistake behind a wrong result, where the ranks' record gives it away.

One is said only where the evidence excludes the others that are as likely: a wrong cause costs more than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from brigade.events import Event, Launch, launches, passes, ready

if TYPE_CHECKING:
    from brigade.checks.reference import Case

Progressed = tuple[Launch, tuple[bool, int]]


@dataclass(frozen=True)
class Evidence:
    """What the ranks' record of one step shows. `mistake` is wrong whatever the numbers are."""

    mistake: str = ""
    averaged: bool = False  # some collective's reduce op is AVG
    synchronous: bool = False  # one was called without async_op=True, and returned None
    forgotten: int | None = None  # handles that nobody waited on in their step; None: not known
    world_size: int | None = None  # of the run, where the ranks that are compared are a part of it


def collect_evidence(events: Sequence[Sequence[Event]] | None, case: Case, step: int | None = 0) -> Evidence:
    """What is known of a step (None: of all) from what the ranks of the case's group recorded."""
    if not events:
        return Evidence(world_size=case.world_size)
    mine = [events[rank] for rank in case.group]
    found = [launch for record in mine for launch in launches(record, step)]
    known = (wrong_group(events, case.group), *(misplaced(record, case, step) for record in mine))
    mistake = next(filter(None, known), "")
    return Evidence(
        mistake,
        any(launch.reduce_op == "AVG" for launch in found),
        any(launch.sync and launch.phase != "construct" for launch in found),
        sum(step not in launch.wait_steps for launch in found if not launch.sync),
        case.world_size,
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


def find_leftover(events: Sequence[Event]) -> str:
    """How a later step launches differently from step 0, which did the same work, or nothing.

    Where the record ends within a step, because the rank failed, only what step 0 had launched by then is compared.
    """
    steps = [event["step"] for event in events if event.get("kind") == "step"]
    for step in steps[1:]:
        first, again = ([(x, progress(events, s, x.place)) for x in synchronising(events, s)] for s in (steps[0], step))
        reached = progress(events, step, len(events)) if step == steps[-1] else None
        if what := difference(first, again, [launch.op for launch, at in first if reached is None or at < reached]):
            return f"something of the step before is left over: in step {step} {what}; finish_grad_sync has to reset it"
    return ""


def synchronising(events: Sequence[Event], step: int) -> list[Launch]:
    """The launches of a step that synchronise gradients: in backward, or in the finish."""
    return [x for x in launches(events, step) if x.phase == "backward" or x.phase.startswith("finish")]


def progress(events: Sequence[Event], step: int, place: int) -> tuple[bool, int]:
    """How far a step was at a place of the record: whether its finish had begun, and how many gradients were ready."""
    begin = next(i for i, event in enumerate(events) if event.get("kind") == "step" and event.get("step") == step)
    is_over = any(event.get("phase", "").startswith("finish") for event in events[begin:place])
    return is_over, sum(at < place for at, _ in ready(events, step))


def difference(first: Sequence[Progressed], again: Sequence[Progressed], due: Sequence[str]) -> str:
    """How the launches of a step differ from those of step 0, which are `first`; each comes with its `progress`.

    `due` are the operations of step 0 that the step had to launch by now.
    """
    for op in dict.fromkeys(due):
        count = sum(launch.op == op for launch, _ in again)
        if count < due.count(op):
            return f"it makes {count} of the {due.count(op)} launches of {op} that step 0 made by then"
    for (_, before), (launch, now) in zip(first, again):
        if now != before:
            return f"a launch of {launch.op} comes {moment(*now)}, and in step 0 it came {moment(*before)}"
    return ""


def moment(is_over: bool, count: int) -> str:
    return "in the finish" if is_over else f"after {count} ready gradient{'s' * (count != 1)}"


def find_no_sync_launches(events: Sequence[Event], step: int) -> list[Launch]:
    """The launches of a step before its last backward pass began; all others are inside no_sync."""
    begins = passes(events, step)
    return [launch for launch in launches(events, step) if len(begins) > 1 and launch.place < begins[-1]]


def wrong_group(events: Sequence[Sequence[Event]], group: Sequence[int]) -> str:
    """Says so where what a rank launches in backward or at the finish is not on the group of these ranks."""
    for rank in group if events else []:
        found = [event for event in events[rank] if event["kind"] == "launch"]
        others = [e["ranks"] for e in found if e["phase"] in ("backward", "finish") and e["ranks"] != group]
        if others:
            where = f"the group of ranks {join_names(others[0])}, not on that of {join_names(group)}"
            return f"rank {rank} launched on {where}: group=self.process_group?"
    return ""


def join_names(names: Sequence[Any], limit: int = 4) -> str:
    names = [str(name) for name in names]
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
