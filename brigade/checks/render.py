"""Format the outcomes of checks as text."""

from __future__ import annotations

import re

from brigade.checks.verdict import LABELS, Outcome, Verdict, label_text


def format_plain(outcome: Outcome) -> str:
    """Return the text about a check that did not pass: the verdict, and the command that repeats the check."""
    if outcome.status == "not written":
        return str(outcome.verdict)
    return f"{outcome.verdict}\n{label_text(LABELS[-1], outcome.repeat)}"


def format_with_prints(outcome: Outcome) -> str:
    """Return the text of `format_plain` and the last lines that the ranks printed; one line for an unwritten part."""
    if outcome.status == "not written":
        return f"to do: {outcome.verdict.part}"
    return "\n".join([format_plain(outcome), *list_printed_lines(outcome)])


def list_printed_lines(outcome: Outcome, lines: int = 20, characters: int | None = None) -> list[str]:
    """Return the last `lines` lines that each rank printed, cut to `characters`, with the rank's number in front."""
    last_lines = []
    for rank, text in enumerate(outcome.printed):
        last_lines += [f"[rank {rank}] {line[:characters]}" for line in text.rstrip().splitlines()[-lines:]]
    return last_lines


def is_same(one: Outcome, other: Outcome) -> bool:
    """Return whether a student would read the same text for both outcomes of a check."""
    if one.passed or other.passed:
        return one.passed and other.passed
    return one.verdict == other.verdict and list_printed_lines(one) == list_printed_lines(other)


def make_key(verdict: Verdict) -> tuple[object, ...]:
    """Return a key that is equal for verdicts with the same underlying mistake, regardless of the rank."""
    if verdict.error:
        message = re.sub(r"\d[\d, ]*", "#", verdict.message)  # sizes are random
        return (verdict.error, message, verdict.location, verdict.likely_cause)
    return (verdict.ending, verdict.expected, verdict.got, verdict.likely_cause)
