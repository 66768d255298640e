"""Read, merge and export gradebooks, which are CSV files with one row for each student."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from brigade.course.modules import CourseError, Module, get_module

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # a spreadsheet evaluates cells that begin with one of these
# The columns by which a platform identifies a student, and the columns of the gradebook that contain the same values.
# https://github.com/instructure/canvas-lms/blob/master/lib/gradebook_importer.rb
CANVAS = {"ID": "canvas id", "SIS User ID": "id", "SIS Login ID": "login"}
# https://docs.moodle.org/405/en/Grade_import
MOODLE = {"Email address": "email", "ID number": "id", "Username": "login"}

Row = dict[str, "str | int | float"]


def escape_formula(value: str | int | float) -> str | int | float:
    """Return a cell that a spreadsheet does not evaluate as a formula."""
    return "'" + value if isinstance(value, str) and value.startswith(FORMULA) else value


def format_csv(table: Sequence[Row]) -> str:
    """Return the table as CSV, with the columns of all rows."""
    longest = max(table, key=len)  # contains all checks, in order
    return format_columns(list(dict.fromkeys(column for row in (longest, *table) for column in row)), table)


def format_columns(columns: Sequence[str], table: Sequence[Row]) -> str:
    """Return these columns of the table as CSV."""
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, restval="", extrasaction="ignore")
    writer.writeheader()
    writer.writerows({key: escape_formula(value) for key, value in row.items()} for row in table)
    return text.getvalue()


def read_csv(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file with commas or semicolons. Raise CourseError for any other file."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        delimiter = ";" if text.partition("\n")[0].count(";") > text.partition("\n")[0].count(",") else ","
        reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, restval="", strict=True)
        return [{column.strip(): value.strip() for column, value in row.items() if column} for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise CourseError(f"{path} is not a CSV file in UTF-8: {error}") from None


def read_gradebook(path: Path) -> list[Row]:
    """Return the rows of a gradebook. Raise CourseError for any other file."""
    rows = read_csv(path)
    if not rows or "student" not in rows[0] or not list_modules(rows):
        raise CourseError(f"{path} is not a gradebook of `brigade grade --class`: it has no students or no modules")
    return [dict(row) for row in rows]


def list_modules(table: Sequence[Mapping]) -> list[Module]:
    """Return the modules whose points the table contains. Raise CourseError if the course has no such module."""
    found = {match[1] for row in table for column in row if (match := re.fullmatch(r"module (\d+)", column))}
    return [get_module(number) for number in sorted(found, key=int)]


def read_points(row: Mapping, entry: Module) -> float | None:
    """Return a student's points for a module, if there are any. Raise CourseError if the cell is not a number."""
    cell = row.get(f"module {entry.number}", "")
    if cell == "":
        return None
    try:
        return float(cell)
    except ValueError:
        raise CourseError(f"{row['student']}: module {entry.number} has {cell!r} instead of points") from None


def shorten(points: float) -> int | float:
    """Return the points rounded to two decimals, or as an int if they have no fraction."""
    return int(points) if points == int(points) else round(points, 2)


def merge(gradebooks: Mapping[str, Sequence[Row]], keep: str, penalties: Mapping[str, float]) -> list[Row]:
    """Merge gradebooks into one with the union of students and modules.

    If several rows of a student have points for a module, `keep` the "best" or the "last" points. The earliest
    gradebook comes first. `penalties` maps gradebooks to the percentage that their points lose beforehand. The scores
    of a module's checks come from the row whose points are kept, without the penalty. For other columns, keep the last
    value. Raise CourseError if the modules belong to several parts of the course.
    """
    entries = list_modules([row for table in gradebooks.values() for row in table])
    parts = list(dict.fromkeys(entry.track for entry in entries))
    if len(parts) > 1:
        raise CourseError(
            f"the {' and the '.join(parts)} modules have separate totals; merge their gradebooks separately"
        )
    students: dict[str, list[tuple[str, Row]]] = {}
    for name, table in gradebooks.items():
        for row in table:
            students.setdefault(str(row["student"]), []).append((name, row))
    return [merge_student(rows, entries, keep, penalties) for rows in students.values()]


