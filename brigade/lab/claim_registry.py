"""The definition of a claim and the list of all claims. `claimed.py` adds the claims, and `claims.py` checks them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

VERDICTS = ("right", "half right", "depends", "wrong")
CITED = "cited"  # replaces the verdict of a claim that has no experiment


class CannotMeasure(Exception):
    """Raised if an experiment needs something that this machine does not have. The message names it."""


@dataclass(frozen=True)
class Finding:
    """The result of an experiment: a text with units and spread, and the verdict that the claim's rule gives."""

    measured: str
    verdict: str


@dataclass(frozen=True)
class Claim:
    """A published claim. `verdict` is the verdict that the reading gives.

    A claim without an experiment has the verdict `CITED`, and its `rule` says why it was not measured. `module` is the
    number of the module whose reading discusses the claim.
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
    """Return a decorator that adds a claim to `CLAIMS`. The decorated function becomes the claim's experiment."""

    def enter(experiment: Callable[[], Finding]) -> Callable[[], Finding]:
        CLAIMS.append(Claim(name, module, text, source, rule, verdict, experiment))
        return experiment

    return enter


def cite(name: str, module: int, text: str, source: str, reason: str) -> None:
    """Add a claim that cannot be measured here; `reason` says why."""
    CLAIMS.append(Claim(name, module, text, source, reason, CITED))
