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

from brigade.checks.plugin import Checked, seed_of
from brigade.checks.verdict import CheckFailed
from brigade.course.modules import MODULES, ROOT, CourseError, Module
from brigade.course.submission import read
from brigade.grade.outcome import Grading, Outcome
from brigade.runner import ranks

TOTAL_S = 900.0  # for one submission; what has not run by then counts as failed
PATIENCE = 2  # a module is stopped after this many of its checks reach their deadline
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
    """A checked submission whose runs end when the time of its module is over."""

    ends_at = float("inf")

    def run(self, *args: object, **kwargs: object) -> ranks.RankResults:
        left = self.ends_at - time.monotonic()
        if left <= 0:
            raise CheckFailed("the module is graded within its time", "its checks have used up that time")
        self.deadline = min(ranks.DEADLINE_S[self.backend], left)
        try:
            return super().run(*args, **kwargs)
        except CheckFailed as failed:
            if self.failure_kind == "deadline" and self.deadline == left:
                failed = CheckFailed(failed.expected, f"{failed.happened}\nHere the module's time ended.", failed.cause)
            raise failed from None


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
    """Grade the modules of `target`. `on_change` is called with the grading before the first check and after each.

    It may raise OSError after a check (no space for the results): the grading goes on, and its last call counts.
    With `prior` "auto" earlier modules are the submission's own; what fails then, while an earlier module does not
    pass all its checks, is checked once more on the reference's: an error costs its points once.
    """
    torch.set_num_threads(1)  # the truth is small, and several gradings may run side by side
    grading = Grading(collect(entries), seed, notes=list(notes))
    on_change(grading)
    Schedule(target, grading, prior, backend, share_gpu, total_s, on_change).run()
    grading.finished = True
    on_change(grading)
    return grading


class Schedule:
    """Runs the checks in an order in which no module can use up the time of the others.

    First, every check runs once. A module gets an equal share of the time that is left, and it is stopped after two
    checks that reach their deadline. Once a check has reached its deadline or a deadlock, later modules start on the
    reference's earlier modules: on the submission's own they would probably wait in vain. Only then are failed checks
    repeated with the other earlier modules.
    """

    def __init__(
        self,
        target: Path,
        grading: Grading,
        prior: str,
        backend: str,
        share_gpu: bool,
        total_s: float,
        on_change: Callable[[Grading], None],
    ):
        self.target = target
        self.grading = grading
        self.prior = prior
        self.backend = backend
        self.share_gpu = share_gpu
        self.total_s = total_s
        self.on_change = on_change
        self.began = time.monotonic()
        self.ends_at = self.began + total_s
        self.endings: dict[tuple[int, str, str], str] = {}  # (module, check, prior source) -> how that attempt ended
        self.stalled: set[int] = set()  # modules that reached a deadline, a deadlock, or the end of their time

    def run(self) -> None:
        """Run every check once, then repeat what failed and may pass with other earlier modules."""
        modules = self.grading.modules()
        for index, (number, outcomes) in enumerate(modules):
            now = time.monotonic()
            share = max(0.0, self.ends_at - now) / (len(modules) - index)
            self.attempt(outcomes, self.first_source(number), now + share)
        if self.prior == "auto":
            for source in ("reference", "own"):
                for _, outcomes in modules:
                    repeated = [outcome for outcome in outcomes if self.may_gain(outcome, source)]
                    self.attempt(repeated, source, self.ends_at)

    def first_source(self, number: int) -> str:
        """Return whose earlier modules the module is checked with first."""
        if self.prior != "auto":
            return self.prior
        return "reference" if any(stalled < number for stalled in self.stalled) else "own"

    def may_gain(self, outcome: Outcome, source: str) -> bool:
        """Return whether a check that has not passed could pass with the earlier modules of `source`."""
        if outcome.passed or self.ending(outcome, source):
            return False
        if source == "reference":
            return earlier_failed(self.grading, outcome.module)
        # It has run on the reference's modules, or not at all. A check that waited in vain there will do so here, too.
        stopped = self.time_outs(outcome.module, "reference") >= PATIENCE
        return not stopped and self.ending(outcome, "reference") not in ("deadline", "deadlock")

    def attempt(self, outcomes: Sequence[Outcome], source: str, ends_at: float) -> None:
        """Run these checks of one module, until it is stopped."""
        started = time.monotonic()
        for outcome in outcomes:
            patience = PATIENCE
            if source == "own" and self.first_source(outcome.module) == "reference":
                patience = 1  # an earlier module has stalled already
            if time.monotonic() >= self.ends_at:
                self.skip(outcome, f"the time limit of the whole grading ({self.total_s:.0f} s) was used up")
            elif self.time_outs(outcome.module, source) >= patience:
                self.skip(outcome, f"module {outcome.module} was stopped: {patience} of its checks did not end in time")
            elif time.monotonic() >= ends_at:
                self.stalled.add(outcome.module)
                share = f"its share of the time limit ({ends_at - started:.0f} s)"
                self.skip(outcome, f"module {outcome.module} had used up {share}")
            else:
                self.examine(outcome, source, ends_at)

    def skip(self, outcome: Outcome, reason: str) -> None:
        """Say why a check does not run. What an earlier attempt said is kept."""
        if not self.has_run(outcome):
            outcome.text = f"This check was not run, because {reason}."
        self.finish(outcome)

    def examine(self, outcome: Outcome, source: str, ends_at: float) -> None:
        """Run one check. A check that is repeated can only gain."""
        start = time.monotonic()
        for _ in range(2):
            try:
                passed, text, ending = verdict(
                    self.target, outcome, source, self.grading.seed, self.backend, self.share_gpu, ends_at
                )
                break
            except ranks.ServerLost as lost:  # ended from outside, for want of memory perhaps: a second try
                passed, text, ending = False, str(lost), "failed"
        outcome.seconds += time.monotonic() - start
        if passed or not self.has_run(outcome):
            outcome.passed, outcome.text, outcome.prior = passed, text, source
        self.endings[outcome.module, outcome.name, source] = ending
        if ending in ("deadline", "deadlock"):
            self.stalled.add(outcome.module)
        self.finish(outcome)

    def finish(self, outcome: Outcome) -> None:
        outcome.finished = True
        self.grading.seconds = time.monotonic() - self.began
        with contextlib.suppress(OSError):
            self.on_change(self.grading)

    def ending(self, outcome: Outcome, source: str) -> str:
        """Return how the check ended with the earlier modules of `source`; "" if it has not run with them."""
        return self.endings.get((outcome.module, outcome.name, source), "")

    def has_run(self, outcome: Outcome) -> bool:
        return any(self.ending(outcome, source) for source in ("own", "reference"))

    def time_outs(self, number: int, source: str) -> int:
        """Return how many of the module's checks reached their deadline with the earlier modules of `source`."""
        return sum(self.ending(outcome, source) == "deadline" for outcome in self.grading.of_module(number))


