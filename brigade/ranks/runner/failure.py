"""The exception that reports a failed run."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brigade.ranks.events import Event
from brigade.ranks.texts import PACKAGE, Sources, holds_sealed, is_sealed

MESSAGE_LIMIT = 4_000  # characters of an exception's message that are kept
# The same, and the letters of printed output of all ranks, if ranks hold code of the reference. A submission could
# write this code there, and the next upload could contain it.
SHORT = 200
MOST_NAME = 40  # letters of an exception's type there
NO_NAMES = ("<module>", "<lambda>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>")  # of functions
FRAMES_LIMIT = 30  # frames of an exception that are kept
# An exception with such a message means that a peer has ended. The rank that raised it is not the cause.
BROKEN_LINK = re.compile(
    "[Cc]onnection (closed|refused|reset)|[Rr]emote (worker|process)|Broken pipe|connectFullMesh|ncclRemoteError"
)
OTHER_SIZE = "gloo received a message of another size: the ranks called different collectives"
JARGON = (
    (r"(group )?<brigade\.[\w.]+Group object at 0x\w+>", "process_group"),
    (r"\b(Strict|Recorded)Work\b", "Work"),
    (r"\b(Strict|Recording|EmulatedLink)Group\b", "ProcessGroup"),
    (r"(?m)^terminate called .*\n?", ""),
    (r"(\[rank\d+\]:)?\[[IWEF]\d{4} [^\]]*\] ?", ""),  # the prefix of torch's log: rank, date, time, thread, line
    (r"(  what\(\):  )?\[enforce fail at [^\]]*\] ?op\.preamble\.length[^\n]*", OTHER_SIZE),
    (r"(  what\(\):  )?\[enforce fail at [^\]]*\] ?", "gloo: "),
)

Frame = tuple[str, int, str, str]  # file, line, function, text of the line, which feedback may have to hide


@dataclass(eq=False)
class RankFailure(Exception):
    """A run that did not end with all results from every rank.

    `kind` is "exception" (a rank raised one), "died" (a rank's process ended), "deadline", "deadlock" (no rank can
    continue), "mismatch" (the ranks called different collectives) or "garbled" (a rank sent something unreadable).
    """

    kind: str
    summary: str
    lines: list[str]  # describe the ranks, one line each
    rank: int | None = None  # the first rank that failed, if a single rank is to blame
    error: str | None = None  # the type name of its exception
    output: list[str] = field(default_factory=list)  # one entry per rank
    message: str = ""  # of the exception
    frames: list[Frame] = field(default_factory=list)  # of the exception, in the files that ranks received
    own: bool = False  # whether the frames are the submission's own code
    waiting: Collection[str] = frozenset()  # the operations in which ranks waited, or that mismatched
    events: list[list[Event]] = field(default_factory=list)  # by rank
    completed: list[Any] = field(default_factory=list)  # the results of the calls that all ranks had ended before

    def __str__(self) -> str:
        return "\n".join([self.summary, *self.lines])


def make_exception_failure(
    rank: int, error: Any, packages: dict[str, Sources], hides_course: bool = False
) -> RankFailure:
    """Return the failure for the exception that a rank has sent. Raise an exception if it is not one of ours.

    A rank can forge frames. With `hides_course`, no line of the course's own files is shown, also not of its scenarios.
    If the rank holds code of the reference, the message is short, and names are those of types and functions.
    """
    is_short = holds_sealed(packages.get(PACKAGE, {}))
    frames: list[Frame] = []
    lines = []
    for file, line, name in error["frames"][-FRAMES_LIMIT:]:
        function = str(name)[:MESSAGE_LIMIT]
        if type(line) is not int:
            raise ValueError("the line of a frame is not a number")
        source, is_shown = find_text(packages, file)
        if is_short and not has_line(source, line, function):
            continue  # the rank may have made it up
        text = "".join(source.split("\n")[max(0, line - 1) : line]).strip()[:MESSAGE_LIMIT]
        frames.append((Path(file).name[:MESSAGE_LIMIT], line, function, text))
        is_shown = is_shown and not (hides_course and is_sealed(file))
        lines.append("  {}, line {}, in {}".format(*frames[-1]) + (f": {text}" if text and is_shown else ""))
    kind, message = str(error["type"])[:MESSAGE_LIMIT], remove_jargon(str(error["message"])[:MESSAGE_LIMIT]).strip()
    if is_short:
        kind, message = kind if kind.isidentifier() and len(kind) <= MOST_NAME else "an exception", message[:SHORT]
    summary = f"rank {rank} raised {kind}: {message or '(no message)'}"
    own = bool(error["own"])
    return RankFailure("exception", summary, lines, rank, kind, message=message, frames=frames, own=own)


def has_line(source: str, line: int, function: str) -> bool:
    """Return whether a text has a line with this number, and a function or class with this name."""
    is_function = function in NO_NAMES or re.search(rf"\b(def|class) {re.escape(function)}\b", source)
    return 0 < line <= source.count("\n") + 1 and bool(source and is_function)


def find_text(packages: dict[str, Sources], path: str) -> tuple[str, bool]:
    """Return the text of a file that the ranks received, or "", and whether feedback may show lines of it.

    If files of the reference are mixed with a student's modules, it must not show them.
    """
    for texts in (dict(sources.values()) for sources in packages.values()):
        if path in texts:
            return texts[path], not is_sealed(path) or all(map(is_sealed, texts))
    return "", False


def remove_jargon(text: str) -> str:
    """Return the text without the names of the toolkit's classes and the technical prefixes of gloo's messages."""
    for pattern, instead in JARGON:
        text = re.sub(pattern, instead, text)
    return text
