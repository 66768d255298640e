"""The only collector of graded checks. It adds the functions to the list from `course.listing`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brigade.course.listing import GradedCheck, list_checks
from brigade.course.modules import ROOT, CourseError, Module

if TYPE_CHECKING:
    from brigade.checks.context import CheckContext


@dataclass(frozen=True, kw_only=True)
class Check(GradedCheck):
    """A graded check that can be run."""

    function: Callable[[CheckContext], None]


def collect(entries: Sequence[Module]) -> list[Check]:
    """Return all graded checks of the modules, in order. This imports their files, and therefore torch."""
    return [
        Check(**asdict(check), function=getattr(import_checks(entry, check.file), check.name))
        for entry in entries
        for check in list_checks(entry)
    ]


def import_checks(entry: Module, file: str = "") -> Any:
    """Import the checks of a module, or the file with an instructor's own. Raise CourseError if the latter fails."""
    if not file:
        return import_from_tests(entry.checks.stem)
    name = Path(file).stem
    if getattr(sys.modules.get(name), "__file__", "") != file:
        import_from_tests("helpers")  # which such a file may import
        spec = importlib.util.spec_from_file_location(name, file)
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except Exception as error:
            del sys.modules[name]
            raise CourseError(f"{file} cannot be imported: {type(error).__name__}: {error}") from None
    return sys.modules[name]


def import_from_tests(name: str) -> Any:
    """Import a Python module from the directory `tests`, such as the checks or the mutants of a course module."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module(name)
