"""Update the gradebook of a class, which belongs to the instructor: keep every cell that a person wrote.

The results directory of the gradebook contains a record of what the grader wrote, `grader.csv`. A cell of the gradebook
that is not empty and differs from the record was changed by a person, so it is kept. Columns and rows that are not in
the record are kept too. During a write, `grader.next` contains the record that the gradebook will have, in case the run
is killed meanwhile. `backups` contains the gradebook as it was before the first write of each run, and before any write
that found a person's changes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from brigade.course.modules import CourseError, Module
from brigade.grade import formats, gradebook
from brigade.grade.gradebook import BOM, Row, escape_formula, format_columns, list_columns, parse_points, read_table
from brigade.grade.roster import UNIQUE


class GradebookFile:
    """The gradebook at `path`. Raise CourseError if it exists but nobody knows which of its cells the grader wrote."""

    def __init__(self, path: Path, results: Path):
        self.path = path
        self.backups = results / "backups"
        self.record, self.next = results / "grader.csv", results / "grader.next"
        self.last_text: str | None = None  # what this run wrote last
        self.corrections: list[str] = []  # what a person changed, for the report
        self.removed: list[str] = []  # rows whose submission is not there any more
        if path.exists() and not self.record.exists():
            raise CourseError(
                f"{path} exists, but {results} has no record of it, so the grader cannot tell which cells a person "
                "changed; rename it, or choose another file for --gradebook"
            )

    def update(self, table: Sequence[Row], graded: Sequence[Module]) -> None:
        """Write the grader's rows for the `graded` modules, without losing what a person wrote."""
        written = [{column: str(escape_formula(value)) for column, value in row.items()} for row in table]
        present, rows, delimiter = read_table(self.path) if self.path.exists() else ([], [], ",")
        gradebook.refuse_several_parts([*graded, *gradebook.list_modules(rows)])
        entries, with_written = gradebook.list_modules([*rows, *written]), gradebook.list_modules(rows, "written")
        record, begun = (
            {get_key(row): row for row in read_table(path)[1]} if path.exists() else {}
            for path in (self.record, self.next)
        )
        rows = merge_rows_without_submission(rows, written, record)
        fresh = {get_key(row): row for row in written}
        known_keys = {get_key(row) for row in rows}
        first_uploads = {("", row["student"]): key for key, row in fresh.items() if key not in known_keys}
        merged, new_record = [], []
        self.corrections, self.removed = [], []
        for row in rows:
            key = get_key(row)
            known = record.get(key, {})
            new = fresh.pop(first_uploads.get(key, key), None)
            if new is None:
                if known:
                    new_record.append(known)
                    self.removed += filter(None, [row.get("submission")])
                merged.append(row)
                continue
            # Empty the checks of these modules, because a module may have other checks now, or no score yet.
            new = {c: "" for c in known if c.partition(".")[0] in {str(entry.number) for entry in graded}} | new
            by_hand = find_changes(row, known, begun.get(key, {}))
            row |= new | by_hand
            total = {column: str(value) for column, value in gradebook.add_up(row, entries, with_written).items()}
            row |= total | by_hand
            for column in [column for column in new if column in by_hand]:
                if known and not is_same(by_hand[column], new[column]):
                    what = f"{column} is {by_hand[column]}; the grader gave {new[column] or 'nothing'}"
                    self.corrections.append(f"{row['student']}: {what}")
            merged.append(row)
            new_record.append(known | {c: value for c, value in (new | total).items() if c not in by_hand})
        students = {row.get("student") for row in merged}
        for row in fresh.values():
            if row["submission"] or row["student"] not in students:
                row |= {c: str(value) for c, value in gradebook.add_up(row, entries, with_written).items()}
                merged.append(row)
                new_record.append(row)
        columns = insert_columns(present, list_columns(written))
        if not self.record.exists():
            formats.write(self.record, "")  # or a run that is killed now could not be repeated
        formats.write(self.next, format_columns(list_columns(new_record), new_record))
        self.write(BOM + format_columns(columns, merged, delimiter))
        self.next.replace(self.record)

    def write(self, text: str) -> None:
        """Replace the gradebook. If somebody else has written to it, make a copy first."""
        current = self.path.read_bytes().decode("utf-8", "replace") if self.path.exists() else None
        if current is not None and current not in (self.last_text, text):
            self.back_up()
        if current != text:
            formats.write(self.path, text)
        self.last_text = text

    def back_up(self) -> None:
        """Copy the gradebook to the backups, under the time of its last change."""
        self.backups.mkdir(mode=0o700, exist_ok=True)
        changed = datetime.fromtimestamp(self.path.stat().st_mtime)
        copy = self.backups / f"{self.path.stem} {changed:%Y-%m-%d %H.%M.%S.%f}.csv"
        with contextlib.suppress(FileExistsError):
            handle = os.open(copy, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb") as file:
                file.write(self.path.read_bytes())


def get_key(row: Mapping[str, str]) -> tuple[str, str]:
    """Return what identifies a row in every run: the submission, or the student if there is no submission."""
    submission = row.get("submission", "")
    return submission, "" if submission else row.get("student", "")


def is_same(one: str, other: str) -> bool:
    """Return whether two cells have the same content. A spreadsheet may write a number in another form."""
    first, second = parse_points(one), parse_points(other)
    return one.strip() == other.strip() or (first is not None and first == second)


def find_changes(row: Row, *known: Row) -> Row:
    """Return the cells that a person has changed since the grader wrote the row. It wrote one of `known`.

    An empty cell is not among them, so that a person can give a cell back to the grader.
    """
    return {
        column: value
        for column, value in row.items()
        if value != "" and not any(is_same(value, cells.get(column, "")) for cells in known)
    }


def merge_rows_without_submission(
    rows: Sequence[Row], fresh: Sequence[Row], record: Mapping[tuple[str, str], Row]
) -> list[Row]:
    """Return the rows of a gradebook without those of students whose submission has a row of its own by now.

    What a person wrote in such a row moves to the submission's row. If it is filled in there, too, both rows stay.
    """
    by_submission = {row["submission"]: row for row in rows if row.get("submission")}
    own = [row for row in fresh if row["submission"] in by_submission]
    merged = []
    for row in rows:
        by_hand = find_changes(row, record.get(get_key(row), {}))
        found = [] if row.get("submission") else [new for new in own if is_same_student(row, new)]
        other = by_submission[found[0]["submission"]] if found else {}
        if not found or by_hand.keys() & find_changes(other, record.get(get_key(other), {}), found[0]).keys():
            merged.append(row)
        else:
            other.update(by_hand)
    return merged


def is_same_student(row: Row, new: Row) -> bool:
    """Return whether two rows have the same value in the first column of a roster that is filled in on both."""
    shared = [field for field in (*UNIQUE, "name") if row.get(field) and new.get(field)]
    return row[shared[0]] == new[shared[0]] if shared else row.get("student") == new["student"]


def insert_columns(present: Sequence[str], columns: Sequence[str]) -> list[str]:
    """Return the columns that are present, with each new column after the column that precedes it in `columns`."""
    result = list(present)
    for before, column in zip(("", *columns), columns):
        if column not in result:
            result.insert(result.index(before) + 1 if before else 0, column)
    return result