def merge_student(
    rows: Sequence[tuple[str, Row]], entries: Sequence[Module], keep: str, penalties: Mapping[str, float]
) -> Row:
    """Merge the rows of one student into one row. Each row comes with the name of its gradebook."""
    taken = re.compile(r"score|max|note|module \d+|\d+\..*")
    merged: Row = {}
    for _, row in rows:
        merged |= {column: value for column, value in row.items() if not taken.fullmatch(column) and value != ""}
    points: Row = {}
    checks: Row = {}
    notes = []
    for entry in entries:
        column = f"module {entry.number}"
        graded = [
            (value * (1 - penalties.get(name, 0) / 100), place)
            for place, (name, row) in enumerate(rows)
            if (value := read_points(row, entry)) is not None
        ]
        if not graded:
            points[column] = ""
            continue
        value, place = graded[-1] if keep == "last" else max(graded, key=lambda pair: pair[0])
        name, row = rows[place]
        points[column] = shorten(value)
        checks |= {key: cell for key, cell in row.items() if key.startswith(f"{entry.number}.")}
        if penalties.get(name):
            notes.append(f"{column}: {shorten(penalties[name])} % off ({name})")
        notes.append(str(row.get("note", "")))
    earned = [float(value) for value in points.values() if value != ""]
    merged |= {"score": shorten(sum(earned)) if earned else "", "max": sum(entry.points for entry in entries)}
    if not earned:
        notes = [str(row.get("note", "")) for _, row in rows]
    return merged | points | checks | {"note": join_texts(notes)}


def join_texts(texts: Sequence[str]) -> str:
    """Join the distinct texts that are not empty, in order."""
    return " / ".join(dict.fromkeys(filter(None, texts)))


def export_canvas(table: Sequence[Row]) -> tuple[str, list[str]]:
    """Return the CSV that Canvas imports into its gradebook, and the students who cannot be identified there.

    Canvas identifies students by its own ID or, without one, by their SIS ID or their login.
    """
    entries = list_modules(table)
    identified, others = split_identified(table, list(CANVAS.values()), "Canvas")
    headings = ["Student", *CANVAS, "Section", *(f"Module {entry.number}" for entry in entries)]
    rows: list[Row] = [{"Student": "Points Possible"} | {f"Module {entry.number}": entry.points for entry in entries}]
    for row in identified:
        person = {"Student": row.get("name") or row["student"], "Section": row.get("section", "")}
        rows.append(person | {heading: row.get(column, "") for heading, column in CANVAS.items()} | list_points(row))
    return format_columns(headings, rows), others


def export_moodle(table: Sequence[Row]) -> tuple[str, list[str]]:
    """Return the CSV for Moodle's grade import, and the students who cannot be identified there.

    Moodle identifies students by one column. Use the email address, the ID number or the user name, in this order.
    """
    entries = list_modules(table)
    columns = {key for row in table for key, value in row.items() if value != ""}
    heading = next((heading for heading, column in MOODLE.items() if column in columns), "Email address")
    identified, others = split_identified(table, [MOODLE[heading]], "Moodle")
    rows = [{heading: row[MOODLE[heading]]} | list_points(row) for row in identified]
    return format_columns([heading, *(f"Module {entry.number}" for entry in entries)], rows), others


def list_points(row: Row) -> Row:
    """Return a row's points for each module, under the names that platforms show."""
    return {column.capitalize(): value for column, value in row.items() if re.fullmatch(r"module \d+", column)}


def split_identified(table: Sequence[Row], columns: Sequence[str], platform: str) -> tuple[list[Row], list[str]]:
    """Return the rows with a value in one of the columns, and the students of the other rows.

    Raise CourseError if no row has such a value.
    """
    identified = [row for row in table if any(row.get(column, "") != "" for column in columns)]
    if not identified:
        raise CourseError(
            f"{platform} identifies students by {' or '.join(columns)}, but the gradebook does not have these "
            "columns; grade the class with --roster"
        )
    return identified, [str(row["student"]) for row in table if row not in identified]


EXPORTS = {"canvas": export_canvas, "moodle": export_moodle}
