"""The only collector of graded checks. It adds the functions to the list from `course.listing`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from brigade.course.checks.context import CheckContext
from brigade.course.checks.course_tests import import_from_tests
from brigade.course.table.listing import GradedCheck, list_checks
from brigade.course.table.modules import Module
from brigade.ranks.errors import UserError


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
    """Import the checks of a module, or the file with an instructor's own. Raise UserError if the latter fails."""
    if not file:
        return import_from_tests(entry.checks.stem)
    name = Path(file).stem
    if getattr(sys.modules.get(name), "__file__", "") != file:
        import_from_tests("helpers")  # which such a file may import
        spec = importlib.util.spec_from_file_location(name, file)
        if spec is None or spec.loader is None:
            raise UserError(f"{file} cannot be imported: it is no Python file")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except Exception as error:
            del sys.modules[name]
            raise UserError(f"{file} cannot be imported: {type(error).__name__}: {error}") from None
    return sys.modules[name]
