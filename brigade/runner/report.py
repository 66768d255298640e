"""The report of a failed run in words."""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brigade.course.listing import Part, find_part
from brigade.course.submission import PACKAGE, Sources, is_sealed
from brigade.events import OPPOSITES, Event, describe
from brigade.progress import Mismatch, Progress

if TYPE_CHECKING:
    from brigade.runner.monitor import RankProcess

MESSAGE_LIMIT = 4_000  # characters of an exception's message that are kept
FRAMES_LIMIT = 30  # frames of an exception that are kept
# An exception with such a message means that a peer has ended. The rank that raised it is not the cause.
BROKEN_LINK = re.compile(
    "[Cc]onnection (closed|refused|reset)|[Rr]emote (worker|process)|Broken pipe|connectFullMesh|ncclRemoteError"
)
NOT_CONNECTED = ", because the ranks did not finish creating a process group"
NCCL_LOG = ". NCCL_DEBUG=INFO shows how far NCCL came"
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

    @property
    def part(self) -> Part | None:
        """The part of a skeleton that raised the exception."""
        return find_part(self.message) if self.error == "NotImplementedError" else None


def make_exception_failure(
    rank: int, error: Any, packages: dict[str, Sources], hides_course: bool = False
) -> RankFailure:
    """Return the failure for the exception that a rank has sent. Raise an exception if it is not one of ours.

    A rank can forge frames. With `hides_course`, no line of the course's own files is shown, also not of its scenarios.
    """
    frames: list[Frame] = []
    lines = []
    for file, line, function in error["frames"][-FRAMES_LIMIT:]:
        source, is_shown = find_text(packages, file)
        text = "".join(source.split("\n")[max(0, int(line) - 1) : int(line)]).strip()[:MESSAGE_LIMIT]
        frames.append((Path(file).name[:MESSAGE_LIMIT], int(line), str(function)[:MESSAGE_LIMIT], text))
        is_shown = is_shown and not (hides_course and is_sealed(file))
        lines.append("  {}, line {}, in {}".format(*frames[-1]) + (f": {text}" if text and is_shown else ""))
    kind, message = str(error["type"])[:MESSAGE_LIMIT], remove_jargon(str(error["message"])[:MESSAGE_LIMIT]).strip()
    summary = f"rank {rank} raised {kind}: {message or '(no message)'}"
    own = bool(error["own"])
    return RankFailure("exception", summary, lines, rank, kind, message=message, frames=frames, own=own)


def find_text(packages: dict[str, Sources], path: str) -> tuple[str, bool]:
    """Return the text of a file that the ranks received, or "", and whether feedback may show lines of it.

    If files of the reference are mixed with a student's modules, it must not show them.
    """
    for texts in (dict(sources.values()) for sources in packages.values()):
        if path in texts:
            return texts[path], not is_sealed(path) or all(map(is_sealed, texts))
    return "", False


def describe_failure(
    kind: str, ranks: Sequence[RankProcess], progress: Progress, deadline_s: float | None, packages: dict[str, Sources]
) -> RankFailure:
    """Return the exception that reports a run that has failed and ended. `kind`: see `runner/monitor.py`."""
    settled = [rank.number for rank in ranks if rank.is_settled]
    lines = [describe_rank(rank, progress, packages, settled) for rank in ranks]
    waits = [rank.record.waiting for rank in ranks if not rank.is_settled]
    connecting = [bool(event) and event["kind"] == "connect" for event in waits]
    lost = [progress.find_lost_launch(rank.number, settled) for rank in ranks]
    waiting = {event["op"] for event in [*waits, *lost] if event and event["kind"] == "launch"}
    if kind == "failed":
        failure = describe_culprit(ranks, lines)
    elif kind == "mismatch":
        own = progress.mismatch
        failure = RankFailure(kind, describe_mismatch(own), lines, own.rank, waiting={own.launch["op"]})
    elif kind == "deadlock":
        what = "a collective that a peer never launched"
        if any(connecting):
            what = "peers that never create its new process group"
        elif waiting <= OPPOSITES.keys():
            what = "a send or a recv that a peer never launched"
        summary = f"deadlock: every rank has stopped, and at least one waits for {what}"
        failure = RankFailure(kind, summary, lines, waiting=waiting)
    else:
        importing = [where for rank in ranks if (where := find_import(rank, packages))]
        why = ""
        if importing:
            why = f" while importing {importing[0]}"
        elif connecting and all(connecting):
            why = NOT_CONNECTED + (NCCL_LOG if ranks[0].request["backend"] == "nccl" else "")
        failure = RankFailure(kind, f"stopped after {deadline_s:.0f} s{why}", lines, waiting=waiting)
    failure.output = [rank.read_output() for rank in ranks]
    return failure


