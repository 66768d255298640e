"""Format the outcomes of checks as text: one message for each mistake. Every command and results file uses this."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import indent

from brigade.course.checks.outcome import USUAL, Outcome
from brigade.ranks.verdict import LABELS, NOT_RUN, label_text

MAX_LINES = 25  # for the failed checks of one module, including their titles
MIN_LINES = 5  # of the message that is complete, with many failed checks
MIN_WIDTH, WIDTH = 40, 400  # characters of a message that is repeated, or shortened to one line


@dataclass(frozen=True)
class Message:
    """Checks of one module that fail for the same reason, the best explained one first, and what a student reads."""

    outcomes: list[Outcome]
    text: str

    def __str__(self) -> str:
        first, *others = (outcome.check.number for outcome in self.outcomes)
        also = f" (and {', '.join(others)})" if others else ""
        complete = "\n" in self.text
        return f"Check {first}{also}:" + ("\n" + indent(self.text, "  ") if complete else f" {self.text}")


def list_messages(outcomes: Sequence[Outcome], shows_all: bool = False) -> list[Message]:
    """Return the messages about the checks of one module that ran and failed, the most specific one first.

    The first message is complete. The others have one line each, because they often follow from the same mistake. Only
    checks that state nothing of their own refer to the first one, which is never one of these if there is another. All
    of them and the titles of the checks have at most MAX_LINES lines. With `shows_all`, nothing is shortened.
    """
    failed = [outcome for outcome in outcomes if outcome.verdict]
    groups: dict[tuple[object, ...], list[Outcome]] = {}
    for outcome in sorted(failed, key=lambda outcome: outcome.vagueness):
        if outcome.ending != NOT_RUN:
            groups.setdefault(make_key(outcome), []).append(outcome)
    if shows_all or not groups:
        return [Message(group, format_message(group[0], prints=20)) for group in groups.values()]
    first, *others = groups.values()
    left = max(MIN_LINES, MAX_LINES - len(failed) - 2)  # its heading, and the vague ones
    lines = clip(format_message(first[0]).splitlines(), max(MIN_LINES, left - bool(others)))
    brief = [group for group in others if group[0].vagueness != USUAL][: left - len(lines)]
    vague = [outcome for group in others if group not in brief for outcome in group]
    return [
        Message(first, "\n".join(lines)),
        *(Message(group, summarize(group[0])) for group in brief),
        *([Message(vague, f"first see {first[0].check.number}")] if vague else []),
    ]


def explain_each(outcomes: Sequence[Outcome]) -> dict[str, str]:
    """Return what the student reads below each check of one module that did not pass, by the name of the check."""
    texts = {outcome.check.name: str(outcome.verdict) for outcome in outcomes if outcome.ending == NOT_RUN}
    for message in list_messages(outcomes):
        first, *others = message.outcomes
        same = message.text if len(message.text) < MIN_WIDTH else f"same cause as {first.check.number}"
        texts |= {first.check.name: message.text} | {outcome.check.name: same for outcome in others}
    return texts


def format_message(outcome: Outcome, prints: int = 4) -> str:
    """Return the verdict on a check, the command that repeats it, and the last lines that each rank printed."""
    if outcome.status == "not written":
        return f"to do: {outcome.reason.part}"
    repeat = [label_text(LABELS[-1], outcome.repeat)] if outcome.repeat and outcome.ending != NOT_RUN else []
    return "\n".join([str(outcome.verdict), *repeat, *list_printed_lines(outcome, prints)])


def summarize(outcome: Outcome) -> str:
    """Return one line about a check that did not pass: the likely cause if it is known, otherwise what was seen."""
    verdict = outcome.reason
    if outcome.status == "not written":
        return format_message(outcome)
    label, text = ("likely cause:", verdict.likely_cause) if verdict.likely_cause else ("got:", verdict.described)
    return f"{label} {text.partition(chr(10))[0][:WIDTH]}"


def clip(lines: list[str], number: int) -> list[str]:
    """Return the lines, without some in the middle if there are more than `number`."""
    if len(lines) <= number:
        return lines
    half = number // 2
    return [*lines[:half], f"... ({len(lines) - number + 1} lines more)", *lines[half - number + 1 :]]


def list_printed_lines(outcome: Outcome, lines: int = 20) -> list[str]:
    """Return the last `lines` lines that each rank printed, cut to WIDTH, with the ranks' numbers in front."""
    ranks: dict[tuple[str, ...], list[int]] = {}
    for rank, text in enumerate(outcome.printed):
        last = [line[:WIDTH] for line in text.rstrip().splitlines()[-lines:]]
        ranks.setdefault(tuple(last), []).append(rank)
    return [
        f"[rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}] {line}"
        for texts, numbers in ranks.items()
        for line in texts
    ]


def make_key(outcome: Outcome) -> tuple[object, ...]:
    """Return a key that is equal for outcomes with the same underlying mistake, whatever the ranks, sizes and times."""
    verdict, name = outcome.reason, outcome.reason.parameter
    if verdict.part or verdict.ending in (NOT_RUN, "unreadable"):
        return (verdict.ending, verdict.part, verdict.got)
    if verdict.error:  # of an exception, or how the process ended
        return (verdict.ending, verdict.error, blur(verdict.message, name), verdict.location)
    if verdict.likely_cause:
        return (blur(verdict.likely_cause, name),)
    return (verdict.ending, blur(verdict.expected, name), blur(verdict.got, name))


def blur(text: str, parameter: str | None = None) -> str:
    """Return a text without the numbers and the parameter, which differ between cases of the same mistake."""
    text = text.replace(parameter, "#") if parameter else text
    return re.sub(r"\d[\d, .]*", "#", text)
