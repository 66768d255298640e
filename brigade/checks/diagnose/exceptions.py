"""The mistake behind a rank's exception, where its message, its record and the submission's text give it away.

A cause is said only where the evidence excludes the others that are as likely: a wrong one costs more than none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from brigade.checks.diagnose.evidence import find_leftover, join_names
from brigade.events import Event, launches

if TYPE_CHECKING:
    from brigade.course.submission import Sources
    from brigade.runner.ranks import RankFailure

IN_PLACE = ("all_reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather")
CALLED_HOOK = "a hook is called where it is registered: pass the function itself, without (...)?"


@dataclass(frozen=True)
class Symptom:
    """An exception of this type ("": any) with this in its message means `cause`; "" where the evidence is missing."""

    name: str
    error: str
    message: str
    cause: str | Callable[[RankFailure, Sources], str]


def by_the_signature(failure: RankFailure, sources: Sources) -> str:
    return "" if failure.own else "the signature differs from the one in the skeleton?"


def by_its_hooks(failure: RankFailure, sources: Sources) -> str:
    in_backward = any("run_backward" in text or "loss.backward()" in text for *_, text in failure.frames)
    return CALLED_HOOK if in_backward and not failure.own else ""


def by_no_result(failure: RankFailure, sources: Sources) -> str:
    """The collective in the submission's text whose result is used though it gives none."""
    for place, op in find_used_results(sources):
        return f"{place}: without async_op=True {op} works in place and returns None"
    return ""


def by_no_return(failure: RankFailure, sources: Sources) -> str:
    names = find_missing_returns(text for _, text in sources.values())
    return f"{join_names(names)} ends without `return`, and so gives None?" if names else ""


def by_unequal_shards(failure: RankFailure, sources: Sources) -> str:
    whole, given = re.search(UNEQUAL_SHARDS, failure.message).groups()
    return (
        f"reduce_scatter(output, input): the output times the number of ranks has {whole} elements, the input {given}; "
        "the output is the own shard, the input the whole bucket, which is as long as all shards?"
    )


def by_no_gradient(failure: RankFailure, sources: Sources) -> str:
    [name] = re.search(NO_ATTRIBUTE, failure.message).groups()
    used = any(f".grad.{name}" in text for *_, text in failure.frames)
    return "the gradient of a parameter that this rank did not use is None: it counts as zeros?" if used else ""


def by_the_last_bucket(failure: RankFailure, sources: Sources) -> str:
    last = failure.frames[-1][-1] if failure.frames else ""
    cause = "an index beyond the buffer's last bucket: the last group may have fewer buckets than the others?"
    return cause if "bucket_ranges[" in last else ""


def by_what_is_left(failure: RankFailure, sources: Sources) -> str:
    return find_leftover(recorded(failure))


def by_no_handle(failure: RankFailure, sources: Sources) -> str:
    events = recorded(failure)
    steps = [event["step"] for event in events if event.get("kind") == "step"]
    if not steps or events[-1].get("phase") not in ("finish", "finish_grad_sync"):
        return ""
    found = launches(events, steps[-1])
    if any(launch.sync for launch in found):
        return "a launch without async_op=True gives no handle?"
    if all(steps[-1] in launch.wait_steps for launch in found):
        return (
            f"only {len(found)} launches were made in this step, and each was waited for: does finish_grad_sync launch "
            "those that never became complete, before it waits?"
        )
    return ""


def recorded(failure: RankFailure) -> list[Event]:
    """What the rank that failed has recorded."""
    return failure.events[failure.rank] if failure.rank is not None and failure.events else []


UNEQUAL_SHARDS = r"outputShape\[0\] \* worldSize == inputShape\[0\] \((\d+) vs\. (\d+)\)"
HOOK_RESULT = "hook returned|hooks should return"
NO_ATTRIBUTE = r"'NoneType' object has no attribute '(\w+)'"
SYMPTOMS = [
    Symptom("breakpoint", "BdbQuit", "", "a breakpoint() was left in? --debug runs one rank on this terminal, where it "
            "works"),
    Symptom("missing name", "NameError", " has no ", "the name was changed or deleted? The skeleton has it; "
            "`brigade reset` brings it back"),
    Symptom("hook result", "TypeError", HOOK_RESULT, "a hook returns a value: it must return None"),
    Symptom("hook result", "RuntimeError", HOOK_RESULT, "a hook returns a value: it must return None"),
    Symptom("called hook", "TypeError", "object is not callable", by_its_hooks),
    Symptom("global rank", "ValueError", r"Global rank \d+ is not part of", "src and dst are ranks of the world; "
            "group_src and group_dst are those of the group?"),
    Symptom("signature", "TypeError",
            r"(missing|takes) .*argument|unexpected keyword argument|multiple values for argument", by_the_signature),
    Symptom("assigned gradient", "RuntimeError", "assign a gradient|assigned grad", "a gradient has its parameter's "
            "dtype and shape: torch.zeros_like(parameter)?"),
    Symptom("no yield", "TypeError", "'NoneType' object is not an iterator", "a function under @contextmanager has no "
            "yield"),
    Symptom("no result", "AttributeError", NO_ATTRIBUTE, by_no_result),
    Symptom("no result", "TypeError", "'NoneType'", by_no_result),
    Symptom("no return", "", "NoneType", by_no_return),
    Symptom("unequal shards", "", UNEQUAL_SHARDS, by_unequal_shards),
    Symptom("no gradient", "", NO_ATTRIBUTE, by_no_gradient),
    Symptom("last bucket", "IndexError", "", by_the_last_bucket),
    Symptom("left over", "", "", by_what_is_left),
    Symptom("no handle", "", "'wait'", by_no_handle),
]  # fmt: skip


def explain_exception(failure: RankFailure, sources: Sources) -> tuple[str, str]:
    """Return the likely cause of a rank's exception, and the name of the symptom; two "" for none."""
    if any(re.search(r"register_\w*hook\(", text) for *_, text in failure.frames[:-1]) and failure.own:
        return CALLED_HOOK, "called hook"  # a call on the line that registers was being made when it raised
    for symptom in SYMPTOMS:
        if symptom.error in ("", failure.error) and re.search(symptom.message, failure.message):
            cause = symptom.cause if isinstance(symptom.cause, str) else symptom.cause(failure, sources)
            if cause:
                return cause, symptom.name
    return "", ""


def find_used_results(sources: Sources) -> Iterable[tuple[str, str]]:
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


def find_missing_returns(texts: Iterable[str]) -> list[str]:
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
