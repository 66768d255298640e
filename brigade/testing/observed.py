"""What was observed in a run. `brigade.checks.claims` has the claims about its steps and launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from brigade.checks.claims import At, Launches, Step
from brigade.runner.ranks import RankResults


class Observed(Sequence[Any]):
    """The results of a run: `seen[rank]` is what the driver returned there.

    `events[rank]` is the record of a rank (`brigade/events.py` describes it), and `output[rank]` what it printed.
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


def find_difference(one: Any, other: Any, what: str) -> str:
    """Return the name of the first part in which two results differ, or "" if they are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return "" if same and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)) else what
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return next(filter(None, (find_difference(one[k], other[k], f"{what}[{k!r}]") for k in one)), "")
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        return next(
            filter(None, (find_difference(a, b, f"{what}[{i}]") for i, (a, b) in enumerate(zip(one, other)))), ""
        )
    return "" if type(one) is type(other) and one == other else what
