"""Read the roster of a class, and find the student for each submission (`brigade grade --class --roster`).

A roster is a CSV file with a header: a gradebook from Canvas, a list of students from Moodle or Gradescope, or a file
written by hand. `FIELDS` contains the headings that are read. Other columns are ignored.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from brigade.grader import formats
from brigade.grader.tables import read_table
from brigade.ranks.errors import UserError

# The fields that identify a student, in the order in which they are tried, and their headings in lower case.
IDENTIFYING = {
    "key": ("key", "submission"),
    "login": ("login", "sis login id", "username", "netid", "github username", "github_username", "anmeldename"),
    "email": ("email", "email address", "e-mail", "e-mail-adresse"),
    "id": ("id", "id number", "sis user id", "sid", "student id", "student number", "matrikelnummer"),
    "canvas id": ("canvas id",),
    "name": ("name", "student", "full name", "student name", "vollständiger name"),
    "participant": ("participant", "identifier"),  # in Moodle, a number for each student of one assignment
}
FIELDS = IDENTIFYING | {
    "section": ("section", "sections", "group", "gruppe"),
    "first name": ("first name", "vorname"),  # becomes a part of the name
    "last name": ("last name", "surname", "nachname"),
}
UNKNOWN = "not in the roster"
NOT_STUDENTS = ("Points Possible", "Student, Test")  # rows of Canvas's gradebook
# The names that platforms give to the submissions in a download. Moodle's contains the student's name (or "Participant"
# if marking is blind) and the number of the participant. Canvas's contains the letters of the name and the canvas id.
# https://github.com/moodle/moodle/blob/main/mod/assign/locallib.php
MOODLE = re.compile(r"(.+)_(\d+)_assignsubmission_.*")
MOODLE_FILE = re.compile(r"(?P<folder>.+_\d+_assignsubmission_[a-z]+)_(.+)")  # without folders for the students
CANVAS = re.compile(r"(?P<name>[^_]+)(?P<late>_LATE)?_(?P<id>\d+)_(?P<attachment>\d+)_(?P<file>.+)")

Person = dict[str, str]  # the values of a student's fields


def read_roster(path: Path) -> tuple[list[Person], list[str]]:
    """Return the students, and the headings of the columns that are ignored.

    Raise UserError if the file is not a roster, or if two students have the same id.
    """
    headings, rows, *_ = read_table(path)
    is_canvas = any(heading.lower().startswith("sis ") for heading in headings)  # the gradebook, whose ID is Canvas's
    names = {one: "canvas id" if is_canvas and one == "ID" else one.lower() for one in headings}
    people = []
    for row in rows:
        cells = {names[heading]: formats.make_printable(value) for heading, value in row.items()}
        person = {field: next(filter(None, map(cells.get, known)), "") for field, known in FIELDS.items()}
        both = f"{person.pop('first name')} {person.pop('last name')}"
        person["name"] = person["name"] or both.strip()
        if any(person[field] for field in IDENTIFYING) and person["name"] not in NOT_STUDENTS:
            people.append(person)
    if not people:
        raise UserError(
            f"{path} has no students; its columns are {', '.join(names.values())}, and the grader needs one such as "
            f"{', '.join(IDENTIFYING)}"
        )
    for field in IDENTIFYING:
        values = [get_key(person) if field == "name" else person[field] for person in people]
        counts = Counter(value.casefold() for value in values if value)
        if twice := [value for value in values if counts[value.casefold()] > 1]:
            raise UserError(f"{path}: two students have the {field} {twice[0]}, so the grader cannot tell them apart")
    return people, [name for name in names.values() if name not in itertools.chain(*FIELDS.values())]


def get_key(person: Person) -> str:
    """Return the value that identifies a student in every gradebook of the class."""
    return next(person[field] for field in IDENTIFYING if person[field])


def find_upload(file: str, owner: str, people: Sequence[Person]) -> Person | None:
    """Return the student who handed in a file: the platform's name for it, or the name without endings, says who."""
    line = formats.make_line(file)
    if MOODLE.fullmatch(line) or CANVAS.fullmatch(line):
        return find_person(line, people)
    return find_person(owner, people) or find_person(line, people)


def find_person(submission: str, people: Sequence[Person]) -> Person | None:
    """Return the student whom a submission's name identifies: the name is, or contains, one of the student's fields."""
    submission = formats.make_line(submission)

    def find(field: str, value: str) -> list[Person]:
        if field == "name":  # such as jane_doe, or Doe-Jane
            return [person for person in people if join_letters(value) in list_joined_names(person["name"])]
        return [person for person in people if person[field] and person[field].casefold() == value.casefold()]

    if match := MOODLE.fullmatch(submission):
        named = find("name", match[1])
        is_blind = match[1].casefold().startswith("participant")
        # Another assignment gives the same number to another student, so the name must not contradict it.
        numbered = [person for person in people if re.findall(r"\d+$", person["participant"]) == [match[2]]]
        agreeing = [person for person in numbered if is_blind or not person["name"] or person in named]
        attempts = [agreeing, named]
    elif match := CANVAS.fullmatch(submission):
        without_number = [person for person in find("name", match["name"]) if not person["canvas id"]]
        attempts = [find("canvas id", match["id"]), without_number]
    else:
        attempts = [find(field, submission) for field in IDENTIFYING]
    return next((found[0] for found in attempts if len(found) == 1), None)


def list_namesakes(name: str, people: Sequence[Person]) -> list[str]:
    """Return the keys of the students with this name if there are several, otherwise nothing."""
    found = [get_key(person) for person in people if join_letters(name) in list_joined_names(person["name"])]
    return found if len(found) > 1 else []


def join_letters(text: str) -> str:
    """Return the letters and digits of a text, without capital letters and accents."""
    return "".join(letter for letter in unicodedata.normalize("NFKD", text).casefold() if letter.isalnum())


def list_joined_names(name: str) -> list[str]:
    """Return how Canvas may join the parts of a name such as "Jane Doe" or "Doe, Jane": doejane and janedoe."""
    parts = name.split()
    return [join_letters("".join(parts[index:] + parts[:index])) for index in range(len(parts))]


def list_fields(people: Sequence[Person]) -> list[str]:
    """Return the columns that a gradebook gets from the roster: all fields with values except the key."""
    return [field for field in [*IDENTIFYING, "section"][1:] if any(person[field] for person in people)]
