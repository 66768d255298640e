"""Read the file of a term, `term.toml`, and say which upload counts and how much lateness takes off its points.

The file contains the roster, the assignments with their deadlines, and the extensions. The gradebook shows what follows
in columns of their own: `uploaded`, `extension` and `late` (percent). `merging.get_rest` applies `late`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NoReturn

from brigade.course.table.modules import Module, select_modules
from brigade.grader import merging, roster
from brigade.grader.classroom import Student, Timing
from brigade.grader.gradebook import LATE, refuse_several_parts
from brigade.grader.roster import Person
from brigade.grader.tables import format_points
from brigade.ranks.errors import UserError

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest installs this package
    import tomli as tomllib

ZONE = "write it with its distance from UTC, such as 2027-02-07T23:59:00+01:00"
# What a value may be, and what a message says if it is something else.
TEXT, TIME, LIST = (str, "write a text"), (datetime, ZONE), (list, "begin each of its rows with [[its name]]")
NUMBER, TABLE = ((int, float), "write a number"), (dict, "write { percent = 20, days = 7 }")
# The keys of each table. Those with a question mark may be left out.
KEYS: dict[str, dict[str, tuple[Any, str]]] = {
    "": {"title": TEXT, "platform": TEXT, "roster": TEXT, "secret": TEXT, "options?": TEXT, "assignments": LIST,
         "extensions?": LIST},
    "assignments": {"name": TEXT, "modules": TEXT, "due": TIME, "uploads?": TEXT, "counts?": TEXT, "late?": TABLE},
    "extensions": {"student": TEXT, "assignment": TEXT, "until": TIME},
    "late": {"percent": NUMBER, "days": NUMBER},
}  # fmt: skip
TAKEN = ("-final", "-canvas", "-moodle", "-feedback", "-adjustments")  # ends the name of a file that we write
RULES = {
    "last": "the last one before the deadline, or else the last late one",
    "best": "for each module, the one with the best points, after what lateness takes off",
}


@dataclass(frozen=True)
class Assignment:
    """Modules with one deadline. Late uploads lose `percent` of their points, and all of them after `days`."""

    name: str
    entries: tuple[Module, ...]
    due: datetime
    uploads: Path
    counts: str
    percent: float
    days: float
    extensions: Mapping[str, datetime]  # by the key of the student

    def describe(self) -> list[str]:
        """Return the rules of this assignment in sentences."""
        late = f"loses {format_points(self.percent)} % until {format_points(self.days)} days after the deadline, and "
        modules = ", ".join(str(entry.number) for entry in self.entries)
        return [
            f"{self.name}, module{'s' * (len(self.entries) > 1)} {modules}: due {format_time(self.due)}.",
            f"Which upload counts: {RULES[self.counts]}.",
            f"Late work {late if self.days else ''}does not count{' after that' if self.days else ''}.",
        ]

    def judge(self, key: str, uploaded: datetime | None, is_marked: bool | None) -> Timing:
        """Return when a student's upload came, the student's extension, and the percentage that the upload loses.

        `is_marked` tells whether Canvas marked the upload as late. It is None for other uploads, for which the time
        tells. A file from Canvas is as old as the download, which proves only that the upload is not younger. So a
        marked upload is in time if it was downloaded before the student's extension ended. Otherwise nobody knows, and
        the extension changes nothing: see `judge_all`.
        """
        until = self.extensions.get(key)
        deadline = until or self.due
        is_late = is_marked
        if uploaded and (is_marked is None or (is_marked and until)):
            is_late = uploaded > deadline
        uploaded = uploaded if is_marked is None else None
        is_too_late = not self.days or (uploaded and uploaded > deadline + timedelta(days=self.days))
        return Timing(
            format_time(uploaded.astimezone(self.due.tzinfo)) if uploaded else "",
            format_time(until) if until else "",
            0.0 if not is_late else 100.0 if is_too_late else self.percent,
        )

    def judge_all(self, everyone: Sequence[Student]) -> list[str]:
        """Judge all uploads. Return lines about those that an instructor should look at."""
        lines = []
        for student in everyone:
            student.timing = timing = self.judge(student.key, student.uploaded, student.is_marked)
            if student.is_marked and timing.extension and timing.late:
                lines.append(
                    f"{student.name}: please decide: Canvas marks this upload as late, and the extension ended before "
                    f"the download; if Canvas shows a time before {timing.extension}, write 0 into the column {LATE}"
                )
        return lines


@dataclass(frozen=True)
class Term:
    """The content of a term file."""

    reader: Reader  # of the file, which names the line of a mistake
    title: str
    platform: str
    roster: Path
    secret: Path
    options: str  # of `brigade grade`
    people: list[Person]
    assignments: dict[str, Assignment]

    @property
    def path(self) -> Path:
        return self.reader.path

    def get_assignment(self, name: str) -> Assignment:
        """Return the assignment with this name. Raise UserError if there is none."""
        if name not in self.assignments:
            raise UserError(f"{self.path} has no assignment {name!r}, only {', '.join(self.assignments)}")
        return self.assignments[name]


def format_time(time: datetime) -> str:
    """Return a time as text, such as "2027-02-07 23:59:00+01:00". Of one zone, texts sort by time."""
    return time.replace(microsecond=0).isoformat(" ")


class Reader:
    """A term file that names the line of a mistake."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.text = path.read_text(encoding="utf-8-sig")  # some editors for Windows write a mark before the text
            self.top = self.check("", 0, tomllib.loads(self.text))
        except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise UserError(f"{path} is not a TOML file in UTF-8: {error}") from None

    def require(self, is_right: object, problem: str, table: str = "", index: int = 0, key: str = "") -> None:
        """Raise UserError with the line of a key, or of the heading of its table, unless all is right."""
        if not is_right:
            self.fail(problem, table, index, key)

    def fail(self, problem: str, table: str = "", index: int = 0, key: str = "") -> NoReturn:
        """Raise UserError with the line of a key, or of the heading of its table."""
        count, place, is_inside = -1, 0, not table
        for number, line in enumerate(self.text.splitlines(), 1):
            if heading := re.match(r"\s*\[+\s*([\w.]+)", line):
                count += heading[1] == table
                is_inside = heading[1] == (table or key) and (not table or count == index)
            if is_inside and (heading or (key and re.match(rf"\s*{re.escape(key)}\b", line))):
                place = number
                if not heading:
                    break
        raise UserError(f"{self.path}{f', line {place}' if place else ''}: {problem}")

    def check(self, table: str, index: int, content: Any, kind: str = "") -> Mapping[str, Any]:
        """Return a row of a table, or the table `kind` in it, if its keys are complete and of the right kind."""
        kinds = {key.rstrip("?"): found for key, found in KEYS[kind or table].items()}
        self.require(isinstance(content, dict), f"begin each row of {table} with [[{table}]]", table, index)
        for key, value in content.items():
            place = (table, index, kind or key)
            self.require(key in kinds, f"unknown key {key!r}; known keys are {', '.join(kinds)}", *place)
            is_right = isinstance(value, kinds[key][0]) and not isinstance(value, bool)
            self.require(is_right, f"{key!r} has a wrong value; {kinds[key][1]}", *place)
            has_zone = not isinstance(value, datetime) or value.tzinfo
            self.require(has_zone, f"{key!r} has no time zone; {ZONE}", *place)
        for key in KEYS[kind or table]:
            self.require(key.endswith("?") or key in content, f"{key!r} is missing", table, index, kind)
        return content

    def check_rows(self, table: str) -> list[Mapping[str, Any]]:
        """Return the rows of a table of the file, which may be missing."""
        return [self.check(table, index, content) for index, content in enumerate(self.top.get(table, []))]


