"""The result of a check, kept as data until it is rendered.

`run.run_check` returns an `Outcome`. This file does not import torch, so that commands can start before torch does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from brigade.course.table.listing import GradedCheck
from brigade.ranks.verdict import BROKEN, GENERAL, USUAL_CAUSE, Verdict

STATED, SEEN, UNEXPLAINED, USUAL, UNWRITTEN = range(5)  # what a verdict tells, from the most to the least specific


@dataclass
class Outcome:
    """The result of one check on one submission.

    `status` is "passed", "failed", "not written", "error" (the check could not finish) or "not run". If the check did
    not pass, `verdict` contains the reason. `printed` is the output of each rank. `repeat` is the command that runs the
    check alone on the same random cases. `exception` is an unexpected exception of the check itself.
    """

    check: GradedCheck
    status: str = "not run"
    verdict: Verdict | None = None
    printed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    prior_source: str = "own"  # whose earlier modules the check used
    repeat: str = ""
    exception: BaseException | None = None

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def reason(self) -> Verdict:
        """The verdict on a check that did not pass. Raise ValueError if there is none."""
        if self.verdict is None:
            raise ValueError(f"the check {self.check.name} has no verdict: {self.status}")
        return self.verdict

    @property
    def is_settled(self) -> bool:
        """Whether the check has run, or will certainly not run."""
        return self.passed or self.verdict is not None

    @property
    def score(self) -> int:
        return self.check.points if self.passed else 0

    @property
    def vagueness(self) -> int:
        """How little the verdict explains: STATED, SEEN, UNEXPLAINED, USUAL or UNWRITTEN."""
        verdict = self.reason
        if verdict.part:
            return UNWRITTEN
        if verdict.hypothesis == USUAL_CAUSE:
            return USUAL
        if verdict.likely_cause or verdict.ending == "unreadable":
            return SEEN if verdict.hypothesis in GENERAL else STATED
        return SEEN if verdict.error or verdict.ending == BROKEN else UNEXPLAINED

    @property
    def ending(self) -> str:
        """How the run that led to the verdict ended; "" if the check passed or has not run."""
        return self.verdict.ending if self.verdict else ""
