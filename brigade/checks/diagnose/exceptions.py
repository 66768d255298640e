"""Find the mistake behind a rank's exception from its message, the rank's record and the submission's text.

Name a cause only if the evidence rules out equally likely causes: a wrong cause is worse than none.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from brigade.checks.diagnose.evidence import FLAG_IGNORED, INNER_NO_SYNC, READ_IN_FORWARD, find_leftover, join_names
from brigade.events import Event, launches, list_backward_passes, list_ready_gradients

if TYPE_CHECKING:
    from brigade.course.submission import Sources
    from brigade.runner.ranks import RankFailure

IN_PLACE = ("all_reduce", "broadcast", "reduce_scatter_tensor", "all_gather_into_tensor", "all_gather")
MAIN_GRAD_AS_GRAD = (
    "main_grad and its parameter have different dtypes, so main_grad cannot be p.grad. Keep the view in p.main_grad. "
    "Only finish_accumulation sets p.grad, to a rounded copy."
)
GATHERED_EARLY = (
    "a group is gathered before its reduce-scatter is launched. If gradients become ready in another order, half of "
    "the next group can be ready earlier. Only groups before queue.next_to_launch are launched."
)
WORLD_RANK = "dist.get_rank() returns the rank in the world. Use dist.get_rank(process_group)."
CALLED_HOOK = "a hook is called on the line that registers it. Pass the function itself, without (...)."


@dataclass(frozen=True)
class Symptom:
    """A rule: `cause` explains an exception of the type `error` ("": any type) whose text matches `message`.

    The line that raised it must match `line`, and the text of its file must match `file`. `not_own` excludes exceptions
    from the submission's own lines. The groups of `message` fill the braces in `cause`. If `cause` is a function and
    returns "", the rule does not apply.
    """

    name: str
    error: str
    message: str
    cause: str | Callable[[RankFailure, Sources], str]
    line: str = ""
    file: str = ""
    not_own: bool = False


def explain_no_result(failure: RankFailure, sources: Sources) -> str:
    """Name a collective that returns None although the submission uses its result."""
    for line, op in find_used_results(sources):
        return f"{line}: without async_op=True, {op} works in place and returns None."
    return ""


def explain_no_return(failure: RankFailure, sources: Sources) -> str:
    names = find_missing_returns(text for _, text in sources.values())
    return f"`return` is missing in {join_names(names)}, so the result is None." if names else ""


def explain_world_rank(failure: RankFailure, sources: Sources) -> str:
    ranks = [event["ranks"] for event in get_events(failure) if event["kind"] == "launch"]
    return WORLD_RANK if any(len(group) < len(failure.events) for group in ranks) else ""


def explain_refusal(failure: RankFailure, sources: Sources) -> str:
    """Explain why the submission's own `raise` refuses a gradient of a step that has one synchronising backward."""
    events = get_events(failure)
    steps = [None, *(event["step"] for event in events if event["kind"] == "step")]
    phase = [event["phase"] for event in events if event["kind"] != "end"][-1:]  # another thread records an "end"
    if not failure.own or phase != ["backward"]:
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
    if launched[0].place < passes[-1]:  # all passes before the last are inside no_sync
        last = next((event for event in reversed(events) if event["kind"] == "step"), {})  # scenarios may lack steps
        if last.get("unsynced") and any(len(list_backward_passes(events, step)) > 1 for step in steps[1:-1]):
            return READ_IN_FORWARD  # earlier steps were not refused: their forwards were inside no_sync, too
        return FLAG_IGNORED if launched[0].place < passes[1] else INNER_NO_SYNC
    is_same = launched[-1].name == ready[-1]
    return "the hook runs twice for one gradient: it is registered twice." if is_same else ""


def explain_leftover(failure: RankFailure, sources: Sources) -> str:
    cause = find_leftover(get_events(failure))
    files = {file for file, *_ in failure.frames}
    if cause and any("LaunchQueue" in text for path, text in sources.values() if Path(path).name in files):
        cause += " For example, LaunchQueue.reset() must reset both num_pending and next_to_launch."
    return cause


