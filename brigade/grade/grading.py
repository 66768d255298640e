"""Runs all graded checks on one submission and keeps the score.

What is possible is known before anything runs: every check of every module asked for is there from the start, with zero
points and the words "did not finish". A check whose ranks die, or that is never reached, stays so.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from brigade.checks.collect import collect
from brigade.checks.run import Conditions, run_check
from brigade.checks.verdict import Outcome, make_not_run
from brigade.course.modules import MODULES, Module
from brigade.grade.outcome import Grading

TOTAL_S = 900.0  # for one submission; what has not run by then counts as failed
PATIENCE = 2  # a module is stopped after this many of its checks reach their deadline


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
    grading = Grading([Outcome(check) for check in collect(entries)], seed, notes=list(notes))
    on_change(grading)
    Schedule(target, grading, prior, Conditions(seed, backend, share_gpu), total_s, on_change).run()
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
        conditions: Conditions,
        total_s: float,
        on_change: Callable[[Grading], None],
    ):
        self.target = target
        self.grading = grading
        self.prior = prior
        self.conditions = conditions
        self.total_s = total_s
        self.on_change = on_change
        self.began = time.monotonic()
        self.ends_at = self.began + total_s
        self.attempts: dict[tuple[int, str, str], Outcome] = {}  # by module, check and prior source
        self.stalled: set[int] = set()  # modules that reached a deadline, a deadlock, or the end of their time

    def run(self) -> None:
        """Run every check once, then repeat what failed and may pass with other earlier modules."""
        modules = self.grading.modules()
        for index, (number, outcomes) in enumerate(modules):
            now = time.monotonic()
            share = max(0.0, self.ends_at - now) / (len(modules) - index)
            self.attempt(outcomes, self.choose_first_source(number), now + share)
        if self.prior == "auto":
            for source in ("reference", "own"):
                for number, _ in modules:
                    repeated = [
                        outcome for outcome in self.grading.list_outcomes(number) if self.may_gain(outcome, source)
                    ]
                    self.attempt(repeated, source, self.ends_at)

    def choose_first_source(self, number: int) -> str:
        """Return whose earlier modules the module is checked with first."""
        if self.prior != "auto":
            return self.prior
        return "reference" if any(stalled < number for stalled in self.stalled) else "own"

    def may_gain(self, outcome: Outcome, source: str) -> bool:
        """Return whether a check that has not passed could pass with the earlier modules of `source`."""
        if outcome.passed or self.get_earlier_outcome(outcome, source):
            return False
        if source == "reference":
            return has_failed_earlier(self.grading, outcome.check.module) or is_missing_name(outcome)
        # It has run on the reference's modules, or not at all. A check that waited in vain there will do so here, too.
        stopped = self.count_timeouts(outcome.check.module, "reference") >= PATIENCE
        before = self.get_earlier_outcome(outcome, "reference")
        return not stopped and not (before and before.ending in ("deadline", "deadlock"))

    def attempt(self, outcomes: Sequence[Outcome], source: str, ends_at: float) -> None:
        """Run these checks of one module, until it is stopped."""
        started = time.monotonic()
        for outcome in outcomes:
            number, patience = outcome.check.module, PATIENCE
            if source == "own" and self.choose_first_source(number) == "reference":
                patience = 1  # an earlier module has stalled already
            if time.monotonic() >= self.ends_at:
                self.skip(outcome, f"the time limit of the whole grading ({self.total_s:.0f} s) was used up")
            elif self.count_timeouts(number, source) >= patience:
                self.skip(outcome, f"module {number} was stopped: {patience} of its checks did not end in time")
            elif time.monotonic() >= ends_at:
                self.stalled.add(number)
                share = f"its share of the time limit ({ends_at - started:.0f} s)"
                self.skip(outcome, f"module {number} had used up {share}")
            else:
                self.examine(outcome, source, ends_at)

    def skip(self, outcome: Outcome, reason: str) -> None:
        """Say why a check does not run. What an earlier attempt said is kept."""
        if not self.has_run(outcome):
            outcome.verdict = make_not_run(reason)
        self.report()

    def examine(self, outcome: Outcome, source: str, ends_at: float) -> None:
        """Run one check. A check that is repeated can only gain."""
        conditions = replace(self.conditions, ends_at=ends_at)
        started = time.monotonic()
        for _ in range(2):
            found = run_check(outcome.check, self.target, conditions, source)
            if found.ending != "lost":  # ended from outside, for want of memory perhaps: a second try
                break
        found.seconds = outcome.seconds + time.monotonic() - started
        found.exception = None  # with all that it holds
        if found.passed or not self.has_run(outcome):
            self.grading.outcomes = [found if other is outcome else other for other in self.grading.outcomes]
        else:
            outcome.seconds = found.seconds
        self.attempts[outcome.check.module, outcome.check.name, source] = found
        if found.ending in ("deadline", "deadlock"):
            self.stalled.add(outcome.check.module)
        self.report()

    def report(self) -> None:
        self.grading.seconds = time.monotonic() - self.began
        with contextlib.suppress(OSError):
            self.on_change(self.grading)

    def get_earlier_outcome(self, outcome: Outcome, source: str) -> Outcome | None:
        """Return what became of the check with the earlier modules of `source`; None if it has not run with them."""
        return self.attempts.get((outcome.check.module, outcome.check.name, source))

    def has_run(self, outcome: Outcome) -> bool:
        return any(self.get_earlier_outcome(outcome, source) for source in ("own", "reference"))

    def count_timeouts(self, number: int, source: str) -> int:
        """Return how many of the module's checks reached their deadline with the earlier modules of `source`."""
        found = [self.get_earlier_outcome(outcome, source) for outcome in self.grading.list_outcomes(number)]
        return sum(outcome is not None and outcome.ending == "deadline" for outcome in found)


def is_missing_name(outcome: Outcome) -> bool:
    """Return whether the module imports what an earlier one does not have: that one may be right in another style."""
    return outcome.verdict is not None and outcome.verdict.error == "ImportError"


def has_failed_earlier(grading: Grading, number: int) -> bool:
    """Whether an earlier module failed a check, or was not asked for and so is not known to be right."""
    graded = {outcome.check.module for outcome in grading.outcomes}
    earlier = [entry.number for entry in MODULES if entry.number < number]
    return any(n not in graded or not all(o.passed for o in grading.list_outcomes(n)) for n in earlier)
