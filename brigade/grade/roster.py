"""Read the roster of a class, and find the student for each submission (`brigade grade --class --roster`).

A roster is a CSV file with a header: a gradebook from Canvas, a list of students from Moodle or Gradescope, or a file
written by hand. `FIELDS` contains the headings that are read. Other columns are ignored.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from brigade.course.modules import CourseError
from brigade.grade import formats
from brigade.grade.gradebook import read_table

# The fields that identify a student, in the order in which they are tried, and their headings in lower case.
FIELDS = {
    "key": ("key", "submission"),
    "login": ("login", "sis login id", "username", "netid", "github username", "github_username", "anmeldename"),
    "email": ("email", "email address", "e-mail", "e-mail-adresse"),
    "id": ("id", "id number", "sis user id", "sid", "student id", "student number", "matrikelnummer"),
    "canvas id": ("canvas id",),
    "name": ("name", "student", "full name", "student name", "vollständiger name"),
    "participant": ("participant", "identifier"),  # in Moodle, a number for each student of one assignment
    "section": ("section", "sections", "group", "gruppe"),
}
NAMES = (("first name", "vorname"), ("last name", "surname", "nachname"))  # together, they are a name
IDENTIFYING = [field for field in FIELDS if field != "section"]
UNIQUE = [field for field in IDENTIFYING if field != "name"]
UNKNOWN = "not in the roster"
NOT_STUDENTS = ("Points Possible", "Student, Test")  # rows of Canvas's gradebook
# The names that platforms give to the submissions in a download. Moodle's contains the student's name (or "Participant"
# if marking is blind) and the number of the participant. Canvas's contains the letters of the name and the canvas id.
# https://github.com/moodle/moodle/blob/main/mod/assign/locallib.php
MOODLE = re.compile(r"(.+)_(\d+)_assignsubmission_.*")
CANVAS = re.compile(r"([^_]+)(?:_LATE)?_(\d+)_\d+_.*")

Person = dict[str, str]  # the values of a student's fields


def read_roster(path: Path) -> tuple[list[Person], list[str]]:
    """Return the students, and the headings of the columns that are ignored.

    Raise CourseError if the file is not a roster, or if two students have the same id.
    """
    headings, rows, _ = read_table(path)
    is_canvas = any(heading.lower().startswith("sis ") for heading in headings)  # the gradebook, whose ID is Canvas's
    names = {one: "canvas id" if is_canvas and one == "ID" else one.lower() for one in headings}
    people = []
    for row in rows:
        cells = {names[heading]: formats.make_printable(value) for heading, value in row.items()}
        person = {field: find_value(cells, known) for field, known in FIELDS.items()}
        both = [find_value(cells, known) for known in NAMES]
        person["name"] = person["name"] or " ".join(filter(None, both))
        if any(person[field] for field in IDENTIFYING) and person["name"] not in NOT_STUDENTS:
            people.append(person)
    known = [heading for group in (*FIELDS.values(), *NAMES) for heading in group]
    if not people:
        raise CourseError(
            f"{path} has no students; its columns are {', '.join(names.values())}, and the grader needs one such as "
            f"{', '.join(IDENTIFYING)}"
        )
    for field in (*UNIQUE, "name"):
        values = [get_key(person) if field == "name" else person[field] for person in people]
        counts = Counter(value.casefold() for value in values if value)
        if twice := [value for value, count in counts.items() if count > 1]:
            raise CourseError(f"{path}: two students have the {field} {twice[0]}, so the grader cannot tell them apart")
    return people, [name for name in names.values() if name not in known]


def find_value(cells: dict[str, str], headings: Sequence[str]) -> str:
    """Return the first value under one of these headings, or ""."""
    return next((cells[heading] for heading in headings if cells.get(heading)), "")


def get_key(person: Person) -> str:
    """Return the value that identifies a student in every gradebook of the class."""
    return next(person[field] for field in IDENTIFYING if person[field])


def find_person(submission: str, people: Sequence[Person]) -> Person | None:
    """Return the student whom a submission's name identifies: the name is, or contains, one of the student's fields."""
    submission = formats.make_line(submission)
    wanted = dict.fromkeys(IDENTIFYING, submission)
    if match := MOODLE.fullmatch(submission):
        wanted = {"name": match[1]}
        # Another assignment gives the same number to another student, so the name must not contradict it.
        numbered = [person for person in people if re.findall(r"\d+$", person["participant"]) == [match[2]]]
        agreeing = [p for p in numbered if not p["name"] or is_equal(p["name"], match[1]) or is_blind(match[1])]
        if len(agreeing) == 1:
            return agreeing[0]
    elif match := CANVAS.fullmatch(submission):
        wanted = {"canvas id": match[2]}
        named = [person for person in people if join_letters(match[1]) in list_joined_names(person["name"])]
        if len(named) == 1 and not named[0]["canvas id"]:
            return named[0]
    for field, value in wanted.items():
        found = [person for person in people if person[field] and is_equal(person[field], value)]
        if field == "name" and not found:  # such as jane_doe, or Doe-Jane
            found = [person for person in people if join_letters(value) in list_joined_names(person["name"])]
        if len(found) == 1:
            return found[0]
    return None


def join_letters(text: str) -> str:
    """Return the letters and digits of a text, without capital letters and accents."""
    return "".join(letter for letter in unicodedata.normalize("NFKD", text).casefold() if letter.isalnum())


def list_joined_names(name: str) -> list[str]:
    """Return how Canvas may join the parts of a name such as "Jane Doe" or "Doe, Jane": doejane and janedoe."""
    parts = name.split()
    return [join_letters("".join(parts[index:] + parts[:index])) for index in range(len(parts))]


def is_equal(one: str, other: str) -> bool:
    """Return whether two texts are equal except for capital letters."""
    return one.casefold() == other.casefold()


def is_blind(name: str) -> bool:
    """Return whether Moodle has replaced a student's name, because marking is blind."""
    return name.casefold().startswith("participant")


def list_fields(people: Sequence[Person]) -> list[str]:
    """Return the columns that a gradebook gets from the roster."""
    return [field for field in FIELDS if field != "key" and any(person[field] for person in people)]
