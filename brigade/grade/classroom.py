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
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brigade.course.modules import MODULES, ROOT, CourseError, Module
from brigade.course.submission import find, read_text
from brigade.grade import feedback_page, formats, incoming, roster
from brigade.grade.gradebook import Row
from brigade.grade.gradebook_file import GradebookFile
from brigade.grade.roster import Person

GRADING_BYTES = 1_000_000_000  # memory for one grading run with four ranks: 0.7 GB measured, plus a margin
LONGEST_NAME = 200  # bytes of a submission's name in the names of its results, to which endings are added
END_S = 20.0  # limit for a grader to clean up


@dataclass(frozen=True)
class Student:
    """One submission of the class, and the path of its results."""

    name: str
    path: Path
    results: Path
    submission: str = ""  # the name of the file or directory, unique and printable

    @property
    def fingerprint_file(self) -> Path:
        """The file with the hash of all inputs from which the results were computed."""
        return self.results.with_suffix(".made-from")

    @property
    def findings(self) -> Path:
        """The file with the findings of the static check."""
        return self.results.with_suffix(".please-look")

    @property
    def log(self) -> Path:
        """The file with the grader's output."""
        return self.results.with_suffix(".log")

    def read_result(self) -> dict[str, Any] | None:
        """Return the results, or None if the student is not graded."""
        if not (self.fingerprint_file.exists() and self.results.exists()):
            return None
        return json.loads(self.results.read_text())


def get_results_path(gradebook: Path) -> Path:
    """Return the directory with the results of all submissions."""
    return gradebook.with_name(gradebook.name + ".results")


def get_findings_path(gradebook: Path) -> Path:
    """Return the file with the findings of the static check in all submissions. It is for the instructor only."""
    return gradebook.with_name(gradebook.name + ".please-look.txt")


def list_students(directory: Path, gradebook: Path, *others: Path) -> list[Student]:
    """Return the submissions in a class's directory, including files that cannot be graded.

    Skip the gradebook, the files beside it, and the `others` that do not come from students. Raise CourseError if there
    is nothing that can be graded.
    """
    if not directory.is_dir():
        raise CourseError(f"there is no directory {directory}")
    ours = (gradebook, get_results_path(gradebook), get_findings_path(gradebook), *others)
    found = [path for path in sorted(directory.iterdir()) if path.name[0] != "." and path not in ours]
    found = [path for path in found if path.name not in incoming.SKIPPED]
    if not any(path.is_dir() or path.name.lower().endswith((".zip", ".py")) for path in found):
        raise CourseError(f"there are no submissions in {directory}; it must contain one directory or zip per student")
    results = get_results_path(gradebook)
    names = Counter(formats.make_line(get_student_name(path)) for path in found)
    submissions: Counter[str] = Counter()
    everyone = []
    for path in found:
        name, submission = (formats.make_line(text) for text in (get_student_name(path), path.name))
        submissions[submission] += 1
        if submissions[submission] > 1:  # the names differ in characters that cannot be shown
            submission += f" ({submissions[submission]})"
        shown = name if names[name] == 1 else submission  # such as ada and ada.zip
        everyone.append(Student(shown, path, results / f"{limit_name(path.name)}.json", submission))
    return everyone


def name_students(everyone: Sequence[Student], people: Sequence[Person]) -> list[Student]:
    """Return the submissions under the names of the roster's students. If a name is not unique, add the submission."""
    persons = [roster.find_person(get_student_name(student.path), people) for student in everyone]
    names = [
        person["name"] or roster.get_key(person) if person else student.name
        for person, student in zip(persons, everyone)
    ]
    return [
        replace(student, name=name if names.count(name) == 1 else f"{name} ({student.submission})")
        for student, name in zip(everyone, names)
    ]


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


def read_texts(student: Student) -> dict[int, str]:
    """Return the texts of the modules by number. The text of a file that must not be read is empty."""
    texts = {}
    with contextlib.suppress(CourseError, OSError):
        with incoming.open_submission(student.path) as submission:
            for entry in MODULES:
                if path := find(submission.directory, entry):
                    texts[entry.number] = ""
                    for file in (path.with_name(name.name) for name in entry.paths):
                        with contextlib.suppress(CourseError):
                            texts[entry.number] += read_text(file, submission.directory)
    return texts


