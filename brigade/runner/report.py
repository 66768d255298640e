"""The state of each rank of a run, and the report of a failed run in words."""

from __future__ import annotations

import contextlib
import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from brigade.course.parts import Part, find_part
from brigade.course.submission import PACKAGE, Sources
from brigade.events import OPPOSITES, Event, describe_with_line
from brigade.progress import Mismatch, Progress, RankRecord

OUTPUT_LIMIT = 20_000  # characters of a rank's output that are kept
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
    (
        r"(  what\(\):  )?\[enforce fail at [^\]]*\] ?op\.preamble\.length[^\n]*",
        OTHER_SIZE,
    ),
    (r"(  what\(\):  )?\[enforce fail at [^\]]*\] ?", "gloo: "),
)

Frame = tuple[str, int, str, str]  # file, line, function, text of the line


class RankFailure(Exception):
    """A run that did not end with a result from every rank.

    `kind` is "exception" (a rank raised one), "died" (a rank's process ended), "deadline", "deadlock" (no rank can
    continue), "mismatch" (the ranks called different collectives) or "garbled" (unreadable result).
    `rank` is the first rank that failed, if a single rank is to blame. `lines` describe the ranks, one line each.
    `error` is the type name of the exception, `message` its message, and `frames` its frames in the files that ranks
    received, as (file, line, function, text). `part` is the part of a skeleton that raised the exception. `output` and
    `events` are lists with one entry per rank.
    """

    events: list[list[Event]]
    waiting: Collection[str] = frozenset()  # the operations in which ranks waited, or that mismatched
    own = False  # whether `lines` show the submission's own code, if a rank raised an exception

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
    """The exception that a rank raised. `is_own` is true if the frames are in the submission."""

    type: str
    message: str
    is_own: bool
    frames: list[Frame]


@dataclass
class RankState:
    """The state of one rank, as far as the parent knows it."""

    number: int
    record: RankRecord
    printed: bytearray = field(default_factory=bytearray)
    stack: bytearray = field(default_factory=bytearray)  # printed on request, by faulthandler
    result: bytes | None = None
    error: RankError | None = None
    status: int | None = None  # exit status of its process, if the process has ended
    garbled: str = ""  # what was wrong with its messages, as the predicate of a sentence
    is_closed: bool = False  # whether its channel is closed

    @property
    def is_settled(self) -> bool:
        """Whether the rank has returned a result, raised an exception or ended."""
        return self.error is not None or self.result is not None or self.status is not None

    def read_output(self) -> str:
        """Return the rank's printed output, up to OUTPUT_LIMIT characters."""
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
    """Return the exception that reports a failed run. `kind`: see `runner/monitor.py`."""
    if kind == "failed":
        failure = _describe_rank_failure(states, progress, packages)
    else:
        lines = [describe_state(state, progress, packages) for state in states]
        rank, waiting = None, {state.record.waiting["op"] for state in states if state.record.waiting}
        if kind == "mismatch":
            rank = mismatch.rank
            summary = (
                f"rank {rank} launched {describe_with_line(mismatch.launch)}, but rank {mismatch.peer} launched "
                f"{describe_with_line(mismatch.peer_launch)}. "
            )
            summary += (
                "A message must have the same length on both ranks"
                if mismatch.launch["op"] in OPPOSITES
                else "All ranks of a group must launch the same collectives in the same order"
            )
        elif kind == "deadlock":
            what = "a send or a recv" if waiting <= OPPOSITES.keys() else "a collective"
            what += " that a peer never launched"
            if any(state.record.connecting for state in states):
                what = "peers that never create its new process group"
            summary = f"deadlock: every rank has stopped, and at least one waits for {what}"
        elif kind == "unconnected":
            kind = "deadline"
            summary = (
                "stopped, because the ranks did not finish creating a process group. Likely cause: the GPUs cannot "
                "communicate. NCCL_DEBUG=INFO shows why"
            )
        else:
            summary = f"stopped after {deadline_s:.0f} s"
        failure = RankFailure(kind, summary, lines, rank)
        failure.waiting = {mismatch.launch["op"]} if mismatch else waiting
    failure.output = [state.read_output() for state in states]
    failure.events = [state.record.events for state in states]
    return failure


def _describe_rank_failure(
    states: Sequence[RankState], progress: Progress, packages: dict[str, Sources]
) -> RankFailure:
    """Return the failure of the rank that failed first."""
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
    summary = f"rank {culprit.number} died without a result ({how})"
    lines = [describe_state(state, progress, packages) for state in states]
    return RankFailure("died", summary, lines, culprit.number, how)


def find_culprit(states: Sequence[RankState]) -> RankState:
    """Return the rank that failed by itself, not because of a peer.

    If a peer has ended, gloo or NCCL raises an exception in a rank, or aborts the rank.
    """
    raised = [state for state in states if state.error]
    first_hand = [state for state in raised if not BROKEN_LINK.search(state.error.message)]
    died = [state for state in states if state.status is not None]
    closed = [state for state in states if state.is_closed]
    return (first_hand or sorted(died, key=lambda state: state.status == -signal.SIGABRT) or raised or closed)[0]


def describe_state(state: RankState, progress: Progress, packages: dict[str, Sources]) -> str:
    """Describe a rank in one line, for example:

    rank 0 waits in all_reduce #3 (fc2.weight, float32, 4096 B), which rank 1 never launched, at naive_ddp.py:4
    """
    last = state.record.describe_last_launch()
    if state.result is not None:
        return f"rank {state.number} ended {last}"
    if state.error:
        return f"rank {state.number} raised {state.error.type} {last}"
    if state.status is not None:
        return f"rank {state.number} died ({describe_exit(state.status)}) {last}"
    line = locate(state.stack, packages)
    return f"rank {state.number} {progress.describe_activity(state.number)}" + (f", at {line}" if line else "")


def locate(stack: bytes | bytearray, packages: dict[str, Sources]) -> str:
    """Return the innermost line of the submission or, without one, of the scenario, in a stack from faulthandler.

    Return "" if there is none.
    """
    frames = re.findall(r'File "([^"\n]+)", line (\d+) in (.+)', stack.decode(errors="replace"))
    for package in sorted(packages, key=lambda name: name != PACKAGE):
        files = {path for path, _ in packages[package].values()}
        for path, line, function in frames:
            if path in files:
                return f"{Path(path).name}:{line} in {function}"
    return ""


def describe_exit(status: int) -> str:
    """Describe how a process ended, for example "killed by SIGKILL"."""
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"exit code {status}"


def remove_jargon(text: str) -> str:
    """Return the text without the names of the toolkit's classes and the technical prefixes of gloo's messages."""
    for pattern, instead in JARGON:
        text = re.sub(pattern, instead, text)
    return text