def explain_no_handle(failure: RankFailure, sources: Sources) -> str:
    if any(function == "launch_next_all_gather" for _, _, function, _ in failure.frames[:-1]):
        return GATHERED_EARLY
    events = get_events(failure)
    steps = [event["step"] for event in events if event.get("kind") == "step"]
    if not steps or events[-1].get("phase") not in ("finish", "finish_grad_sync"):
        return ""
    launched = launches(events, steps[-1])
    if any(launch.sync for launch in launched):
        return "a launch without async_op=True returns no handle."
    if all(steps[-1] in launch.wait_steps for launch in launched):
        count = f"only {len(launched)} launch{'es' * (len(launched) > 1)}" if launched else "no launch"
        return (
            f"the step made {count}. Before it waits, finish_grad_sync must launch the buckets that never became "
            "complete."
        )
    return ""


def get_events(failure: RankFailure) -> list[Event]:
    """Return the record of the failed rank."""
    return failure.events[failure.rank] if failure.rank is not None and failure.events else []


OPTIONS = "lr|betas|eps|momentum|weight_decay|dampening|nesterov|amsgrad|maximize|foreach|capturable|fused"
UNEQUAL_SHARDS = r"outputShape\[0\] \* worldSize == inputShape\[0\] \((\d+) vs\. (\d+)\)"
HOOK_RESULT = "hook returned|hooks should return"
ASSIGNED = "assign a gradient|assigned grad"
OTHER_DTYPE = f"({ASSIGNED}).*(dtype|different type)"
SYMPTOMS = [
    Symptom("breakpoint", "BdbQuit", "", "you left the debugger, or a breakpoint() is still in the code. It works only "
            "with --debug, which runs one rank on this terminal."),
    Symptom("missing name", "NameError", " has no ", "this name from the skeleton was changed or deleted. "
            "`brigade reset` restores it."),
    Symptom("hook result", "TypeError", HOOK_RESULT, "a hook returns a value. It must return None."),
    Symptom("hook result", "RuntimeError", HOOK_RESULT, "a hook returns a value. It must return None."),
    Symptom("called hook", "TypeError", "object is not callable", CALLED_HOOK, line=r"backward\(", not_own=True),
    Symptom("global rank", "ValueError", r"Global rank \d+ is not part of", "src and dst are ranks of the world. Use "
            "group_src and group_dst for ranks of the group."),
    Symptom("freed", "RuntimeError", "out of bounds for storage of size 0", "a freed weight is used. Its unit is freed "
            "too early or not gathered, or the weight is not a view of the memory that is gathered, for example "
            "because its storage was replaced."),
    Symptom("message to itself", "", "Pair is not connected|should not be the same as the rank of the current process",
            "a rank sends a message to itself. In a group, pass group_dst and group_src, which "
            "are ranks of the group. A ring of one rank has no steps."),
    Symptom("nothing to step", "ValueError", "got an empty parameter list", "a rank owns no parameter, and torch's "
            "optimizers refuse an empty list. They accept empty param_groups: pass a list of param_groups."),
    Symptom("signature", "TypeError",
            r"(missing|takes) .*argument|unexpected keyword argument|multiple values for argument",
            "the signature differs from the one in the skeleton.", not_own=True),
    Symptom("assigned gradient", "RuntimeError", ASSIGNED, "the new gradient must have its parameter's dtype and "
            "shape. Use torch.zeros_like(parameter).", line="zeros|ones|empty"),
    Symptom("assigned gradient", "RuntimeError", f"({ASSIGNED}).*dtype '[^']*(BFloat16|Half)' to .* '[^']*Float'",
            "the gradient has 16 bits, but its tensor is fp32, as main parameters are. Convert the gradient to the "
            "dtype of its tensor."),
    Symptom("assigned gradient", "RuntimeError", f"^(?!.*grad_dtype 'Double').*{OTHER_DTYPE}",  # nothing is wider
            "p.grad must have its parameter's dtype. torch.cat promotes several dtypes to the widest one. Use one flat "
            "tensor per dtype, and copy the pieces into p.grad.", file=r"torch\.cat\("),
    Symptom("assigned gradient", "RuntimeError", OTHER_DTYPE, MAIN_GRAD_AS_GRAD, file="main_grad"),
    Symptom("assigned gradient", "RuntimeError", OTHER_DTYPE, "p.grad must have its parameter's dtype. Convert the "
            "gradient with .to(parameter.dtype)."),
    Symptom("assigned gradient", "RuntimeError", f"({ASSIGNED}).*device", "p.grad must be on the device of its "
            "parameter."),
    Symptom("assigned gradient", "RuntimeError", ASSIGNED, "p.grad must have its parameter's shape. Copy the piece of "
            "the flat tensor into p.grad instead."),
    Symptom("missing option", "KeyError", f"^'({OPTIONS})'$", "the param_groups of the outer optimizer have no '{0}'. "
            "Pass the defaults of the inner optimizer to super().__init__."),
    Symptom("no yield", "TypeError", "'NoneType' object is not an iterator", "a function decorated with "
            "@contextmanager has no yield."),
    Symptom("no result", "AttributeError", "'NoneType' object has no attribute", explain_no_result),
    Symptom("no result", "TypeError", "'NoneType'", explain_no_result),
    Symptom("no return", "", "NoneType", explain_no_return),
    Symptom("unequal shards", "", UNEQUAL_SHARDS,
            "reduce_scatter(output, input) received an input of {1} elements, but the outputs of all ranks have {0} "
            "elements in total. The output must be the rank's own shard. The input must be the whole flat tensor, "
            "which is as long as all shards together."),
    Symptom("no gradient", "", "'NoneType' object has no attribute", "the gradient of a parameter that a rank did not "
            "use is None. Treat it as zeros.", line=r"\.grad\."),
    Symptom("world rank", "IndexError", "", WORLD_RANK, line=r"get_rank\(\)"),
    Symptom("world rank", "IndexError", "", explain_world_rank, file=r"get_rank\(\)"),
    Symptom("last bucket", "IndexError", "", "an index is beyond the buffer's last bucket. The last group may have "
            "fewer buckets than the others.", line=r"bucket_ranges\["),
    Symptom("refusal", "RuntimeError", "", explain_refusal, line="^raise "),
    Symptom("left over", "", "", explain_leftover),
    Symptom("no handle", "", "'wait'", explain_no_handle),
]  # fmt: skip


