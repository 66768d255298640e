"""The score of a submission during and after grading. This file does not import torch, which takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from brigade.course.checks.outcome import Outcome
from brigade.course.table.listing import list_checks
from brigade.course.table.modules import Module

UNFINISHED = "did not finish"


@dataclass
class Grading:
    """The state of one submission's grading run, which can be written to a results file at any time."""

    outcomes: list[Outcome]
    seed: int
    is_seed_secret: bool = False  # whether other grading runs use it too, so that no results may contain it
    started: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)  # for everybody: ignored files and missing protections
    found: list[int] = field(default_factory=list)  # the numbers of the modules that the submission contains
    unreadable: str = ""  # why nothing can be graded
    finished: bool = False
    visibility: str | None = None  # on Gradescope, of the results of an instructor's own checks, or of all

    @property
    def score(self) -> int:
        """The points of all checks together."""
        return sum(outcome.score for outcome in self.outcomes)

    @property
    def max_score(self) -> int:
        """The maximum number of points for all checks together."""
        return sum(outcome.check.points for outcome in self.outcomes)

    def list_outcomes(self, number: int) -> list[Outcome]:
        """Return the outcomes of one module's checks."""
        return [outcome for outcome in self.outcomes if outcome.check.module == number]

    def modules(self) -> list[tuple[int, list[Outcome]]]:
        """Return the numbers of the graded modules in order, each with its outcomes."""
        numbers = sorted({outcome.check.module for outcome in self.outcomes})
        return [(number, self.list_outcomes(number)) for number in numbers]

    def count_settled(self) -> int:
        """Return how many checks have run or been skipped."""
        return sum(outcome.is_settled for outcome in self.outcomes)


def make_empty_grading(entries: Sequence[Module], seed: int) -> Grading:
    """Return a grading run of these modules in which no check has run."""
    return Grading([Outcome(check) for entry in entries for check in list_checks(entry)], seed)
