"""Options that several commands have in common, and the numbers and the files that options accept."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from brigade.course.table.modules import TARGETS
from brigade.ranks.errors import UserError


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts, and their description in messages."""

    kind: type
    contains: Callable[[Any], bool]
    description: str


ABOVE_ZERO = Range(float, lambda value: 0 < value < math.inf, "a number above 0")
NOT_NEGATIVE = Range(float, lambda value: 0 <= value < math.inf, "a number that is not negative")
AT_LEAST_ONE = Range(int, lambda value: value >= 1, "at least 1")


def add(
    parser: argparse._ActionsContainer, usage: str, text: str, numbers: Range | None = None, **details: Any
) -> None:
    """Add an option such as "--ranks N", or "--save" without a value. `text` describes it in the help.

    If `numbers` are given, parsing raises UserError for any other number.
    """
    name, _, metavar = usage.partition(" ")
    if numbers:
        kind, contains, description = numbers.kind, numbers.contains, numbers.description

        def parse(value: str) -> Any:
            number = kind(value)
            if not contains(number):
                raise UserError(f"{name} {value}: expected {description}")
            return number

        parse.__name__ = kind.__name__  # for argparse's own message if the text is not a number
        details["type"] = parse
    if metavar:
        details["metavar"] = metavar
    elif "choices" not in details:
        details["action"] = "store_true"
    parser.add_argument(name, help=text, **details)


def add_target(parser: argparse.ArgumentParser, details: str = "") -> None:
    add(parser, "--target DIR", TARGETS + details, default="lessons")


def add_prior(parser: argparse.ArgumentParser) -> None:
    prior = "use your own earlier modules, or those of the reference solution (default: own)"
    add(parser, "--prior", prior, default="own", choices=("own", "reference"))


@overload
def resolve_results_file(path: str, submission: Sequence[str] = (), makes_parent: bool = False) -> Path: ...


@overload
def resolve_results_file(path: None, submission: Sequence[str] = (), makes_parent: bool = False) -> None: ...


def resolve_results_file(path: str | None, submission: Sequence[str] = (), makes_parent: bool = False) -> Path | None:
    """Return the absolute path of a results file, or None if `path` is None. Create its directory if `makes_parent`.

    Raise UserError if the file cannot be written, or if it or a directory inside a path of the `submission` is a
    link: then the author of the submission could choose which file is overwritten.
    """
    if path is None:
        return None
    given = Path(os.path.abspath(path))
    roots = {root for one in submission for root in (Path(os.path.abspath(one)), Path(one).resolve())}
    for part in (given, *(parent for parent in given.parents if roots & set(parent.parents))):
        if part.is_symlink():
            raise UserError(f"{part} is a link; results cannot be written to or through a link")
    out = given.parent.resolve() / given.name
    if makes_parent and out.parent.parent.is_dir() and not out.parent.exists():
        out.parent.mkdir(mode=0o700, exist_ok=True)
        give_to_caller(out.parent)
    if not out.parent.is_dir():
        raise UserError(f"there is no directory {out.parent} for the results; create it first")
    if out.exists() and not out.is_file():
        raise UserError(f"{out} is not an ordinary file, so the results cannot replace it")
    return out


def give_to_caller(path: Path | int) -> None:
    """Give a file or directory that root has made to the user who has called `sudo`, if one has."""
    if os.geteuid() == 0 and "SUDO_UID" in os.environ and "SUDO_GID" in os.environ:
        os.chown(path, int(os.environ["SUDO_UID"]), int(os.environ["SUDO_GID"]))
