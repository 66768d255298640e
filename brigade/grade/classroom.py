"""Grade a class (`brigade grade --class`): every submission in a directory, several at a time, into one gradebook.

A separate process, `brigade grade --submission`, grades each submission and writes a results file to the directory
`GRADEBOOK.results`. A second file stores a hash of the modules' text, the course and the options. If the hash is
unchanged, a repeated run, such as one after an interruption, uses the existing results.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import json
import os
import subprocess
import textwrap
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from brigade.course.modules import MODULES, ROOT, CourseError, Module
from brigade.course.submission import find, read_text
from brigade.grade import feedback_page, formats, incoming, roster
from brigade.grade.gradebook import Row
from brigade.grade.roster import Person

GRADING_BYTES = 1_000_000_000  # memory for one grading run with four ranks: 0.7 GB measured, plus a margin
LONGEST_NAME = 200  # bytes of a submission's name in the names of its results, to which endings are added
END_S = 20.0  # limit for a grader to clean up


@dataclass(eq=False)
class Student:
    """One submission of the class, its student in the roster, and what is known about it so far."""

    path: Path
    results: Path
    submission: str  # the name of the file or directory, unique and printable
    name: str  # of the student, or of the submission without its file extension; unique and printable
    person: Person | None = None
    texts: dict[int, str] = field(default_factory=dict)  # of the modules, by number
    fingerprint: str = ""  # of everything that the results depend on
    is_waiting: bool = False  # whether it has to be graded
    result: dict[str, Any] | None = None  # of the last complete grading run

    @property
    def fingerprint_file(self) -> Path:
        """The file with the fingerprint of the results. It exists only if a grading run was complete."""
        return self.results.with_suffix(".made-from")

    @property
    def findings(self) -> Path:
        """The file with the findings of the static check."""
        return self.results.with_suffix(".please-look")

    @property
    def log(self) -> Path:
        """The file with the grader's output."""
        return self.results.with_suffix(".log")

    @property
    def key(self) -> str:
        """What identifies the student in every gradebook of the class."""
        return roster.get_key(self.person) if self.person else self.name

    def read_state(self, course: str, options: Sequence[str]) -> None:
        """Read the modules and the results, and find out whether it has to be graded with these options."""
        self.texts = read_texts(self.path)
        self.fingerprint = hashlib.sha256(json.dumps([course, *options, self.texts]).encode()).hexdigest()
        is_complete = self.fingerprint_file.exists() and self.results.exists()
        self.result = json.loads(self.results.read_text()) if is_complete else None
        self.is_waiting = not is_complete or self.fingerprint_file.read_text() != self.fingerprint


def get_results_path(gradebook: Path) -> Path:
    """Return the directory with the results of all submissions."""
    return gradebook.with_name(gradebook.name + ".results")


def get_findings_path(gradebook: Path) -> Path:
    """Return the file with the findings of the static check in all submissions. It is for the instructor only."""
    return gradebook.with_name(gradebook.name + ".please-look.txt")


def list_students(directory: Path, gradebook: Path, *others: Path, people: Sequence[Person] = ()) -> list[Student]:
    """Return the submissions in a class's directory, including files that cannot be graded.

    Skip the gradebook, the files beside it, and the `others` that do not come from students. `people` is the roster.
    Raise CourseError if there is nothing that can be graded.
    """
    if not directory.is_dir():
        raise CourseError(f"there is no directory {directory}")
    ours = (gradebook, get_results_path(gradebook), get_findings_path(gradebook), *others)
    found = [path for path in sorted(directory.iterdir()) if path.name[0] != "." and path not in ours]
    found = [path for path in found if path.name not in incoming.SKIPPED]
    if not any(path.is_dir() or path.name.lower().endswith((".zip", ".py")) for path in found):
        raise CourseError(f"there are no submissions in {directory}; it must contain one directory or zip per student")
    lines = [formats.make_line(path.name) for path in found]
    everyone = []
    for index, path in enumerate(found):
        again = lines[:index].count(lines[index])  # names that differ in characters that cannot be shown
        submission = lines[index] + (f" ({again + 1})" if again else "")
        name = formats.make_line(get_student_name(path))
        if person := roster.find_person(name, people):
            name = person["name"] or roster.get_key(person)
        results = get_results_path(gradebook) / f"{limit_name(path.name)}.json"
        everyone.append(Student(path, results, submission, name, person))
    names = [student.name for student in everyone]
    for student in everyone:
        if names.count(student.name) > 1:  # such as ada and ada.zip
            student.name += f" ({student.submission})"
    return everyone


def get_student_name(path: Path) -> str:
    """Return a submission's name without the file extension."""
    if path.is_dir():
        return path.name
    endings = [*incoming.ARCHIVES, *(f"_{module}" for module in incoming.ENTRIES)]
    endings = [ending for ending in endings if path.name.lower().endswith(ending)]
    return path.name[: -len(max(endings, key=len))] if endings else path.stem


