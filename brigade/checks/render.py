"""Outcomes of checks as text."""

from __future__ import annotations

import re

from brigade.checks.verdict import LABELS, Outcome, Verdict, label_text


def plain(outcome: Outcome) -> str:
    """Return what a student reads about a check that did not pass: the verdict and how to repeat it."""
    if outcome.status == "not written":
        return str(outcome.verdict)
    return f"{outcome.verdict}\n{label_text(LABELS[-1], outcome.repeat)}"


def with_prints(outcome: Outcome) -> str:
    """Return the same text with the last lines that the ranks printed; one line for a part that is not written yet."""
    if outcome.status == "not written":
        return f"to do: {outcome.verdict.part}"
    return "\n".join([plain(outcome), *printed_lines(outcome)])


def printed_lines(outcome: Outcome, lines: int = 20, characters: int | None = None) -> list[str]:
    """Return the last `lines` lines that each rank printed, cut to `characters`, with the rank's number in front."""
    last_lines = []
    for rank, text in enumerate(outcome.printed):
        last_lines += [f"[rank {rank}] {line[:characters]}" for line in text.rstrip().splitlines()[-lines:]]
    return last_lines


def is_same(one: Outcome, other: Outcome) -> bool:
    """Return whether a student would read the same text for both outcomes of a check."""
    if one.passed or other.passed:
        return one.passed and other.passed
    return one.verdict == other.verdict and printed_lines(one) == printed_lines(other)


def reason(verdict: Verdict) -> tuple[object, ...]:
    """Return a key that is equal for verdicts with the same underlying mistake, whatever the rank."""
    if verdict.error:
        message = re.sub(r"\d+", "#", verdict.message)  # sizes are random
        return (verdict.error, message, verdict.location, verdict.likely_cause)
    return (verdict.ending, verdict.expected, verdict.got, verdict.likely_cause)
