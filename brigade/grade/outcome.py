"""The score of a submission while it is being graded, and afterwards. Imports no torch: that takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from brigade.checks.verdict import Outcome
from brigade.course.listing import list_checks
from brigade.course.modules import Module
from brigade.grade.static_look import Finding

UNFINISHED = "did not finish"


@dataclass
class Grading:
    """The state of grading one submission; complete, and worth writing down, at every moment."""

    outcomes: list[Outcome]
    seed: int
    started: datetime = field(default_factory=lambda: datetime.now(timezone.utc))
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)  # for everybody: what was ignored, what isolation there was
    findings: list[Finding] = field(default_factory=list)  # for the instructor: what is worth a look
    finished: bool = False

    @property
    def score(self) -> int:
        return sum(outcome.score for outcome in self.outcomes)

    @property
    def max_score(self) -> int:
        return sum(outcome.check.points for outcome in self.outcomes)

    def list_outcomes(self, number: int) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.check.module == number]

    def modules(self) -> list[tuple[int, list[Outcome]]]:
        """The modules that are graded, by number, each with its checks."""
        numbers = sorted({outcome.check.module for outcome in self.outcomes})
        return [(number, self.list_outcomes(number)) for number in numbers]

    def count_unfinished(self) -> int:
        """How many checks have not run, and are not known not to run."""
        return sum(not outcome.is_settled for outcome in self.outcomes)


def make_empty_grading(entries: Sequence[Module], seed: int) -> Grading:
    """A grading of these modules in which no check has run."""
    return Grading([Outcome(check) for entry in entries for check in list_checks(entry)], seed)
