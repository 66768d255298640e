"""Grade all submissions of a class: `brigade grade --class`, and `brigade term grade`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from brigade.course.cli.options import resolve_results_file
from brigade.course.table import listing
from brigade.grader import class_report, classroom, feedback, formats, isolation, marking, merging, roster
from brigade.grader.classroom import Student
from brigade.grader.cli.grade_student import begin
from brigade.grader.gradebook import (
    GraderFile,
    Row,
    get_adjustments_path,
    get_results_path,
    join,
    list_modules,
    refuse_several_parts,
)
from brigade.grader.request import GradeRequest, read_secret
from brigade.grader.roster import Person
from brigade.grader.term import Assignment
from brigade.ranks.runner import machine


@dataclass(frozen=True)
class ClassRequest:
    """Grade the submissions in a directory, each as `grade` says. The other fields are options of `brigade grade`.

    The `assignment` of a term, if there is one, says how much lateness takes off. With a `slice` (I, N), grade only
    the submissions whose place in the sorted list is I modulo N, and write no gradebook.
    """

    grade: GradeRequest
    directory: str
    gradebook: str
    roster: str | None = None
    feedback: str | None = None
    memory_gb: float = 4.0
    assignment: Assignment | None = None
    slice: tuple[int, int] | None = None


def grade_class(request: ClassRequest) -> int:
    """Grade a class and write its gradebook, or grade a slice of it. Return the exit status."""
    with begin(request.grade) as entries:
        directory = Path(request.directory).resolve()
        gradebook = resolve_results_file(request.gradebook, makes_parent=directory.is_dir())
        people, ignored = roster.read_roster(Path(request.roster)) if request.roster else ([], [])
        ours = [Path(path).resolve() for path in (request.feedback, request.roster) if path]
        everyone = classroom.list_students(directory, gradebook, *ours, people=people)
        judged = request.assignment.judge_all(everyone) if request.assignment else []
        if isolation.may_isolate():  # without private mounts, one submission could read another
            isolation.close_off([directory])
        if request.slice:
            return grade_slice(request, gradebook, everyone[request.slice[0] :: request.slice[1]])
        with classroom.lock_gradebook(gradebook):
            own = set_secret(request.grade, gradebook)
            kept = read_states(everyone, own)
            before = {student: student.result["score"] for student in everyone if student.result}
            book, adjustments = GraderFile(gradebook), get_adjustments_path(gradebook)

            def save() -> list[Row]:
                table = classroom.make_table(everyone, people)
                marking.add_marks(gradebook, table)
                return book.write(table, entries, classroom.list_columns(entries))

            rows = join(save(), adjustments)  # refuses wrong ones before anything is graded
            refuse_several_parts([*entries, *list_modules(rows)])
            grade_waiting(own, everyone, request.memory_gb, save)
            rows = join(save(), adjustments)
            by_submission = {row.submission: row for row in rows}
            lines = class_report.list_lines(everyone, entries, people, before, by_submission) + judged
            if ignored:
                lines.append(f"columns of the roster that are not used: {', '.join(ignored)}")
            lines += class_report.list_skipped(directory)
            if request.feedback:
                lines += write_feedback(request, gradebook, everyone, rows, people)
            lines += class_report.write_similar(gradebook, everyone, entries)
    report = Console(highlight=False, soft_wrap=True, markup=False)
    secret_file = get_secret_path(gradebook)
    report.print(f"The random cases follow from the secret in {secret_file}, which students must not know.")
    report.print(f"{len(everyone)} submissions, {kept} of them unchanged since an earlier grading run: {gradebook}")
    for line in lines:
        report.print(f"  {line}")
    return 0 if all(student.result for student in everyone) else 1


def grade_slice(request: ClassRequest, gradebook: Path, everyone: Sequence[Student]) -> int:
    """Grade a slice of a class, beside others that run at the same time. Return the exit status."""
    with classroom.lock_gradebook(gradebook, waits=True):  # the first slice may draw the secret
        own = set_secret(request.grade, gradebook)
    kept = read_states(everyone, own)
    grade_waiting(own, everyone, request.memory_gb, lambda: classroom.make_table(everyone))
    print(f"{len(everyone)} submissions, {kept} of them unchanged since an earlier grading run")
    return 0 if all(student.result for student in everyone) else 1


def get_secret_path(gradebook: Path) -> Path:
    """Return the file with the secret of a class. It is one for all, in every run."""
    return get_results_path(gradebook) / ".secret"


def set_secret(request: GradeRequest, gradebook: Path) -> GradeRequest:
    """Return the request with the secret of the class: a given one, or that of an earlier run, or a new one."""
    given = "" if request.seed is None else str(request.seed)
    if given or request.secret:
        formats.write(get_secret_path(gradebook), given or request.secret, is_secret=True)
    secret = read_secret(get_secret_path(gradebook), draws_one=True).decode(errors="replace")
    return replace(request, seed=None, secret=secret)


def read_states(everyone: Sequence[Student], request: GradeRequest) -> int:
    """Find out which submissions have to be graded, because something that their results depend on has changed.

    Return how many have a result and need not be graded.
    """
    extra = [path.read_text() for path in listing.EXTRA]
    conditions = isolation.list_conditions(request.backend, request.share_gpu)
    classroom.read_states(everyone, [request.encode(), *conditions, *extra])
    return sum(student.result is not None and not student.is_waiting for student in everyone)


def grade_waiting(
    request: GradeRequest, everyone: Sequence[Student], memory_gb: float, save: Callable[[], list[Row]]
) -> None:
    """Grade all that have to be graded. Call `save` after each, which returns their rows of the gradebook."""
    room = int(memory_gb * 1e9 // classroom.GRADING_BYTES)
    at_once = 1 if request.backend == "nccl" else max(1, min(room, machine.count_cores()))
    waiting = [student for student in everyone if student.is_waiting]
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    columns = (TextColumn("submissions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(waiting))

        def follow(student: Student) -> None:
            row = save()[everyone.index(student)]
            what = f"{student.result['score']} points" if student.result else row.texts["note"]
            console.print(f"{student.name}: {what}", markup=False)
            progress.advance(task)

        classroom.grade_all(waiting, request, at_once=at_once, on_finish=follow)


def write_feedback(
    request: ClassRequest, gradebook: Path, everyone: Sequence[Student], rows: Sequence[Row], people: Sequence[Person]
) -> list[str]:
    """Write the feedback for all students. Return lines about it."""
    directory, counting = Path(request.feedback or "").resolve(), None
    if assignment := request.assignment:
        merged, _ = merging.merge({"": rows}, assignment.counts)
        counted = merging.list_counted(rows, assignment.counts)
        counting = feedback.Counting(merged, counted, assignment.describe()[1])
    record, by_submission = get_results_path(gradebook) / "feedback.json", {row.submission: row for row in rows}
    count, changed = feedback.write_feedback(directory, everyone, by_submission, record, people, counting)
    lines = [f"feedback for {count} students: {directory}"]
    return lines + [f"an old page that somebody has changed, and that stays: {name}" for name in changed]