def explain_exception(failure: RankFailure, sources: Sources) -> tuple[str, str]:
    """Return the likely cause of a rank's exception and the name of the symptom, or ("", "") if there is none."""
    registering = [text for _, _, function, text in failure.frames[:-1] if function != "<lambda>"]
    if any(re.search(r"register_\w*hook\(", text) for text in registering) and failure.own:
        return CALLED_HOOK, "called hook"  # the line that registers the hook was calling it
    file, _, _, line = failure.frames[-1] if failure.frames else ("", 0, "", "")
    text = next((text for path, text in sources.values() if Path(path).name == file), "")
    for symptom in SYMPTOMS:
        match = re.search(symptom.message, failure.message)
        is_there = match and re.search(symptom.line, line) and re.search(symptom.file, text)
        if is_there and symptom.error in ("", failure.error) and not (symptom.not_own and failure.own):
            cause = symptom.cause
            cause = cause.format(*match.groups()) if isinstance(cause, str) else cause(failure, sources)
            if cause:
                return cause, symptom.name
    return "", ""


def find_used_results(sources: Sources) -> Iterable[tuple[str, str]]:
    """Yield (file and line, name) for each collective whose result is used although it lacks async_op=True."""
    for path, text in sources.values():
        tree = parse(text)
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or id(node) in alone or len(node.args) > 3:
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            options = {keyword.arg: keyword.value for keyword in node.keywords}
            is_async = getattr(options.get("async_op"), "value", "async_op" in options)
            if name in IN_PLACE and None not in options and not is_async:
                yield f"{Path(path).name}, line {node.lineno}", name


def find_missing_returns(texts: Iterable[str]) -> list[str]:
    """Return the functions of these texts that declare a result but never return one."""
    functions = [n for text in texts for n in ast.walk(parse(text)) if isinstance(n, ast.FunctionDef)]
    return [
        node.name
        for node in functions
        if ast.unparse(node.returns or ast.Constant(None)) != "None"
        and not all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in node.body)  # a docstring
        and not isinstance(node.body[-1], ast.Raise)
        and not any(map(returns_value, node.body))
    ]


def returns_value(node: ast.AST) -> bool:
    """Return whether a statement returns or yields something, ignoring the functions inside it."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
        return False
    if isinstance(node, (ast.Yield, ast.YieldFrom)) or isinstance(node, ast.Return) and node.value is not None:
        return True
    return any(map(returns_value, ast.iter_child_nodes(node)))


def parse(text: str) -> ast.Module:
    """Return the syntax tree of a student's text, or an empty tree if the text is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])
