"""The report of a failed run in words."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence
from pathlib import Path

from brigade.ranks.events import OPPOSITES, describe
from brigade.ranks.progress import Mismatch, Progress
from brigade.ranks.runner.failure import BROKEN_LINK, RankFailure
from brigade.ranks.runner.process import RankProcess
from brigade.ranks.texts import PACKAGE, Sources

NOT_CONNECTED = ", because the ranks did not finish creating a process group"
FRAME = re.compile(r' *File "(.+)", line (\d+) in (.+)')  # a line of faulthandler
NCCL_LOG = ". NCCL_DEBUG=INFO shows how far NCCL came"


def describe_failure(
    kind: str, ranks: Sequence[RankProcess], progress: Progress, deadline_s: float | None, packages: dict[str, Sources]
) -> RankFailure:
    """Return the exception that reports a run that has failed and ended. `kind`: see `runner/monitor.py`."""
    settled = [rank.number for rank in ranks if rank.is_settled]
    lines = [describe_rank(rank, progress, packages, settled) for rank in ranks]
    waits = [rank.record.waiting for rank in ranks if not rank.is_settled]
    connecting = [event is not None and event["kind"] == "connect" for event in waits]
    lost = [progress.find_lost_launch(rank.number, settled) for rank in ranks]
    waiting = {event["op"] for event in [*waits, *lost] if event and event["kind"] == "launch"}
    if kind == "failed":
        failure = describe_culprit(ranks, lines)
    elif own := progress.mismatch if kind == "mismatch" else None:
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
    raised = sorted((rank.failure for rank in ranks if rank.failure), key=lambda failure: failure.kind != "garbled")
    first_hand = [failure for failure in raised if not BROKEN_LINK.search(failure.message)]
    ended = [(rank.status, rank.number, rank.failure) for rank in ranks if rank.status is not None]
    died = sorted(ended, key=lambda one: one[0] == -signal.SIGABRT)
    if first_hand or not died:
        return (first_hand or raised)[0]
    status, number, failure = died[0]
    how = describe_exit(status)
    return failure or RankFailure("died", f"rank {number} died without a result ({how})", lines, number, how)


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
    own = list_frames(rank.stack or b"", files)
    is_importing = any(function == "<module>" for *_, function in own)
    return f"{Path(own[0][0]).name}, line {own[0][1]}" if is_importing else ""


def list_frames(stack: bytes | bytearray, files: Iterable[str]) -> list[tuple[str, str, str]]:
    """Return the file, the line and the function of each frame that is in one of these files, the innermost first.

    The stack comes from faulthandler, which replaces characters outside ASCII with escapes such as \\xfc. The frames of
    the main thread, which faulthandler prints last, come first. A rank may print anything instead, so the pattern is
    tried only once per line. Then the time is proportional to the length.
    """
    escaped = {path.encode("ascii", "backslashreplace").decode(): path for path in files}
    others, _, current = stack.decode("ascii", errors="replace").rpartition("\nCurrent thread ")
    lines = f"{current}\n{others}".split("\n")
    frames = [frame.groups() for line in lines if (frame := FRAME.fullmatch(line))]
    return [
        (escaped[file], line, function.encode().decode("unicode_escape", errors="replace"))
        for file, line, function in frames
        if file in escaped
    ]


def locate(stack: bytes, packages: dict[str, Sources]) -> str:
    """Return the innermost line of the submission in a stack from faulthandler, or else of the scenario, or else ""."""
    for package in sorted(packages, key=lambda name: name != PACKAGE):
        for path, line, function in list_frames(stack, {path for path, _ in packages[package].values()}):
            return f"{Path(path).name}:{line} in {function}"
    return ""


def describe_exit(status: int) -> str:
    """Describe how a process ended, for example "killed by SIGKILL"."""
    names = {-number: number.name for number in signal.Signals}
    return f"killed by {names[status]}" if status in names else f"exit code {status}"
