"""Run all graded checks on one submission and keep the score.

The maximum score is known before anything runs. A grading run contains every check of the requested modules from the
start, with zero points and the words "did not finish". A check keeps this result until it has run or is skipped.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from brigade.checks.collect import collect
from brigade.checks.run import Conditions, run_check
from brigade.checks.verdict import Outcome, make_not_run
from brigade.course.modules import TRAINING_MODULES, Module
from brigade.grade.outcome import Grading

TOTAL_S = 900.0  # for one submission; checks that have not run by then count as failed
PATIENCE = 2  # stop a module after this many of its checks have reached their deadline


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
    """Grade the modules of `target`. Call `on_change` with the grading before the first check and after each check.

    `on_change` may raise OSError after a check, for example if the disk is full. The grading run then continues. Only
    exceptions of the first and the last call propagate. With `prior` "auto", the earlier modules are the submission's
    own. If a check fails, and an earlier module does not pass all its checks, the check is repeated with the
    reference's earlier modules. So an error costs points only once.
    """
    grading = Grading([Outcome(check) for check in collect(entries)], seed, notes=list(notes))
    on_change(grading)
    Schedule(target, grading, prior, Conditions(seed, backend, share_gpu), total_s, on_change).run()
    grading.finished = True
    on_change(grading)
    return grading


class Schedule:
    """Run the checks in an order in which no module can use up the time of the others.

    First, every check runs once. Each module gets an equal share of the remaining time, and is stopped after two checks
    that reach their deadline. After a check that reaches its deadline or deadlocks, later modules run with the
    reference's earlier modules, because they would probably hang with the submission's own. Then failed checks are
    repeated: with the reference's earlier modules if they ran with the submission's own, and vice versa.
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
        self.stalled: set[int] = set()  # modules that hung in a check or used up their time

    def run(self) -> None:
        """Run every check once, then repeat failed checks that may pass with other earlier modules."""
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
        """Return the source of the earlier modules to use first: "own" or "reference"."""
        if self.prior != "auto":
            return self.prior
        return "reference" if any(stalled < number for stalled in self.stalled) else "own"

    def may_gain(self, outcome: Outcome, source: str) -> bool:
        """Return whether a check that has not passed could pass with the earlier modules of `source`."""
        if outcome.passed or self.get_earlier_outcome(outcome, source):
            return False
        if source == "reference":
            return has_failed_earlier(self.grading, outcome.check.module) or is_missing_name(outcome)
        # The check has run with the reference's modules or not at all. If it hung with them, it would hang again.
        stopped = self.count_timeouts(outcome.check.module, "reference") >= PATIENCE
        before = self.get_earlier_outcome(outcome, "reference")
        return not stopped and not (before and before.ending in ("deadline", "deadlock"))

    def attempt(self, outcomes: Sequence[Outcome], source: str, ends_at: float) -> None:
        """Run these checks of one module until it is stopped or out of time."""
        started = time.monotonic()
        for outcome in outcomes:
            number, patience = outcome.check.module, PATIENCE
            if source == "own" and self.choose_first_source(number) == "reference":
                patience = 1  # an earlier module has stalled already
            if time.monotonic() >= self.ends_at:
                self.skip(outcome, f"the grading run has used up its time limit ({self.total_s:.0f} s)")
            elif self.count_timeouts(number, source) >= patience:
                self.skip(outcome, f"module {number} was stopped: {patience} of its checks did not finish in time")
            elif time.monotonic() >= ends_at:
                self.stalled.add(number)
                share = f"its share of the time limit ({ends_at - started:.0f} s)"
                self.skip(outcome, f"module {number} has used up {share}")
            else:
                self.examine(outcome, source, ends_at)

    def skip(self, outcome: Outcome, reason: str) -> None:
        """Record why a check does not run. Keep the verdict of an earlier attempt."""
        if not self.has_run(outcome):
            outcome.verdict = make_not_run(reason)
        self.report()

    def examine(self, outcome: Outcome, source: str, ends_at: float) -> None:
        """Run one check. Running a check again can only gain points."""
        conditions = replace(self.conditions, ends_at=ends_at)
        started = time.monotonic()
        for _ in range(2):
            found = run_check(outcome.check, self.target, conditions, source)
            if found.ending != "lost":  # killed from outside, perhaps because memory ran out: try again
                break
        found.seconds = outcome.seconds + time.monotonic() - started
        found.exception = None  # free the objects that it refers to
        if found.passed or not self.has_run(outcome):
            self.grading.outcomes = [found if other is outcome else other for other in self.grading.outcomes]
        else:
            outcome.seconds = found.seconds
        self.attempts[outcome.check.module, outcome.check.name, source] = found
        if found.ending in ("deadline", "deadlock"):
            self.stalled.add(outcome.check.module)
        self.report()

    def report(self) -> None:
        """Call `on_change` with the changed grading, and ignore an OSError."""
        self.grading.seconds = time.monotonic() - self.began
        with contextlib.suppress(OSError):
            self.on_change(self.grading)

    def get_earlier_outcome(self, outcome: Outcome, source: str) -> Outcome | None:
        """Return the outcome of the check with the earlier modules of `source`, or None if it has not run with them."""
        return self.attempts.get((outcome.check.module, outcome.check.name, source))

    def has_run(self, outcome: Outcome) -> bool:
        """Return whether the check has run with any earlier modules."""
        return any(self.get_earlier_outcome(outcome, source) for source in ("own", "reference"))

    def count_timeouts(self, number: int, source: str) -> int:
        """Return how many of the module's checks reached their deadline with the earlier modules of `source`."""
        found = [self.get_earlier_outcome(outcome, source) for outcome in self.grading.list_outcomes(number)]
        return sum(outcome is not None and outcome.ending == "deadline" for outcome in found)


def is_missing_name(outcome: Outcome) -> bool:
    """Return whether the module imports a name that an earlier module does not define. It may still be correct."""
    return outcome.verdict is not None and outcome.verdict.error == "ImportError"


def has_failed_earlier(grading: Grading, number: int) -> bool:
    """Return whether an earlier module has failed a check, or is not graded and so may be wrong."""
    graded = {outcome.check.module for outcome in grading.outcomes}
    earlier = [entry.number for entry in TRAINING_MODULES if entry.number < number]
    return any(n not in graded or not all(o.passed for o in grading.list_outcomes(n)) for n in earlier)
