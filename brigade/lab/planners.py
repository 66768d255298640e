"""The pure functions of the solutions, which plan buckets, layouts and schedules, for pictures and sliders."""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator

from brigade.course.modules import HAS_SOLUTIONS, REFERENCE, CourseError, find_module
from brigade.course.submission import install, read

PACKAGE = "planned_solutions"


@functools.cache
def import_solution(name: str) -> Callable:
    """Import a public function of the solutions into this process and return it.

    In the student edition, import the student's own function.
    """
    entry = find_module(name)
    install(PACKAGE, read(REFERENCE, entry.number).sources)
    return getattr(importlib.import_module(f"{PACKAGE}.{entry.package}.{entry.name}"), name)


@contextlib.contextmanager
def load_planner(name: str) -> Iterator[Callable]:
    """Yield `import_solution(name)`. In the block, errors of unwritten or broken student code become CourseError."""
    try:
        yield import_solution(name)
    except NotImplementedError as part:
        raise CourseError(f"{part} is not written yet") from None
    except Exception as error:
        if HAS_SOLUTIONS or isinstance(error, CourseError):
            raise
        number = find_module(name).number
        raise CourseError(f"your own {name} does not work: `brigade check {number}` tells you more") from None
