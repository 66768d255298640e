"""brigade grade: grade one submission, or all submissions in a directory."""

from __future__ import annotations

import argparse
import contextlib
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from brigade.course.checks.run import prepare
from brigade.course.cli.options import ABOVE_ZERO, add, resolve_results_file
from brigade.course.table import listing
from brigade.course.table.modules import CORE, MODULES, CourseError, Module, select_modules
from brigade.course.table.submission import find
from brigade.grader import (
    class_report,
    classroom,
    feedback,
    formats,
    grading,
    incoming,
    isolation,
    merging,
    roster,
    watchdog,
)
from brigade.grader.gradebook import Row, get_results_path, refuse_several_parts
from brigade.grader.gradebook_file import GradebookFile
from brigade.grader.outcome import make_empty_grading
from brigade.grader.term import Assignment
from brigade.ranks.ipc.interrupts import delay_interrupts
from brigade.ranks.runner import machine, ranks

PARTS = tuple(dict.fromkeys(entry.track for entry in MODULES))


def add_grade_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade grade`."""
    what = parser.add_mutually_exclusive_group(required=True)
    add(what, "--submission PATH", "a directory or an archive with the modules, or module files", nargs="+")
    per_student = "a directory that contains one directory or archive per student"
    add(what, "--class DIR", per_student, dest="class_directory")
    add(parser, "--gradebook FILE.csv", "with --class: the file to write, with one row per student")
    people = "with --class: a list of the students, with columns such as name, id and email"
    add(parser, "--roster FILE.csv", people)
    feedback = "with --class: write each student's results to this directory, as text and as a web page"
    add(parser, "--feedback DIR", feedback)
    memory = "with --class: the memory in GB that all grading runs may use together (default: 4)"
    add(parser, "--memory-gb N", memory, ABOVE_ZERO, default=4.0)
    add(parser, "--out FILE", "the results file (default: print to the terminal)")
    formatted = "the output format (default: gradescope with --out, otherwise text)"
    add(parser, "--format", formatted, choices=tuple(formats.WRITERS))
    selection = parser.add_mutually_exclusive_group()
    add(selection, "--modules LIST", "modules of one part, such as 1-4 or 2,5", default="")
    add(selection, "--part", "all modules of a part (default: core)", default=CORE, choices=PARTS)
    prior = "where earlier modules come from: the submission (own), the reference, or the submission first and then, "
    prior += "for checks that fail, the reference in place of modules that lost points or are not graded (auto, the "
    prior += "default)"
    extra = "grade with the checks in these files of yours, too; each has a line such as MODULE = 3"
    add(parser, "--extra FILE.py", extra, nargs="+", default=[])
    when = "when students see results on Gradescope: those of --extra if it is given, otherwise all (default: visible)"
    add(parser, "--visibility", when, choices=("visible", "after_due_date", "after_published", "hidden"))
    add(parser, "--prior", prior, default="auto", choices=("auto", "own", "reference"))
    cases = parser.add_mutually_exclusive_group()
    seed = "repeat the random cases of the grading run that used this seed; with --class, it is the class's secret"
    add(cases, "--seed N", seed, type=int)
    secret = "a file with a secret, from which and from the submission the random cases follow, so "
    secret += "that equal submissions get equal points, and no other submission gets the same cases"
    add(cases, "--secret FILE", secret, type=Path)
    add(parser, "--backend", "the backend (default: gloo)", default="gloo", choices=("gloo", "nccl"))
    add(parser, "--share-gpu", "put several NCCL ranks on one GPU")
    limit = "the time limit for one submission (default: 900)"
    add(parser, "--limit SECONDS", limit, ABOVE_ZERO, default=900.0)


def run_grade(options: argparse.Namespace) -> int:
    """Grade, and return the exit status: 0 if every submission was graded, whatever its score, otherwise 1."""
    entries = select_graded_modules(options)
    listing.set_extra(options.extra)
    if isolation.may_isolate():  # submissions run as another user, who must not read what is hidden from students
        isolation.close_off(listing.EXTRA)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    if options.backend == "nccl":
        machine.make_nccl_environments(2, options.share_gpu)
    with handle_sigterm_as_ctrl_c():
        if options.class_directory:
            return run_class(options, entries, console, getattr(options, "assignment", None))  # set by `brigade term`
        return run_one(options, entries, console)


def select_graded_modules(options: argparse.Namespace) -> list[Module]:
    """Return the modules of --modules or --part. Raise CourseError if they belong to several parts of the course."""
    if not options.modules:
        return [entry for entry in MODULES if entry.track == options.part]
    entries = select_modules(options.modules)
    refuse_several_parts(entries)
    return entries


@contextlib.contextmanager
def handle_sigterm_as_ctrl_c() -> Iterator[None]:
    """Handle SIGTERM like Ctrl-C inside the block, so that everything is cleaned up."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_one(options: argparse.Namespace, entries: Sequence[Module], console: Console) -> int:
    """Grade --submission and write the results to --out."""
    if options.gradebook or options.roster or options.feedback:
        raise CourseError("--gradebook, --roster and --feedback work only with --class; for one submission, use --out")
    render = formats.WRITERS[options.format or ("gradescope" if options.out else "text")]
    out = resolve_results_file(options.out, options.submission)
    state = make_empty_grading(entries, draw_seed() if options.seed is None else options.seed)
    if options.visibility and render is not formats.format_gradescope:
        raise CourseError("--visibility works only with --format gradescope")
    state.visibility = options.visibility
    state.is_seed_secret = options.seed is not None  # other submissions may be graded with it
    secret = read_secret(options.secret) if options.secret else None
    columns = (TextColumn("checks"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=None)

        def follow() -> None:
            text = render(state)
            if out:
                formats.write(out, text)
            progress.update(task, total=len(state.outcomes), completed=state.count_settled())

        with delay_interrupts():
            tempfile.gettempdir()  # creates a test file, which an interrupt would leave behind
        follow()  # before torch is imported, which takes seconds
        try:
            with (
                incoming.open_submission(*options.submission) as (directory, remarks),
                isolation.isolate_ranks(filter(None, [*options.submission, options.out]), options.backend) as notes,
            ):
                with delay_interrupts():
                    prepare()
                    grading.collect(entries)
                state.found = [entry.number for entry in MODULES if find(directory, entry)]
                if ranks.SERVER.sandbox:
                    notes += isolation.verify_isolation(options.backend)
                state.notes = [*notes, *remarks]
                with watchdog.watch(options.limit):
                    grading.grade(
                        directory,
                        state,
                        prior=options.prior,
                        backend=options.backend,
                        share_gpu=options.share_gpu,
                        total_s=options.limit,
                        on_change=follow,
                        secret=secret,
                    )
        except CourseError as error:
            state.unreadable = str(error) if isinstance(error, incoming.Unreadable) else ""
            state.notes.append(str(error))
            follow()
            raise
    if out:
        score = f"{state.score} of {state.max_score} points in {state.seconds:.0f} s"
        seed = "" if state.is_seed_secret else f", seed {state.seed}"
        console.print(f"{score}{seed}: {out}", markup=False)
        if sentence := formats.format_written_points(state):
            console.print(sentence)
    else:
        print(render(state), end="")
    return 0


def read_secret(path: Path, draws_one: bool = False) -> bytes:
    """Return the content of a file, without space around it. Raise CourseError if there is none.

    If there is no file, and `draws_one`, draw a secret, which only the owner of the file can read.
    """
    try:
        if draws_one and not path.exists():
            formats.write(path, secrets.token_hex(), is_secret=True)
        secret = path.read_bytes().strip()
    except OSError as error:
        raise CourseError(f"{path}: {error.strerror}") from None
    if not secret:
        raise CourseError(f"{path} is empty, but it must contain a secret")
    return secret


def draw_seed() -> int:
    """Return a seed that nobody can guess or find by trying."""
    return secrets.randbits(62)


def run_class(
    options: argparse.Namespace, entries: Sequence[Module], console: Console, assignment: Assignment | None = None
) -> int:
    """Grade all submissions in --class and write --gradebook. Return the exit status.

    The `assignment` of a term, if there is one, says how much lateness takes off.
    """
    if not options.gradebook or options.out or options.format or options.visibility:
        raise CourseError("--class needs --gradebook FILE.csv, and does not work with --out, --format or --visibility")
    given = "" if options.seed is None else str(options.seed)
    if options.secret:
        given = read_secret(options.secret).decode(errors="replace")
    directory = Path(options.class_directory).resolve()
    gradebook = resolve_results_file(options.gradebook, makes_parent=directory.is_dir())
    people, ignored = roster.read_roster(Path(options.roster)) if options.roster else ([], [])
    ours = [Path(path).resolve() for path in (options.feedback, options.roster) if path]
    everyone = classroom.list_students(directory, gradebook, *ours, people=people)
    judged = assignment.judge_all(everyone) if assignment else []
    passed_on = ["--prior", options.prior, "--backend", options.backend, "--limit", str(options.limit)]
    passed_on += ["--modules", options.modules] if options.modules else ["--part", options.part]
    passed_on += ["--share-gpu"] if options.share_gpu else []
    passed_on += ["--extra", *map(str, listing.EXTRA)] if listing.EXTRA else []
    if isolation.may_isolate():  # without private mounts, one submission could read another
        isolation.close_off([directory])
    with classroom.lock_gradebook(gradebook) as lock:
        results = get_results_path(gradebook)
        book = GradebookFile(gradebook, results)
        secret_file = results / ".secret"  # one for all, in every run
        if given:
            formats.write(secret_file, given, is_secret=True)
        secret = read_secret(secret_file, draws_one=True).decode(errors="replace")
        extra = [path.read_text() for path in listing.EXTRA]
        conditions = isolation.list_conditions(options.backend, options.share_gpu)
        classroom.read_states(everyone, [*passed_on, *conditions, secret, *extra])
        before = {student: student.result["score"] for student in everyone if student.result}
        waiting = [student for student in everyone if student.is_waiting]
        kept = sum(student.result is not None and not student.is_waiting for student in everyone)
        passed_on += ["--secret", str(secret_file)]
        room = int(options.memory_gb * 1e9 // classroom.GRADING_BYTES)
        columns = (TextColumn("submissions"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            task = progress.add_task("", total=len(waiting))

            def save() -> list[Row]:
                table = classroom.make_table(everyone, entries, people)
                book.update(table, entries)
                return table

            def follow(student: classroom.Student) -> None:
                row = save()[everyone.index(student)]
                what = f"{row['score']} points" if student.result else row["note"]
                console.print(f"{student.name}: {what}", markup=False)
                progress.advance(task)

            save()
            at_once = 1 if options.backend == "nccl" else max(1, min(room, machine.count_cores()))
            command = [sys.executable, "-m", "brigade.grader.cli.grade_student", *passed_on]
            classroom.grade_all(waiting, command, at_once=at_once, lock=lock, on_finish=follow)
        save()
        lines = class_report.list_lines(everyone, entries, people, before, book) + judged
        if ignored:
            lines.append(f"columns of the roster that are not used: {', '.join(ignored)}")
        lines += class_report.list_skipped(directory)
        if options.feedback:
            counting = None
            if assignment:
                rows, _ = merging.read_gradebook(gradebook)
                merged, _ = merging.merge({"": rows}, assignment.counts, {})
                counted = merging.list_counted(rows, assignment.counts)
                counting = feedback.Counting(merged, counted, assignment.describe()[1])
            record = results / "feedback.json"
            count, changed = feedback.write_feedback(ours[0], everyone, book.rows, record, people, counting)
            lines.append(f"feedback for {count} students: {ours[0]}")
            lines += [f"an old page that somebody has changed, and that stays: {name}" for name in changed]
        lines += class_report.write_similar(gradebook, everyone, entries)
    report = Console(highlight=False, soft_wrap=True, markup=False)
    report.print(f"The random cases follow from the secret in {secret_file}, which students must not know.")
    report.print(f"{len(everyone)} submissions, {kept} of them unchanged since an earlier grading run: {gradebook}")
    for line in lines:
        report.print(f"  {line}")
    return 0 if all(student.result for student in everyone) else 1
