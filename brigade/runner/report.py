"""What became of each rank of a run, and the report of a run that failed, in words."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from brigade.course.parts import Part, find_part
from brigade.course.submission import PACKAGE, Sources
from brigade.events import OPPOSITES, Event, Mismatch, Progress, RankRecord, describe

OUTPUT_LIMIT = 20_000  # characters of a rank's output that are kept
# An exception with this message says that a peer has gone. The rank that raised it is not the cause.
BROKEN_LINK = re.compile(
    "[Cc]onnection (closed|refused|reset)|[Rr]emote (worker|process)|Broken pipe|connectFullMesh|ncclRemoteError"
)
JARGON = (
    (r"(group )?<brigade\.[\w.]+Group object at 0x\w+>", "process_group"),
    (r"\b(Strict|Recorded)Work\b", "Work"),
    (r"\b(Strict|Recording|EmulatedLink)Group\b", "ProcessGroup"),
    (r"(?m)^terminate called .*\n?", ""),
    (r"(  what\(\):  )?\[enforce fail at [^\]]*\] ?", "gloo: "),
)

Frame = tuple[str, int, str, str]  # file, line, function, text of the line


class RankFailure(Exception):
    """A run that did not end with a result from every rank.

    `kind`: "exception" (a rank raised), "died" (its process ended), "deadline", "deadlock" (no rank can go on),
    "mismatch" (the ranks called different collectives) or "garbled" (unreadable result).
    `rank` is the first to fail, where one is to blame; `lines` say one thing per rank; `error` is the exception's
    type name and `message` what it said; `frames` are its frames in the files that ranks were sent, as (file, line,
    function, text); `part` is the part of a skeleton that raised it. `output` is what the ranks printed, `events` what
    they recorded.
    """

    events: list[list[Event]]
    own = False  # whether `lines` are the submission's, where a rank raised

    def __init__(
        self,
        kind: str,
        summary: str,
        lines: list[str],
        rank: int | None = None,
        error: str | None = None,
        output: list[str] | None = None,
        *,
        message: str = "",
        frames: Sequence[Frame] = (),
    ):
        super().__init__("\n".join([summary, *lines]))
        self.kind, self.summary, self.lines, self.rank, self.error = kind, summary, lines, rank, error
        self.output, self.events = output or [], []
        self.message, self.frames = message, list(frames)
        self.part: Part | None = find_part(message) if error == "NotImplementedError" else None


@dataclass(frozen=True)
class RankError:
    """The exception that a rank raised. `is_own`: the frames are the submission's."""

    type: str
    message: str
    is_own: bool
    frames: list[Frame]


@dataclass
class RankState:
    """What the parent knows of one rank."""

    number: int
    record: RankRecord
    printed: bytearray = field(default_factory=bytearray)
    stack: bytearray = field(default_factory=bytearray)  # where it stood when it was asked
    result: bytes | None = None
    error: RankError | None = None
    status: int | None = None  # of its process, if that has ended
    garbled: str = ""  # what is wrong with what it sent
    is_closed: bool = False  # its channel

    @property
    def is_settled(self) -> bool:
        """Whether it has returned, raised or ended."""
        return self.error is not None or self.result is not None or self.status is not None

    def read_output(self) -> str:
        """Return what it printed."""
        text = remove_jargon(self.printed[:OUTPUT_LIMIT].decode(errors="replace"))
        return text + ("\n... (more was printed)" if len(self.printed) > OUTPUT_LIMIT else "")


