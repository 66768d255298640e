"""Gradebooks: CSV files with one row for each submission. The grader writes one, and a person writes beside it.

The grader overwrites its file, such as `week2.csv`, in every run. What a person corrects or adds is in
`week2-adjustments.csv` (for `grades.csv`, in `adjustments.csv`), which the grader only reads. `read_gradebook` joins
both. If anybody else has changed the grader's file, it is neither read nor overwritten.
"""

from __future__ import annotations

import copy
import hashlib
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from brigade.course.table import listing, written
from brigade.course.table.modules import Module, get_module
from brigade.grader import formats, roster
from brigade.grader.tables import BOM, escape, format_csv, format_points, parse_number, read_table
from brigade.ranks.errors import UserError

MODULE = re.compile(r"(module|written) (\d{1,9})")  # the columns whose points count
CHECK = re.compile(r"(\d{1,9})\.\w+")  # the columns of checks, such as "1.subgroups"
UPLOADED, EXTENSION, LATE = "uploaded", "extension", "late"  # the columns of a term: see term.py
ADJUSTMENT = "adjustment"  # points to add, or below zero, to take off
TAKEN_OFF = "taken off"  # the points that lateness has taken off those that count
SIGNED = (ADJUSTMENT, TAKEN_OFF)
KEYS = ("student", "submission")  # the columns that say whose a row is
SUMS = ("score", "max")  # the columns that follow from others
FIRST = [*KEYS, *roster.FIELDS, UPLOADED, EXTENSION, LATE, *SUMS]
MOST_NAMED = 8  # columns in one message


@dataclass(eq=False)
class Row:
    """One submission, or a student without one. Points and percentages are numbers by column, all other cells texts."""

    student: str
    submission: str = ""
    numbers: dict[str, float] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    @property
    def score(self) -> float | None:
        """The sum of all points that count, or None if no module has points, and there is no adjustment."""
        counted = [column for column in self.numbers if column == ADJUSTMENT or MODULE.fullmatch(column)]
        is_graded = any(not column.startswith("written") for column in counted)
        return sum(self.numbers[column] for column in counted) if is_graded else None

    @property
    def name(self) -> str:
        """The student, and the submission if it has another name."""
        return self.student + (f" ({self.submission})" if self.submission not in ("", self.student) else "")


def get_results_path(gradebook: Path) -> Path:
    """Return the directory with the results of all submissions."""
    return gradebook.with_name(gradebook.name + ".results")


def get_adjustments_path(gradebook: Path) -> Path:
    """Return the file in which a person writes. The grader never changes it."""
    return gradebook.with_name("adjustments.csv" if gradebook.stem == "grades" else f"{gradebook.stem}-adjustments.csv")


def count_points(entries: Iterable[Module], with_written: Iterable[Module] = ()) -> int:
    """Return the maximum of the points for these modules, and for the written answers to `with_written`."""
    return listing.count_points(entries) + written.count_points(with_written)


def list_modules(rows: Iterable[Row], kind: str = "module") -> list[Module]:
    """Return the modules for which rows have points, or "written" points.

    Raise UserError if the course has no such module.
    """
    found = {column.removeprefix(f"{kind} ") for row in rows for column in row.numbers if column.startswith(f"{kind} ")}
    return [get_module(number) for number in sorted(found, key=int)]


def list_points(rows: Sequence[Row]) -> dict[str, int]:
    """Return the columns of points that rows have, with the maximum of each."""
    found = {f"module {entry.number}": count_points([entry]) for entry in list_modules(rows)}
    return found | {f"written {entry.number}": count_points([], [entry]) for entry in list_modules(rows, "written")}


def refuse_several_parts(entries: Sequence[Module]) -> None:
    """Raise UserError if the modules belong to several parts of the course."""
    parts = list(dict.fromkeys(entry.track for entry in entries))
    if len(parts) > 1:
        raise UserError(f"the {' and the '.join(parts)} modules have separate totals; grade them separately")


# ---- text


def rank(column: str) -> tuple[int, int]:
    """Return the key that sorts columns: whose a row is, sums, modules, checks, what a person wrote, and the note."""
    if column in FIRST:
        return 0, FIRST.index(column)
    if match := MODULE.fullmatch(column) or CHECK.fullmatch(column):
        return {"module": 1, "written": 2}.get(match[1], 3), int(match[match.lastindex or 1])
    return 4 + (column not in SIGNED) + (column == "note"), 0


