"""Read and write gradebooks, which are CSV files with one row for each submission, and add up their points."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from brigade.course.table import listing, written
from brigade.course.table.modules import CourseError, Module, get_module

BOM = "\ufeff"  # without it, Excel does not read a CSV file as UTF-8
# A spreadsheet evaluates cells that begin with one of these. It may read separators as the beginning of another cell.
FORMULA = re.compile(r"(^|[;,|\t\r\n])(\s*)(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")
NUMBER = re.compile(r"-?\d+([.,]\d+)?")
OURS = re.compile(r"score|max|note|module \d+|\d+\..*")  # the columns that the grader computes
UPLOADED, EXTENSION, LATE = "uploaded", "extension", "late"  # the columns of a term: see term.py
ADJUSTMENT = "adjustment"  # a person's column: points to add, or below zero, to take off
MOST_NAMED = 8  # columns in one message
KEYS = ("student", "submission")  # the columns that say whose a row is
SEPARATOR = re.compile(r"sep=(.)\r?\n")  # a first line that tells Excel the delimiter

Row = dict[str, str]


class Table(NamedTuple):
    """A CSV file: its columns, its rows, its delimiter, and its first line if that only names the delimiter."""

    columns: list[str]
    rows: list[Row]
    delimiter: str
    first_line: str


def get_results_path(gradebook: Path) -> Path:
    """Return the directory with the results of all submissions."""
    return gradebook.with_name(gradebook.name + ".results")


def get_record_path(gradebook: Path) -> Path:
    """Return the file that contains what the grader wrote to the gradebook: see `gradebook_file.py`."""
    return get_results_path(gradebook) / "grader.csv"


def escape_formulas(table: Iterable[Row]) -> list[Row]:
    """Return the table with cells that a spreadsheet does not evaluate as formulas."""
    return [
        {column: cell if NUMBER.fullmatch(cell) else FORMULA.sub(r"\1\2'", cell) for column, cell in row.items()}
        for row in table
    ]


def list_columns(table: Sequence[Row]) -> list[str]:
    """Return the columns of all rows, in the order of the longest row, which contains most checks."""
    return list(dict.fromkeys(column for row in sorted(table, key=len, reverse=True) for column in row))


def format_csv(columns: Sequence[str], table: Sequence[Row], delimiter: str = ",") -> str:
    """Return these columns of the table as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore", delimiter=delimiter)
    writer.writeheader()
    writer.writerows(table)
    return text.getvalue()


def format_table(table: Sequence[Row]) -> str:
    """Return a table as the text of a CSV file that Excel reads as UTF-8."""
    return BOM + format_csv(list_columns(table), table)


