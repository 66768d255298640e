"""Merge gradebooks into one, and export a gradebook to a platform: one row for each student, chosen by a stated rule.

Nothing that a person wrote is lost without a line that says so. Notes and comments of several rows name the row from
which they come. What lateness takes off is in the column `late` of a row, and nowhere else: see term.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from brigade.grader import gradebook, roster, uploads
from brigade.grader.gradebook import ADJUSTMENT, LATE, TAKEN_OFF, UPLOADED, Row, list_modules, list_points
from brigade.grader.tables import format_csv, format_points
from brigade.ranks.errors import UserError

# The columns by which a platform identifies a student, and the columns of the gradebook that contain the same values.
PLATFORMS = {
    # https://github.com/instructure/canvas-lms/blob/master/lib/gradebook_importer.rb
    "canvas": {"ID": "canvas id", "SIS User ID": "id", "SIS Login ID": "login"},
    # https://docs.moodle.org/405/en/Grade_import
    "moodle": {"Email address": "email", "ID number": "id", "Username": "login", "Identifier": "participant"},
}
Source = tuple[str, Row]  # the name of the gradebook, and the row


class Counted(NamedTuple):
    """What counts in a column of a student: the points after what lateness takes off, and the row with them."""

    points: float
    row: Row


def merge(gradebooks: Mapping[str, Sequence[Row]], keep: str) -> tuple[list[Row], list[str]]:
    """Merge gradebooks into one with the union of students and modules. Return it, and lines about what to know.

    If several rows of a student have points for a module, `keep` the "best" or the "last" points. The earliest
    gradebook comes first. In one gradebook, the names of the submissions tell which one is last. The scores of a
    module's checks come from the row whose points are kept. Raise UserError if the modules belong to several parts of
    the course.
    """
    every_row = [row for table in gradebooks.values() for row in table]
    gradebook.refuse_several_parts(list_modules(every_row))
    lines: list[str] = []
    merged = {student: merge_rows(rows, keep, lines) for student, rows in group_rows(gradebooks).items()}
    return [merged[student] for student in dict.fromkeys(row.student for row in every_row)], lines


def group_rows(gradebooks: Mapping[str, Sequence[Row]]) -> dict[str, list[Source]]:
    """Return the rows of each student, the earliest gradebook and the earliest upload first."""
    students: dict[str, list[Source]] = {}
    for name, table in gradebooks.items():
        for row in sorted(table, key=lambda row: (row.texts.get(UPLOADED, ""), uploads.sort_key(row.submission))):
            students.setdefault(row.student, []).append((name, row))
    return students


def choose_rows(rows: Sequence[Row], keep: str) -> dict[str, Counted]:
    """Return what counts of a student for each column of points. Of `rows`, the last one comes last."""
    chosen = {}
    for kind in ("module", "written"):
        for column in (f"{kind} {entry.number}" for entry in list_modules(rows, kind)):
            attempts = [Counted(row.numbers[column] * get_rest(row), row) for row in rows if column in row.numbers]
            # Of equal points, and of uploads that are equally late, the last ones stay last.
            attempts.sort(key=lambda attempt: attempt.points if keep == "best" else get_rest(attempt.row))
            chosen[column] = Counted(round(attempts[-1].points, 2), attempts[-1].row)
    return chosen


def list_counted(table: Sequence[Row], keep: str) -> dict[str, list[str]]:
    """Return which columns of points count, by the submission of the row from which they come."""
    counted: dict[str, list[str]] = {}
    for rows in group_rows({"": table}).values():
        for column, (_, row) in choose_rows([row for _, row in rows], keep).items():
            counted.setdefault(row.submission, []).append(column)
    return counted


def merge_rows(sources: Sequence[Source], keep: str, lines: list[str]) -> Row:
    """Merge the rows of one student. Add to `lines` what is not in the merged row."""
    rows = [row for _, row in sources]
    counted: set[Row] = set()  # the rows of which some points are kept
    whole, remarks, off = Row(rows[0].student), [], 0.0
    for column, (points, row) in choose_rows(rows, keep).items():
        counted.add(row)
        whole.numbers[column] = points
        kind, _, number = column.partition(" ")
        if kind == "module":
            whole.numbers |= {check: value for check, value in row.numbers.items() if check.startswith(f"{number}.")}
        if row.numbers.get(LATE) and (lost := row.numbers[column] - points):
            off += lost
            remarks.append(f"{column}: {format_points(lost)} points off (late)")
    kept = [row for row in rows if not counted or row in counted]
    labels = {row: label_row(name, row, sources, row not in kept) for name, row in sources}
    whole.submission = "; ".join(dict.fromkeys(row.submission for row in rows if row.submission))
    for column in dict.fromkeys(column for row in rows for column in row.texts if column != "note"):
        whole.texts[column] = join_cells(column, sources, labels, kept)
    if any(LATE in row.numbers or TAKEN_OFF in row.numbers for row in rows):
        whole.numbers[TAKEN_OFF] = off + sum(row.numbers.get(TAKEN_OFF, 0) for row in rows if row in counted)
    notes = [f"{labels[row]}: {row.texts['note']}" for row in rows if row.texts.get("note")]
    whole.texts["note"] = " / ".join([*notes, *remarks])
    for row in rows:
        if (points := row.numbers.get(ADJUSTMENT, 0)) and row not in kept:
            lines.append(f"{row.student}: the adjustment {format_points(points)} does not count ({labels[row]})")
    if any(row.numbers.get(ADJUSTMENT) for row in rows):
        whole.numbers[ADJUSTMENT] = sum(row.numbers.get(ADJUSTMENT, 0) for row in kept)
    return whole


def get_rest(row: Row) -> float:
    """Return the fraction of the points that a row keeps after its lateness."""
    return 1 - row.numbers.get(LATE, 0) / 100


def label_row(name: str, row: Row, sources: Sequence[Source], is_left_out: bool) -> str:
    """Return where a row comes from: its gradebook, and its submission if this gradebook has several of the student."""
    several = sum(other == name for other, _ in sources) > 1
    return ", ".join(filter(None, ["not counted" * is_left_out, name, row.submission * several]))


def join_cells(column: str, sources: Sequence[Source], labels: Mapping[Row, str], kept: Sequence[Row]) -> str:
    """Return the cells of a column in one.

    Say from which row each one comes, if they differ, if the row does not count, or if another row of the same
    gradebook has none.
    """
    cells = [(name, row, row.texts[column]) for name, row in sources if row.texts.get(column)]
    distinct = list(dict.fromkeys(cell for *_, cell in cells))
    if column in roster.FIELDS:  # about the student, equal in all rows, and not about one submission
        return distinct[-1] if distinct else ""
    from_all = sum(name in {name for name, *_ in cells} for name, _ in sources) == len(cells)
    if len(distinct) < 2 and from_all and all(row in kept for _, row, _ in cells):
        return "".join(distinct)
    return " / ".join(f"{labels[row]}: {cell}" for _, row, cell in cells)


def list_duplicates(table: Sequence[Row]) -> list[str]:
    """Return a line for each student who has several rows."""
    rows: dict[str, list[str]] = {}
    for row in table:
        rows.setdefault(row.student, []).append(row.submission or "a row without a submission")
    return [f"{student} has {len(names)} rows: {'; '.join(names)}" for student, names in rows.items() if len(names) > 1]


def export(table: Sequence[Row], platform: str, keep: str, name: str) -> tuple[str, int, list[str]]:
    """Return the CSV that a platform's gradebook imports, the number of its students, and lines about what to know.

    `name` is the assignment of a term. It ends the heading of its adjustments, so that those of two do not meet.

    Rows of one student are merged: see `merge`. Canvas tries all its columns, but Moodle identifies students by only
    one: use the first that is filled in. Raise UserError if no row has a value in any of these columns, or if two
    students have the same.
    """
    headings = PLATFORMS[platform]
    filled = [heading for heading, column in headings.items() if any(row.texts.get(column) for row in table)]
    if not filled:
        raise UserError(
            f"{platform.capitalize()} identifies students by {' or '.join(headings.values())}, but the gradebook does "
            "not have these columns; grade the class with --roster"
        )
    is_canvas = platform == "canvas"
    used = [*headings] if is_canvas else filled[:1]
    merged, lines = merge({"": table}, keep)
    lines = list_duplicates(table) + lines
    most = list_points(merged)
    sources = {column.capitalize(): column for column in most}
    if any(ADJUSTMENT in row.numbers for row in merged):
        sources[f"{ADJUSTMENT.capitalize()} {name}"] = ADJUSTMENT
    columns = ["Student", *used, "Section", *sources] if is_canvas else [*used, *sources]
    rows: list[dict[str, str]] = []
    seen: dict[tuple[str, str], str] = {}
    for row in merged:
        person = {heading: row.texts.get(headings[heading], "") for heading in used}
        if not any(person.values()):
            lines.append(f"left out, because the roster does not identify them: {row.student}")
            continue
        for heading, value in person.items():
            other = seen.setdefault((heading, value), row.student) if value else row.student
            if other != row.student:
                raise UserError(f"{other} and {row.student} have the {heading} {value}: give them one `student`")
        person |= {"Student": row.texts.get("name") or row.student, "Section": row.texts.get("section", "")}
        points = {heading: row.numbers.get(column) for heading, column in sources.items()}
        rows.append(person | {head: "" if value is None else format_points(value) for head, value in points.items()})
    possible = {heading: str(most.get(column, 0)) for heading, column in sources.items()}
    top = [{"Student": "Points Possible"} | possible] if is_canvas else []
    return format_csv(columns, [*top, *rows]), len(rows), lines
