"""Read, merge and export gradebooks, which are CSV files with one row for each student."""

from __future__ import annotations

import csv
import io
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path

from brigade.course import written
from brigade.course.modules import CourseError, Module, get_module

BOM = "\ufeff"  # without it, Excel does not read a CSV file as UTF-8
# A spreadsheet evaluates cells that begin with one of these. It may read separators as the beginning of another cell.
FORMULA = re.compile(r"(^|[;,|\t\r\n])(\s*)(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")
NUMBER = re.compile(r"-?\d+([.,]\d+)?")
# The columns by which a platform identifies a student, and the columns of the gradebook that contain the same values.
# https://github.com/instructure/canvas-lms/blob/master/lib/gradebook_importer.rb
CANVAS = {"ID": "canvas id", "SIS User ID": "id", "SIS Login ID": "login"}
# https://docs.moodle.org/405/en/Grade_import
MOODLE = {"Email address": "email", "ID number": "id", "Username": "login", "Identifier": "participant"}

Row = dict[str, "str | int | float"]


def escape_formula(value: str | int | float) -> str | int | float:
    """Return a cell that a spreadsheet does not evaluate as a formula."""
    if not isinstance(value, str) or NUMBER.fullmatch(value):
        return value
    return FORMULA.sub(r"\1\2'", value)


def format_csv(columns: Sequence[str], table: Sequence[Row]) -> str:
    """Return these columns of the table as CSV without formulas."""
    return format_columns(columns, [{key: escape_formula(value) for key, value in row.items()} for row in table])


def list_columns(table: Sequence[Row]) -> list[str]:
    """Return the columns of all rows in order."""
    longest = max(table, key=len, default={})  # contains all checks, in order
    return list(dict.fromkeys(column for row in (longest, *table) for column in row))


def format_columns(columns: Sequence[str], table: Sequence[Row], delimiter: str = ",") -> str:
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
    headings, *lines = list(filter(any, lines)) or [[]]
    for place in range(max(map(len, [headings, *lines]))):
        heading = "".join(headings[place : place + 1])
        if heading in headings[:place] if heading else any("".join(line[place : place + 1]) for line in lines):
            problem = f"is {heading!r} again" if heading else "is empty"
            raise CourseError(f"{path}: the heading of column {place + 1} {problem}; give it a name of its own")
    rows = [{column: value for column, value in zip(headings, line) if column} for line in lines]
    return list(filter(None, headings)), rows, delimiter


def read_gradebook(path: Path) -> list[Row]:
    """Return the rows of a gradebook. Raise CourseError for any other file."""
    columns, rows, _ = read_table(path)
    if not rows or "student" not in columns or not any(re.fullmatch(r"module \d+", column) for column in columns):
        raise CourseError(f"{path} is not a gradebook of `brigade grade --class`: it has no students or no modules")
    return [dict(row) for row in rows]


def list_modules(table: Sequence[Mapping], kind: str = "module") -> list[Module]:
    """Return the modules for which the table has points, or "written" points.

    Raise CourseError if the course has no such module.
    """
    found = {match[1] for row in table for c in row if row[c] != "" and (match := re.fullmatch(rf"{kind} (\d+)", c))}
    return [get_module(number) for number in sorted(found, key=int)]


def refuse_several_parts(entries: Sequence[Module]) -> None:
    """Raise CourseError if the modules belong to several parts of the course."""
    parts = list(dict.fromkeys(entry.track for entry in entries))
    if len(parts) > 1:
        raise CourseError(f"the {' and the '.join(parts)} modules have separate totals; grade them separately")


def parse_points(cell: str | int | float) -> float | None:
    """Return the number in a cell, or None if it does not contain a finite number from 0 on.

    A spreadsheet may write a decimal comma.
    """
    try:
        return value if 0 <= (value := float(str(cell).replace(",", "."))) < math.inf else None
    except ValueError:
        return None


def read_points(row: Mapping, column: str) -> float | None:
    """Return a student's points in a column, if there are any. Raise CourseError if the cell is not a number."""
    cell = row.get(column, "")
    if cell != "" and parse_points(cell) is None:
        raise CourseError(f"{row['student']}: {column} has {cell!r} instead of points")
    return None if cell == "" else parse_points(cell)