def format_rows(rows: Sequence[Row], columns: Iterable[str] = (), is_merged: bool = False) -> str:
    """Return rows, which have at least these columns, as the text of a CSV file that Excel reads as UTF-8.

    The maximum of a row is that of its modules. If `is_merged`, it is that of all modules, for everybody.
    """
    found = [column for row in rows for column in (*row.texts, *row.numbers)]
    every = list_modules(rows)
    with_written = list_modules(rows, "written")
    cells = []
    for row in rows:
        entries = every if is_merged else list_modules([row])
        most = str(count_points(entries, with_written)) if is_merged or row.score is not None else ""
        score = "" if row.score is None else format_points(row.score)
        own = {column: format_points(number) for column, number in row.numbers.items()}
        whose = {"student": row.student, "submission": row.submission}
        cells.append(own | row.texts | whose | {"score": score, "max": most})
    return BOM + format_csv(sorted(dict.fromkeys([*KEYS, *SUMS, *columns, *found, "note"]), key=rank), cells)


def read_number(column: str, cell: str, who: str) -> float:
    """Return the number in a cell. Raise UserError if there is none, or if it is below zero."""
    number = parse_number(cell)
    if number is None or (number < 0 and column not in SIGNED):
        raise UserError(f"{who}: {column} has {cell!r} instead of points")
    if column == LATE and number > 100:
        raise UserError(f"{who}: {LATE} is {cell}, but it is a percentage, at most 100")
    return number


def fill_in(row: Row, cells: Iterable[tuple[str, str]], who: str) -> None:
    """Put the cells that are not empty into a row, as numbers or as texts."""
    for column, cell in cells:
        if cell and column not in (*KEYS, *SUMS):
            if column in (LATE, *SIGNED) or MODULE.fullmatch(column) or CHECK.fullmatch(column):
                row.numbers[column] = read_number(column, cell, who)
            else:
                row.texts[column] = cell