def compute_fingerprint() -> str:
    """Return a hash of the checks, the solutions and the toolkit."""
    digest = hashlib.sha256()
    for path in sorted(path for top in ("tests", "solutions", "brigade") for path in (ROOT / top).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def find_outdated(everyone: Sequence[Student], options: Sequence[str]) -> dict[Student, str]:
    """Return the students whose results are missing or outdated, each with the hash of the current inputs."""
    course = compute_fingerprint()
    outdated = {}
    for student in everyone:
        everything = json.dumps([course, *options, read_texts(student)])
        wanted = hashlib.sha256(everything.encode()).hexdigest()
        if not (
            student.results.exists()
            and student.fingerprint_file.exists()
            and student.fingerprint_file.read_text() == wanted
        ):
            outdated[student] = wanted
    return outdated


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
    waiting: Mapping[Student, str],
    command: Sequence[str],
    *,
    at_once: int,
    lock: int,
    on_finish: Callable[[Student], None],
) -> None:
    """Run `command` for each student, `at_once` at a time; see `find_outdated` for `waiting`.

    `command` takes the options `--submission` and `--out`. An interrupt ends all graders.
    """
    queue = list(waiting)
    running: list[tuple[subprocess.Popen, Student]] = []
    try:
        while queue or running:
            while queue and len(running) < at_once:
                student = queue.pop(0)
                try:
                    running.append((start_grader(student, command, lock), student))
                except OSError as error:  # concerns only this student
                    formats.write(student.log, f"the grader could not be started: {error}\n")
                    on_finish(student)
            time.sleep(0.05)
            for job in [job for job in running if job[0].poll() is not None]:
                running.remove(job)
                process, student = job
                process.stdin.close()
                if process.returncode == 0:
                    formats.write(student.fingerprint_file, waiting[student])
                on_finish(student)
    finally:
        for process, *_ in running:
            process.terminate()
        for process, *_ in running:
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


def make_row(student: Student, entries: Sequence[Module], waiting: Container[Student] = ()) -> Row:
    """Return the student's row in the gradebook: the total score, and the scores of each module and check.

    A student who is still `waiting` has no score, because earlier results come from other checks, options or modules.
    """
    line: Row = {"student": student.name, "submission": student.submission, "score": "", "max": ""}
    line |= {f"module {entry.number}": "" for entry in entries}
    if student in waiting:
        return line | {"note": "not graded yet"}
    result = student.read_result()
    if result is None:
        notes = json.loads(student.results.read_text())["notes"] if student.results.exists() else []
        reason = notes[-1] if notes else f"the grader wrote no results: see {student.log.name}"
        return line | {"note": f"not graded / {reason}"}
    line |= {"score": result["score"], "max": result["max_score"]}
    for entry in entries:
        line[f"module {entry.number}"] = sum(c["score"] for c in result["checks"] if c["module"] == entry.number)
    for check in result["checks"]:
        line[f"{check['module']}.{check['name'].removeprefix('test_')}"] = check["score"]
    return line | {"note": " / ".join(result["notes"])}


def save(
    book: GradebookFile,
    everyone: Sequence[Student],
    entries: Sequence[Module],
    waiting: Container[Student] = (),
    people: Sequence[Person] = (),
) -> list[Row]:
    """Update the gradebook and return the grader's rows. The rows of students who are still `waiting` have no score.

    `people` is the roster, if there is one.
    """
    table = [make_row(student, entries, waiting) for student in everyone]
    if people:
        table = roster.identify(table, people, [get_student_name(student.path) for student in everyone])
    book.update(table, entries)
    return table


def read_scores(everyone: Sequence[Student]) -> dict[Student, int]:
    """Return the scores of the students who are graded."""
    results = {student: student.read_result() for student in everyone}
    return {student: result["score"] for student, result in results.items() if result}


def write_feedback(directory: Path, everyone: Sequence[Student], people: Sequence[Person] = ()) -> int:
    """Write each graded student's feedback as text and as a web page, and archives of the pages for Moodle and Canvas.

    Return the number of students.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    graded = [student for student in everyone if student.fingerprint_file.exists()]
    archives: dict[str, dict[str, str | bytes]] = {"moodle.zip": {}, "canvas.zip": {}}
    for student, named in zip(graded, name_students(graded, people)):
        result = student.read_result()
        page = feedback_page.format_page(named.name, result)
        name, earlier = (limit_name(one.name.replace("/", "-")) for one in (named, student))
        upload = formats.make_printable(student.path.name)
        for ending in ("txt", "html") if name != earlier else ():  # written before the roster identified the student
            (directory / f"{earlier}.{ending}").unlink(missing_ok=True)
        formats.write(directory / f"{name}.txt", f"{named.name}\n\n{formats.format_result(result)}")
        formats.write(directory / f"{name}.html", page)
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


def count_failures(table: Sequence[Row]) -> list[tuple[str, int]]:
    """Return each failed check with the number of submissions that fail it, the largest number first."""
    columns = (column for row in table for column, value in row.items() if "." in column and value == 0)
    return Counter(columns).most_common()
