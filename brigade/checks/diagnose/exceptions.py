"""Find the mistake behind a rank's exception from its message, the rank's record and the submission's text.

Name a cause only if the evidence rules out equally likely causes: a wrong cause is worse than none.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from brigade.checks.diagnose.evidence import FLAG_IGNORED, INNER_NO_SYNC, READ_IN_FORWARD, find_leftover, join_names
from brigade.course.syntax import parse_tree
from brigade.events import Event, launches, list_backward_passes, list_ready_gradients, list_step_events

if TYPE_CHECKING:
    from brigade.course.submission import Sources
    from brigade.runner.ranks import RankFailure

# A line that uses the result of a complete call without async_op=True, such as `work = dist.all_reduce(tensor)`.
USED_RESULT = (
    r"^[^#\n]*(?:=|\(|return) *(?:\w+\.)*(all_reduce|broadcast|reduce_scatter_tensor|all_gather_into_tensor|all_gather)"
    r"\((?!.*(async_op=(?!False)|True|\*)).*\)$"
)
MAIN_GRAD_AS_GRAD = (
    "main_grad and its parameter have different dtypes, so main_grad cannot be p.grad. Keep the view in p.main_grad. "
    "Only finish_accumulation sets p.grad, to a rounded copy."
)
GATHERED_EARLY = (
    "a group is gathered before its reduce-scatter is launched. If gradients become ready in another order, half of "
    "the next group can be ready earlier. Only groups before queue.next_to_launch are launched."
)
NOT_LAUNCHED = (
    "there is no handle, because nothing was launched for it. Before it waits, finish_grad_sync must launch the "
    "buckets that never became complete."
)
WORLD_RANK = "dist.get_rank() returns the rank in the world. Use dist.get_rank(process_group)."
CALLED_HOOK = "a hook is called on the line that registers it. Pass the function itself, without (...)."


@dataclass(frozen=True)
class Symptom:
    """A rule: `cause` explains an exception of the type `error` ("": any type) whose text matches `message`.

    The line that raised it must match `line`, and a line of its file must match `file`. `not_own` excludes exceptions
    from the submission's own lines. The groups of `message` and `file` fill the braces in `cause`. If `cause` is a
    function and returns "", the rule does not apply.
    """

    name: str
    error: str
    message: str
    cause: str | Callable[[RankFailure, Sources], str]
    line: str = ""
    file: str = ""
    not_own: bool = False


def explain_no_return(failure: RankFailure, sources: Sources) -> str:
    names: list[str] = []
    for _, text in sources.values():
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # perhaps of a module that is not used
            names += find_missing_returns(text)
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
    finishes = [place for place, event in list_step_events(events, steps[-1]) if event.get("phase") == "finish"]
    if any(launched[0].place < place < passes[-1] for place in finishes):
        return "after finish_grad_sync, state is left that makes the wrapper refuse the next backward of the same step."
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
    steps = [event["step"] for event in events if event["kind"] == "step"]
    if not steps or events[-1].get("phase") not in ("finish", "finish_grad_sync"):
        return ""
    launched = launches(events, steps[-1])
    if any(launch.sync for launch in launched):
        return "a launch without async_op=True returns no handle."
    return NOT_LAUNCHED if all(steps[-1] in launch.wait_steps for launch in launched) else ""


def get_events(failure: RankFailure) -> list[Event]:
    """Return the record of the failed rank."""
    return failure.events[failure.rank] if failure.rank is not None and failure.events else []


OPTIONS = "lr|betas|eps|momentum|weight_decay|dampening|nesterov|amsgrad|maximize|foreach|capturable|fused"
UNEQUAL_SHARDS = r"outputShape\[0\] \* worldSize == inputShape\[0\] \((\d+) vs\. (\d+)\)"
ASSIGNED = "assign a gradient|assigned grad"
OTHER_DTYPE = f"({ASSIGNED}).*(dtype|different type)"
SYMPTOMS = [
    Symptom("breakpoint", "BdbQuit", "", "you left the debugger, or a breakpoint() is still in the code. It works only "
            "with --debug, which runs one rank on this terminal."),
    Symptom("missing name", "NameError", " has no ", "this name from the skeleton was changed or deleted. "
            "`brigade reset` restores it."),
    Symptom("hook result", "", "hook returned|hooks should return", "a hook returns a value. It must return None."),
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
    Symptom("assigned gradient", "RuntimeError", f"({ASSIGNED}).*dtype '[^']*(BFloat16|Half)' to .* '[^']*Float'",
            "the gradient has 16 bits, but its tensor is fp32, as main parameters are. Convert the gradient to the "
            "dtype of its tensor."),
    Symptom("assigned gradient", "RuntimeError", f"^(?!.*grad_dtype 'Double').*{OTHER_DTYPE}",  # nothing is wider
            "p.grad must have its parameter's dtype. torch.cat promotes several dtypes to the widest one. Use one flat "
            "tensor per dtype, and copy the pieces into p.grad.", file=r"torch\.cat\("),
    Symptom("assigned gradient", "RuntimeError", OTHER_DTYPE, MAIN_GRAD_AS_GRAD, file="main_grad"),
    Symptom("assigned gradient", "RuntimeError", ASSIGNED, "p.grad must have its parameter's dtype, shape and device. "
            "Use torch.zeros_like(parameter), convert the gradient, or copy the piece of the flat tensor into p.grad."),
    Symptom("missing option", "KeyError", f"^'({OPTIONS})'$", "the param_groups of the outer optimizer have no '{0}'. "
            "Pass the defaults of the inner optimizer to super().__init__."),
    Symptom("no yield", "TypeError", "'NoneType' object is not an iterator", "a function decorated with "
            "@contextmanager has no yield."),
    Symptom("no result", "", "'NoneType'", "without async_op=True, {0} works in place and returns None.",
            file=USED_RESULT),
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
        match, in_file = re.search(symptom.message, failure.message), re.search(symptom.file, text, re.MULTILINE)
        is_there = match and in_file and re.search(symptom.line, line) and symptom.error in ("", failure.error)
        if is_there and not (symptom.not_own and failure.own):
            cause, groups = symptom.cause, [*match.groups(), *in_file.groups()]
            if cause := cause.format(*groups) if isinstance(cause, str) else cause(failure, sources):
                return cause, symptom.name
    return "", ""


def find_missing_returns(text: str) -> list[str]:
    """Return the functions that declare a result and have code, but contain no `return`, `yield` or `raise`."""
    return [
        node.name
        for node in ast.walk(parse_tree(text))
        if isinstance(node, ast.FunctionDef)
        and ast.unparse(node.returns or ast.Constant(None)) != "None"
        and len(node.body) > (ast.get_docstring(node) is not None)
        and not any(isinstance(inner, (ast.Return, ast.Yield, ast.YieldFrom, ast.Raise)) for inner in ast.walk(node))
    ]
