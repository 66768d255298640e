"""The reason why a check did not pass, kept as data until it is rendered.

This file does not import torch, so that commands can start before torch is imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

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
    part: Any = None
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


def join_names(names: Sequence[Any], limit: int = 4) -> str:
    """Join the names for use in a sentence: all names, or the first `limit` names and the number of the others."""
    names = [str(name) for name in names]
    shown = names[:limit] + [f"{len(names) - limit} more"] * (len(names) > limit)
    return " and ".join(filter(None, [", ".join(shown[:-1]), *shown[-1:]]))
