"""The likely causes of failures in module 17."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

ACCEPTS_ALL = "the judge raises no AssertionError for any of the wrong implementations."


def explain_pair(trial: Any, trials: Sequence[Any]) -> str:
    """Return what is wrong with a pair that rejects a right implementation, if the other verdicts prove it."""
    if accepted := [size for size, reason in trial.reasons.items() if not reason]:
        return f"the pair depends on the number of ranks: it accepts this implementation on {accepted[0]} ranks."
    if all(each.is_rejected for each in trials):
        return "the pair rejects every implementation, so the mistake is in the pair."
    return ""


def explain_demand(trial: Any) -> str:
    """Return why a pair rejects a right implementation, if it is not the one from which the readings come."""
    if trial.under_test.sentence.startswith(("the reference", "your own")):
        return ""
    return "the pair demands something that this implementation does in another way, and that no reading promises."


def explain_survivors(survivors: Sequence[Any], wrong: Sequence[Any]) -> str:
    """Return which topics the pair does not examine, because all wrong implementations of these topics survive."""
    rejected = {each.topic for each in wrong if each not in survivors}
    missed = sorted({each.topic for each in survivors} - rejected)
    if not missed:
        return ""
    return f"the pair does not examine {' or '.join(missed)}, because all implementations that are wrong there survive."
