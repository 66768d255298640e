"""Entries for the leaderboard of a class: `brigade bench --entry` writes them, and `brigade leaderboard` reads them.

An entry is one line of JSON: the rows of a bench with fixed settings, the versions and the machine, the results of the
checks, and SHA-256 checksums of the modules, of the course's files and of the line itself. The checksums show whether a
file has changed since the entry was written. They do not show that the numbers are true, because the student can change
everything on their machine. An instructor who doubts an entry can repeat the bench with the submission that has the
same checksum.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from brigade.course.editions import CHECKS
from brigade.course.modules import ROOT, TRAINING_MODULES, CourseError
from brigade.course.submission import Sources
from brigade.lab.bench import TRUSTED_SHARE, Bench, Spread, round_numbers, summarize
from brigade.lab.ladder import EMULATED, get_variant

FORMAT = 1
MODULES = tuple(entry for entry in TRAINING_MODULES if entry.number >= 4)  # from the first module with buckets on
WORLD_SIZE = 2
BACKEND = "gloo"
SETTINGS = {"ranks": WORLD_SIZE, "backend": BACKEND, "workload": round_numbers(asdict(EMULATED))}
SEED = 1  # of the checks
KINDS = ("param", "grad", "state")  # kinds of memory, as in the names of a row's fields
MAX_NAME = 40  # characters
MAX_BYTES = 50_000  # of a line; a line with all modules has about 10 000
HASHED = (
    "brigade/events.py",
    "brigade/progress.py",
    *(f"brigade/{folder}/**/*.py" for folder in ("ipc", "runner", "rank", "checks", "lab")),
    *CHECKS,
)


@dataclass(frozen=True)
class Result:
    """The results of a module in an entry: the step time relative to torch DDP, and MB (10^6 bytes) per rank.

    `module` is the label of the variant. `peak_mb` and `kept_mb` are the memory for parameters, gradients and optimizer
    state, at the peak of a step and between steps.
    """

    module: str
    ratio: Spread
    sent_mb: float
    peak_mb: float
    kept_mb: float


@dataclass(frozen=True)
class Entry:
    """A validated entry.

    `submission` is the SHA-256 checksum of the student's modules, and `course` is that of the files in `HASHED`.
    """

    name: str
    date: str
    torch: str
    python: str
    cores: str
    course: str
    submission: str
    results: tuple[Result, ...]


def check_name(name: str) -> str:
    """Return the name of an entry. Raise CourseError if a table cannot show it."""
    if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name.strip()) == len(name) <= MAX_NAME:
        raise CourseError(f"the name of an entry must have 1 to {MAX_NAME} printable characters")
    return name


def make_file_name(name: str) -> str:
    """Return the name of an entry's file, such as "entry-ada.json"."""
    return f"entry-{re.sub(r'[^0-9A-Za-z_-]+', '-', name)}.json"


def make_line(name: str, results: Bench, sources: Sources, failed: dict[int, list[str]], left_out: list[str]) -> str:
    """Return the line of an entry.

    `failed` contains the names of the failed checks of each module that was checked. `left_out` contains sentences
    about the modules that are not written.
    """
    content = {
        "format": FORMAT,
        "name": name,
        **summarize(results),
        "real_share": results.ladder.real_s / results.ladder.link_s,
        "expected_loss": results.ladder.expected_loss,
        "check_seed": SEED,
        "failed_checks": failed,
        "left_out": left_out,
        "submission": {module: hash_text(text) for module, (_, text) in sorted(sources.items())},
        "course": hash_course(),
    }
    content = json.loads(json.dumps(round_numbers(content)))
    return json.dumps(content | {"checksum": compute_checksum(content)}) + "\n"


def compute_checksum(content: dict[str, Any]) -> str:
    """Return the SHA-256 checksum of an entry without its field `checksum`."""
    return hash_text(json.dumps({key: content[key] for key in sorted(content) if key != "checksum"}, sort_keys=True))


def hash_text(text: str) -> str:
    """Return the SHA-256 of a text as 64 hexadecimal digits."""
    return hashlib.sha256(text.encode()).hexdigest()


@functools.cache
def hash_course() -> str:
    """Return a SHA-256 checksum of the files that run the checks and the bench.

    The checksum is the same in the student edition.
    """
    paths = sorted({path for pattern in HASHED for path in ROOT.glob(pattern)})
    return hash_text("\0".join(f"{path.relative_to(ROOT)}\0{path.read_text()}" for path in paths))


def read_line(line: str) -> Entry:
    """Return the entry on this line. The line is not trusted. Raise CourseError if it is not a valid entry."""
    try:
        content = json.loads(line, parse_constant=refuse_constant)
        if content["format"] != FORMAT:
            raise CourseError(f"its format is {str(content['format'])[:20]!r}, but this version reads format {FORMAT}")
        if content["checksum"] != compute_checksum(content):
            raise CourseError("its checksum does not match, so the line was changed after it was written")
        if any(content[name] != value for name, value in SETTINGS.items()):
            raise CourseError("its settings are not those of `brigade bench --entry`")
        if not 0 <= read_number(content["real_share"]) <= TRUSTED_SHARE:
            raise CourseError(
                f"the real collectives took more than {100 * TRUSTED_SHARE:.0f} % of the emulated time, so the machine "
                "was too slow or too busy to emulate the link"
            )
        made_with = [read_text(str(content["made_with"][name])) for name in ("torch", "python", "cores")]
        return Entry(
            check_name(content["name"]),
            read_text(content["date"]),
            *made_with,
            read_text(content["course"]),
            hash_text(json.dumps(content["submission"], sort_keys=True)),
            read_results(content["rows"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise CourseError("it is not a line that `brigade bench --entry` wrote") from None


def read_results(rows: Sequence[dict[str, Any]]) -> tuple[Result, ...]:
    """Return the results of the course's modules. Raise ValueError, KeyError or TypeError if they are malformed."""
    labels = [get_variant(entry).label for entry in MODULES]
    results = tuple(
        Result(
            row["variant"],
            Spread(*(read_number(row["ratio"][name]) for name in ("median", "lower", "upper"))),
            read_number(row["sent_mb"]),
            sum(read_number(row[f"peak_{kind}_mb"]) for kind in KINDS),
            sum(read_number(row[f"{kind}_mb"]) for kind in KINDS),
        )
        for row in rows
        if row["variant"] in labels
    )
    if not results or len({result.module for result in results}) < len(results):
        raise ValueError("no module, or one module twice")
    return results


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


def refuse_constant(name: str) -> None:
    """Raise ValueError, because NaN and infinity are not measurements."""
    raise ValueError(f"{name} in an entry")
