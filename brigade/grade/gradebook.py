"""Read, merge and export gradebooks, which are CSV files with one row for each student."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from brigade.course import written
from brigade.course.modules import CourseError, Module, get_module

BOM = "\ufeff"  # without it, Excel does not read a CSV file as UTF-8
# A spreadsheet evaluates cells that begin with one of these. It may read separators as the beginning of another cell.
FORMULA = re.compile(r"(^|[;,|\t\r\n])(\s*)(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")
NUMBER = re.compile(r"-?\d+([.,]\d+)?")
OURS = re.compile(r"score|max|note|module \d+|\d+\..*")  # the columns that the grader computes
# The columns by which a platform identifies a student, and the columns of the gradebook that contain the same values.
PLATFORMS = {
    # https://github.com/instructure/canvas-lms/blob/master/lib/gradebook_importer.rb
    "canvas": {"ID": "canvas id", "SIS User ID": "id", "SIS Login ID": "login"},
    # https://docs.moodle.org/405/en/Grade_import
    "moodle": {"Email address": "email", "ID number": "id", "Username": "login", "Identifier": "participant"},
}

Row = dict[str, str]


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


def read_table(path: Path) -> tuple[list[str], list[dict[str, str]], str]:
    """Return the columns, the rows and the delimiter of a CSV file with commas, semicolons or tabs.

    Raise CourseError for any other file, or if a cell does not belong to exactly one column, because it would be lost.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
        delimiter = max(",;\t", key=text.partition("\n")[0].count)
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise CourseError(f"{path} is not a CSV file in UTF-8 ({error}); save it as 'CSV UTF-8'") from None
    lines = [[unicodedata.normalize("NFC", cell.strip()) for cell in line] for line in lines]
    columns = list(filter(any, itertools.zip_longest(*filter(any, lines), fillvalue="")))
    headings = [column[0] for column in columns]
    if wrong := [heading for heading in headings if not heading or headings.count(heading) > 1]:
        problem = f"the heading {wrong[0]!r} is there twice" if wrong[0] else "a column has no heading"
        raise CourseError(f"{path}: {problem}; give each column a name of its own")
    return headings, [dict(zip(headings, cells)) for cells in list(zip(*columns))[1:]], delimiter


def read_gradebook(path: Path) -> list[Row]:
    """Return the rows of a gradebook. Raise CourseError for any other file."""
    columns, rows, _ = read_table(path)
    if not rows or "student" not in columns or not any(re.fullmatch(r"module \d+", column) for column in columns):
        raise CourseError(f"{path} is not a gradebook of `brigade grade --class`: it has no students or no modules")
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


def parse_points(cell: str) -> float | None:
    """Return the number in a cell, or None if it does not contain a finite number from 0 on.

    A spreadsheet may write a decimal comma.
    """
    try:
        return value if 0 <= (value := float(cell.replace(",", "."))) < math.inf else None
    except ValueError:
        return None


def read_points(row: Row, column: str) -> float | None:
    """Return a student's points in a column, if there are any. Raise CourseError if the cell is not a number."""
    cell = row.get(column, "")
    points = parse_points(cell)
    if cell and points is None:
        raise CourseError(f"{row['student']}: {column} has {cell!r} instead of points")
    return points


def format_points(points: float) -> str:
    """Return the points with at most two decimals."""
    return f"{round(points, 2):g}"


def add_up(row: Row, entries: Sequence[Module], with_written: Sequence[Module]) -> Row:
    """Return the score and the maximum for the modules of a row, and for the written answers to `with_written`.

    Return empty cells if no module has points.
    """
    graded = [entry for entry in entries if row.get(f"module {entry.number}")]
    columns = [f"module {entry.number}" for entry in graded] + [f"written {entry.number}" for entry in with_written]
    score = sum(read_points(row, column) or 0 for column in columns)
    if not graded:
        return {"score": "", "max": ""}
    return {"score": format_points(score), "max": sum_points(graded, with_written)}


def sum_points(entries: Sequence[Module], with_written: Sequence[Module]) -> str:
    """Return the maximum of the points for these modules, and for the written answers to `with_written`."""
    return str(sum(entry.points for entry in entries) + written.count_points(with_written))


def merge(gradebooks: Mapping[str, Sequence[Row]], keep: str, penalties: Mapping[str, float]) -> list[Row]:
    """Merge gradebooks into one with the union of students and modules.

    If several rows of a student have points for a module, `keep` the "best" or the "last" points. The earliest
    gradebook comes first. `penalties` maps gradebooks to the percentage that their points lose beforehand. The scores
    of a module's checks come from the row whose points are kept, without the penalty. For other columns, keep the last
    value. Raise CourseError if the modules belong to several parts of the course.
    """
    every_row = [row for table in gradebooks.values() for row in table]
    entries, with_written = list_modules(every_row), list_modules(every_row, "written")
    refuse_several_parts(entries)
    students: dict[str, list[tuple[str, Row]]] = {}
    for name, table in gradebooks.items():
        for row in table:
            students.setdefault(row["student"], []).append((name, row))
    merged = []
    for rows in students.values():
        whole = {c: value for _, row in rows for c, value in row.items() if value and not OURS.fullmatch(c)}
        whole |= {"score": "", "max": ""} | {f"module {entry.number}": "" for entry in entries}
        notes = [f"{name}: {row['note']}" for name, row in rows if row.get("note")]
        for entry in entries:
            column = f"module {entry.number}"
            attempts = [(points, name, row) for name, row in rows if (points := read_points(row, column)) is not None]
            attempts = [(points * (1 - penalties.get(name, 0) / 100), name, row) for points, name, row in attempts]
            if attempts:
                points, name, row = attempts[-1] if keep == "last" else max(attempts, key=lambda attempt: attempt[0])
                whole[column] = format_points(points)
                whole |= {c: value for c, value in row.items() if c.startswith(f"{entry.number}.")}
                if penalties.get(name):
                    notes.append(f"{column}: {format_points(penalties[name])} % off ({name})")
        whole |= add_up(whole, entries, with_written)
        merged.append(whole | {"max": sum_points(entries, with_written), "note": " / ".join(notes)})
    return escape_formulas(merged)


def export(table: Sequence[Row], platform: str) -> tuple[str, list[str]]:
    """Return the CSV that a platform's gradebook imports, and the students who cannot be identified there.

    Canvas tries all its columns, but Moodle identifies students by only one: use the first that is filled in. Raise
    CourseError if no row has a value in any of these columns.
    """
    headings = PLATFORMS[platform]
    filled = [heading for heading, column in headings.items() if any(row.get(column) for row in table)]
    if not filled:
        raise CourseError(
            f"{platform.capitalize()} identifies students by {' or '.join(headings.values())}, but the gradebook does "
            "not have these columns; grade the class with --roster"
        )
    is_canvas = platform == "canvas"
    used = [*headings] if is_canvas else filled[:1]
    possible = {f"Module {entry.number}": str(entry.points) for entry in list_modules(table)}
    for entry in list_modules(table, "written"):
        possible[f"Written {entry.number}"] = sum_points([], [entry])
    columns = ["Student", *used, "Section", *possible] if is_canvas else [*used, *possible]
    rows, others = [{"Student": "Points Possible"} | possible] if is_canvas else [], []
    for row in table:
        person = {heading: row.get(headings[heading], "") for heading in used}
        if any(person.values()):
            person |= {"Student": row.get("name") or row["student"], "Section": row.get("section", "")}
            rows.append(person | {heading: row.get(heading.lower(), "") for heading in possible})
        else:
            others.append(row["student"])
    return format_csv(columns, escape_formulas(rows)), others