def earlier_failed(grading: Grading, number: int) -> bool:
    """Whether an earlier module failed a check, or was not asked for and so is not known to be right."""
    graded = {outcome.module for outcome in grading.outcomes}
    earlier = [entry.number for entry in MODULES if entry.number < number]
    return any(n not in graded or not all(o.passed for o in grading.of_module(n)) for n in earlier)


def verdict(
    target: Path, outcome: Outcome, source: str, seed: int, backend: str, share_gpu: bool, ends_at: float
) -> tuple[bool, str, str]:
    """Return whether the check passes, what the student is told, and how it ended.

    It ended with "passed", "failed", or with the kind of the run that failed (see `ranks.RankFailure`). Raises
    ServerLost when the fork server has ended.
    """
    entry = MODULES[outcome.module - 1]
    checked = None
    try:
        sources = read(target, entry.number, source).sources
        checked = Timed(sources, seed=seed_of(seed, outcome.name), backend=backend, share_gpu=share_gpu)
        checked.ends_at = ends_at
        checks(entry)[outcome.name](checked)
    except CheckFailed as failed:
        text = shortened(str(failed), checked.output if checked else [])
        return False, text, (checked.failure_kind if checked else "") or "failed"
    except ranks.ServerLost:
        raise
    except CourseError as error:
        return False, str(error), "failed"
    except Exception as error:  # an answer that a check did not foresee is wrong, and never a crash of the grader
        said = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return False, f"what the ranks returned could not be examined ({said})", "failed"
    return True, "", "passed"


def shortened(text: str, output: Sequence[str]) -> str:
    """The feedback and the last lines that the ranks printed: one screen."""
    lines = [text[:TEXT_LIMIT] + (" ..." if len(text) > TEXT_LIMIT else "")]
    for rank, printed in enumerate(output):
        lines += [f"[rank {rank}] {line[:200]}" for line in printed.rstrip().splitlines()[-PRINTED_LINES:]]
    return "\n".join(lines)[: 2 * TEXT_LIMIT]
