"""The result of a check, kept as data until it is rendered.

A failing check raises `CheckFailed` with a `Verdict`; `run.run_check` returns an `Outcome`. This file does not import
torch, so that commands can start before torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from brigade.course.listing import GradedCheck, Part

LABELS = ("Expected:", "Got:", "Likely cause:", "Repeat:")
LABEL_WIDTH = 14  # the length of "Likely cause: "

# How the run that led to a verdict ended: one of these, or a kind of `RankFailure`, "unreadable" (the submission),
# "refused" (the check cannot run here), "lost" (the process that starts the ranks) or "unexamined" (the check raised).
COMPLETE = "complete"  # every rank returned a result, but not the expected one
NOT_RUN = "not run"  # `got` is the reason
BROKEN = "broken"  # the check raises an exception on the reference, too
# Hypotheses of vague causes. A more specific cause replaces them, or is shown first.
GENERAL = ("early_read", "ranks_disagree")
USUAL_CAUSE = "usual cause"  # a hypothesis without evidence of its own
STATED, SEEN, UNEXPLAINED, USUAL, UNWRITTEN = range(5)  # what a verdict tells, from the most to the least specific


@dataclass(frozen=True)
class Verdict:
    """The reason why a check did not pass. `got` refers to `rank`, `step` and `parameter`, if they are known.

    `hypothesis` is the name of the rule that found the likely cause. `part` is the part of the module that is not
    written yet. `error` is the type of a rank's exception, `message` its text, and `location` the line of the
    submission. `note` adds a fact, such as the time limit of the check.
    """

    expected: str
    got: str
    likely_cause: str = ""
    hypothesis: str = ""
    ending: str = COMPLETE
    rank: int | None = None
    step: int | None = None
    parameter: str | None = None
    part: Part | None = None
    location: tuple[str, int, str] | None = None  # file, line, function
    error: str = ""
    message: str = ""
    note: str = ""

    @property
    def is_vague(self) -> bool:
        """Whether no likely cause is known, or only one that a more specific one should replace."""
        return not self.likely_cause or self.hypothesis in GENERAL

    @property
    def described(self) -> str:
        """The value of `got` with the place of the failure in front, such as "rank 1, step 0, weight"."""
        places = (("rank ", self.rank), ("step ", self.step), ("", self.parameter or None))
        where = ", ".join(f"{word}{place}" for word, place in places if place is not None)
        return f"{where}: {self.got}" if where and self.ending == COMPLETE else self.got

    def __str__(self) -> str:
        if self.ending == NOT_RUN:
            return f"Not run: {self.got}."
        labelled = zip((*LABELS[:3], ""), (self.expected, self.described, self.likely_cause, self.note), strict=True)
        return "\n".join(label_text(label, text) for label, text in labelled if text)


def label_text(label: str, text: str) -> str:
    """Return a text with its label in front. All its lines start in the same column."""
    return f"{label:<{LABEL_WIDTH}}" + text.replace("\n", "\n" + " " * LABEL_WIDTH)


def make_not_run(reason: str) -> Verdict:
    """Return the verdict on a check that was not run."""
    return Verdict("the check runs", reason, ending=NOT_RUN)


class CheckFailed(AssertionError):
    """The exception that a failing check raises. If a rank failed, `events` contains each rank's record."""

    def __init__(self, verdict: Verdict, events: Sequence[Sequence[dict[str, Any]]] = ()):
        super().__init__(verdict)
        self.verdict, self.events = verdict, events

    def with_cause(self, likely_cause: str) -> CheckFailed:
        """Return the same failure with another likely cause."""
        return CheckFailed(replace(self.verdict, likely_cause=likely_cause, hypothesis=""), self.events)


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
