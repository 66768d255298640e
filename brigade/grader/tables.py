"""Read and write CSV files that people open with a spreadsheet, and the numbers in their cells."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from brigade.ranks.errors import UserError

BOM = "\ufeff"  # without it, Excel does not read a CSV file as UTF-8
# A spreadsheet evaluates cells that begin with one of these. It may read separators as the beginning of another cell.
FORMULA = re.compile(r"(^|[;,|\t\r\n])(\s*)(?=[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20])")
NUMBER = re.compile(r"-?\d+([.,]\d+)?")
SEPARATOR = re.compile(r"sep=(.)\r?\n")  # a first line that tells Excel the delimiter


class Table(NamedTuple):
    """The columns and the rows of a CSV file."""

    columns: list[str]
    rows: list[dict[str, str]]


def escape(cell: str) -> str:
    """Return a cell that a spreadsheet does not evaluate as a formula."""
    return cell if NUMBER.fullmatch(cell) else FORMULA.sub(r"\1\2'", cell)


def format_csv(columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> str:
    """Return these columns of a table as CSV. No cell is a formula."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerows([columns, *([escape(row.get(column, "")) for column in columns] for row in rows)])
    return text.getvalue()


def read_table(path: Path) -> Table:
    """Return the content of a CSV file with commas, semicolons or tabs.

    Raise UserError for any other file, or if a cell does not belong to exactly one column, because it would be lost.
    """
    try:
        content = path.read_bytes()
        text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
        separator = SEPARATOR.match(text)
        text = text[separator.end() :] if separator else text
        delimiter = separator[1] if separator else max(",;\t", key=text.partition("\n")[0].count)
        lines = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a CSV file in UTF-8 ({error}); save it as 'CSV UTF-8'") from None
    lines = [[unicodedata.normalize("NFC", cell.strip()) for cell in line] for line in lines]
    columns = list(filter(any, itertools.zip_longest(*filter(any, lines), fillvalue="")))
    headings = [column[0] for column in columns]
    if wrong := [heading for heading in headings if not heading or headings.count(heading) > 1]:
        problem = f"the heading {wrong[0]!r} is there twice" if wrong[0] else "a column has no heading"
        raise UserError(f"{path}: {problem}; give each column a name of its own")
    rows = [dict(zip(headings, cells, strict=True)) for cells in list(zip(*columns, strict=True))[1:]]
    return Table(headings, rows)


def parse_number(cell: str) -> float | None:
    """Return the finite number in a cell, or None. A spreadsheet may write a decimal comma."""
    try:
        return value if math.isfinite(value := float(cell.replace(",", "."))) else None
    except ValueError:
        return None


def format_points(points: float) -> str:
    """Return the points with at most two decimals."""
    return f"{round(points, 2) + 0:.2f}".rstrip("0").rstrip(".")
