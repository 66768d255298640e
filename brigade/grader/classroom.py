"""Grade a class (`brigade grade --class`): every submission in a directory, several at a time, into one gradebook.

A separate process, `brigade grade --submission`, grades each submission and writes a results file to the directory
`GRADEBOOK.results`. A second file stores a hash of the modules' text, the course, the options and the conditions, such
as torch's version. If the hash is unchanged, a repeated run, such as one after an interruption, uses the results.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from brigade.course.table.listing import list_checks
from brigade.course.table.modules import ROOT, CourseError, Module
from brigade.grader import formats, incoming, roster, uploads
from brigade.grader.gradebook import Row, get_results_path
from brigade.grader.roster import Person

GRADING_BYTES = 1_000_000_000  # memory for one grading run with four ranks: 0.7 GB measured, plus a margin
LONGEST_NAME = 200  # bytes of a submission's name in the names of its results, to which endings are added
END_S = 20.0  # limit for a grader to clean up
NOT_GRADED = "not graded"
KILLED = "the grader was killed, because it did not stop at its time limit, or because memory ran out"


@dataclass(eq=False)
class Student:
    """One submission of the class, its student in the roster, and what is known about it so far.

    Beside `results`, there are files with the grader's output (`.log`), and `made_from`, which contains the fingerprint
    of the results and exists only if they are complete.
    """

    paths: list[Path]  # one directory or archive, or several module files
    results: Path
    submission: str  # the name of the upload, unique and printable
    name: str  # of the student, or of the submission without its file extension; unique and printable
    person: Person | None = None
    notes: list[str] = field(default_factory=list)  # about the upload
    uploaded: datetime | None = None  # see `uploads.Upload`, also for the next field
    is_marked: bool | None = None
    unreadable: str = ""  # why nothing can be graded, in one sentence
    texts: dict[str, str] = field(default_factory=dict)  # of the module files, by name
    fingerprint: str = ""  # of everything that the results depend on
    is_waiting: bool = False  # whether it has to be graded
    result: dict[str, Any] | None = None  # of the last complete grading run
    was_killed: bool = False  # whether the grader was killed in this run
    columns: Row = field(default_factory=dict)  # of a term: see `term.Assignment.judge`

    def __post_init__(self) -> None:
        self.made_from = self.results.with_suffix(".made-from")
        self.log = self.results.with_suffix(".log")

    @property
    def path(self) -> Path:
        """The directory, the archive or the first module file."""
        return self.paths[0]

    @property
    def key(self) -> str:
        """What identifies the student in every gradebook of the class."""
        return roster.get_key(self.person) if self.person else self.name


def get_similar_path(gradebook: Path) -> Path:
    """Return the file with the pairs of submissions that are nearly identical. It is for the instructor only."""
    return gradebook.with_name(gradebook.name + ".similar.csv")


def list_students(directory: Path, gradebook: Path, *others: Path, people: Sequence[Person] = ()) -> list[Student]:
    """Return the submissions in a class's directory, including files that cannot be graded.

    Skip the gradebook, the files beside it, and the `others` that do not come from students. `people` is the roster.
    Raise CourseError if there is nothing that can be graded.
    """
    ours = (gradebook, get_results_path(gradebook), get_similar_path(gradebook), *others)
    found = uploads.list_uploads(directory, ours)
    persons = [roster.find_upload(upload.paths[0].name, upload.owner, people) for upload in found]
    names = [
        one["name"] or roster.get_key(one) if one else upload.owner for one, upload in zip(persons, found, strict=True)
    ]
    # such as ada and ada.zip
    names = [
        f"{name} ({upload.name})" if names.count(name) > 1 else name for name, upload in zip(names, found, strict=True)
    ]
    results = [get_results_path(gradebook) / f"{limit_name(upload.name)}.json" for upload in found]
    students = zip(found, results, uploads.make_unique(names), persons, strict=True)
    return [
        Student(upload.paths, path, upload.name, name, one, upload.notes, upload.uploaded, upload.is_marked)
        for upload, path, name, one in students
    ]


def limit_name(name: str) -> str:
    """Return the name of a submission, or its beginning and a hash if file names with endings would be too long."""
    encoded = os.fsencode(name)
    if len(encoded) <= LONGEST_NAME:
        return name
    return encoded[: LONGEST_NAME // 2].decode(errors="ignore") + "-" + hashlib.sha256(encoded).hexdigest()[:16]


def read_states(everyone: Sequence[Student], options: Sequence[str]) -> None:
    """Find out which submissions cannot be read, and which have to be graded.

    Grade a submission if its modules, the course or the `options` have changed, which include the conditions.
    """
    course = hashlib.sha256()
    for path in sorted(path for top in ("tests", "solutions", "brigade") for path in (ROOT / top).rglob("*.*")):
        if path.suffix in (".py", ".txt"):  # texts are the data of checks
            course.update(path.read_bytes())
    for student in everyone:
        with explain_unreadable(student):
            student.texts = read_texts(student)
        if student.unreadable:
            continue
        made_from = json.dumps([course.hexdigest(), *options, student.texts])
        student.fingerprint = hashlib.sha256(made_from.encode()).hexdigest()
        is_complete = student.made_from.exists() and student.results.exists()
        student.result = json.loads(student.results.read_text()) if is_complete else None
        student.is_waiting = not is_complete or student.made_from.read_text() != student.fingerprint


@contextlib.contextmanager
def explain_unreadable(student: Student) -> Iterator[None]:
    """Keep the reason if a submission cannot be read inside the block."""
    try:
        yield
    except CourseError as error:
        student.unreadable = str(error)


def read_texts(student: Student) -> dict[str, str]:
    """Return the texts of the module files in a submission, by name. Raise CourseError if nothing can be graded."""
    try:
        with incoming.open_submission(*student.paths) as (place, _):
            return incoming.read_modules(place)[0]
    except OSError as error:
        raise CourseError(f"{student.submission} cannot be read: {error.strerror}") from None


def is_unchanged(student: Student) -> bool:
    """Return whether a submission still has the texts that were read before it was graded."""
    with contextlib.suppress(CourseError):
        return read_texts(student) == student.texts
    return False


@contextlib.contextmanager
def lock_gradebook(gradebook: Path) -> Iterator[int]:
    """Lock the gradebook against a second run. Yield the descriptor of the lock, for graders to inherit."""
    results = get_results_path(gradebook)
    results.mkdir(mode=0o700, exist_ok=True)
    with open(results / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CourseError(f"another run is writing to {gradebook}; wait until it has finished") from None
        yield lock.fileno()


def grade_all(
    waiting: Sequence[Student], command: Sequence[str], *, at_once: int, lock: int, on_finish: Callable[[Student], None]
) -> None:
    """Run `command` for each student, `at_once` at a time.

    `command` takes the options `--submission` and `--out`. An interrupt ends all graders.
    """
    queue = list(waiting)
    running: dict[Student, subprocess.Popen] = {}
    try:
        while queue or running:
            while queue and len(running) < at_once:
                student = queue.pop(0)
                running[student] = start_grader(student, command, lock)
            time.sleep(0.05)
            for student in [student for student, process in running.items() if process.poll() is not None]:
                process = running.pop(student)
                if process.stdin:
                    process.stdin.close()
                student.is_waiting, student.result = False, None
                student.was_killed = process.returncode == -signal.SIGKILL  # by its watchdog, or because of memory
                if process.returncode == 0:
                    student.result = json.loads(student.results.read_text())
                    if is_unchanged(student):  # otherwise the next run grades it again
                        formats.write(student.made_from, student.fingerprint)
                on_finish(student)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
            process.kill()
            process.wait()


def start_grader(student: Student, command: Sequence[str], lock: int) -> subprocess.Popen:
    """Start the grader of a student. It ends with this process, because its standard input then closes."""
    student.made_from.unlink(missing_ok=True)
    files = ["--submission", *map(str, student.paths), "--out", str(student.results)]
    with open(student.log, "w") as log:
        return subprocess.Popen(
            [*command, *files, "--format", "json"],
            cwd=ROOT,  # a directory in which no student's directory can be imported as a package
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C goes to this process only, which then ends the graders
        )


def make_table(everyone: Sequence[Student], entries: Sequence[Module], people: Sequence[Person] = ()) -> list[Row]:
    """Return the grader's rows of the gradebook: one for each submission, and for each student without one.

    The columns are the roster's fields, the total score, the scores of each module and check, and a note.
    """
    fields = roster.list_fields(people)
    timing = dict.fromkeys(column for student in everyone for column in student.columns)
    columns = ["student", "submission", *fields, *timing, "score", "max"]
    columns += [f"module {entry.number}" for entry in entries]
    columns += [name_column(check.module, check.name) for entry in entries for check in list_checks(entry)]
    table = [make_row(student, fields) for student in everyone]
    for person in list_absent(everyone, people):
        row = {"student": roster.get_key(person), "note": "no submission"}
        table.append(row | {name: person[name] for name in fields})
    return [dict.fromkeys([*columns, "note"], "") | row for row in table]


def name_column(module: int, check: str) -> str:
    """Return the column of a check, such as "1.subgroups"."""
    return f"{module}.{check.removeprefix('test_')}"


def list_absent(everyone: Sequence[Student], people: Sequence[Person]) -> list[Person]:
    """Return the students of the roster who have no submission."""
    present = [student.person for student in everyone]
    return [person for person in people if person not in present]


def make_row(student: Student, fields: Sequence[str]) -> Row:
    """Return a submission's row, with the roster's `fields`.

    A student who is still waiting has no score, because earlier results come from other checks, options or modules.
    """
    row = {"student": student.key, "submission": student.submission}
    row |= {name: student.person[name] for name in fields if student.person} | student.columns
    notes = [*([roster.UNKNOWN] if fields and not student.person else []), *student.notes]
    result = student.result
    if student.unreadable:
        notes += [NOT_GRADED, student.unreadable]
    elif student.is_waiting:
        notes.append("not graded yet")
    elif result is None:
        told = json.loads(student.results.read_text())["notes"] if student.results.exists() else []
        told += [f"{KILLED}: see {student.log.name}"] * student.was_killed
        notes += [NOT_GRADED, *(told or [f"the grader wrote no results: see {student.log.name}"])[-1:]]
    else:
        row |= {"score": str(result["score"]), "max": str(result["max_score"])}
        for entry, _, checks in formats.list_modules(result):
            row[f"module {entry.number}"] = str(sum(check["score"] for check in checks))
            row |= {name_column(entry.number, check["name"]): str(check["score"]) for check in checks}
        notes += result["notes"]
    return row | {"note": " / ".join(notes)}
