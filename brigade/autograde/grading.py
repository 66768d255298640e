"""Runs all graded checks on one submission and keeps the score.

What is possible is known before anything runs: every check of every module asked for is there from the start, with zero
points and the words "did not finish". A check whose ranks die, or that is never reached, stays so.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from brigade import ranks
from brigade.autograde.outcome import Grading, Outcome
from brigade.course import MODULES, ROOT, CourseError, Module
from brigade.plugin import Checked, seed_of
from brigade.submission import read
from brigade.verdict import CheckFailed

TOTAL_S = 900.0  # for one submission; what has not run by then counts as failed
DEADLINE_S = 20.0  # for one run of ranks
TEXT_LIMIT = 4_000  # characters of feedback for one check: about a screen
PRINTED_LINES = 10  # of each rank


def collect(entries: Sequence[Module]) -> list[Outcome]:
    """All graded checks of the modules, in order, none of which has run."""
    return [
        Outcome(entry.number, name, inspect.getdoc(check).splitlines()[0], points_of(check))
        for entry in entries
        for name, check in checks(entry).items()
    ]


def checks(entry: Module) -> dict[str, Callable[[Checked], None]]:
    """The module's graded checks, by name."""
    if str(ROOT / "tests") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests"))
    module = importlib.import_module(entry.checks.stem)
    return {name: function for name, function in vars(module).items() if name.startswith("test_")}


def points_of(check: Callable[[Checked], None]) -> int:
    return next(mark.args[0] for mark in check.pytestmark if mark.name == "points")


class Timed(Checked):
    """A checked submission whose runs end with the whole grading's time."""

    ends_at = float("inf")

    def run(self, *args: object, **kwargs: object) -> ranks.RankResults:
        left = self.ends_at - time.monotonic()
        if left <= 0:
            raise CheckFailed("the submission is graded within its time limit", "the time was used up by its checks")
        self.deadline = min(DEADLINE_S, left) if self.backend == "gloo" else left
        return super().run(*args, **kwargs)


def grade(
    target: Path,
    entries: Sequence[Module],
    *,
    seed: int,
    prior: str = "auto",
    backend: str = "gloo",
    share_gpu: bool = False,
    total_s: float = TOTAL_S,
    notes: Sequence[str] = (),
    on_change: Callable[[Grading], None] = lambda grading: None,
) -> Grading:
    """Grades the modules of `target`. `on_change` is called with the grading before the first check and after each.

    It may raise OSError after a check (no space for the results): the grading goes on, and its last call counts.
    With `prior` "auto" earlier modules are the submission's own; what fails then, while an earlier module does not
    pass all its checks, is checked once more on the reference's: an error costs its points once.
    """
    torch.set_num_threads(1)  # the truth is small, and several gradings may run side by side
    grading = Grading(collect(entries), seed, notes=list(notes))
    on_change(grading)
    began = time.monotonic()

    def examine(outcome: Outcome, whose: str) -> None:
        start = time.monotonic()
        for _ in range(2):
            try:
                passed, text = verdict(target, outcome, whose, grading.seed, backend, share_gpu, began + total_s)
                break
            except ranks.ServerLost as lost:  # ended from outside, for want of memory perhaps: a second try
                passed, text = False, str(lost)
        outcome.seconds += time.monotonic() - start
        if passed or not outcome.finished:  # a repeated check can only gain
            outcome.passed, outcome.text, outcome.prior = passed, text, whose
        outcome.finished = True
        grading.seconds = time.monotonic() - began
        with contextlib.suppress(OSError):
            on_change(grading)

    for outcome in grading.outcomes:
        examine(outcome, "reference" if prior == "reference" else "own")
    if prior == "auto":
        for outcome in grading.outcomes:
            if not outcome.passed and earlier_failed(grading, outcome.module, target):
                examine(outcome, "reference")
    grading.finished = True
    on_change(grading)
    return grading


def earlier_failed(grading: Grading, number: int, target: Path) -> bool:
    """Whether an earlier module failed a check, or was not asked for and so is not known to be right."""
    graded = {outcome.module for outcome in grading.outcomes}
    earlier = [entry.number for entry in MODULES if entry.number < number]
    return any(n not in graded or not all(o.passed for o in grading.of_module(n)) for n in earlier)


def verdict(
    target: Path, outcome: Outcome, whose: str, seed: int, backend: str, share_gpu: bool, ends_at: float
) -> tuple[bool, str]:
    """Whether the check passes, and what the student is told. Raises ServerLost when the fork server has ended."""
    entry = MODULES[outcome.module - 1]
    checked = None
    try:
        sources = read(target, entry.number, whose).sources
        checked = Timed(sources, seed=seed_of(seed, outcome.name), backend=backend, share_gpu=share_gpu)
        checked.ends_at = ends_at
        checks(entry)[outcome.name](checked)
    except CheckFailed as failed:
        return False, shortened(str(failed), checked.output if checked else [])
    except ranks.ServerLost:
        raise
    except CourseError as error:
        return False, str(error)
    except Exception as error:  # an answer that a check did not foresee is wrong, and never a crash of the grader
        said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return False, f"what the ranks returned could not be examined ({said})"
    return True, ""


def shortened(text: str, output: Sequence[str]) -> str:
    """The feedback and the last lines that the ranks printed: one screen."""
    lines = [text[:TEXT_LIMIT] + (" ..." if len(text) > TEXT_LIMIT else "")]
    for rank, printed in enumerate(output):
        lines += [f"[rank {rank}] {line[:200]}" for line in printed.rstrip().splitlines()[-PRINTED_LINES:]]
    return "\n".join(lines)[: 2 * TEXT_LIMIT]
