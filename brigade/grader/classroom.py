"""Grade a class (`brigade grade --class`): every submission in a directory, several at a time, into one gradebook.

A separate process grades each submission, as `brigade grade --submission` does, and writes a results file to
`GRADEBOOK.results`. A second file stores a hash of the modules' text, the course, the options and the conditions, such
as torch's version. If the hash is unchanged, a repeated run, such as one after an interruption, uses the results.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from brigade.course.table.listing import list_checks
from brigade.course.table.modules import ROOT, Module
from brigade.grader import formats, incoming, roster, uploads
from brigade.grader.gradebook import EXTENSION, LATE, UPLOADED, Row, get_adjustments_path, get_results_path
from brigade.grader.request import GradeRequest
from brigade.grader.roster import Person
from brigade.ranks.errors import UserError

GRADING_BYTES = 1_000_000_000  # memory for one grading run with four ranks: 0.7 GB measured, plus a margin
LONGEST_NAME = 200  # bytes of a submission's name in the names of its results, to which endings are added
NOT_GRADED = "not graded"
POLL_S = 0.2  # between two attempts to lock a submission
KILLED = "the grader was killed, because it did not stop at its time limit, or because memory ran out"


@dataclass(frozen=True)
class Timing:
    """When an upload came, the student's extension, and the percentage that the upload loses: see `term.py`."""

    uploaded: str
    extension: str
    late: float


@dataclass(eq=False)
class Student:
    """One submission of the class, its student in the roster, and what is known about it so far.

    Beside `results`, there are files with the grader's output (`.log`), which is also the submission's lock, and
    `made_from`, which contains the fingerprint of the results and exists only if they are complete.
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
    timing: Timing | None = None  # in a term

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
    Raise UserError if there is nothing that can be graded.
    """
    beside = (get_results_path(gradebook), get_adjustments_path(gradebook), get_similar_path(gradebook))
    ours = (gradebook, *beside, *others)
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
        read_result(student)


def read_result(student: Student) -> None:
    """Read the last complete result of a submission, and find out whether it has to be graded."""
    made_from = ""
    with contextlib.suppress(FileNotFoundError):  # such as while another run grades it
        made_from = student.made_from.read_text()
        student.result = json.loads(student.results.read_text())
    student.is_waiting = student.result is None or made_from != student.fingerprint


@contextlib.contextmanager
def explain_unreadable(student: Student) -> Iterator[None]:
    """Keep the reason if a submission cannot be read inside the block."""
    try:
        yield
    except UserError as error:
        student.unreadable = str(error)


def read_texts(student: Student) -> dict[str, str]:
    """Return the texts of the module files in a submission, by name. Raise UserError if nothing can be graded."""
    try:
        with incoming.open_submission(*student.paths) as (place, _):
            return incoming.read_modules(place)[0]
    except OSError as error:
        raise UserError(f"{student.submission} cannot be read: {error.strerror}") from None


def is_unchanged(student: Student) -> bool:
    """Return whether a submission still has the texts that were read before it was graded."""
    with contextlib.suppress(UserError):
        return read_texts(student) == student.texts
    return False


@contextlib.contextmanager
def lock_gradebook(gradebook: Path, waits: bool = False) -> Iterator[None]:
    """Lock the gradebook against another run. If there is one, wait for it, or raise UserError unless this `waits`."""
    results = get_results_path(gradebook)
    results.mkdir(mode=0o700, exist_ok=True)
    with open(results / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except OSError:
            raise UserError(f"another run is writing to {gradebook}; wait until it has finished") from None
        yield


@contextlib.contextmanager
def lock_submission(student: Student, lifeline: int) -> Iterator[int]:
    """Lock a submission against other runs, after they have graded it. Yield the lock, for the grader to inherit.

    Raise KeyboardInterrupt if the lifeline closes before.
    """
    with open(student.log, "a") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if select.select([lifeline], [], [], POLL_S)[0]:
                    raise KeyboardInterrupt from None
        yield lock.fileno()


def grade_all(
    waiting: Sequence[Student], request: GradeRequest, *, at_once: int, on_finish: Callable[[Student], None]
) -> None:
    """Grade the students as the request says, `at_once` at a time, each in a process. An interrupt ends them all."""
    lifeline, ours = os.pipe()  # graders end when it closes
    pool = ThreadPoolExecutor(at_once)
    try:
        running = {pool.submit(grade_one, student, request, lifeline): student for student in waiting}
        for future in as_completed(running):
            future.result()
            on_finish(running[future])
    finally:
        os.close(ours)
        pool.shutdown(cancel_futures=True)
        os.close(lifeline)


def grade_one(student: Student, request: GradeRequest, lifeline: int) -> None:
    """Grade one student, unless another run has done it meanwhile, such as that of another slice."""
    with lock_submission(student, lifeline) as lock:
        read_result(student)
        if not student.is_waiting:
            return
        status = run_grader(student, request, (lock, lifeline))
        student.was_killed = status == -signal.SIGKILL  # by its watchdog, or because of memory
        student.result = json.loads(student.results.read_text()) if status == 0 else None
        if status == 0 and is_unchanged(student):  # otherwise the next run grades it again
            formats.write(student.made_from, student.fingerprint)
        student.is_waiting = False  # at last, because the gradebook is written meanwhile


def run_grader(student: Student, request: GradeRequest, inherited: tuple[int, int]) -> int:
    """Grade one student in a process. Return its status. It inherits the lock, and the pipe that ends it."""
    student.made_from.unlink(missing_ok=True)
    own = replace(request, submission=tuple(map(str, student.paths)), out=str(student.results))
    with open(student.log, "w") as log:
        done = subprocess.run(
            [sys.executable, "-m", "brigade.grader.cli.grade_student", str(inherited[1])],
            input=own.encode(),
            text=True,
            cwd=ROOT,  # a directory in which no student's directory can be imported as a package
            stdout=log,
            stderr=log,
            pass_fds=inherited,
            start_new_session=True,  # Ctrl-C goes to this process only, which then ends the graders
        )
    return done.returncode


def make_table(everyone: Sequence[Student], people: Sequence[Person] = ()) -> list[Row]:
    """Return the grader's rows of the gradebook: one for each submission, and for each student without one."""
    fields = roster.list_fields(people)
    absent = [
        Row(roster.get_key(person), texts={name: person[name] for name in fields} | {"note": "no submission"})
        for person in list_absent(everyone, people)
    ]
    return [make_row(student, fields) for student in everyone] + absent


def list_columns(entries: Sequence[Module]) -> list[str]:
    """Return the columns of points that a gradebook has although nobody may have points."""
    columns = [f"module {entry.number}" for entry in entries]
    return columns + [name_column(check.module, check.name) for entry in entries for check in list_checks(entry)]


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
    texts = {name: student.person[name] for name in fields if student.person}
    notes = [*([roster.UNKNOWN] if fields and not student.person else []), *student.notes]
    numbers: dict[str, float] = {}
    if student.timing:
        texts |= {UPLOADED: student.timing.uploaded, EXTENSION: student.timing.extension}
        numbers[LATE] = student.timing.late
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
        for entry, checks in formats.list_modules(result):
            numbers[f"module {entry.number}"] = sum(check["score"] for check in checks)
            numbers |= {name_column(entry.number, check["name"]): check["score"] for check in checks}
        notes += result["notes"]
    return Row(student.key, student.submission, numbers, texts | {"note": " / ".join(notes)})
