"""brigade grade --class: every submission below a directory, several at a time, into one gradebook.

Each submission is graded by a process of its own, `brigade grade --submission`, with a results file in the directory
`GRADEBOOK.results`. Beside it stands what it was made from: a hash of the modules' text, the course and the options.
When that is unchanged, an interrupted or repeated run takes the results as they are.
"""

from __future__ import annotations

import contextlib
import csv
import fcntl
import hashlib
import io
import json
import re
import subprocess
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from brigade.course.modules import MODULES, ROOT, CourseError, Module
from brigade.course.submission import MAX_SOURCE_BYTES, find
from brigade.grade import formats, incoming, similarity
from brigade.grade.static_look import HEADING

GRADING_BYTES = 1_000_000_000  # what grading one takes, four ranks included: 0.7 GB measured, and half as much again
TRIES = 2  # for a grader that was killed
END_S = 20.0  # that a grader gets to put everything away
FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # what a spreadsheet takes a cell for that begins with one of these
CODE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)

Row = dict[str, "str | int"]


@dataclass(frozen=True)
class Student:
    """One submission of the class and where its results belong."""

    name: str
    path: Path
    results: Path
    conflict: str = ""  # a note on another submission that seems to be the same student's

    @property
    def fingerprint_file(self) -> Path:
        return self.results.with_suffix(".made-from")

    @property
    def log(self) -> Path:
        return self.results.with_suffix(".log")


def get_results_path(gradebook: Path) -> Path:
    return gradebook.with_name(gradebook.name + ".results")


def list_students(directory: Path, gradebook: Path) -> tuple[list[Student], list[str]]:
    """Return the submissions in a class's directory (its directories and archives) and the names of its other entries.

    Raise CourseError if there are no submissions.
    """
    if not directory.is_dir():
        raise CourseError(f"there is no directory {directory}")
    ours = (gradebook, get_results_path(gradebook))
    entries = [path for path in sorted(directory.iterdir()) if path.name[0] != "." and path not in ours]
    found = [path for path in entries if path.is_dir() or path.name.lower().endswith(incoming.ARCHIVES)]
    if not found:
        raise CourseError(f"there are no submissions in {directory}: one directory or archive per student")
    same: dict[str, list[str]] = {}
    for path in found:
        same.setdefault(remove_archive_suffix(path), []).append(formats.make_printable(path.name))
    results = get_results_path(gradebook)
    everyone = []
    for path in found:
        name, alike = remove_archive_suffix(path), same[remove_archive_suffix(path)]
        several = len(alike) > 1  # such as ada and ada.zip
        conflict = f"Possibly one student: {', '.join(alike)}. Each is graded" if several else ""
        shown = formats.make_printable(path.name if several else name)
        everyone.append(Student(shown, path, results / f"{path.name}.json", conflict))
    return everyone, [formats.make_printable(path.name) for path in entries if path not in found]


def remove_archive_suffix(path: Path) -> str:
    """Return the name of a submission without the ending of an archive."""
    if path.is_dir():
        return path.name
    endings = [ending for ending in incoming.ARCHIVES if path.name.lower().endswith(ending)]
    return path.name[: -len(max(endings, key=len))] if endings else path.name


def read_texts(student: Student) -> dict[int, str]:
    """The text of each module that can be found, by number; unreadable ones are left to the grading."""
    found = {}
    with contextlib.suppress(CourseError, OSError):
        with incoming.open_submission(student.path) as submission:
            for entry in MODULES:
                if path := find(submission.directory, entry):
                    with open(path, "rb") as file:
                        found[entry.number] = file.read(MAX_SOURCE_BYTES + 1).decode(errors="backslashreplace")
    return found