def read_table(path: Path) -> Table:
    """Return the content of a CSV file with commas, semicolons or tabs.

    Raise CourseError for any other file, or if a cell does not belong to exactly one column, because it would be lost.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
        separator = SEPARATOR.match(text)
        text = text[separator.end() :] if separator else text
        delimiter = separator[1] if separator else max(",;\t", key=text.partition("\n")[0].count)
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise CourseError(f"{path} is not a CSV file in UTF-8 ({error}); save it as 'CSV UTF-8'") from None
    lines = [[unicodedata.normalize("NFC", cell.strip()) for cell in line] for line in lines]
    columns = list(filter(any, itertools.zip_longest(*filter(any, lines), fillvalue="")))
    headings = [column[0] for column in columns]
    if wrong := [heading for heading in headings if not heading or headings.count(heading) > 1]:
        problem = f"the heading {wrong[0]!r} is there twice" if wrong[0] else "a column has no heading"
        raise CourseError(f"{path}: {problem}; give each column a name of its own")
    rows = [dict(zip(headings, cells, strict=True)) for cells in list(zip(*columns, strict=True))[1:]]
    return Table(headings, rows, delimiter, separator[0] if separator else "")


def check_columns(path: Path, columns: Sequence[str], needed: Iterable[str]) -> None:
    """Raise CourseError if a column is missing without which the rows or the points would be misunderstood."""
    if missing := [column for column in needed if column not in columns]:
        raise CourseError(
            f"{path} has no column {missing[0]!r}, so nothing was changed; if it has been renamed, give it back this "
            f"name. The file begins with the columns {', '.join(columns[:MOST_NAMED])}"
        )


def list_needed(path: Path) -> list[str]:
    """Return the columns that the grader has written to a gradebook and that nobody may rename."""
    record = get_record_path(path)
    known = read_table(record).columns if record.exists() else []
    return [column for column in known if column in KEYS or re.fullmatch(r"module \d+", column)]


def read_gradebook(path: Path) -> list[Row]:
    """Return the rows of a gradebook. Raise CourseError for any other file."""
    columns, rows, *_ = read_table(path)
    check_columns(path, columns, ["student", *list_needed(path)])
    if not rows or not any(re.fullmatch(r"module \d+", column) for column in columns):
        raise CourseError(f"{path} is not a gradebook of `brigade grade --class`: it has no students or no modules")
    if anonymous := [number for number, row in enumerate(rows, 2) if not row["student"]]:
        raise CourseError(f"{path}: row {anonymous[0]} has no student; write one into it, or delete the row")
    return rows


def list_modules(table: Iterable[Row], kind: str = "module") -> list[Module]:
    """Return the modules for which the table has points, or "written" points.

    Raise CourseError if the course has no such module.
    """
    found = {match[1] for row in table for c in row if row[c] and (match := re.fullmatch(rf"{kind} (\d+)", c))}
    return [get_module(number) for number in sorted(found, key=int)]


def refuse_several_parts(entries: Sequence[Module]) -> None:
    """Raise CourseError if the modules belong to several parts of the course."""
    parts = list(dict.fromkeys(entry.track for entry in entries))
    if len(parts) > 1:
        raise CourseError(f"the {' and the '.join(parts)} modules have separate totals; grade them separately")


def parse_number(cell: str) -> float | None:
    """Return the finite number in a cell, or None. A spreadsheet may write a decimal comma."""
    try:
        return value if math.isfinite(value := float(cell.replace(",", "."))) else None
    except ValueError:
        return None


def parse_points(cell: str) -> float | None:
    """Return the number in a cell, or None if it does not contain a finite number from 0 on."""
    value = parse_number(cell)
    return value if value is not None and value >= 0 else None


def read_points(row: Row, column: str) -> float | None:
    """Return a student's points in a column, if there are any. Raise CourseError if the cell is not a number."""
    cell = row.get(column, "")
    points = parse_number(cell) if column == ADJUSTMENT else parse_points(cell)
    if cell and points is None:
        raise CourseError(f"{row['student']}: {column} has {cell!r} instead of points")
    return points


def format_points(points: float) -> str:
    """Return the points with at most two decimals."""
    return f"{round(points, 2) + 0:.2f}".rstrip("0").rstrip(".")


def add_up(row: Row, entries: Sequence[Module], with_written: Sequence[Module]) -> Row:
    """Return the score and the maximum for the modules of a row, and for the written answers to `with_written`.

    An adjustment counts in the score. Return empty cells if there is none, and no module has points.
    """
    graded = [entry for entry in entries if row.get(f"module {entry.number}")]
    columns = [f"module {entry.number}" for entry in graded] + [f"written {entry.number}" for entry in with_written]
    score = sum(read_points(row, column) or 0 for column in [*columns, ADJUSTMENT])
    if not graded and not row.get(ADJUSTMENT):
        return {"score": "", "max": ""}
    return {"score": format_points(score), "max": sum_points(graded, with_written)}


def sum_points(entries: Sequence[Module], with_written: Sequence[Module] = ()) -> str:
    """Return the maximum of the points for these modules, and for the written answers to `with_written`."""
    return str(listing.count_points(entries) + written.count_points(with_written))
