"""What was observed in a run. `brigade.ranks.claims` has the claims about its steps and launches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from brigade.ranks.claims import At, Launches, Step
from brigade.ranks.runner.ranks import RankResults


class Observed(Sequence[Any]):
    """The results of a run: `seen[rank]` is what the driver returned there.

    `events[rank]` is the record of a rank (`brigade/ranks/events.py` describes it), and `output[rank]` what it printed.
    """

    def __init__(self, results: RankResults):
        self._values, self.events, self.output = list(results), results.events, results.output

    def __getitem__(self, rank: Any) -> Any:
        return self._values[rank]

    def __len__(self) -> int:
        return len(self._values)

    def steps(self, rank: int | None = None) -> Iterator[Step]:
        """Yield each step of each rank, or of one rank, in order. Raise ValueError if no driver had a step."""
        marks = [[e["step"] for e in own if e["kind"] == "step" and e["step"] is not None] for own in self.events]
        numbers = [list(dict.fromkeys(own)) for own in marks]
        if not any(numbers):
            raise ValueError("there are no steps: write `with step(0):` into the driver")
        for one in range(len(self)) if rank is None else [rank]:
            for number in numbers[one]:
                yield Step(self.events[one], one, number)

    def step(self, number: int, rank: int = 0) -> Step:
        """Return one step of one rank. Raise ValueError if there is none."""
        for each in self.steps(rank):
            if each.number == number:
                return each
        raise ValueError(f"rank {rank} has no step {number}")

    def launches(self, op: str | None = None, *, rank: int = 0, count: int | None = None) -> Launches:
        """Return all launches of a rank, also those outside of steps: see `Step.launches`."""
        return Step(self.events[rank], rank, None).launches(op, count=count)

    def peak_bytes(self, kind: str = "all") -> int:
        """Return the largest number of bytes of a kind that were alive at once, on any rank in any step.

        Kinds are "parameters", "gradients", "optimizer state", "other" (such as activations and buffers for
        communication) and "all". Views of one block count once, and memory that torch does not manage does not count.
        Raise ValueError if no model was watched, or if the kind is unknown.
        """
        return self._read_bytes("peak", kind)

    def kept_bytes(self, kind: str = "all") -> int:
        """Return the largest number of bytes of a kind that were alive at the end of a step: see `peak_bytes`."""
        return self._read_bytes("kept", kind)

    def _read_bytes(self, which: str, kind: str) -> int:
        counts: list[dict[str, int]] = [e[which] for own in self.events for e in own if e["kind"] == "memory"]
        if not counts:
            raise ValueError("no bytes were counted: call watch(model) in the driver, before `with step(0):`")
        if which == "kept":
            counts = [each | {"all": sum(each.values())} for each in counts]
        if unknown := [each for each in counts if kind not in each]:
            raise ValueError(f"there is no kind {kind!r}: expected one of {', '.join(unknown[0])}")
        return max(each[kind] for each in counts)

    def are_equal_on_all_ranks(self, name: str | None = None) -> Observed:
        """Claim that the driver returned the same on all ranks, or only its entry `name`, tensors bit by bit."""
        values = [value if name is None else value[name] for value in self]
        what = "the result" if name is None else name
        for rank, value in enumerate(values):
            if difference := find_difference(value, values[0], what):
                At(rank).claim(f"{what} is equal on all ranks", False, f"{difference} differs from rank 0")
        return self

    def equals_one_process(self, alone: Observed, name: str | None = None, *, tolerance: float = 1e-5) -> Observed:
        """Claim that each rank returned what one process returns that has the data of all ranks.

        `alone` is a run of the driver with `world_size=1` and these data. Compare the results, or only their entries
        `name`. Of tensors and floats, the error is at most `tolerance` times the largest entry in `alone`, because sums
        in another order are rounded differently. Everything else must be equal. Raise ValueError if `alone` has several
        ranks.
        """
        if len(alone) != 1:
            raise ValueError(
                f"alone has {len(alone)} ranks: run the driver with world_size=1 and the data of all ranks"
            )
        what = "the result" if name is None else name
        expected = f"{what} is that of one process"
        wanted = dict(list_parts(alone[0] if name is None else alone[0][name], what))
        for rank, value in enumerate(self):
            found = dict(list_parts(value if name is None else value[name], what))
            other = [*(found.keys() ^ wanted.keys())]
            At(rank).claim(expected, not other, f"{min(other, default='')} is returned in only one of the runs")
            for part, one in found.items():
                got, cause = compare(one, wanted[part], tolerance, len(self))
                At(rank).claim(expected, not got, f"{part} {got}", cause)
        return self


def list_parts(value: Any, what: str) -> Iterator[tuple[str, Any]]:
    """Yield each part of a result that is no list and no dict, with its name. A part without parts is one."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
    for key, part in items:
        yield from list_parts(part, f"{what}[{key!r}]")
    if not items or not value:
        yield what, value


def compare(one: Any, wanted: Any, tolerance: float, world_size: int) -> tuple[str, str]:
    """Return how a part of a result differs from that of one process, and the cause if it is certain, or ("", "")."""
    if not isinstance(wanted, (float, torch.Tensor)) or type(one) is not type(wanted):
        difference = find_difference(one, wanted, "is another one")
        return difference, ""
    one, wanted = torch.as_tensor(one), torch.as_tensor(wanted)
    if (one.shape, one.dtype) != (wanted.shape, wanted.dtype):
        return f"is {tuple(one.shape)} {one.dtype} instead of {tuple(wanted.shape)} {wanted.dtype}", ""
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    one, wanted = one.to(wide).flatten(), wanted.to(wide).flatten()
    scale, error = (float(values.abs().max()) if values.numel() else 0.0 for values in (wanted, one - wanted))
    if error <= tolerance * scale:  # not so for NaN
        return "", ""
    got, cause = f"differs by {error:.3g}, and its largest entry is {scale:.3g}", ""
    size = one.norm() * wanted.norm()
    if size > 0 and abs(torch.vdot(wanted, one)) > 0.99 * size:
        ratio = float(one.norm() / wanted.norm())
        got += f"; it is {ratio:.3g} times as large, in nearly the same direction"
        if world_size > 1 and math.isclose(ratio, world_size, rel_tol=1e-3):
            cause = "ranks are summed but not divided by their number."
        if world_size > 1 and math.isclose(ratio, 1 / world_size, rel_tol=1e-3):
            cause = "a mean over the ranks is divided by their number again."
    return got, cause


def find_difference(one: Any, other: Any, what: str) -> str:
    """Return the name of the first part in which two results differ, or "" if they are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return "" if same and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) else what
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(filter(None, (find_difference(one[k], other[k], f"{what}[{k!r}]") for k in one)), "")
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return next(filter(None, (find_difference(a, b, f"{what}[{i}]") for i, (a, b) in pairs)), "")
    return "" if type(one) is type(other) and one == other else what
