"""Merge gradebooks into one, and export a gradebook to a platform: one row for each student, chosen by a stated rule.

Nothing that a person wrote is lost without a line that says so. A score that is not the sum of its points becomes an
adjustment, which is a column of its own. Notes and comments of several rows name the row from which they come.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from brigade.course.table.modules import CourseError
from brigade.grader import gradebook, roster, uploads
from brigade.grader.gradebook import (
    ADJUSTMENT,
    LATE,
    OURS,
    UPLOADED,
    Row,
    escape_formulas,
    format_csv,
    format_points,
    list_modules,
    parse_number,
    read_points,
)
from brigade.grader.gradebook_file import get_key, is_same

# The columns by which a platform identifies a student, and the columns of the gradebook that contain the same values.
PLATFORMS = {
    # https://github.com/instructure/canvas-lms/blob/master/lib/gradebook_importer.rb
    "canvas": {"ID": "canvas id", "SIS User ID": "id", "SIS Login ID": "login"},
    # https://docs.moodle.org/405/en/Grade_import
    "moodle": {"Email address": "email", "ID number": "id", "Username": "login", "Identifier": "participant"},
}
TAKEN_OFF = "taken off"  # the points that lateness has taken off those that count
PERSONAL = ("student", *roster.FIELDS)  # columns about the student, equal in all rows, and not about one submission
Source = tuple[str, Row]  # the name of the gradebook, and the row


def read_gradebook(path: Path) -> tuple[list[Row], list[str]]:
    """Return the rows of a gradebook, and a line for each score that differs from the sum of its points.

    The grader's record tells who wrote the score. If a person did, the difference becomes an adjustment. If the grader
    did, a person has changed points since, and the sum counts. Without a record, the sum counts too, and the line says
    so.
    """
    rows = gradebook.read_gradebook(path)
    record = gradebook.get_record_path(path)
    known = gradebook.read_table(record).rows if record.exists() else []
    entries, with_written = list_modules(rows), list_modules(rows, "written")
    lines = []
    for row in rows:
        total, score = gradebook.add_up(row, entries, with_written)["score"] or "0", row.get("score", "")
        recorded = [one.get("score", "") for one in known if get_key(one) == get_key(row)]
        if not score or is_same(score, total) or any(is_same(score, one) for one in recorded):
            continue
        points = parse_number(score)
        line = f"{name_row(row)}: the score {score} is not the sum of the points, {total}"
        if points is None:
            lines.append(f"{line}, and it is not a number, so the sum counts")
            continue
        difference = format_points(points - float(total))
        if record.exists():
            row[ADJUSTMENT] = format_points((read_points(row, ADJUSTMENT) or 0) + float(difference))
            lines.append(f"{line}, so {difference} counts as an adjustment")
        else:
            lines.append(
                f"{line}, which counts; if the score is right, write {difference} into a column `{ADJUSTMENT}`"
            )
    return rows, lines


def name_row(row: Row) -> str:
    """Return the student of a row, and the submission if it has another name."""
    submission = row.get("submission", "")
    return row["student"] + (f" ({submission})" if submission not in ("", row["student"]) else "")


def merge(
    gradebooks: Mapping[str, Sequence[Row]], keep: str, penalties: Mapping[str, float]
) -> tuple[list[Row], list[str]]:
    """Merge gradebooks into one with the union of students and modules. Return it, and lines about what to know.

    If several rows of a student have points for a module, `keep` the "best" or the "last" points. The earliest
    gradebook comes first. In one gradebook, the names of the submissions tell which one is last. `penalties` maps
    gradebooks to the percentage that their points lose beforehand. The scores of a module's checks come from the row
    whose points are kept, without the penalty. Raise CourseError if the modules belong to several parts of the course.
    """
    every_row = [row for table in gradebooks.values() for row in table]
    gradebook.refuse_several_parts(list_modules(every_row))
    merged: dict[str, Row] = {}
    lines: list[str] = []
    for student, rows in group_rows(gradebooks).items():
        merged[student] = merge_rows(rows, keep, penalties, lines)
        add_totals(merged[student], every_row)
    order = dict.fromkeys(row["student"] for row in every_row)
    return escape_formulas([merged[student] for student in order]), lines


def group_rows(gradebooks: Mapping[str, Sequence[Row]]) -> dict[str, list[Source]]:
    """Return the rows of each student, the earliest gradebook and the earliest upload first."""
    students: dict[str, list[Source]] = {}
    for name, table in gradebooks.items():
        for row in sorted(table, key=lambda row: (row.get(UPLOADED, ""), uploads.sort_key(row.get("submission", "")))):
            students.setdefault(row["student"], []).append((name, row))
    return students


def choose_rows(rows: Sequence[Source], keep: str, penalties: Mapping[str, float]) -> dict[str, tuple[float, str, Row]]:
    """Return for each column of points what counts of a student: the points, and the gradebook and row with them."""
    chosen = {}
    every_row = [row for _, row in rows]
    for kind in ("module", "written"):
        for column in (f"{kind} {entry.number}" for entry in list_modules(every_row, kind)):
            attempts = [(points, name, row) for name, row in rows if (points := read_points(row, column)) is not None]
            attempts = [(points * get_rest(row, penalties.get(name, 0)), name, row) for points, name, row in attempts]
            # Of equal points, and of uploads that are equally late, the last ones stay last.
            attempts.sort(key=lambda attempt: attempt[0] if keep == "best" else get_rest(attempt[2]))
            chosen[column] = attempts[-1]
    return chosen


def list_counted(table: Sequence[Row], keep: str) -> dict[str, list[str]]:
    """Return which columns of points count, by the submission of the row from which they come."""
    counted: dict[str, list[str]] = {}
    for rows in group_rows({"": table}).values():
        for column, (_, _, row) in choose_rows(rows, keep, {}).items():
            counted.setdefault(row.get("submission", ""), []).append(column)
    return counted


def merge_rows(rows: Sequence[Source], keep: str, penalties: Mapping[str, float], lines: list[str]) -> Row:
    """Merge the rows of one student. Add to `lines` what is not in the merged row."""
    every_row = [row for _, row in rows]
    counted: list[Row] = []  # the rows of which some points are kept
    points_of: Row = {}
    remarks, off = [], 0.0
    for column, (points, name, row) in choose_rows(rows, keep, penalties).items():
        counted.append(row)
        points_of[column] = format_points(points)
        kind, _, number = column.partition(" ")
        if kind == "module":
            points_of |= {c: value for c, value in row.items() if c.startswith(f"{number}.")}
        if row.get(LATE) and (lost := (read_points(row, column) or 0) - points):
            off += lost
            remarks.append(f"{column}: {format_points(lost)} points off (late)")
        if penalties.get(name):
            remarks.append(f"{column}: {format_points(penalties[name])} % off ({name})")
    labels = [label_row(name, row, rows, counted) for name, row in rows]
    whole: Row = {}
    for column in dict.fromkeys(column for row in every_row for column in row):
        if not OURS.fullmatch(column) and column not in (ADJUSTMENT, LATE, TAKEN_OFF):  # which are numbers
            whole[column] = join_cells(column, rows, labels, counted)
    off += sum(read_points(row, TAKEN_OFF) or 0 for row in every_row if row in counted)
    whole |= {TAKEN_OFF: format_points(off)} if any(LATE in row or TAKEN_OFF in row for row in every_row) else {}
    labelled = list(zip(labels, every_row, strict=True))
    notes = [f"{label}: {row['note']}" for label, row in labelled if row.get("note")]
    adjustments = [(label, row, read_points(row, ADJUSTMENT) or 0) for label, row in labelled]
    lines += [
        f"{row['student']}: the adjustment {format_points(points)} does not count ({label})"
        for label, row, points in adjustments
        if points and counted and row not in counted
    ]
    if any(points for *_, points in adjustments):
        kept = [points for _, row, points in adjustments if not counted or row in counted]
        whole[ADJUSTMENT] = format_points(sum(kept))
    return whole | points_of | {"note": " / ".join([*notes, *remarks])}


def get_rest(row: Row, penalty: float = 0.0) -> float:
    """Return the fraction of the points that a row keeps after its lateness and another penalty in percent."""
    late = read_points(row, LATE) or 0
    if late > 100:
        raise CourseError(f"{name_row(row)}: {LATE} is {row[LATE]}, but it is a percentage, at most 100")
    return (1 - late / 100) * (1 - penalty / 100)


def label_row(name: str, row: Row, rows: Sequence[Source], counted: Sequence[Row]) -> str:
    """Return where a row comes from: its gradebook, and its submission if this gradebook has several of the student."""
    several = sum(other == name for other, _ in rows) > 1
    words = [*["not counted"] * bool(counted and row not in counted), name, *[row.get("submission", "")] * several]
    return ", ".join(filter(None, words))


def join_cells(column: str, rows: Sequence[Source], labels: Sequence[str], counted: Sequence[Row]) -> str:
    """Return the cells of a column in one.

    Say from which row each one comes, if they differ, if the row does not count, or if another row of the same
    gradebook has none.
    """
    cells = [
        (label, name, row, row[column]) for label, (name, row) in zip(labels, rows, strict=True) if row.get(column)
    ]
    distinct = list(dict.fromkeys(cell for *_, cell in cells))
    if column in PERSONAL:
        return distinct[-1] if distinct else ""
    if column == "submission":
        return "; ".join(distinct)
    are_counted = all(not counted or row in counted for _, _, row, _ in cells)
    from_all = sum(name in {name for _, name, *_ in cells} for name, _ in rows) == len(cells)
    if len(distinct) < 2 and are_counted and from_all:
        return "".join(distinct)
    return " / ".join(f"{label}: {cell}" for label, *_, cell in cells)


def add_totals(row: Row, every_row: Sequence[Row]) -> None:
    """Add the score of a merged row, and the maximum for everybody."""
    entries, with_written = list_modules(every_row), list_modules(every_row, "written")
    for entry in entries:
        row.setdefault(f"module {entry.number}", "")
    score = gradebook.add_up(row, entries, with_written)["score"]
    row |= {"score": score, "max": gradebook.sum_points(entries, with_written)}


def list_duplicates(table: Sequence[Row]) -> list[str]:
    """Return a line for each student who has several rows."""
    rows: dict[str, list[str]] = {}
    for row in table:
        rows.setdefault(row["student"], []).append(row.get("submission") or "a row without a submission")
    return [f"{student} has {len(names)} rows: {'; '.join(names)}" for student, names in rows.items() if len(names) > 1]


def export(table: Sequence[Row], platform: str, keep: str, name: str = "") -> tuple[str, int, list[str]]:
    """Return the CSV that a platform's gradebook imports, the number of its students, and lines about what to know.

    `name` is the assignment of a term. It ends the heading of its adjustments, so that those of two do not meet.

    Rows of one student are merged: see `merge`. Canvas tries all its columns, but Moodle identifies students by only
    one: use the first that is filled in. Raise CourseError if no row has a value in any of these columns, or if two
    students have the same.
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
    possible = {f"Module {entry.number}": gradebook.sum_points([entry]) for entry in list_modules(table)}
    for entry in list_modules(table, "written"):
        possible[f"Written {entry.number}"] = gradebook.sum_points([], [entry])
    merged, lines = merge({"": table}, keep, {})
    lines = list_duplicates(table) + lines
    sources = {heading: heading.lower() for heading in possible}
    if any(row.get(ADJUSTMENT) for row in merged):
        heading = f"{ADJUSTMENT.capitalize()} {name}".strip()
        possible[heading], sources[heading] = "0", ADJUSTMENT
    columns = ["Student", *used, "Section", *possible] if is_canvas else [*used, *possible]
    rows: list[dict[str, str]] = []
    seen: dict[tuple[str, ...], str] = {}
    for row in merged:
        person = {heading: row.get(headings[heading], "") for heading in used}
        if not any(person.values()):
            lines.append(f"left out, because the roster does not identify them: {row['student']}")
            continue
        for heading, value in person.items():
            other = seen.setdefault((heading, value), row["student"]) if value else row["student"]
            if other != row["student"]:
                raise CourseError(f"{other} and {row['student']} have the {heading} {value}: give them one `student`")
        person |= {"Student": row.get("name") or row["student"], "Section": row.get("section", "")}
        points = {heading: read_points(row, column) for heading, column in sources.items()}
        rows.append(person | {name: "" if value is None else format_points(value) for name, value in points.items()})
    top = [{"Student": "Points Possible"} | possible] if is_canvas else []
    return format_csv(columns, escape_formulas([*top, *rows])), len(rows), lines