def limit_name(name: str) -> str:
    """Return the name of a submission, or its beginning and a hash if file names with endings would be too long."""
    encoded = os.fsencode(name)
    if len(encoded) <= LONGEST_NAME:
        return name
    return encoded[: LONGEST_NAME // 2].decode(errors="ignore") + "-" + hashlib.sha256(encoded).hexdigest()[:16]


def read_texts(path: Path) -> dict[int, str]:
    """Return the texts of a submission's modules by number. The text of a file that must not be read is empty."""
    texts = {}
    with contextlib.suppress(CourseError, OSError):
        with incoming.open_submission(path) as submission:
            for entry in MODULES:
                if main := find(submission.directory, entry):
                    texts[entry.number] = ""
                    for file in (main.with_name(name.name) for name in entry.paths):
                        with contextlib.suppress(CourseError):
                            texts[entry.number] += read_text(file, submission.directory)
    return texts


def read_states(everyone: Sequence[Student], options: Sequence[str]) -> None:
    """Find out which students have to be graded, because their modules, the course or the options have changed."""
    digest = hashlib.sha256()
    for path in sorted(path for top in ("tests", "solutions", "brigade") for path in (ROOT / top).rglob("*.py")):
        digest.update(path.read_bytes())
    for student in everyone:
        student.read_state(digest.hexdigest(), options)


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
    waiting: Sequence[Student],
    command: Sequence[str],
    *,
    at_once: int,
    lock: int,
    on_finish: Callable[[Student], None],
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
                process.stdin.close()
                student.is_waiting, student.result = False, None
                if process.returncode == 0:
                    student.result = json.loads(student.results.read_text())
                    formats.write(student.fingerprint_file, student.fingerprint)
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
    student.fingerprint_file.unlink(missing_ok=True)
    with open(student.log, "w") as log:
        return subprocess.Popen(
            [
                *[*command, "--submission", str(student.path), "--out", str(student.results), "--format", "json"],
                *["--please-look", str(student.findings)],
            ],
            cwd=ROOT,  # a directory in which no student's directory can be imported as a package
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C goes to this process only, which then ends the graders
        )


def make_table(everyone: Sequence[Student], entries: Sequence[Module], people: Sequence[Person] = ()) -> list[Row]:
    """Return the grader's rows of the gradebook: one for each submission, and for each student without one."""
    fields = roster.list_fields(people)
    table = [make_row(student, entries, fields) for student in everyone]
    for person in list_absent(everyone, people):
        values = {"student": roster.get_key(person), **{name: person[name] for name in fields}}
        table.append(dict.fromkeys(table[0], "") | values | {"note": "no submission"})
    return table


def list_absent(everyone: Sequence[Student], people: Sequence[Person]) -> list[Person]:
    """Return the students of the roster who have no submission."""
    present = [student.person for student in everyone]
    return [person for person in people if person not in present]


def make_row(student: Student, entries: Sequence[Module], fields: Sequence[str]) -> Row:
    """Return a submission's row: the roster's `fields`, the total score, and the scores of each module and check.

    A student who is still waiting has no score, because earlier results come from other checks, options or modules.
    """
    row: Row = {"student": student.key, "submission": student.submission}
    row |= {name: student.person[name] if student.person else "" for name in fields}
    row |= dict.fromkeys(["score", "max", *(f"module {entry.number}" for entry in entries)], "")
    notes = [roster.UNKNOWN] if fields and not student.person else []
    result = student.result
    if student.is_waiting:
        notes.append("not graded yet")
    elif result is None:
        told = json.loads(student.results.read_text())["notes"] if student.results.exists() else []
        notes += ["not graded", *(told or [f"the grader wrote no results: see {student.log.name}"])[-1:]]
    else:
        row |= {"score": result["score"], "max": result["max_score"]}
        for entry in entries:
            row[f"module {entry.number}"] = sum(c["score"] for c in result["checks"] if c["module"] == entry.number)
        for check in result["checks"]:
            row[f"{check['module']}.{check['name'].removeprefix('test_')}"] = check["score"]
        notes += result["notes"]
    return row | {"note": " / ".join(notes)}


def write_feedback(directory: Path, everyone: Sequence[Student]) -> int:
    """Write each graded student's feedback as text and as a web page, and archives of the pages for Moodle and Canvas.

    Return the number of students.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    graded = [student for student in everyone if student.result]
    archives: dict[str, dict[str, str | bytes]] = {"moodle.zip": {}, "canvas.zip": {}}
    for student in graded:
        page = feedback_page.format_page(student.name, student.result)
        name = limit_name(student.name.replace("/", "-"))
        formats.write(directory / f"{name}.txt", f"{student.name}\n\n{formats.format_result(student.result)}")
        formats.write(directory / f"{name}.html", page)
        upload = formats.make_printable(student.path.name)
        if roster.MOODLE.fullmatch(upload):
            archives["moodle.zip"][f"{upload}/feedback.html"] = page
        elif roster.CANVAS.fullmatch(upload) and upload.endswith(".zip"):  # Canvas shows the file under this name
            archives["canvas.zip"][upload] = make_zip({"feedback.html": page})
    for name, files in archives.items():
        (directory / name).unlink(missing_ok=True)
        if files:
            (directory / name).write_bytes(make_zip(files))
    return len(graded)


def make_zip(files: Mapping[str, str | bytes]) -> bytes:
    """Return the content of a zip with these files."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in files.items():
            bundle.writestr(name, text)
    return content.getvalue()


def write_findings(gradebook: Path, everyone: Sequence[Student]) -> list[str]:
    """Write the findings in all submissions to one file. Return the names of the submissions with findings."""
    texts = {s.name: s.findings.read_text() for s in everyone if s.findings.exists()}
    watched = {name: textwrap.indent(text, "  ") for name, text in texts.items() if text}
    formats.write(get_findings_path(gradebook), "\n".join(f"{name}\n{text}" for name, text in watched.items()))
    return list(watched)
