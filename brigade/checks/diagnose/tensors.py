"""The mistake behind wrong tensors: small hypotheses that are tried in order, once a check has failed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from brigade.checks.diagnose.evidence import Evidence

Tensors = Mapping[str, "Tensor | None"]


@dataclass(frozen=True)
class Difference:
    """A tensor that is wrong: the one called `name` in entry `index` of those compared. `error` is the largest."""

    index: int
    name: str
    found: Tensor | None
    expected: Tensor
    error: float


@dataclass(frozen=True)
class Comparison:
    """The tensors of all ranks, what was expected of each, and which are wrong.

    `suspected` maps a cause to the values (per rank) that it would give.
    """

    actual: Sequence[Tensors]
    expected: Tensors
    wrong: Sequence[Difference]
    suspected: Mapping[str, Sequence[Tensors]] = field(default_factory=dict)
    evidence: Evidence = field(default_factory=Evidence)

    @property
    def size(self) -> int:
        return len(self.actual)

    def factors(self) -> list[float | None]:
        """Return by which factor each wrong tensor is wrong, None where it is no factor."""
        return [ratio(entry.found, entry.expected) for entry in self.wrong if entry.expected.any()]


def explain_tensors(compared: Comparison) -> tuple[str, str]:
    """Return the mistake that would explain all the wrong tensors, and the name of the hypothesis; two "" for none."""
    for hypothesis in HYPOTHESES:
        if cause := hypothesis(compared):
            return cause, hypothesis.__name__
    return "", ""


def recorded_mistake(compared: Comparison) -> str:
    return compared.evidence.mistake


def overwritten_gradient(compared: Comparison) -> str:
    gone = all(value is None for tensors in compared.actual for value in tensors.values())
    if not compared.evidence.synchronous or not gone:
        return ""
    return "p.grad was overwritten? A collective works in place, and returns None unless it has async_op=True"


def missing_gradient(compared: Comparison) -> str:
    if any(entry.found is not None for entry in compared.wrong):
        return ""
    return "a gradient that is None on some rank must still take part, as zeros, and receive the average?"


def read_too_early(compared: Comparison) -> str:
    found = [entry.found for entry in compared.wrong if entry.found is not None]
    if not any(value.is_floating_point() and value.isnan().any() for value in found):
        return ""
    until = "NaN stands where a collective's result belongs until its handle was waited on: "
    if compared.evidence.forgotten:
        return until + "a handle was never waited on"
    if compared.evidence.forgotten == 0:
        return until + "all handles were, so the result was read too early, or belongs to another tensor?"
    return until + "a handle was never waited on, or the result was read too early?"


def suspected_values(compared: Comparison) -> str:
    for cause, values in compared.suspected.items():
        if all(same(entry.found, values[entry.index].get(entry.name)) for entry in compared.wrong):
            return cause
    return ""


def one_factor(compared: Comparison) -> str:
    """All are wrong by one factor, which group sizes and usual mistakes explain."""
    factors = compared.factors()
    if not factors or None in factors or max(factors) - min(factors) >= 1e-3 * max(factors):
        return ""
    factor, size = factors[0], compared.size
    world_size = compared.evidence.world_size or size
    is_all = len(compared.wrong) == size * len(compared.expected)
    several = len({entry.name for entry in compared.wrong}) > 1
    every = ("every gradient" if is_all else "each of these") if several else "it"
    averaged = (1 / size, f"{every} is exactly {size}× too small: ReduceOp.AVG has divided already?")
    known = [
        *[averaged] * compared.evidence.averaged,
        (size, f"{every} is exactly {size}× too large: summed over the ranks, not averaged?"),
        (
            size / world_size,  # 1 where the group is the world
            f"{every} is divided by {world_size}, the size of the world, not by {size}, the size of the group?"
            + (f" Or twice by {size}?" if size * size == world_size else ""),
        ),
        (1 / size, f"{every} is exactly {size}× too small: divided twice?"),
        (size / 2, f"{every} is divided by 2 where the group has {size} rank{'s' * (size > 1)}?"),
        (2, f"{every} is exactly 2× too large: counted twice?"),
    ]
    for value, cause in known:
        if value != 1 and abs(factor - value) < 2e-3 * value:
            return cause
    if abs(factor - 1) > 0.02:  # weights that are a little wrong have a factor too
        return f"{every} is {factor:.4g}× what it should be: divided by the wrong number?"
    return ""


def several_divisions(compared: Comparison) -> str:
    factors, size = compared.factors(), compared.size
    powers = [size**k for k in (1, 2, 3, 4)]
    if size == 1 or None in factors or not all(any(abs(r * n - 1) < 2e-3 for n in powers) for r in factors):
        return ""
    return f"some gradients are divided by {size} once too often, others more often: by what of the flat tensor?"


def displaced_entries(compared: Comparison) -> str:
    """The wrong entries are right ones that belong elsewhere."""
    moved, right, margin = moved_entries(compared)
    if not len(moved):
        return ""
    ordered = right.sort().values
    place = torch.searchsorted(ordered, moved).clamp(1, len(ordered) - 1)
    nearest = torch.minimum((ordered[place - 1] - moved).abs(), (ordered[place] - moved).abs())
    if not bool((moved.abs() > margin).all()) or not bool((nearest <= margin).all()):
        return ""
    return "all entries are right ones that belong elsewhere: the flat tensor is cut at wrong places, or out of order?"


def mixed_entries(compared: Comparison) -> str:
    """The wrong entries add up as the right ones do."""
    moved, right, _ = moved_entries(compared)
    sums = [flat(tensors.values()).sum() for tensors in compared.actual]
    is_sum_right = all(abs(float(each - right.sum())) < 1e-6 * float(right.abs().sum()) for each in sums)
    if not len(moved) or compared.size == 1 or not is_sum_right:
        return ""
    return (
        "the sum of all entries is right, their places are not: are the parameters in the same order on all ranks? "
        "A set has another one on each"
    )


def moved_entries(compared: Comparison) -> tuple[Tensor, Tensor, float]:
    """Return the wrong entries, all right ones, and how far equal ones may differ. No entries where they say little."""
    right, nothing = flat(compared.expected.values()), torch.zeros(0, dtype=torch.float64)
    is_complete = all(entry.found is not None and entry.expected.is_floating_point() for entry in compared.wrong)
    if not len(right) or not is_complete:
        return nothing, right, 0.0
    margin = 2e-6 * float(right.abs().max())
    found, expected = flat(e.found for e in compared.wrong), flat(e.expected for e in compared.wrong)
    moved = found[~((found - expected).abs() <= margin)]
    return (nothing if len(moved) < 8 or moved.isnan().any() else moved), right, margin


def ranks_disagree(compared: Comparison) -> str:
    first = compared.wrong[0].name
    one, *others = (tensors.get(first) for tensors in compared.actual)
    if all(same(one, other) for other in others):
        return ""
    return f"the ranks do not agree: {first} was not exchanged, or not all of it?"


HYPOTHESES: tuple[Callable[[Comparison], str], ...] = (
    recorded_mistake,
    overwritten_gradient,
    missing_gradient,
    read_too_early,
    suspected_values,
    one_factor,
    several_divisions,
    displaced_entries,
    mixed_entries,
    ranks_disagree,
)
# A cause that one of these gives says little: a better one replaces it.
GENERAL = (read_too_early.__name__, ranks_disagree.__name__)


def flat(tensors: Iterable[Tensor | None]) -> Tensor:
    """All entries of those that are not None, in float64."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(t.double().flatten() for t in tensors if t is not None)])


def same(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors agree to the rounding of float32; None counts as zeros."""
    if one is None or other is None:
        return (one is None or not one.any()) and (other is None or not other.any())
    return one.shape == other.shape and torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-7)


def ratio(found: Tensor | None, expected: Tensor) -> float | None:
    """The factor k with found = k × expected, if there is one."""
    if found is None or not expected.any():
        return None
    a, b = found.double().flatten(), expected.double().flatten()
    k = float(a @ b / (b @ b))
    return k if torch.allclose(a, k * b, rtol=1e-2, atol=1e-2 * abs(k) * float(b.abs().max())) and k else None
