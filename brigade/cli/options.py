"""Options that several commands have in common, and the ranges of numbers that options accept."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from brigade.course.modules import TARGETS, CourseError


@dataclass(frozen=True)
class Range:
    """The numbers that an option accepts, and their description in messages."""

    kind: type
    contains: Callable[[Any], bool]
    description: str


ABOVE_ZERO = Range(float, lambda value: 0 < value < math.inf, "a number above 0")
NOT_NEGATIVE = Range(float, lambda value: 0 <= value < math.inf, "a number that is not negative")
FRACTION = Range(float, lambda value: 0 < value <= 1, "a number above 0 and at most 1")


def add_number(parser: argparse._ActionsContainer, name: str, numbers: Range, **details: Any) -> None:
    """Add an option that accepts these numbers. Parsing raises CourseError for any other number."""

    def parse(text: str) -> Any:
        value = numbers.kind(text)
        if not numbers.contains(value):
            raise CourseError(f"{name} {text}: expected {numbers.description}")
        return value

    parse.__name__ = numbers.kind.__name__  # for argparse's own message if the text is not a number
    parser.add_argument(name, type=parse, **details)


def add_target(parser: argparse.ArgumentParser, details: str = "") -> None:
    parser.add_argument("--target", default="lessons", metavar="DIR", help=TARGETS + details)


def add_prior(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prior",
        default="own",
        choices=("own", "reference"),
        help="use your own earlier modules, or those of the reference solution (default: own)",
    )