def compute_fingerprint() -> str:
    """Changes with the checks, the solutions and the toolkit."""
    digest = hashlib.sha256()
    for path in sorted(path for top in ("tests", "solutions", "brigade") for path in (ROOT / top).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def find_outdated(everyone: Sequence[Student], options: Sequence[str]) -> dict[Student, str]:
    """Those without results that were made from the same, and what new results would be made from."""
    course = compute_fingerprint()
    found = {}
    for student in everyone:
        everything = json.dumps([course, *options, read_texts(student)])
        wanted = hashlib.sha256(everything.encode()).hexdigest()
        if not (
            student.results.exists()
            and student.fingerprint_file.exists()
            and student.fingerprint_file.read_text() == wanted
        ):
            found[student] = wanted
    return found


@contextlib.contextmanager
def lock_gradebook(gradebook: Path) -> Iterator[int]:
    """Keeps a second run away from the gradebook; yields the descriptor that does, for graders to hold as well."""
    results = get_results_path(gradebook)
    results.mkdir(mode=0o700, exist_ok=True)
    with open(results / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CourseError(f"another run is writing to {gradebook}: wait for its end") from None
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

    `command` grades the submission that its options `--submission` and `--out` name. End all graders when interrupted.
    """
    queue = [(student, 1) for student in waiting]
    running: list[tuple[subprocess.Popen, Student, int]] = []
    try:
        while queue or running:
            while queue and len(running) < at_once:
                student, attempt = queue.pop(0)
                running.append((start_grader(student, command, lock), student, attempt))
            time.sleep(0.05)
            for job in [job for job in running if job[0].poll() is not None]:
                running.remove(job)
                process, student, attempt = job
                process.stdin.close()
                if process.returncode < 0 and attempt < TRIES:  # from outside, for want of memory: not their doing
                    queue.append((student, attempt + 1))
                    continue
                if process.returncode == 0:
                    student.fingerprint_file.write_text(waiting[student])
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
    """The student's grader. It ends when this process does, because then its standard input ends."""
    student.fingerprint_file.unlink(missing_ok=True)
    with open(student.log, "w") as log:
        return subprocess.Popen(
            [*command, "--submission", str(student.path), "--out", str(student.results), "--format", "json"],
            cwd=ROOT,  # and not where a student's directory could be found as a package
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            pass_fds=[lock],
            start_new_session=True,  # Ctrl-C is for us; we then end the graders in order
        )


def make_row(student: Student, entries: Sequence[Module], waiting: Container[Student] = ()) -> Row:
    """Return the student's row in the gradebook: the score, and those of each module and of each check.

    A student who is still `waiting` has no score: results of an earlier run, made from other checks, options or
    modules, do not belong under this header.
    """
    line: Row = {"student": student.name}
    try:
        result = json.loads(student.results.read_text())
    except (OSError, ValueError):
        result = None
    if student in waiting:
        earlier = f"; an earlier run gave {result['score']}, under other conditions" if result else ""
        return line | {"score": "", "note": collect_notes(student, f"not graded yet{earlier}")}
    if result is None:
        note = f"the grader gave no results: see {student.log.name}"
        return line | {"score": 0, "note": collect_notes(student, note)}
    line |= {"score": result["score"], "max": result["max_score"]}
    for entry in entries:
        line[f"module {entry.number}"] = sum(c["score"] for c in result["checks"] if c["module"] == entry.number)
    for check in result["checks"]:
        line[f"{check['module']}.{check['name'].removeprefix('test_')}"] = check["score"]
    line[HEADING] = " / ".join(result["findings"])
    return line | {"note": collect_notes(student, *result["notes"])}


def collect_notes(student: Student, *notes: str) -> str:
    """Return the notes of a row, including the one on a conflict."""
    return " / ".join(filter(None, [student.conflict, *notes]))


def format_csv(table: Sequence[Row]) -> str:
    """The table as CSV; the columns of all rows."""
    longest = max(table, key=len)  # one that knows all checks, in order
    columns = list(dict.fromkeys(column for row in (longest, *table) for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows({key: escape_formula(value) for key, value in row.items()} for row in table)
    return text.getvalue()


def escape_formula(value: str | int) -> str | int:
    """A spreadsheet must not take a student's name or a note for a formula."""
    return "'" + value if isinstance(value, str) and value.startswith(FORMULA) else value


def save(
    gradebook: Path, everyone: Sequence[Student], entries: Sequence[Module], waiting: Container[Student] = ()
) -> list[Row]:
    """Write the gradebook and return its rows. Those of students who are still `waiting` have no score."""
    table = [make_row(student, entries, waiting) for student in everyone]
    formats.write(gradebook, format_csv(table))
    return table


def count_failures(table: Sequence[Row]) -> list[tuple[str, int]]:
    """The checks that fail, and how many students fail each, most first."""
    return Counter(
        column for row in table for column, value in row.items() if "." in column and value == 0
    ).most_common()


def find_near_identical(everyone: Sequence[Student], entries: Sequence[Module]) -> list[similarity.Group]:
    """Students whose modules are alike; answers that come with the course take part under their directories' names."""
    everybodys: dict[str, dict[int, str]] = {student.name: read_texts(student) for student in everyone}
    given = {}
    for entry in entries:
        for place, path in (
            ("solutions/", ROOT / "solutions" / entry.path),  # no student's name has a slash
            ("tests/alternatives/", ROOT / "tests" / "alternatives" / f"{entry.package}.py"),
        ):
            everybodys.setdefault(place, {})[entry.number] = path.read_text()
        reading = "".join(path.read_text() for path in sorted(entry.lesson.glob("*.md")))
        given[entry.number] = [
            *(path.read_text() for path in sorted(entry.lesson.glob("*.py"))),  # the skeleton, and scripts to measure
            *map(textwrap.dedent, CODE.findall(reading)),
        ]
    return similarity.find_groups(everybodys, given)