def read_rows(path: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of a gradebook alone, and a line for each score that is not the sum of its points.

    Raise UserError for any other file.
    """
    columns, cells = read_table(path)
    if "student" not in columns:
        raise UserError(
            f"{path} has no column 'student', so nothing was changed; if it has been renamed, give it back this "
            f"name. The file begins with the columns {', '.join(columns[:MOST_NAMED])}"
        )
    if not cells or not any(re.fullmatch(r"module \d+", column) for column in columns):
        raise UserError(f"{path} is not a gradebook of `brigade grade --class`: it has no students or no modules")
    rows, lines = [], []
    for number, one in enumerate(cells, 2):
        if not one["student"]:
            raise UserError(f"{path}: row {number} has no student; write one into it, or delete the row")
        row = Row(one["student"], one.get("submission", ""))
        fill_in(row, one.items(), row.student)
        rows.append(row)
        score, total = one.get("score", ""), row.score or 0.0
        given = parse_number(score)
        if not score or given == round(total, 2):
            continue
        line = f"{row.name}: the score {score} is not the sum of the points, {format_points(total)}"
        if given is None:
            lines.append(f"{line}, and it is not a number, so the sum counts")
            continue
        difference = format_points(given - total)
        lines.append(f"{line}, which counts; if the score is right, write {difference} into a column `{ADJUSTMENT}`")
    return rows, lines


def read_gradebook(path: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of a gradebook with what a person wrote beside it, and lines about scores: see `read_rows`.

    Raise UserError if somebody has changed the grader's file, or if nobody knows to whom a row of the person belongs.
    """
    if get_record_path(path).exists():
        require_unchanged(path)
    rows, lines = read_rows(path)
    return join(rows, get_adjustments_path(path)), lines


def join(rows: Iterable[Row], adjustments: Path) -> list[Row]:
    """Return copies of rows, in which the cells that a person wrote into a file replace those of the grader.

    A row of this file names its submission. If the student has only one row, the student is enough, by any value of the
    roster. Raise UserError if it fits to no row or to several, or if a column is not for people.
    """
    joined = copy.deepcopy([*rows])
    columns, cells = read_table(adjustments) if adjustments.exists() else ([], [])
    seen: set[Row] = set()
    for one in cells:
        student, submission = (escape(one.get(key, "")) for key in KEYS)
        filled = [column for column in columns if one[column] and column not in KEYS]
        who = f"{adjustments.name}, {submission or student or 'a row without a student'}"
        if wrong := [column for column in filled if column in SUMS or CHECK.fullmatch(column)]:
            raise UserError(f"{who}: {wrong[0]} follows from other points; correct those of a module instead")
        found = [row for row in joined if escape(row.submission) == submission or not submission]
        found = [row for row in found if student in list_names(row) or (submission and not student)]
        if filled and len(found) > 1:
            several = "; ".join(row.name for row in found)
            raise UserError(f"{who}: several rows fit; write the submission or the student of one of them: {several}")
        if filled and (not found or found[0] in seen):
            raise UserError(f"{who}: {'there are two rows for it' if found else 'the gradebook has no such row'}")
        if filled:
            seen.add(found[0])
            fill_in(found[0], one.items(), who)
    return joined


def list_names(row: Row) -> list[str]:
    """Return the values by which a person may name the student of a row, as they are in a file."""
    return [escape(name) for name in (row.student, *map(row.texts.get, roster.IDENTIFYING)) if name]


# ---- the grader's file


def get_record_path(path: Path) -> Path:
    """Return the file with the hashes of the grader's last two versions of its gradebook."""
    return get_results_path(path) / "written"


def require_unchanged(path: Path) -> None:
    """Raise UserError if a gradebook is not what the grader wrote."""
    record = get_record_path(path)
    known = record.read_text().split() if record.exists() else []
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() not in known:
        raise UserError(
            f"{path} is not what the grader wrote, so it is neither read nor overwritten; write corrections into "
            f"{get_adjustments_path(path).name}, rename {path.name}, and grade again"
        )


class GraderFile:
    """The gradebook that the grader writes. Raise UserError if somebody else has written or changed it.

    `backups` contains the gradebook as it was before each run.
    """

    def __init__(self, path: Path):
        self.path, self.earlier, self.columns = path, list[Row](), list[str]()
        require_unchanged(path)
        if path.exists():
            self.earlier, self.columns = read_rows(path)[0], read_table(path).columns
            (get_results_path(path) / "backups").mkdir(exist_ok=True)
            changed = datetime.fromtimestamp(path.stat().st_mtime)
            shutil.copy(path, get_results_path(path) / "backups" / f"{path.stem} {changed:%Y-%m-%d %H.%M.%S.%f}.csv")

    def write(self, rows: Sequence[Row], graded: Sequence[Module], columns: Iterable[str] = ()) -> list[Row]:
        """Write the rows of a run that has graded these modules. Return them with what other runs wrote.

        That is points of other modules, and rows of submissions that are not there any more.
        """
        refuse_several_parts([*graded, *list_modules(self.earlier)])
        numbers = {str(entry.number) for entry in graded}
        fresh = {escape(row.submission): row for row in rows if row.submission}
        kept = []
        for row in self.earlier:
            others = {}
            for column, points in row.numbers.items():
                match = MODULE.fullmatch(column) or CHECK.fullmatch(column)
                if match and match[1] != "written" and match[match.lastindex or 1] not in numbers:
                    others[column] = points
            if (new := fresh.get(row.submission)) is not None:
                new.numbers = others | new.numbers
            elif row.submission:
                kept.append(row)
        every = [*rows, *kept]
        text = format_rows(every, columns)
        before = self.path.read_bytes() if self.path.exists() else b""
        if before != (content := text.encode(errors="replace")):
            hashes = [hashlib.sha256(version).hexdigest() for version in (before, content)]
            formats.write(get_record_path(self.path), "\n".join(hashes))  # first, in case that we are killed
            formats.write_bytes(self.path, content)
        if not (path := get_adjustments_path(self.path)).exists():
            own = [f"module {entry.number}" for entry in graded]
            own += [f"written {entry.number}" for entry in graded if written.count_points([entry])]
            formats.write(path, BOM + format_csv([*KEYS, *own, LATE, ADJUSTMENT, "comment"], []))
        return every
