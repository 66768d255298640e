"""`brigade leaderboard`: read a class's entries, rank them, and show them in the terminal or as a Markdown page."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from brigade.course.modules import CourseError
from brigade.course.submission import open_no_follow
from brigade.lab.entry import MAX_BYTES, Entry, Result, hash_course, read_line
from brigade.lab.plots import format_quartiles, make_empty_table

PATTERN = "*entry*.json*"  # learning platforms add names before a file's name, and numbers after it
MOST_FILES = 2_000
MOST_LINES = 2_000  # per file


@dataclass(frozen=True)
class Category:
    """A table of the leaderboard: how to compute the value that it compares, and how to show it. Lower is better."""

    title: str
    heading: str
    compute_value: Callable[[Result], float]
    describe: Callable[[Result], str]


CATEGORIES = (
    Category(
        "Fastest step",
        "step time, relative to torch DDP",
        lambda result: result.ratio.median,
        lambda result: f"{result.ratio.median:.2f} [{format_quartiles(result.ratio, 2)}]",
    ),
    Category(
        "Fewest bytes sent",
        "MB that a rank sends in a step",
        lambda result: result.sent_mb,
        lambda result: f"{result.sent_mb:.2f}",
    ),
    Category(
        "Least memory at the peak of a step",
        "MB on the fullest rank",
        lambda result: result.peak_mb,
        lambda result: f"{result.peak_mb:.2f}",
    ),
    Category(
        "Least memory between steps",
        "MB on the fullest rank",
        lambda result: result.kept_mb,
        lambda result: f"{result.kept_mb:.2f}",
    ),
)
ENTRIES_TITLE = "Entries"
ENTRIES_HEADINGS = ("name", "date", "torch", "Python", "cores", "modules", "submission")
UNSAFE = re.compile(r"[^\w .,:-]|_|(?<!\d)\.")  # in a table cell: everything that could be Markdown, HTML or a link


def read_entries(directory: Path) -> tuple[list[Entry], list[str]]:
    """Return the entries in a directory and its subdirectories, and a sentence about each problem.

    If several entries have the same name, the latest one counts. Raise CourseError if there is no entry.
    """
    if not directory.is_dir():
        raise CourseError(f"there is no directory {directory}")
    paths = sorted(directory.rglob(PATTERN))
    problems = [f"Only the first {MOST_FILES} of {len(paths)} files were read."] if len(paths) > MOST_FILES else []
    by_name: dict[str, Entry] = {}
    for path in paths[:MOST_FILES]:
        place = ascii(str(path.relative_to(directory)))[1:-1]
        try:
            lines = read_lines(path)
        except CourseError as error:
            problems.append(f"{place} was left out: {error}.")
            continue
        for number, line in enumerate(lines, 1):
            try:
                entry = read_line(line)
            except CourseError as error:
                problems.append(f"{place}, line {number}, was left out: {error}.")
                continue
            if entry.course != hash_course():
                problems.append(f"{place}, line {number}: the checks or the bench differ from this course's.")
            if entry.name in by_name:
                problems.append(
                    f"{place}, line {number}: there are several entries with this name; the latest one counts."
                )
            by_name[entry.name] = max(by_name.get(entry.name, entry), entry, key=lambda one: one.date)
    if not by_name:
        raise CourseError(" ".join([f"there is no valid entry in {directory}.", *problems]).rstrip("."))
    return list(by_name.values()), problems


def read_lines(path: Path) -> list[str]:
    """Return the nonempty lines of a file. Raise CourseError if the file is not an ordinary file or is too large."""
    try:
        with open(path, "rb", opener=open_no_follow) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CourseError("it is not an ordinary file")
            raw = file.read(MAX_BYTES * MOST_LINES + 1)
        lines = [line for line in raw.decode().splitlines() if line.strip()]
    except OSError as error:
        raise CourseError(f"it cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise CourseError("it is not text") from None
    if len(lines) > MOST_LINES or any(len(line) > MAX_BYTES for line in lines):
        raise CourseError(f"it has more than {MOST_LINES} lines, or a line has more than {MAX_BYTES} characters")
    return lines


def rank(entries: Sequence[Entry], category: Category) -> list[tuple[int, Entry, Result]]:
    """Return (rank, entry, result of its best module) for each entry, the best first.

    Entries whose rounded values are equal have the same rank.
    """
    best = [(min(entry.results, key=category.compute_value), entry) for entry in entries]
    best.sort(key=lambda pair: (round(category.compute_value(pair[0]), 2), pair[1].name))
    values = [round(category.compute_value(result), 2) for result, _ in best]
    return [(1 + values.index(value), entry, result) for value, (result, entry) in zip(values, best)]


def make_rows(entries: Sequence[Entry]) -> dict[str, list[tuple[str, ...]]]:
    """Return the tables by title. Each table has a row of headings, then a row for each entry."""
    tables = {
        category.title: [
            ("rank", "name", category.heading, "module"),
            *(
                (str(number), entry.name, category.describe(result), result.module)
                for number, entry, result in rank(entries, category)
            ),
        ]
        for category in CATEGORIES
    }
    tables[ENTRIES_TITLE] = [
        ENTRIES_HEADINGS,
        *(
            (
                entry.name,
                entry.date[:10],
                entry.torch,
                entry.python,
                entry.cores,
                ",".join(result.module.partition(" ")[0] for result in entry.results),
                entry.submission[:12],
            )
            for entry in sorted(entries, key=lambda entry: entry.name)
        ),
    ]
    return tables


def make_tables(entries: Sequence[Entry]) -> list[Table]:
    """Return the tables for the terminal."""
    tables = []
    for title, (headings, *rows) in make_rows(entries).items():
        table = make_empty_table(title, headings[0], headings[1:])
        for row in rows:
            table.add_row(*map(Text, row))
        tables.append(table)
    return tables


def make_page(entries: Sequence[Entry], today: str) -> str:
    """Return the tables as a Markdown page. `today` is the date on the page."""
    lines = ["# Leaderboard", "", f"Entries as of {today}. [The rules](leaderboard.md) explain the numbers."]
    for title, rows in make_rows(entries).items():
        cells = [[escape(cell) for cell in row] for row in rows]
        cells.insert(1, ["---"] * len(rows[0]))
        lines += ["", f"## {title}", "", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return the text for a cell of a Markdown table, with character references instead of unsafe characters."""
    return UNSAFE.sub(lambda match: f"&#{ord(match[0])};", text)
