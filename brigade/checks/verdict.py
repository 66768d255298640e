"""What became of a check, as data until it is rendered.

A check that fails raises `CheckFailed` with a `Verdict`; `run.run_check` returns an `Outcome`. This file needs no
torch, so that commands can begin before torch is imported.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from brigade.course.listing import GradedCheck
from brigade.course.parts import Part

LABELS = ("expected", "got", "likely cause")
LABEL_WIDTH = 14

# How the run behind a verdict ended. The kinds of `RankFailure` come between the first and the others.
COMPLETE = "complete"  # every rank delivered a result, and it is wrong
NOT_RUN = "not run"
ENDINGS = (
    COMPLETE,
    *("exception", "died", "deadline", "deadlock", "mismatch", "garbled"),
    "unreadable",  # the submission cannot be read
    "refused",  # the check cannot run here
    "lost",  # the process that starts the ranks was ended from outside
    "unexamined",  # the check itself raised an exception
    NOT_RUN,  # `got` is the reason
)


@dataclass(frozen=True)
class Location:
    """A line of the submission."""

    file: str
    line: int
    function: str


@dataclass(frozen=True)
class Verdict:
    """Why a check did not pass. `got` is about `rank`, `step` and `parameter`, where they are known.

    `hypothesis` is the name of the rule that found the likely cause. `part` is the part of the module that is not
    written yet. `error` is the type of a rank's exception and `message` what it said. `note` says under which
    condition the check ran, where that matters.
    """

    expected: str
    got: str
    likely_cause: str = ""
    hypothesis: str = ""
    ending: str = COMPLETE  # one of ENDINGS
    rank: int | None = None
    step: int | None = None
    parameter: str | None = None
    part: Part | None = None
    location: Location | None = None
    error: str = ""
    message: str = ""
    note: str = ""

    @property
    def where(self) -> str:
        """Such as "rank 1, step 0, weight"; "" if nothing of it is known, or `got` says it already."""
        if self.ending != COMPLETE:
            return ""
        rank = [] if self.rank is None else [f"rank {self.rank}"]
        step = [] if self.step is None else [f"step {self.step}"]
        return ", ".join([*rank, *step, *filter(None, [self.parameter])])

    @property
    def described(self) -> str:
        """What was got and where, as one text."""
        return f"{self.where}: {self.got}" if self.where else self.got

    def __str__(self) -> str:
        if self.ending == NOT_RUN:
            return f"This check was not run, because {self.got}."
        labelled = zip((*LABELS, ""), (self.expected, self.described, self.likely_cause, self.note))
        lines = [f"{label:<{LABEL_WIDTH}}{text}" for label, text in labelled if text]
        return "\n".join(line.replace("\n", "\n" + " " * LABEL_WIDTH) for line in lines)


def not_run(reason: str) -> Verdict:
    """Return the verdict on a check that is not run."""
    return Verdict("the check runs", reason, ending=NOT_RUN)


class CheckFailed(AssertionError):
    """Raised by a check that does not pass."""

    def __init__(self, verdict: Verdict):
        super().__init__(verdict)
        self.verdict = verdict

    def with_cause(self, likely_cause: str, hypothesis: str = "") -> CheckFailed:
        """Return the same failure with another likely cause."""
        return CheckFailed(replace(self.verdict, likely_cause=likely_cause, hypothesis=hypothesis))


@dataclass
class Outcome:
    """What became of one check on one submission.

    `status` is "passed", "failed", "not written", "error" (the check could not be run to its end) or "not run".
    Without a pass, `verdict` says why; `printed` is what each rank printed. `repeat` is the command that runs the check
    alone on the same random cases. `exception` is that of a check which fell over.
    """

    check: GradedCheck
    status: str = "not run"
    verdict: Verdict | None = None
    printed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    prior_source: str = "own"  # whose earlier modules it ran with
    repeat: str = ""
    exception: BaseException | None = None

    @property
    def passed(self) -> bool:
        return self.status == "passed"

    @property
    def is_settled(self) -> bool:
        """Whether it has run, or is known not to run."""
        return self.passed or self.verdict is not None

    @property
    def score(self) -> int:
        return self.check.points if self.passed else 0

    @property
    def ending(self) -> str:
        """How the run behind the verdict ended; "" after a pass, and before anything has run."""
        return self.verdict.ending if self.verdict else ""
