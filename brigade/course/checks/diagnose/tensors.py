"""Find the mistake behind wrong tensors. After a check has failed, try small hypotheses in order."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from brigade.course.checks.diagnose.evidence import TOO_LARGE, Evidence, is_averaged

Tensors = Mapping[str, "Tensor | None"]


@dataclass(frozen=True)
class Difference:
    """A wrong tensor: `name` in `Comparison.actual[index]`. `error` is its largest absolute error."""

    index: int
    name: str
    actual: Tensor | None
    expected: Tensor
    error: float


@dataclass(frozen=True)
class Comparison:
    """The tensors of all ranks, the expected tensors, and the differences.

    `hypotheses` maps a likely cause to the values (per rank) that it would produce.
    """

    actual: Sequence[Tensors]
    expected: Tensors
    wrong: Sequence[Difference]
    hypotheses: Mapping[str, Sequence[Tensors]]
    evidence: Evidence


def explain_tensors(compared: Comparison) -> tuple[str, str]:
    """Return a mistake that explains all wrong tensors and the name of its hypothesis, or ("", "") if none does."""
    if compared.evidence.mistake:
        return compared.evidence.mistake, "recorded_mistake"
    rules = (missing_gradient, early_read, hypothesis_values, rounded_values, one_factor, misplaced_entries)
    for rule in (*rules, ranks_disagree):
        if cause := rule(compared):
            return cause, rule.__name__
    return "", ""


def missing_gradient(compared: Comparison) -> str:
    if any(entry.actual is not None for entry in compared.wrong):
        return ""
    has_sync_launch = any(launch.sync and launch.phase != "construct" for launch in compared.evidence.launched or ())
    if has_sync_launch and not any(flatten_all(each.values()).numel() for each in compared.actual):
        return (
            "p.grad was overwritten with None. A collective works in place and returns None unless async_op=True. Do "
            "not assign its result to p.grad."
        )
    if all(tensors.get(entry.name) is None for entry in compared.wrong for tensors in compared.actual):
        return "the average is not stored in p.grad, or p.grad is set to None later: it is None on every rank."
    return (
        "a gradient that is None on a rank stays None there, but its average is not. Use zeros instead, and store the "
        "average in p.grad."
    )


def early_read(compared: Comparison) -> str:
    values, evidence = [entry.actual for entry in compared.wrong if entry.actual is not None], compared.evidence
    if not any(value.is_floating_point() and value.isnan().any() for value in values):
        return ""
    meaning = "the result of a collective is NaN until you wait on its handle. "
    if evidence.launched is None:
        return meaning + "The code does not wait on a handle, or it reads the result before the wait."
    num_handles = sum(not launch.sync for launch in evidence.launched)
    if evidence.unawaited:
        ops = ", ".join(sorted({launch.op for launch in evidence.unawaited}))
        return f"{meaning}The code does not wait on {len(evidence.unawaited)} of {num_handles} handles ({ops})."
    late = "The code waits on every handle, but it reads or copies the result before the wait."
    return meaning + late if num_handles else ""  # without handles, NaN comes from somewhere else


def hypothesis_values(compared: Comparison) -> str:
    """Return a cause whose values agree with all wrong tensors, and are much nearer to them than the right values."""
    for cause, values in compared.hypotheses.items():
        if all(is_explained(entry, values[entry.index].get(entry.name)) for entry in compared.wrong):
            return cause
    return ""


def is_explained(entry: Difference, value: Tensor | None) -> bool:
    """Return whether a wrong tensor agrees with `value`, which differs from the expected tensor, too."""
    if not agree(entry.actual, value):
        return False
    zeros = torch.zeros_like(entry.expected)
    actual, value = (zeros if each is None else each for each in (entry.actual, value))
    return not float((actual.double() - value.double()).abs().max()) > entry.error / 2  # NaN agrees with NaN


def rounded_values(compared: Comparison) -> str:
    """Explain tensors that contain only numbers of a narrower dtype and are correct to its precision."""
    for dtype in (torch.bfloat16, torch.float32):
        if all(is_rounded(entry, dtype) for entry in compared.wrong):
            wide, narrow = (str(each).removeprefix("torch.") for each in (compared.wrong[0].expected.dtype, dtype))
            return (
                f"the values are rounded to {narrow}, because they pass through a {narrow} tensor. Use {wide} for that "
                "tensor."
            )
    return ""


def is_rounded(entry: Difference, dtype: torch.dtype) -> bool:
    """Return whether a wrong tensor is the expected tensor, rounded to a narrower dtype."""
    actual, expected = entry.actual, entry.expected
    if actual is None or not actual.is_floating_point() or actual.numel() < 2:
        return False
    is_close = entry.error <= 8 * torch.finfo(dtype).eps * float(expected.double().abs().max())
    is_narrow = torch.equal(actual, actual.to(dtype).to(actual.dtype))
    return actual.dtype.itemsize > dtype.itemsize and is_close and is_narrow


def one_factor(compared: Comparison) -> str:
    """Explain tensors that are all wrong by the same factor, if a group size or a common mistake gives this factor."""
    found = [find_factor(entry.actual, entry.expected) for entry in compared.wrong]
    factors = [factor for factor in found if factor is not None]
    if not factors or len(factors) < len(found) or max(factors) - min(factors) >= 1e-3 * max(factors):
        return ""
    factor, size = factors[0], len(compared.actual)
    world_size = compared.evidence.world_size or size
    twice = f", or it is divided by {size} twice." if size * size == world_size else "."
    summed = f"is exactly {size}× too large: it is summed over the ranks but not divided by the group size"
    summed += ", or it is counted twice." if size == 2 else "."
    if is_averaged(compared.evidence.launched or ()):
        summed = TOO_LARGE.format("is exactly", size)
    known = [  # the factor of each mistake
        (size, summed),
        (size / world_size, f"is divided by the world size ({world_size}) instead of the group size ({size}){twice}"),
        (1 / size, f"is exactly {size}× too small: it is divided twice."),
        (size / 2, f"is divided by 2, but the group has {size} rank{'s' * (size > 1)}."),
        (2, "is exactly 2× too large: it is counted twice."),
    ]
    if size > 1:  # else the tensors of all ranks may have been joined, and the size of the group is not known
        other = f"is {factor:.4g}× the expected value: it is divided by {size / factor:.0f} instead of {size}."
        known.append((size / max(1, round(size / factor)), other))
    if any(launch.raced for launch in compared.evidence.launched or ()):
        lost = (
            f"is exactly {size}× too large, and a tensor is changed, for example divided, before wait() is called on "
        )
        known.insert(0, (size, f"{lost}its handle. The result of the collective then replaces the change."))
    if any(launch.reduce_op == "AVG" for launch in compared.evidence.launched or ()):
        again = f"is exactly {size}× too small: it is divided again after ReduceOp.AVG has divided it."
        known.insert(0, (1 / size, again))
    causes = [cause for value, cause in known if value != 1 and abs(factor - value) < 2e-3 * value]
    return f"every wrong tensor {causes[0]}" if causes else ""


def misplaced_entries(compared: Comparison) -> str:
    """Explain wrong entries that are the correct entries of other positions, or whose sum is correct."""
    right = flatten_all(compared.expected.values())
    is_complete = all(entry.actual is not None and entry.expected.is_floating_point() for entry in compared.wrong)
    if not len(right) or not is_complete:
        return ""
    margin = 2e-6 * float(right.abs().max())  # two entries that differ by less count as equal
    actual, expected = flatten_all(e.actual for e in compared.wrong), flatten_all(e.expected for e in compared.wrong)
    moved = actual[~((actual - expected).abs() <= margin)]
    if len(moved) < 8 or moved.isnan().any():
        return ""
    ordered = right.sort().values
    index = torch.searchsorted(ordered, moved).clamp(1, len(ordered) - 1)
    nearest = torch.minimum((ordered[index - 1] - moved).abs(), (ordered[index] - moved).abs())
    if bool((moved.abs() > margin).all()) and bool((nearest <= margin).all()):
        return (
            "the values are correct, but they are in the wrong places: the flat tensor is split at wrong positions or "
            "in the wrong order."
        )
    sums = [flatten_all(tensors.values()).sum() for tensors in compared.actual]
    is_exact = all(entry.expected.dtype == torch.float64 for entry in compared.wrong)  # else rounding changes the sum
    margin = (1e-12 if is_exact else 1e-6) * float(right.abs().sum())
    if len(compared.actual) == 1 or any(abs(float(each - right.sum())) >= margin for each in sums):
        return ""
    return (
        "the sum of all entries is correct, but their positions are not: the ranks order the parameters differently. "
        "For example, a set has a different order on each rank."
    )


def ranks_disagree(compared: Comparison) -> str:
    first = compared.wrong[0].name
    one, *others = (tensors.get(first) for tensors in compared.actual)
    if all(agree(one, other) for other in others):
        return ""
    return f"the ranks have different values of {first}, but a collective would give all of them the same."


def flatten_all(tensors: Iterable[Tensor | None]) -> Tensor:
    """Return all entries of the tensors that are not None, in float64."""
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(t.double().flatten() for t in tensors if t is not None)])


def agree(one: Tensor | None, other: Tensor | None) -> bool:
    """Return whether two tensors agree up to float32 rounding; None counts as zeros."""
    if one is None or other is None:
        return (one is None or not one.any()) and (other is None or not other.any())
    if one.shape != other.shape:
        return False
    return torch.allclose(one.double(), other.double(), rtol=1e-4, atol=1e-7, equal_nan=True)


def agree_by_name(some: Tensors, others: Tensors) -> bool:
    """Return whether all tensors of `others` agree with those of the same names in `some`."""
    return all(agree(some.get(name), other) for name, other in others.items())


def find_factor(actual: Tensor | None, expected: Tensor) -> float | None:
    """Return the factor k with actual = k × expected, or None."""
    if actual is None or not expected.any() or not actual.isfinite().all():
        return None
    a, b = actual.double().flatten(), expected.double().flatten()
    k = float(a @ b / (b @ b))
    return k if torch.allclose(a, k * b, rtol=1e-2, atol=1e-2 * abs(k) * float(b.abs().max())) and k else None