def add_up(row: Row, entries: Sequence[Module], with_written: Sequence[Module]) -> Row:
    """Return the score and the maximum for the modules of a row, and for the written answers to `with_written`.

    Return empty cells if no module has points.
    """
    graded = [entry for entry in entries if row.get(f"module {entry.number}", "") != ""]
    points = [read_points(row, f"module {entry.number}") for entry in graded]
    points += [read_points(row, f"written {entry.number}") or 0 for entry in with_written]
    if not graded:
        return {"score": "", "max": ""}
    return {"score": shorten(sum(points)), "max": sum_points(graded, with_written)}


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
    every_row = [row for table in gradebooks.values() for row in table]
    entries, with_written = list_modules(every_row), list_modules(every_row, "written")
    refuse_several_parts(entries)
    students: dict[str, list[tuple[str, Row]]] = {}
    for name, table in gradebooks.items():
        for row in table:
            students.setdefault(str(row["student"]), []).append((name, row))
    merged = [merge_student(rows, entries, keep, penalties) for rows in students.values()]
    for row in merged:
        row |= add_up(row, entries, with_written) | {"max": sum_points(entries, with_written)}
    return merged


def sum_points(entries: Sequence[Module], with_written: Sequence[Module]) -> int:
    """Return the maximum of the points for these modules, and for the written answers to `with_written`."""
    return sum(entry.points for entry in entries) + written.count_points(with_written)


def merge_student(
    rows: Sequence[tuple[str, Row]], entries: Sequence[Module], keep: str, penalties: Mapping[str, float]
) -> Row:
    """Merge the rows of one student into one row. Each row comes with the name of its gradebook.

    The score and the maximum are left empty.
    """
    ours = re.compile(r"score|max|note|module \d+|\d+\..*")
    others: Row = {}
    points: Row = {f"module {entry.number}": "" for entry in entries}
    checks: Row = {}
    late: dict[str, str] = {}
    notes = []
    for name, row in rows:
        others |= {column: value for column, value in row.items() if not ours.fullmatch(column) and value != ""}
        notes += [f"{name}: {row['note']}"] if row.get("note") else []
        penalty = penalties.get(name, 0)
        for column, kept in points.items():
            earned = read_points(row, column)
            if earned is None:
                continue
            value = earned * (1 - penalty / 100)
            if keep == "last" or kept == "" or value > float(kept):
                points[column] = shorten(value)
                prefix = column.removeprefix("module ") + "."
                checks |= {key: cell for key, cell in row.items() if key.startswith(prefix)}
                late[column] = f"{column}: {shorten(penalty)} % off ({name})" if penalty else ""
    note = " / ".join(filter(None, [*late.values(), *notes]))
    return others | {"score": "", "max": ""} | points | checks | {"note": note}


def export_canvas(table: Sequence[Row]) -> tuple[str, list[str]]:
    """Return the CSV that Canvas imports into its gradebook, and the students who cannot be identified there.

    Canvas identifies students by its own ID or, without one, by their SIS ID or their login.
    """
    identified, others = split_identified(table, list(CANVAS.values()), "Canvas")
    possible = {f"Module {entry.number}": entry.points for entry in list_modules(table)}
    possible |= {f"Written {entry.number}": written.count_points([entry]) for entry in list_modules(table, "written")}
    rows: list[Row] = [{"Student": "Points Possible"} | possible]
    for row in identified:
        person = {"Student": row.get("name") or row["student"], "Section": row.get("section", "")}
        rows.append(person | {heading: row.get(column, "") for heading, column in CANVAS.items()} | list_points(row))
    return format_csv(["Student", *CANVAS, "Section", *possible], rows), others


def export_moodle(table: Sequence[Row]) -> tuple[str, list[str]]:
    """Return the CSV for Moodle's grade import, and the students who cannot be identified there.

    Moodle identifies students by one column. Use the email address, the ID number or the user name, in this order.
    """
    columns = {key for row in table for key, value in row.items() if value != ""}
    heading = next((heading for heading, column in MOODLE.items() if column in columns), "Email address")
    identified, others = split_identified(table, [MOODLE[heading]], "Moodle")
    rows = [{heading: row[MOODLE[heading]]} | list_points(row) for row in identified]
    return format_csv([heading, *list_points(table[0])], rows), others


def list_points(row: Row) -> Row:
    """Return a row's points for each module and its written answers, under the names that platforms show."""
    return {c.capitalize(): value for c, value in row.items() if re.fullmatch(r"(module|written) \d+", c)}


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
