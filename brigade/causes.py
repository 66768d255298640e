"""The mistake behind a failed run, where its exception, its record and the submission's text give it away.

A cause is said only where the evidence excludes the others that are as likely: a wrong one costs more than none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from brigade.events import Event, launches, ready
from brigade.evidence import wrong_group

if TYPE_CHECKING:
    from brigade.ranks import RankFailure
    from brigade.reference import Case
    from brigade.submission import Sources

IN_PLACE = ("all_reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather")
CALLED_HOOK = "a hook is called where it is registered: pass the function itself, without (...)?"


# ---- of an exception


@dataclass(frozen=True)
class Symptom:
    """An exception of this type, with this in its message, means `cause`; "" where the evidence is missing."""

    error: str
    message: str
    cause: str | Callable[[RankFailure, Sources], str]


def by_the_signature(failure: RankFailure, sources: Sources) -> str:
    return "" if failure.own else "the signature differs from the one in the skeleton?"


def by_its_hooks(failure: RankFailure, sources: Sources) -> str:
    in_backward = any("run_backward" in line or "loss.backward()" in line for line in failure.lines)
    return CALLED_HOOK if in_backward and not failure.own else ""


def by_none(failure: RankFailure, sources: Sources) -> str:
    """The collective in the submission's text whose result is used though it gives none."""
    for place, op in used_results(sources):
        return f"{place}: without async_op=True {op} works in place and returns None"
    return ""


SYMPTOMS = [
    Symptom("BdbQuit", "", "a breakpoint() was left in? --debug runs one rank on this terminal, where it works"),
    Symptom("NameError", " has no ", "the name was changed or deleted? The skeleton has it; `brigade reset` brings it "
            "back"),
    Symptom("TypeError", "hook returned|hooks should return", "a hook returns a value: it must return None"),
    Symptom("RuntimeError", "hook returned|hooks should return", "a hook returns a value: it must return None"),
    Symptom("TypeError", "object is not callable", by_its_hooks),
    Symptom("ValueError", r"Global rank \d+ is not part of", "src and dst are ranks of the world; group_src and "
            "group_dst are those of the group?"),
    Symptom("TypeError", r"(missing|takes) .*argument|unexpected keyword argument|multiple values for argument",
            by_the_signature),
    Symptom("RuntimeError", "assign a gradient|assigned grad", "a gradient has its parameter's dtype and shape: "
            "torch.zeros_like(parameter)?"),
    Symptom("TypeError", "'NoneType' object is not an iterator", "a function under @contextmanager has no yield"),
    Symptom("AttributeError", "'NoneType' object has no attribute", by_none),
    Symptom("TypeError", "'NoneType'", by_none),
]  # fmt: skip


def of_exception(failure: RankFailure, sources: Sources) -> str:
    """The likely cause of a rank's exception, or nothing."""
    if any(re.search(r"register_\w*hook\(", line) for line in failure.lines[:-1]) and failure.own:
        return CALLED_HOOK  # a call on the line that registers was being made when it raised
    for symptom in SYMPTOMS:
        if symptom.error == failure.error and re.search(symptom.message, failure.summary):
            return symptom.cause if isinstance(symptom.cause, str) else symptom.cause(failure, sources)
    return ""


def used_results(sources: Sources) -> Iterable[tuple[str, str]]:
    """(file and line, name) of each collective without async_op in these texts whose result is used: there is none."""
    for path, text in sources.values():
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):
            continue
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or id(node) in alone or len(node.args) > 3:
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            if name in IN_PLACE and None not in options and is_false(options.get("async_op")):
                yield f"{Path(path).name}, line {node.lineno}", name


def is_false(node: ast.expr | None) -> bool:
    return node is None or isinstance(node, ast.Constant) and not node.value


# ---- of a record


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
    if not mistake and any(launch.raced for launch in found):
        mistake = "what a collective works on was changed before its handle was waited on: divided, or overwritten?"
    return Evidence(
        mistake,
        any(launch.reduce_op == "AVG" for launch in found),
        any(launch.sync and launch.phase != "construct" for launch in found),
        sum(step not in launch.wait_steps for launch in found if not launch.sync),
    )


def misplaced(record: Sequence[Event], case: Case, step: int) -> str:
    """Whether weights are reduced, or gradients before they are in `.grad`."""
    found = [launch for launch in launches(record, step) if launch.phase in ("backward", "finish")]
    if any(launch.op == "all_reduce" and launch.memory == "weight" for launch in found):
        return "the parameter itself is all-reduced, not its gradient: p.grad?"
    numels = {name: p.numel() for name, p in case.parameters().items() if p.requires_grad}
    complete = {name: place for place, name in ready(record, step)}
    if sorted(launch.numel for launch in found) != sorted(numels.values()):
        return ""  # not one launch for each
    for launch in found:
        names = [name for name, numel in numels.items() if numel == launch.numel]
        if len(names) == 1 and launch.phase == "backward" and launch.place < complete.get(names[0], -1):
            return (
                f"{names[0]} is all-reduced before its gradient is in .grad: a tensor's hook (register_hook) gets the "
                "incoming gradient, register_post_accumulate_grad_hook runs when it has been added"
            )
    return ""
