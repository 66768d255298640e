"""A leaderboard for a class: `brigade bench --entry` writes entries, and `brigade leaderboard` compares them.

An entry is the summary of a bench with fixed settings, in JSON. It proves nothing, because it was written on the
student's machine. An instructor who doubts an entry can repeat the bench with the student's submission.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from brigade.course.modules import BEYOND, TRAINING_MODULES, CourseError
from brigade.course.submission import Sources, open_no_follow
from brigade.lab.bench import TRUSTED_SHARE, round_numbers, summarize
from brigade.lab.ladder import EMULATED, Ladder, get_variant
from brigade.lab.plots import make_empty_table

FORMAT = 2
SETTINGS = {"format": FORMAT, "ranks": 2, "backend": "gloo", "workload": round_numbers(asdict(EMULATED))}
MODULES = tuple(entry for entry in TRAINING_MODULES if entry.number >= 4 and entry.track != BEYOND)  # with buckets
PATTERN = "*entry*.json"  # learning platforms add names before a file's name, and numbers after it
MOST_FILES = 2_000
MAX_BYTES = 50_000  # of a file; one with all modules has about 10 000
MAX_NAME = 20  # characters
NUMBERS = ("step, relative\nto torch DDP", "MB\nsent", "MB at\npeak", "MB\nkept")
HEADINGS = ("name", *NUMBERS, "submis-\nsion")
SUMS = (  # of a row's fields, in the next three columns
    ("sent_mb",),
    ("peak_param_mb", "peak_grad_mb", "peak_state_mb"),
    ("param_mb", "grad_mb", "state_mb"),
)
UNSAFE = re.compile(r"[^\w .,:-]|_|(?<!\d)\.")  # in a table cell: everything that could be Markdown, HTML or a link


@dataclass(frozen=True)
class Entry:
    """A validated entry: `cells` are its row of the table, without the name. `ratio` is its best step time."""

    name: str
    date: str
    ratio: float
    cells: tuple[str, ...]


def check_name(name: str) -> str:
    """Return the name of an entry. Raise CourseError if a table cannot show it."""
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name.strip()) == len(name) <= MAX_NAME:
        raise CourseError(f"the name of an entry must have 1 to {MAX_NAME} printable characters")
    return name


def make_file_name(name: str) -> str:
    """Return the name of an entry's file, such as "entry-ada.json"."""
    return f"entry-{re.sub(r'[^0-9A-Za-z_-]+', '-', name)}.json"


def make_entry(name: str, ladder: Ladder, sources: Sources) -> str:
    """Return the text of an entry. `sources` are the submission's modules."""
    share = ladder.real_s / ladder.link_s
    texts = sorted((module, text) for module, (_, text) in sources.items())
    submission = hashlib.sha256(json.dumps(texts).encode()).hexdigest()
    content = {"format": FORMAT, "name": name, "real_share": share, "submission": submission, **summarize(ladder)}
    return json.dumps(round_numbers(content), indent=1) + "\n"


def read_entry(path: Path) -> Entry:
    """Return the entry in a file. The file is not trusted. Raise CourseError if it is not a valid entry."""
    try:
        with open(path, "rb", opener=open_no_follow) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise CourseError("it is not an ordinary file")
            raw = file.read(MAX_BYTES + 1)
        content = json.loads(raw.decode())
        if any(content[name] != value for name, value in SETTINGS.items()):
            raise CourseError("its format or its settings are not those of `brigade bench --entry`")
        if not 0 <= read_number(content["real_share"]) <= TRUSTED_SHARE:
            raise CourseError(
                f"the real collectives took more than {100 * TRUSTED_SHARE:.0f} % of the emulated time, so the machine "
                "was too slow or too busy to emulate the link"
            )
        labels = [get_variant(entry).label for entry in MODULES]
        rows = {row["variant"]: row for row in content["rows"] if row["variant"] in labels}
        fastest = min(rows, key=lambda label: read_number(rows[label]["ratio"]["median"]))
        ratio, lower, upper = (read_number(rows[fastest]["ratio"][name]) for name in ("median", "lower", "upper"))
        cells = [f"{ratio:.2f} [{lower:.2f}-{upper:.2f}] ({fastest.partition(' ')[0]})"]
        for names in SUMS:
            totals = {label: sum(read_number(row[name]) for name in names) for label, row in rows.items()}
            best = min(totals, key=totals.__getitem__)
            cells.append(f"{totals[best]:.2f} ({best.partition(' ')[0]})")
        name, date = check_name(content["name"]), read_text(content["date"])
        return Entry(name, date, ratio, (*cells, read_text(content["submission"])[:8]))
    except OSError as error:
        raise CourseError(f"it cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise CourseError("it is not a file that `brigade bench --entry` wrote") from None


def read_number(value: Any) -> float:
    """Return a number that is finite and not negative. Raise ValueError for any other value."""
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise ValueError(f"{value!r} is not a number that a bench writes")
    return float(value)


def read_text(value: Any) -> str:
    """Return a printable text of at most 64 characters. Raise ValueError for any other value."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > 64:
        raise ValueError("not a text that a bench writes")
    return value


def read_entries(directory: Path) -> tuple[list[Entry], list[str]]:
    """Return the entries in a directory and its subdirectories, the fastest first, and a sentence about each problem.

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
            entry = read_entry(path)
        except CourseError as error:
            problems.append(f"{place} was left out: {error}.")
            continue
        if entry.name in by_name:
            problems.append(f"{place}: there are several entries with this name; the latest one counts.")
        by_name[entry.name] = max(by_name.get(entry.name, entry), entry, key=lambda one: one.date)
    if not by_name:
        raise CourseError(" ".join([f"there is no valid entry in {directory}.", *problems]).rstrip("."))
    return sorted(by_name.values(), key=lambda entry: (entry.ratio, entry.name)), problems


def make_table(entries: Sequence[Entry]) -> Table:
    """Return the table for the terminal."""
    table = make_empty_table("The best of each entry's modules, with its number", HEADINGS[0], HEADINGS[1:])
    for entry in entries:
        table.add_row(*map(Text, (entry.name, *entry.cells)))
    return table


def make_page(entries: Sequence[Entry], today: str) -> str:
    """Return the table as a Markdown page. `today` is the date on the page."""
    rows = [[heading.replace("-\n", "").replace("\n", " ") for heading in HEADINGS], ["---"] * len(HEADINGS)]
    rows += [[escape(cell) for cell in (entry.name, *entry.cells)] for entry in entries]
    lines = ["# Leaderboard", "", f"Entries as of {today}. [The rules](leaderboard.md) explain the numbers.", ""]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def escape(text: str) -> str:
    """Return the text for a cell of a Markdown table, with character references instead of unsafe characters."""
    return UNSAFE.sub(lambda match: f"&#{ord(match[0])};", text)
