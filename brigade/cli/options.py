"""Options that several commands share, and the ranges of numbers that options take."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from brigade.course.modules import TARGETS, CourseError


@dataclass(frozen=True)
class Range:
    """The numbers that an option takes, and how a message describes them."""

    kind: type
    contains: Callable[[Any], bool]
    description: str


ABOVE_ZERO = Range(float, lambda value: 0 < value < math.inf, "a number above 0")
NOT_NEGATIVE = Range(float, lambda value: 0 <= value < math.inf, "a number that is not negative")
FRACTION = Range(float, lambda value: 0 < value <= 1, "a number above 0, at most 1")


def add_number(parser: argparse._ActionsContainer, name: str, numbers: Range, **details: Any) -> None:
    """Add an option that takes these numbers; parsing raises CourseError for any other number."""

    def parse(text: str) -> Any:
        value = numbers.kind(text)
        if not numbers.contains(value):
            raise CourseError(f"{name} {text}: expected {numbers.description}")
        return value

    parse.__name__ = numbers.kind.__name__  # for argparse's own message if the text is no number
    parser.add_argument(name, type=parse, **details)


def add_target(parser: argparse.ArgumentParser, details: str = "") -> None:
    parser.add_argument("--target", default="lessons", metavar="DIR", help=TARGETS + details)


def add_prior(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prior", default="own", choices=("own", "reference"), help="whose earlier modules to use (default: own)"
    )
