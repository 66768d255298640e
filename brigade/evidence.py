"""Causes of a failure that a rank's record shows, or the submission's text: what tells one mistake from another."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence
from typing import Any

from brigade.events import Event, Launch, counters, launches, passes


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


def exception_cause(message: str, events: Sequence[Event], texts: Iterable[str]) -> str:
    """Why a rank raised: from the exception's message, the rank's record and the submission's text; or nothing."""
    if "NoneType" in message and (names := without_return(texts)):
        return f"{listing(names)} ends without `return`, and so gives None?"
    if shapes := re.search(r"outputShape\[0\] \* worldSize == inputShape\[0\] \((\d+) vs\. (\d+)\)", message):
        whole, given = shapes.groups()
        return (
            f"reduce_scatter(output, input): the output times the number of ranks has {whole} elements, the input "
            f"{given}; the output is the own shard, the input the whole bucket, which is as long as all shards?"
        )
    if (missing := re.search(r"'NoneType' object has no attribute '(\w+)'", message)) and (
        f".grad.{missing[1]}" in message
    ):
        return "the gradient of a parameter that this rank did not use is None: it counts as zeros?"
    if "IndexError" in message and "bucket_ranges[" in message.splitlines()[-1]:
        return "an index beyond the buffer's last bucket: the last group may have fewer buckets than the others?"
    if cause := left_over(events):
        return cause
    noted = counters(events)
    step = max(noted, default=0)
    if "'wait'" in message and noted.get(step):
        found, units = launches(events, step), len(noted[step][0].get("missing", []))
        if any(launch.sync for launch in found):
            return "a launch without async_op=True gives no handle?"
        if len(found) < units:
            return (
                f"only {len(found)} of {units} were launched in this step: does finish_grad_sync launch those that "
                "never became complete, before it waits?"
            )
    return ""


def without_return(texts: Iterable[str]) -> list[str]:
    """The functions of these texts that are declared to return something, and nowhere do."""
    found = []
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, ast.FunctionDef) or node.returns is None:
                continue
            nothing = isinstance(node.returns, ast.Constant) and node.returns.value is None
            is_written = not all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in node.body)
            is_written = is_written and not isinstance(node.body[-1], ast.Raise)
            if is_written and not nothing and not any(map(gives, node.body)):
                found.append(node.name)
    return found


def gives(node: ast.AST) -> bool:
    """Whether a statement returns or yields something, functions inside it aside."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
        return False
    if isinstance(node, (ast.Yield, ast.YieldFrom)) or isinstance(node, ast.Return) and node.value is not None:
        return True
    return any(map(gives, ast.iter_child_nodes(node)))


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
