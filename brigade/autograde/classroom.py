"""brigade grade --class: every submission below a directory, several at a time, into one gradebook.

Each submission is graded by a process of its own, `brigade grade --submission`, with a results file in the directory
`GRADEBOOK.results`. Beside it stands what it was made from: the text of the modules, the course, and the options. When
all that is unchanged, an interrupted or repeated run takes the results as they are.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from brigade.autograde import formats, incoming, similarity
from brigade.course import MODULES, ROOT, CourseError, Module
from brigade.submission import find

GRADING_BYTES = 1_300_000_000  # what grading one submission takes at most: the grader, the server and four ranks
TRIES = 2  # for a grader that ends without results


@dataclass(frozen=True)
class Student:
    """One submission of the class and where its results belong."""

    name: str
    path: Path
    results: Path

    @property
    def made_from(self) -> Path:
        return self.results.with_suffix(".made-from")


def students(directory: Path, gradebook: Path) -> list[Student]:
    """The submissions in a class's directory: its directories and zip files. Raises CourseError without any."""
    if not directory.is_dir():
        raise CourseError(f"there is no directory {directory}")
    results = gradebook.with_name(gradebook.name + ".results")
    found = [
        Student(path.stem if path.is_file() else path.name, path, results / f"{path.name}.json")
        for path in sorted(directory.iterdir())
        if not path.name.startswith(".") and path != results and (path.is_dir() or path.suffix == ".zip")
    ]
    if not found:
        raise CourseError(f"there are no submissions in {directory}: one directory or zip file per student")
    return found


def fingerprint(student: Student, course: str, options: Sequence[str]) -> str:
    """Changes with the student's modules, the course and the options."""
    digest = hashlib.sha256(json.dumps([course, *options]).encode())
    for number, text in texts(student).items():
        digest.update(f"{number}:{hashlib.sha256(text.encode()).hexdigest()}".encode())
    return digest.hexdigest()


def course_fingerprint() -> str:
    """Changes with the checks, the solutions and the toolkit."""
    digest = hashlib.sha256()
    for path in sorted(path for top in ("tests", "solutions", "brigade") for path in (ROOT / top).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def texts(student: Student) -> dict[int, str]:
    """The text of each module that can be found, by number; unreadable ones are left to the grading."""
    found = {}
    try:
        with incoming.opened(student.path) as directory:
            for entry in MODULES:
                if path := find(directory, entry):
                    found[entry.number] = path.read_bytes()[:1_000_001].decode(errors="replace")
    except (CourseError, OSError):
        pass
    return found


def grade_class(
    everyone: Sequence[Student],
    options: Sequence[str],
    *,
    at_once: int,
    on_finish: Callable[[Student, bool], None],
) -> None:
    """Grades all, `at_once` at a time. `on_finish` is told each student and whether the results were there already."""
    course = course_fingerprint()
    waiting = []
    for student in everyone:
        wanted = fingerprint(student, course, options)
        if student.made_from.exists() and student.made_from.read_text() == wanted and student.results.exists():
            on_finish(student, True)
        else:
            waiting.append((student, wanted, 1))
    running: list[tuple[subprocess.Popen, Student, str, int]] = []
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                student, wanted, attempt = waiting.pop(0)
                running.append((started(student, options), student, wanted, attempt))
            time.sleep(0.05)
            for job in [job for job in running if job[0].poll() is not None]:
                running.remove(job)
                process, student, wanted, attempt = job
                if process.returncode == 0:
                    student.made_from.write_text(wanted)
                elif process.returncode < 0 and attempt < TRIES:  # killed from outside: not the submission's doing
                    waiting.append((student, wanted, attempt + 1))
                    continue
                on_finish(student, False)
    finally:
        for process, *_ in running:
            process.terminate()
        for process, *_ in running:
            process.wait()


def started(student: Student, options: Sequence[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "brigade.cli", "grade", "--submission", str(student.path), "--out"]
    with open(student.results.with_suffix(".log"), "w") as log:
        return subprocess.Popen(
            [*command, str(student.results), *options],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )


def rows(everyone: Sequence[Student], entries: Sequence[Module]) -> list[dict[str, str | int]]:
    """The gradebook: a row for each student, a column for each check with its points."""
    table = []
    for student in everyone:
        row: dict[str, str | int] = {"student": student.name}
        try:
            result = json.loads(student.results.read_text())
        except (OSError, ValueError):
            table.append(row | {"score": 0, "note": "the grader gave no results: see its log"})
            continue
        row |= {"score": result["score"], "max": sum(test["max_score"] for test in result["tests"])}
        for entry in entries:
            mine = [test for test in result["tests"] if f"module {entry.number}" in test["tags"]]
            row[f"module {entry.number}"] = sum(test["score"] for test in mine)
            row |= {f"{entry.number}.{test['tags'][1].removeprefix('test_')}": test["score"] for test in mine}
        row["note"] = " / ".join(result["output"].splitlines()[1:])
        table.append(row)
    return table


def written(table: Sequence[dict[str, str | int]]) -> str:
    """The table as CSV; the columns of all rows."""
    columns = list(dict.fromkeys(column for row in table for column in row if column != "note")) + ["note"]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="")
    writer.writeheader()
    writer.writerows({key: guarded(value) for key, value in row.items()} for row in table)
    return text.getvalue()


def guarded(value: str | int) -> str | int:
    """A spreadsheet must not take a student's name or a note for a formula."""
    return "'" + value if isinstance(value, str) and value[:1] in ("=", "+", "-", "@") else value


def hardest(table: Sequence[dict[str, str | int]]) -> list[tuple[str, int]]:
    """The checks that fail, and how many students fail each, most first."""
    counts: dict[str, int] = {}
    for row in table:
        for column, value in row.items():
            if "." in column and value == 0:
                counts[column] = counts.get(column, 0) + 1
    return sorted(counts.items(), key=lambda pair: -pair[1])


def near_identical(everyone: Sequence[Student]) -> list[similarity.Pair]:
    """Pairs of students, or of a student and the reference, whose modules are alike."""
    skeletons = {entry.number: (ROOT / "lessons" / entry.path).read_text() for entry in MODULES}
    solutions = {entry.number: (ROOT / "solutions" / entry.path).read_text() for entry in MODULES}
    return similarity.alike({s.name: texts(s) for s in everyone} | {"the reference": solutions}, skeletons)


def save(gradebook: Path, everyone: Sequence[Student], entries: Sequence[Module]) -> list[dict[str, str | int]]:
    """Writes the gradebook; returns its rows."""
    table = rows(everyone, entries)
    formats.write(gradebook, written(table))
    return table