def read_term(path: Path) -> Term:
    """Return the content of a term file. Raise UserError with the place of the first mistake in it."""
    reader, folder = Reader(path), path.resolve().parent
    top, require = reader.top, reader.require
    require(top["platform"] in merging.PLATFORMS, f"platform is one of {', '.join(merging.PLATFORMS)}", key="platform")
    require((folder / top["roster"]).is_file(), f"there is no file {folder / top['roster']}", key="roster")
    people, _ = roster.read_roster(folder / top["roster"])
    assignments: dict[str, Assignment] = {}
    ends: dict[str, dict[str, datetime]] = {}
    for index, row in enumerate(reader.check_rows("assignments")):
        place, name, counts = ("assignments", index), row["name"], row.get("counts", "last")
        late = reader.check(*place, row.get("late", {"percent": 100, "days": 0}), "late")
        try:
            entries = tuple(select_modules(row["modules"] or "none"))
            refuse_several_parts(entries)
        except UserError as error:
            require(False, str(error).replace("--modules", "modules"), *place, "modules")
        is_name = re.fullmatch(r"\w[\w -]*", name)
        require(is_name, "a name becomes a name of files: use letters, digits, spaces, - and _", *place, "name")
        require(not name.endswith(TAKEN), f"a name must not end with {' or '.join(TAKEN)}", *place, "name")
        require(name not in assignments, f"there are two assignments {name!r}", *place, "name")
        require(counts in RULES, f"counts is one of {', '.join(RULES)}", *place, "counts")
        require(0 <= late["percent"] <= 100, "percent is a number from 0 to 100", *place, "late")
        require(0 <= late["days"] <= 1000, "days is a number from 0 to 1000", *place, "late")
        rule = (counts, float(late["percent"]), float(late["days"]), ends.setdefault(name, {}))
        assignments[name] = Assignment(name, entries, row["due"], folder / row.get("uploads", name), *rule)
    for index, row in enumerate(reader.check_rows("extensions")):
        place, name, person = ("extensions", index), row["assignment"], roster.find_person(row["student"], people)
        require(name in assignments, f"there is no assignment {name!r}", *place, "assignment")
        if not person:
            problem = f"{top['roster']} has no student {row['student']!r}"
            if several := roster.list_namesakes(row["student"], people):
                problem = f"{row['student']!r} is the name of several students; write one of {', '.join(several)}"
            reader.fail(problem, *place, "student")
        key = roster.get_key(person)
        require(key not in ends[name], f"{row['student']!r} has two extensions for {name!r}", *place, "student")
        require(row["until"] > assignments[name].due, "this extension ends before the work is due", *place, "until")
        ends[name][key] = row["until"]
    paths = (folder / top["roster"], folder / top["secret"])
    return Term(reader, top["title"], top["platform"], *paths, top.get("options", ""), people, assignments)
