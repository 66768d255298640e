"""The score of a submission while it is being graded, and afterwards. Imports no torch: that takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone

from brigade.course.modules import Module
from brigade.grade.static_look import Finding

UNFINISHED = "did not finish"


@dataclass
class Outcome:
    """One check, and how it went."""

    module: int
    name: str
    title: str
    points: int
    passed: bool = False
    finished: bool = False
    text: str = UNFINISHED
    seconds: float = 0.0
    prior: str = "own"  # whose earlier modules it ran with when it passed, or last

    @property
    def score(self) -> int:
        return self.points if self.passed else 0


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
        return sum(outcome.points for outcome in self.outcomes)

    def of_module(self, number: int) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.module == number]

    def modules(self) -> list[tuple[int, list[Outcome]]]:
        """The modules that are graded, by number, each with its checks."""
        return [(number, self.of_module(number)) for number in sorted({outcome.module for outcome in self.outcomes})]


def nothing_yet(entries: Sequence[Module], seed: int) -> Grading:
    """A grading that knows the modules' points and not yet their checks."""
    return Grading([Outcome(e.number, e.package, f"all of {e.title}", e.points) for e in entries], seed)
