"""Read the roster of a class, and find the student for each submission (`brigade grade --class --roster`).

A roster is a CSV file with a header: a gradebook from Canvas, a list of students from Moodle or Gradescope, or a file
written by hand. `FIELDS` contains the headings that are read. Other columns are ignored.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from brigade.course.modules import CourseError
from brigade.grade import formats
from brigade.grade.gradebook import Row, read_csv

# The fields that identify a student, in the order in which they are tried, and their headings in lower case.
FIELDS = {
    "key": ("key", "submission"),
    "login": ("login", "sis login id", "username", "netid"),
    "email": ("email", "email address", "e-mail"),
    "id": ("id", "id number", "sis user id", "sid", "student id"),
    "canvas id": ("canvas id",),
    "name": ("name", "student", "full name", "student name"),
    "section": ("section", "sections", "group"),
}
IDENTIFYING = [field for field in FIELDS if field != "section"]
UNIQUE = [field for field in IDENTIFYING if field != "name"]
NOT_STUDENTS = ("Points Possible", "Student, Test")  # rows of Canvas's gradebook
DOWNLOADED = {  # the names that platforms give to the submissions in a download, and the fields that they contain
    "name": re.compile(r"(.+)_\d+_assignsubmission_.*"),  # Moodle
    "canvas id": re.compile(r"[^_]+(?:_LATE)?_(\d+)_\d+_.*"),  # Canvas
}

Person = dict[str, str]  # the values of a student's fields


@dataclass(frozen=True)
class Identified:
    """A gradebook's rows with the columns of the roster, and the names that do not match."""

    table: list[Row]
    unknown: list[str]  # submissions without a student
    missing: list[str]  # students without a submission
    several: dict[str, list[str]]  # the submissions of each student with more than one


def read_roster(path: Path) -> list[Person]:
    """Return the students. Raise CourseError if the file is not a roster, or if two students have the same id."""
    people = []
    for row in read_csv(path):
        cells = {heading.lower(): formats.make_printable(value) for heading, value in row.items()}
        if any(heading.startswith("sis ") for heading in cells):  # a gradebook of Canvas
            cells["canvas id"] = cells.pop("id", "")
        person = {field: find_value(cells, headings) for field, headings in FIELDS.items()}
        names = [cells.get("first name", ""), cells.get("last name", "") or cells.get("surname", "")]
        person["name"] = person["name"] or " ".join(filter(None, names))
        if any(person[field] for field in IDENTIFYING) and person["name"] not in NOT_STUDENTS:
            people.append(person)
    if not people:
        raise CourseError(f"{path} has no students; it needs a heading such as {', '.join(IDENTIFYING)}")
    for field in UNIQUE:
        refuse_repetition(path, field, [person[field] for person in people if person[field]])
    refuse_repetition(path, "name", [get_key(person) for person in people])
    return people


def refuse_repetition(path: Path, field: str, values: Sequence[str]) -> None:
    """Raise CourseError if two students of the roster have the same value."""
    if twice := [value for value, count in Counter(map(str.casefold, values)).items() if count > 1]:
        raise CourseError(f"{path}: two students have the {field} {twice[0]}, so the grader cannot tell them apart")


def find_value(cells: dict[str, str], headings: Sequence[str]) -> str:
    """Return the first value under one of these headings, or ""."""
    return next((cells[heading] for heading in headings if cells.get(heading)), "")


def get_key(person: Person) -> str:
    """Return the value that identifies a student in every gradebook of the class."""
    return next(person[field] for field in IDENTIFYING if person[field])


def find_person(submission: str, people: Sequence[Person]) -> Person | None:
    """Return the student whom a submission's name identifies: the name is, or contains, one of the student's fields."""
    wanted = dict.fromkeys(IDENTIFYING, submission)
    for field, pattern in DOWNLOADED.items():
        if match := pattern.fullmatch(submission):
            wanted = {field: match[1]}
    for field, value in wanted.items():
        found = [person for person in people if person[field] and person[field].casefold() == value.casefold()]
        if len(found) == 1:
            return found[0]
    return None


def identify(table: Sequence[Row], people: Sequence[Person], names: Sequence[str]) -> Identified:
    """Add the roster's columns to the rows of a gradebook, and a row for each student without a submission.

    `names` are the names of the submissions, one for each row, without the ending of an archive. In the column
    `student`, the student's key replaces the name of the submission, which moves to the column `submission`.
    """
    columns = [field for field in FIELDS if field != "key" and any(person[field] for person in people)]
    rows: list[Row] = []
    unknown: list[str] = []
    submissions: dict[str, list[str]] = {get_key(person): [] for person in people}
    for row, name in zip(table, names):
        person = find_person(name, people)
        key = get_key(person) if person else row["student"]
        fields = {field: person[field] if person else "" for field in columns}
        note = str(row["note"]) if person else " / ".join(filter(None, ["not in the roster", str(row["note"])]))
        rows.append({"student": key, "submission": row["student"], **fields} | {**row, "student": key, "note": note})
        if person:
            submissions[str(key)].append(str(row["student"]))
        else:
            unknown.append(str(row["student"]))
    for person in people:
        if not submissions[get_key(person)]:
            fields = {field: person[field] for field in columns}
            rows.append({"student": get_key(person), "submission": "", **fields, "score": "", "note": "no submission"})
    missing = [key for key, found in submissions.items() if not found]
    return Identified(rows, unknown, missing, {key: found for key, found in submissions.items() if len(found) > 1})