def describe_failure(
    kind: str,
    states: Sequence[RankState],
    progress: Progress,
    mismatch: Mismatch | None,
    deadline_s: float | None,
    packages: dict[str, Sources],
) -> RankFailure:
    """Return what to tell the user. `kind` is "mismatch", "deadlock", "deadline" or "failed": see `monitor.py`."""
    if kind == "failed":
        failure = _describe_rank_failure(states, progress, packages)
    else:
        lines = [describe_state(state, progress, packages) for state in states]
        rank = None
        if kind == "mismatch":
            rank = mismatch.rank
            summary = (
                f"rank {rank} called {describe(mismatch.launch)} where rank {mismatch.peer} called "
                f"{describe(mismatch.peer_launch)}: "
                "all ranks of a group must call the same collectives in the same order"
            )
        elif kind == "deadlock":
            waiting = {state.record.waiting["op"] for state in states if state.record.waiting}
            what = "send or a recv" if waiting <= OPPOSITES.keys() else "collective"
            summary = f"deadlock: every rank has stopped, and someone waits for a {what} that a peer never launched"
        else:
            summary = f"stopped after {deadline_s:.0f} s"
        failure = RankFailure(kind, summary, lines, rank)
    failure.output = [state.read_output() for state in states]
    failure.events = [state.record.events for state in states]
    return failure


def _describe_rank_failure(
    states: Sequence[RankState], progress: Progress, packages: dict[str, Sources]
) -> RankFailure:
    """Return the failure of the rank that is to blame."""
    for state in states:
        if state.garbled:
            return RankFailure("garbled", f"rank {state.number} {state.garbled}", [], state.number)
    culprit = find_culprit(states)
    if error := culprit.error:
        summary = f"rank {culprit.number} raised {error.type}: {error.message or '(no message)'}"
        frames = [(Path(file).name, line, function, text) for file, line, function, text in error.frames]
        lines = [
            f"  {file}, line {line}, in {function}" + (f": {text}" if text else "")
            for file, line, function, text in frames
        ]
        failure = RankFailure(
            "exception", summary, lines, culprit.number, error.type, message=error.message, frames=frames
        )
        failure.own = error.is_own
        return failure
    how = "it closed its channel" if culprit.status is None else describe_exit(culprit.status)
    summary = f"rank {culprit.number} ended without a result ({how})"
    lines = [describe_state(state, progress, packages) for state in states]
    return RankFailure("died", summary, lines, culprit.number)


def find_culprit(states: Sequence[RankState]) -> RankState:
    """Return the rank that failed by itself.

    A rank whose peer has gone gets an exception from gloo or NCCL, or is aborted by it.
    """
    raised = [state for state in states if state.error]
    first_hand = [state for state in raised if not BROKEN_LINK.search(state.error.message)]
    died = [state for state in states if state.status is not None]
    closed = [state for state in states if state.is_closed]
    return (first_hand or sorted(died, key=lambda state: state.status == -signal.SIGABRT) or raised or closed)[0]


def describe_state(state: RankState, progress: Progress, packages: dict[str, Sources]) -> str:
    """Return one line on a rank.

    Such as: rank 0 waits in all_reduce #3 (fc2.weight, float32, 4096 B), which rank 1 never launched, at naive_ddp.py:4
    """
    last = state.record.describe_last_launch()
    if state.result is not None:
        return f"rank {state.number} finished {last}"
    if state.error:
        return f"rank {state.number} raised {state.error.type} {last}"
    if state.status is not None:
        return f"rank {state.number} ended ({describe_exit(state.status)}) {last}"
    line = locate(state.stack, packages)
    return f"rank {state.number} {progress.describe_activity(state.number)}" + (f", at {line}" if line else "")


def locate(stack: bytes | bytearray, packages: dict[str, Sources]) -> str:
    """Return the innermost line of the submission, or else of the scenario, in a stack that faulthandler printed."""
    frames = re.findall(r'File "([^"\n]+)", line (\d+) in (.+)', stack.decode(errors="replace"))
    for package in sorted(packages, key=lambda name: name != PACKAGE):
        files = {path for path, _ in packages[package].values()}
        for path, line, function in frames:
            if path in files:
                return f"{Path(path).name}:{line} in {function}"
    return ""


def describe_exit(status: int) -> str:
    """Return how a process ended, such as: killed by SIGKILL"""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"exit code {status}"


def remove_jargon(text: str) -> str:
    """Return the text without names of the toolkit's classes, and without what gloo's C++ says of itself."""
    for pattern, instead in JARGON:
        text = re.sub(pattern, instead, text)
    return text
