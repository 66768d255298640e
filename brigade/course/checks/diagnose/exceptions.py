"""Find the mistake behind a rank's exception from its message, the rank's record and the submission's text.

Name a cause only if the evidence rules out equally likely causes: a wrong cause is worse than none.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from brigade.course.checks.course_tests import import_from_tests
from brigade.course.checks.diagnose.evidence import explain_refusal, find_leftover
from brigade.course.table.modules import MODULES
from brigade.ranks.events import Event
from brigade.ranks.runner.server import SERVER
from brigade.ranks.syntax import parse_tree
from brigade.ranks.verdict import join_names

if TYPE_CHECKING:
    from brigade.ranks.runner.ranks import RankFailure
    from brigade.ranks.texts import Sources

# A line that uses the result of a complete call without async_op=True, such as `work = dist.all_reduce(tensor)`.
USED_RESULT = (
    r"^[^#\n]*(?:=|\(|return) *(?:\w+\.)*(all_reduce|broadcast|reduce_scatter_tensor|all_gather_into_tensor|all_gather)"
    r"\((?!.*(async_op=(?!False)|True|\*)).*\)$"
)
# What is longer is not searched, because a search can take quadratic time: characters of a line, and of a file that is
# parsed. The longest file of the reference has 42,000.
LONGEST_LINE, LONGEST_TEXT = 300, 60_000
CALLED_HOOK = "a hook is called on the line that registers it. Pass the function itself, without (...)."


# Which of these it is cannot be told: what other ranks had done by then depends on time.
NO_GRADIENT = (
    "p.grad is None in this line: zero_grad sets it to None, with main_grad it stays None, and it is None for a "
    "parameter that this rank did not use. Treat it as zeros."
)


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
    for text in (text for _, text in sources.values() if len(text) <= LONGEST_TEXT):
        with contextlib.suppress(SyntaxError, ValueError, RecursionError):  # perhaps of a module that is not used
            names += find_missing_returns(text)
    return f"`return` is missing in {join_names(names)}, so the result is None." if names else ""


def explain_world_rank(failure: RankFailure, sources: Sources) -> str:
    groups = [event["ranks"] for event in get_events(failure) if event["kind"] == "launch"]
    is_smaller = any(len(group) < len(failure.events) for group in groups)
    is_called = is_smaller or "get_rank()" in failure.frames[-1][3]
    return "dist.get_rank() returns the rank in the world. Use dist.get_rank(process_group)." if is_called else ""


def explain_helper_file(failure: RankFailure, sources: Sources) -> str:
    name = failure.message.rstrip("'").rpartition("'")[2].rpartition(".")[2]
    paths = [Path(path).with_name(f"{name}.py") for path, _ in sources.values() if path]
    if "'submission." not in failure.message and not any(path.is_file() for path in paths):
        return ""  # perhaps a package that is not installed
    return f"only the course's files are read, so {name}.py is not there. Move what you need from it into this file."


def tell_offline(sentence: str) -> Callable[[RankFailure, Sources], str]:
    """Return a function that explains an exception by a sentence if the ranks are offline: see `sandbox/enter.py`."""
    return lambda failure, sources: sentence if SERVER.sandbox and SERVER.sandbox.offline else ""


REFUSED_CALL = tell_offline(
    "a graded rank may use only the system calls that Python and torch need, and this line made another one, for "
    "example for a socket or a file lock."
)
HIDDEN_LOAD = tell_offline(
    "a graded rank sees nothing of the machine in /proc, and os.getloadavg() reads the load from there. Do without it."
)
NO_USER_NAME = tell_offline(
    "a graded rank runs as a user who has a number, but no name. Do without the name, or use os.getuid()."
)
REFUSED_LOCK = tell_offline(
    "a graded rank may not lock files, and sqlite3 locks the file of a database. Use sqlite3.connect(':memory:'), or "
    "keep the data in another kind of file."
)
LOST_TENSOR = tell_offline(
    "another process could not send its tensors to the rank, which waits for them: a graded rank may use no sockets. "
    "Load the data in the rank itself, with num_workers=0."
)
HIDDEN_FILE = tell_offline(
    "a graded rank sees nothing in /proc and /sys except its own /proc/self/stat, statm and status. Use sys.stdout "
    "and sys.stderr instead of /dev/stdout and /dev/stderr, which are links into /proc."
)


def explain_deadline(failure: RankFailure, sources: Sources) -> tuple[str, str]:
    """Return the likely cause of a run that did not end, and its name, or ("", "") if there is none.

    A process sends a tensor to another one as the descriptor of a file, through a socket. If the kernel refuses that,
    the thread of multiprocessing that sends prints an exception and ends, and the receiver waits forever.
    """
    is_refused = any("resource_sharer.py" in text and "PermissionError: [Errno 1]" in text for text in failure.output)
    cause = LOST_TENSOR(failure, sources) if is_refused else ""
    return cause, "lost tensor" if cause else ""


def get_events(failure: RankFailure) -> list[Event]:
    """Return the record of the failed rank."""
    return failure.events[failure.rank] if failure.rank is not None and failure.events else []


# The general symptoms. Those that a module teaches are in its causes.py.
SYMPTOMS = [
    Symptom("breakpoint", "BdbQuit", "", "you left the debugger, or a breakpoint() is still in the code. It works only "
            "with --debug, which runs one rank on this terminal."),
    Symptom("missing name", "NameError", " has no ", "this name from the skeleton was changed or deleted. "
            "`brigade reset` restores it."),
    Symptom("no module", "AttributeError", " object has no attribute 'module'", "the wrapper does not keep its "
            "argument in self.module, which given code and later modules read.", line=r"find_trainable\(self"),
    Symptom("helper file", "ModuleNotFoundError", r"No module named '[\w.]+'$", explain_helper_file),
    Symptom("refused call", "PermissionError", r"^\[Errno 1\]", REFUSED_CALL),
    Symptom("hidden load", "OSError", "^Load averages are unobtainable", HIDDEN_LOAD),
    Symptom("no user name", "", r"^'?getpwuid\(\): uid not found|^No username set in the environment", NO_USER_NAME),
    Symptom("refused lock", "OperationalError", "^access permission denied", REFUSED_LOCK),
    Symptom("hidden file", "FileNotFoundError", r"'/(proc|sys|dev/(fd|stdin|stdout|stderr))\b", HIDDEN_FILE),
    Symptom("hook result", "", "hook returned|hooks should return", "a hook returns a value. It must return None."),
    Symptom("called hook", "TypeError", "object is not callable", CALLED_HOOK, line=r"backward\(", not_own=True),
    Symptom("global rank", "ValueError", r"Global rank \d+ is not part of", "src and dst are ranks of the world. Use "
            "group_src and group_dst for ranks of the group."),
    Symptom("signature", "TypeError",
            r"(missing|takes) .*argument|unexpected keyword argument|multiple values for argument",
            "the signature differs from the one in the skeleton.", not_own=True),
    Symptom("no yield", "TypeError", "'NoneType' object is not an iterator", "a function decorated with "
            "@contextmanager has no yield."),
    Symptom("no result", "", "'NoneType'", "without async_op=True, {0} works in place and returns None.",
            file=USED_RESULT),
    Symptom("no return", "", "NoneType", explain_no_return),
    Symptom("no gradient", "", "'NoneType' object has no attribute", NO_GRADIENT, line=r"\.grad\."),
    Symptom("world rank", "IndexError", "", explain_world_rank, file=r"get_rank\(\)"),
]  # fmt: skip
LAST_SYMPTOMS = [  # which apply to the wrappers of all modules
    Symptom("refusal", "RuntimeError", "",
            lambda failure, _: explain_refusal(get_events(failure)) if failure.own else "", line="^raise "),
    Symptom("left over", "", "", lambda failure, _: find_leftover(get_events(failure))),
]  # fmt: skip


def explain_exception(failure: RankFailure, sources: Sources) -> tuple[str, str]:
    """Return the likely cause of a rank's exception and the name of the symptom, or ("", "") if there is none.

    The first symptom that applies counts: of the general ones, then of those of the modules, the last module first, and
    then `LAST_SYMPTOMS`.
    """
    registering = [text for _, _, function, text in failure.frames[:-1] if function != "<lambda>"]
    if any(re.search(r"register_\w*hook\(", text) for text in registering) and failure.own:
        return CALLED_HOOK, "called hook"  # the line that registers the hook was calling it
    file, _, _, line = failure.frames[-1] if failure.frames else ("", 0, "", "")
    lines = next((text for path, text in sources.values() if Path(path).name == file), "").split("\n")
    text = "\n".join(line for line in lines if len(line) <= LONGEST_LINE)
    for symptom in itertools.chain(SYMPTOMS, list_symptoms_of_modules(), LAST_SYMPTOMS):
        match, in_file = re.search(symptom.message, failure.message), re.search(symptom.file, text, re.MULTILINE)
        is_there = re.search(symptom.line, line) and symptom.error in ("", failure.error)
        if match and in_file and is_there and not (symptom.not_own and failure.own):
            cause, groups = symptom.cause, [*match.groups(), *in_file.groups()]
            if cause := cause.format(*groups) if isinstance(cause, str) else cause(failure, sources):
                return cause, symptom.name
    return "", ""


def list_symptoms_of_modules() -> Iterator[Symptom]:
    """Yield the symptoms of all modules. The failing line may be in an earlier module than the one that is checked."""
    for entry in reversed(MODULES):
        if (entry.tests / "causes.py").exists():
            yield from getattr(import_from_tests(f"{entry.package}.causes"), "SYMPTOMS", ())


@functools.lru_cache(maxsize=128)  # parsing can take seconds, and every check fails with the same few files
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
