"""The only collector of graded checks. It adds the functions to the list from `course.listing`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from brigade.course.listing import GradedCheck, list_checks
from brigade.course.modules import ROOT, Module

if TYPE_CHECKING:
    from brigade.checks.context import CheckContext


@dataclass(frozen=True, kw_only=True)
class Check(GradedCheck):
    """A graded check that can be run."""

    function: Callable[[CheckContext], None]


def collect(entries: Sequence[Module]) -> list[Check]:
    """Return all graded checks of the modules, in order. This imports their files, and therefore torch."""
    return [
        Check(**asdict(check), function=getattr(import_from_tests(entry.checks.stem), check.name))
        for entry in entries
        for check in list_checks(entry)
    ]


def import_from_tests(name: str) -> Any:
    """Import a Python module from the directory `tests`, such as the checks or the mutants of a course module."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module(name)
