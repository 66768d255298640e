"""What a claim is, and the list of all claims: `claimed.py` enters them, `claims.py` checks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

VERDICTS = ("right", "half right", "depends", "wrong")
CITED = "cited"  # instead of a verdict


class CannotMeasure(Exception):
    """What an experiment needs is not on this machine; the message says what."""


@dataclass(frozen=True)
class Finding:
    """What an experiment measured, in words with units and spread, and the verdict that the claim's rule gives."""

    measured: str
    verdict: str


@dataclass(frozen=True)
class Claim:
    """What somebody says. `verdict` is the reading's; without an experiment it is `CITED`, and `rule` says why.

    `module` is the one whose reading discusses it.
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
    """Enters a claim with the function that is its experiment."""

    def enter(experiment: Callable[[], Finding]) -> Callable[[], Finding]:
        CLAIMS.append(Claim(name, module, text, source, rule, verdict, experiment))
        return experiment

    return enter


def cited(name: str, module: int, text: str, source: str, why: str) -> None:
    """Enters a claim that cannot be measured here."""
    CLAIMS.append(Claim(name, module, text, source, why, CITED))
