"""Outcomes of checks in words."""

from __future__ import annotations

from brigade.checks.verdict import LABEL_WIDTH, Outcome, Verdict


def plain(outcome: Outcome) -> str:
    """What a student reads of a check that did not pass: the verdict, and how to repeat it."""
    if outcome.status == "not written":
        return str(outcome.verdict)
    return f"{outcome.verdict}\n{'repeat':<{LABEL_WIDTH}}{outcome.repeat}"


def with_prints(outcome: Outcome) -> str:
    """The same with the last lines that the ranks printed, and one line only for a part that is not written yet."""
    if outcome.status == "not written":
        return f"to do: {outcome.verdict.part}"
    return "\n".join([plain(outcome), *printed_lines(outcome)])


def printed_lines(outcome: Outcome, lines: int = 20, characters: int | None = None) -> list[str]:
    """Return the last lines that each rank printed, each with the rank's number in front and so many characters."""
    shown = []
    for rank, text in enumerate(outcome.printed):
        shown += [f"[rank {rank}] {line[:characters]}" for line in text.rstrip().splitlines()[-lines:]]
    return shown


def is_same(one: Outcome, other: Outcome) -> bool:
    """Return whether a student reads the same of two outcomes of a check."""
    if one.passed or other.passed:
        return one.passed and other.passed
    return one.verdict == other.verdict and printed_lines(one) == printed_lines(other)


def reason(verdict: Verdict) -> tuple[object, ...]:
    """Return what two verdicts have in common if one mistake is behind both, on whatever rank it shows."""
    if verdict.error:
        return (verdict.error, verdict.message, verdict.location, verdict.likely_cause)
    return (verdict.ending, verdict.expected, verdict.got, verdict.likely_cause)
