"""Update the gradebook of a class, which belongs to the instructor: keep every cell that a person wrote.

The results directory of the gradebook contains a record of what the grader wrote, `grader.csv`. A cell of the gradebook
that is not empty and differs from the record was changed by a person, so it is kept. Columns and rows that are not in
the record are kept too. During a write, the record contains the rows from before and after the write, in case the run
is killed meanwhile. `backups` contains the gradebook as it was before each run.
"""

from __future__ import annotations

import shutil
from collections import ChainMap
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

from brigade.course.table.modules import CourseError, Module
from brigade.grader import formats, gradebook
from brigade.grader.gradebook import (
    BOM,
    Row,
    escape_formulas,
    format_csv,
    get_record_path,
    list_columns,
    parse_points,
    read_table,
)


class GradebookFile:
    """The gradebook at `path`. Raise CourseError if it exists but nobody knows which of its cells the grader wrote."""

    def __init__(self, path: Path, results: Path):
        self.path, self.record = path, get_record_path(path)
        self.corrections: list[str] = []  # what a person changed, for the report
        self.removed: list[str] = []  # rows whose submission is not there any more
        self.rows: dict[str, Row] = {}  # after an update, by submission
        if not path.exists():
            return
        if not self.record.exists():
            raise CourseError(
                f"{path} exists, but {results} has no record of it, so the grader cannot tell which cells a person "
                "changed; rename it, or choose another file for --gradebook"
            )
        (results / "backups").mkdir(exist_ok=True)
        changed = datetime.fromtimestamp(path.stat().st_mtime)
        shutil.copy(path, results / "backups" / f"{path.stem} {changed:%Y-%m-%d %H.%M.%S.%f}.csv")

    def update(self, table: Sequence[Row], graded: Sequence[Module]) -> None:
        """Write the grader's rows for the `graded` modules, without losing what a person wrote."""
        fresh = escape_formulas(table)
        present, rows, delimiter, first_line = read_table(self.path) if self.path.exists() else ([], [], ",", "")
        gradebook.refuse_several_parts([*graded, *gradebook.list_modules(rows)])
        if rows:
            gradebook.check_columns(self.path, present, [*gradebook.KEYS, *gradebook.list_needed(self.path)])
        entries, with_written = gradebook.list_modules([*rows, *fresh]), gradebook.list_modules(rows, "written")
        before = read_table(self.record).rows if self.record.exists() else []
        keys = {get_key(row) for row in rows}
        waiting = {get_key(row): row for row in fresh}
        uploads = {row["student"]: get_key(row) for row in fresh if get_key(row) not in keys}
        merged, record = [], []
        self.corrections, self.removed = [], []
        for row in rows:
            submission, student = key = get_key(row)
            known = [one for one in before if get_key(one) == key]
            by_hand = find_changes(row, known)
            new = waiting.pop(key, None)
            if new is None and not submission and student in uploads:  # the student has handed in by now
                new = waiting.pop(uploads[student], None)
            if new:
                for column in new if known else ():
                    if column in by_hand and column != "score" and not is_same(by_hand[column], new[column]):
                        what = f"{column} is {by_hand[column]}; the grader gave {new[column] or 'nothing'}"
                        self.corrections.append(f"{row['student']}: {what}")
                row |= new | by_hand
                total = gradebook.add_up(row, entries, with_written)
                if "score" in by_hand and not is_same(by_hand["score"], total["score"]):
                    what = f"the score {by_hand['score']} is not the sum of the points, {total['score'] or 'none'}"
                    self.corrections.append(f"{row['student']}: {what}; merge and export keep the difference")
                row |= total | by_hand
                changed = {column: value for column, value in (new | total).items() if column not in by_hand}
                record.append(dict(ChainMap(changed, *reversed(known))))
            elif known:
                if not submission and not by_hand:
                    continue  # a student who was absent, and is not in the roster any more
                self.removed.append(submission or student)
                record += known
            merged.append(row)
        students = {row.get("student") for row in merged}
        for row in waiting.values():
            if row["submission"] or row["student"] not in students:
                row |= gradebook.add_up(row, entries, with_written)
                merged.append(row)
                record.append(row)
        columns = list(dict.fromkeys([*present, *list_columns(fresh)]))
        self.rows = {row["submission"]: row for row in merged if row.get("submission")}
        text = BOM + first_line + format_csv(columns, merged, delimiter)
        self.write_record([*before, *record])
        if not self.path.exists() or text.encode(errors="replace") != self.path.read_bytes():
            formats.write(self.path, text)
        self.write_record(record)

    def add_up(self, columns: Sequence[str], rows: Sequence[Row]) -> list[str]:
        """Write these rows, whose points a command has changed, with their new sums.

        Keep a score that a person wrote. Return a line for each of them, because the points have changed since.
        """
        _, _, delimiter, first_line = read_table(self.path)
        before = read_table(self.record).rows
        record = [dict(row) for row in before]
        entries, with_written = gradebook.list_modules(rows), gradebook.list_modules(rows, "written")
        lines = []
        for row in rows:
            known = [one for one in record if get_key(one) == get_key(row)]
            by_hand, total = find_changes(row, known), gradebook.add_up(row, entries, with_written)
            if not is_same(by_hand.get("score", total["score"]), total["score"]):
                what = (
                    f"you wrote the score {by_hand['score']}, but the points add up to {total['score'] or 'none'} now"
                )
                lines.append(f"{row['student']}: {what}; empty the cell, and correct points instead of the score")
            row |= {column: value for column, value in total.items() if column not in by_hand}
            for one in known:
                one |= total
        self.write_record([*before, *record])
        formats.write(self.path, BOM + first_line + format_csv(columns, rows, delimiter))
        self.write_record(record)
        return lines

    def write_record(self, rows: Sequence[Row]) -> None:
        """Replace the record by these rows."""
        formats.write(self.record, format_csv(list_columns(rows), rows))


def get_key(row: Row) -> tuple[str, str]:
    """Return what identifies a row in every run: the submission, or the student if there is no submission."""
    submission = row.get("submission", "")
    return submission, "" if submission else row.get("student", "")


def is_same(one: str, other: str) -> bool:
    """Return whether two cells have the same content. A spreadsheet may write a number in another form."""
    points = parse_points(one)
    return one == other or (points is not None and points == parse_points(other))


def find_changes(row: Row, known: Sequence[Row]) -> Row:
    """Return the cells that a person has changed since the grader wrote the row. It wrote one of `known`.

    An empty cell is not among them, so that a person can give a cell back to the grader.
    """
    return {
        column: value
        for column, value in row.items()
        if value and not any(is_same(value, one.get(column, "")) for one in known)
    }
