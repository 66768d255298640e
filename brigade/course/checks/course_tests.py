"""The directory `tests` of the course, from which checks, causes and mutants are imported."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from brigade.course.table.modules import ROOT


def import_from_tests(name: str) -> Any:
    """Import a Python module from the directory `tests`, such as the checks or the mutants of a course module."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    return importlib.import_module(name)
