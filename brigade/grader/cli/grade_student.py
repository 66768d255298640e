"""Grade one submission: `brigade grade --submission`, and the process that a class starts for each student.

python -m brigade.grader.cli.grade_student LIFELINE < REQUEST.json

The process ends when the pipe with the descriptor LIFELINE closes, because the parent has ended.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from brigade.course.checks.run import prepare
from brigade.course.cli.errors import run_safely
from brigade.course.cli.main import program
from brigade.course.table import listing
from brigade.course.table.modules import MODULES, Module, get_module
from brigade.course.table.submission import find
from brigade.grader import formats, grading, incoming, isolation, watchdog
from brigade.grader.outcome import Grading, make_empty_grading
from brigade.grader.request import GradeRequest, decode
from brigade.ranks.errors import UserError
from brigade.ranks.ipc.interrupts import delay_interrupts
from brigade.ranks.runner import machine, ranks


@contextlib.contextmanager
def begin(request: GradeRequest) -> Iterator[list[Module]]:
    """Prepare this process for a request, and yield the modules. SIGTERM is like Ctrl-C, so that all is cleaned up."""
    if isolation.may_isolate():  # submissions run as another user, who must not read what is hidden from students
        isolation.close_off(listing.EXTRA)
    if request.backend == "nccl":
        machine.make_nccl_environments(2, request.share_gpu)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield [get_module(number) for number in request.modules]
    finally:
        signal.signal(signal.SIGTERM, before)


def grade_student(request: GradeRequest) -> int:
    """Grade one submission, and return the exit status 0. Raise UserError if it cannot be graded."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with begin(request) as entries, watchdog.watch(request.limit) as begin_time:
        state = make_empty_grading(entries, secrets.randbits(62) if request.seed is None else request.seed)
        state.visibility = request.visibility
        state.is_seed_secret = request.seed is not None  # other submissions may be graded with it
        run(request, state, console, begin_time)
    if request.out:
        score = f"{state.score} of {state.max_score} points in {state.seconds:.0f} s"
        seed = "" if state.is_seed_secret else f", seed {state.seed}"
        console.print(f"{score}{seed}: {request.out}", markup=False)
        if sentence := formats.format_written_points(state):
            console.print(sentence)
    else:
        print(formats.WRITERS[request.form](state), end="")
    return 0


def run(request: GradeRequest, state: Grading, console: Console, begin_time: Callable[[], int]) -> None:
    """Grade a submission. Its results file and a progress bar follow."""
    columns = (TextColumn("checks"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=console, disable=not console.is_terminal)
    task = progress.add_task("", total=None)

    def follow() -> None:
        text = formats.WRITERS[request.form](state)
        if request.out:
            formats.write(Path(request.out), text)
        progress.update(task, total=len(state.outcomes), completed=state.count_settled())

    with delay_interrupts():
        tempfile.gettempdir()  # creates a test file, which an interrupt would leave behind
    follow()  # before torch is imported, which takes seconds
    try:
        with (
            incoming.open_submission(*request.submission) as (directory, remarks),
            isolation.isolate_ranks(filter(None, [*request.submission, request.out]), request.backend) as notes,
        ):
            with delay_interrupts():
                signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the next grader cleans up (`temporary.py`)
                prepare()
                grading.collect([get_module(number) for number in request.modules])
            with progress:
                state.found = [entry.number for entry in MODULES if find(directory, entry)]
                if ranks.SERVER.sandbox:
                    notes += isolation.verify_isolation(request.backend)
                state.notes = [*notes, *remarks]
                begin_time()
                grading.grade(
                    directory,
                    state,
                    prior=request.prior,
                    backend=request.backend,
                    share_gpu=request.share_gpu,
                    total_s=request.limit,
                    on_change=follow,
                    secret=request.secret.encode(errors="surrogateescape") or None,
                    at_a_time=request.at_a_time if isolation.separates_runs(request.backend) else 1,
                )
    except UserError as error:
        state.unreadable = str(error) if isinstance(error, incoming.Unreadable) else ""
        state.notes.append(str(error))
        follow()
        raise


def end_with_parent(lifeline: int) -> None:
    """Wait until the pipe closes, then terminate this process."""
    os.read(lifeline, 1)
    os.kill(os.getpid(), signal.SIGTERM)


def main() -> int:
    """Grade as the request on standard input says."""
    request = decode(sys.stdin.read())
    listing.set_extra(request.extra)
    return grade_student(request)


if __name__ == "__main__":
    threading.Thread(target=end_with_parent, args=[int(sys.argv[1])], daemon=True).start()
    program(lambda: run_safely(main))