def describe_mismatch(mismatch: Mismatch) -> str:
    """Describe two launches that should be the same."""
    own, other = (
        f"launched {describe(launch)}" + (f" at {launch['line']}" if launch["line"] else "")
        for launch in (mismatch.launch, mismatch.peer_launch)
    )
    rule = "All ranks of a group must launch the same collectives in the same order"
    if mismatch.launch["op"] in OPPOSITES:
        rule = "A message must have the same length on both ranks"
    return f"rank {mismatch.rank} {own}, but rank {mismatch.peer} {other}. {rule}"


def describe_culprit(ranks: Sequence[RankProcess], lines: list[str]) -> RankFailure:
    """Return the failure of the rank that failed first, by itself and not because of a peer.

    If a peer has ended, gloo or NCCL raises an exception in a rank, or aborts the rank.
    """
    raised = sorted((rank for rank in ranks if rank.failure), key=lambda rank: rank.failure.kind != "garbled")
    first_hand = [rank for rank in raised if not BROKEN_LINK.search(rank.failure.message)]
    died = sorted((rank for rank in ranks if rank.status is not None), key=lambda rank: rank.status == -signal.SIGABRT)
    culprit = (first_hand or died or raised)[0]
    if culprit.failure:
        return culprit.failure
    how = describe_exit(culprit.status)
    return RankFailure("died", f"rank {culprit.number} died without a result ({how})", lines, culprit.number, how)


def describe_rank(
    rank: RankProcess, progress: Progress, packages: dict[str, Sources], settled: Sequence[int] = ()
) -> str:
    """Describe a rank in one line. `settled` are the ranks that have finished or failed. For example:

    rank 0 waits in all_reduce #3 (fc2.weight, float32, 4096 B), which rank 1 never launched, at naive_ddp.py:4

    The line is left out if the rank moved on while it printed its stacks, because it could belong to an earlier wait.
    """
    last = rank.record.describe_last_launch()
    if rank.is_complete:
        return f"rank {rank.number} ended {last}"
    if rank.failure and rank.failure.error:
        return f"rank {rank.number} raised {rank.failure.error} {last}"
    if rank.status is not None:
        return f"rank {rank.number} died ({describe_exit(rank.status)}) {last}"
    if where := find_import(rank, packages):  # the end of an earlier event may not have arrived yet
        return f"rank {rank.number} is importing {where}"
    line = locate(rank.resting_stack, packages)
    return f"rank {rank.number} {progress.describe_activity(rank.number, settled)}" + (f", at {line}" if line else "")


def find_import(rank: RankProcess, packages: dict[str, Sources]) -> str:
    """Return the line of the submission that a rank runs while it imports the submission, or "" if it does not."""
    files = {path for path, _ in packages.get(PACKAGE, {}).values()}
    own = [frame for frame in list_frames(rank.stack or b"") if frame[0] in files]
    is_importing = any(function == "<module>" for *_, function in own)
    return f"{Path(own[0][0]).name}, line {own[0][1]}" if is_importing else ""


def list_frames(stack: bytes | bytearray) -> list[tuple[str, str, str]]:
    """Return the file, the line and the function of each frame in a stack from faulthandler, the innermost first."""
    return re.findall(r'File "([^"\n]+)", line (\d+) in (.+)\n', stack.decode(errors="replace"))


def locate(stack: bytes, packages: dict[str, Sources]) -> str:
    """Return the innermost line of the submission in a stack from faulthandler, or else of the scenario, or else ""."""
    frames = list_frames(stack)
    for package in sorted(packages, key=lambda name: name != PACKAGE):
        files = {path for path, _ in packages[package].values()}
        for path, line, function in frames:
            if path in files:
                return f"{Path(path).name}:{line} in {function}"
    return ""


def describe_exit(status: int) -> str:
    """Describe how a process ended, for example "killed by SIGKILL"."""
    names = {-number: number.name for number in signal.Signals}
    return f"killed by {names[status]}" if status in names else f"exit code {status}"


def remove_jargon(text: str) -> str:
    """Return the text without the names of the toolkit's classes and the technical prefixes of gloo's messages."""
    for pattern, instead in JARGON:
        text = re.sub(pattern, instead, text)
    return text
