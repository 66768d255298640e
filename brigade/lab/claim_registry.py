"""The class for a claim, and the list of all claims: `claimed.py` fills it, `claims.py` checks it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

VERDICTS = ("right", "half right", "depends", "wrong")
CITED = "cited"  # instead of a verdict


class CannotMeasure(Exception):
    """This machine lacks something that an experiment needs; the message says what."""


@dataclass(frozen=True)
class Finding:
    """The result of an experiment, in words with units and spread, and the verdict of the claim's rule."""

    measured: str
    verdict: str


@dataclass(frozen=True)
class Claim:
    """A statement that a reading checks. `verdict` is the reading's.

    Without an experiment, `verdict` is `CITED` and `rule` says why. `module` is the one whose reading discusses it.
    """

    name: str
    module: int
    claim: str
    source: str
    rule: str
    verdict: str
    experiment: Callable[[], Finding] | None = None


CLAIMS: list[Claim] = []


def claim(
    name: str, module: int, text: str, source: str, rule: str, verdict: str
) -> Callable[[Callable[[], Finding]], Callable[[], Finding]]:
    """Return a decorator that adds a claim, with the decorated function as its experiment."""

    def enter(experiment: Callable[[], Finding]) -> Callable[[], Finding]:
        CLAIMS.append(Claim(name, module, text, source, rule, verdict, experiment))
        return experiment

    return enter


def cited(name: str, module: int, text: str, source: str, why: str) -> None:
    """Add a claim that cannot be measured here."""
    CLAIMS.append(Claim(name, module, text, source, why, CITED))
