"""What was observed in a run, and claims about it. A claim that is wrong raises an AssertionError that says why."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch

from brigade.checks.verdict import CheckFailed, Verdict
from brigade.events import Event, Launch, describe, launches, list_ready_gradients, summarize
from brigade.rank.emulated_link import count_sent_bytes
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
        return select(launches(self.events[rank]), [], {}, {"rank": rank}, op, count)

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
                claim(False, f"{what} is equal on all ranks", f"{difference} differs from rank 0", rank=rank)
        return self


class Step:
    """What one rank did in one step. `number` is that of `with step(number):`."""

    def __init__(self, events: Sequence[Event], rank: int, number: int):
        self._events, self.rank, self.number = events, rank, number

    @property
    def gradients(self) -> list[str]:
        """The names of the watched model's parameters, in the order in which their gradients became ready."""
        return [name for _, name in list_ready_gradients(self._events, self.number)]

    def launches(self, op: str | None = None, *, count: int | None = None) -> Launches:
        """Return the launches of the step in order, without barriers; with `op`, only those of "all_reduce" etc.

        With `count`, claim that there are so many.
        """
        ready = list_ready_gradients(self._events, self.number)
        numels = {name: numel for e in self._events if e["kind"] == "watched" for name, numel in e["numels"].items()}
        place = {"rank": self.rank, "step": self.number}
        return select(launches(self._events, self.number), ready, numels, place, op, count)

    def bytes_sent(self) -> float:
        """Return how many bytes the rank sends in its launches with a ring algorithm, on average over the ranks.

        A reduce-scatter, an all-gather and an all-to-all of n bytes on N ranks count as n (N - 1) / N, an all-reduce as
        twice as much.
        """
        return sum(count_sent_bytes(one.op, one.nbytes, len(one.ranks)) for one in launches(self._events, self.number))


class Launches(Sequence[Launch]):
    """Some launches of one rank in order, and claims about them. Each claim returns the launches, so they can follow.

    A launch has the fields of `brigade.events.Launch`, such as `op`, `dtype`, `numel` and `nbytes`.
    """

    def __init__(
        self,
        found: Sequence[Launch],
        ready: Sequence[tuple[int, str]],
        numels: Mapping[str, int],
        place: dict[str, Any],
    ):
        self._found, self._ready, self._numels, self._place = list(found), ready, numels, place

    def __getitem__(self, index: Any) -> Any:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def are_asynchronous(self) -> Launches:
        """Claim that none of the calls waits for its own result."""
        for one in self:
            what = f"{name(one)} waits inside the call"
            self._claim(not one.sync, "every launch is asynchronous", what, "it is called without async_op=True.")
        return self

    def are_awaited(self) -> Launches:
        """Claim that the rank waits for each launch in the same step, and changes no tensor of it before."""
        expected = "every launch is awaited, and its tensors do not change before"
        for one in self:
            waited = one.sync or one.is_polled or bool(one.waits)
            cause = "its handle is dropped, or wait() is called on another one."
            self._claim(waited, expected, f"nobody waits for {name(one)}", cause)
            here = one.sync or one.is_polled or one.wait_steps[:1] == [one.step]
            self._claim(here, expected, f"the rank waits for {name(one)} after the step")
            self._claim(not one.raced, expected, f"a tensor of {name(one)} changes between launch and wait")
        return self

    def come_before_gradient(self, offset: int) -> Launches:
        """Claim that communication overlaps with backward: each launch is made soon after its last gradient is ready.

        It comes before the gradient that is `offset` after its last one is ready: +1 means that nothing comes between,
        as in a hook, and +2 that one gradient may. Near the end of backward, where no such gradient follows, it must
        come during backward. The launches carry the gradients in the order in which they become ready; their sizes
        tell which. Padding makes this claim more lenient. Raise ValueError if no model is watched, or without a
        backward.
        """
        if not self._ready:
            raise ValueError(
                "no gradient became ready: call watch(model) before wrapping, and run backward in the step"
            )
        ends = list(accumulate(self._numels[gradient] for _, gradient in self._ready))
        for index, (one, carried) in enumerate(zip(self, accumulate(one.numel for one in self))):
            last = bisect_left(ends, carried)
            if last + offset < len(self._ready):
                limit, gradient = self._ready[last + offset]
                own = self._ready[last][1]
                what = f"launch {index}, whose last gradient is that of {own}, comes before that of {gradient} is ready"
                self._claim(one.place < limit, what, f"{name(one)} comes {self._describe_place(one)}")
            else:
                what = f"launch {index} comes during backward"
                self._claim(one.phase == "backward", what, f"{name(one)} comes {self._describe_place(one)}")
        return self

    def have_dtype(self, dtype: Any) -> Launches:
        """Claim that all launches carry this dtype, for example torch.bfloat16 or "bfloat16"."""
        wanted = str(dtype).removeprefix("torch.")
        for one in self:
            self._claim(one.dtype == wanted, f"every launch carries {wanted}", f"{name(one)} carries {one.dtype}")
        return self

    def carry(self, nbytes: int) -> Launches:
        """Claim that the launches carry `nbytes` bytes together, each counted once in full."""
        got = sum(one.nbytes for one in self)
        self._claim(got == nbytes, f"the launches carry {nbytes} bytes together", f"{got} bytes in {summarize(self)}")
        return self

    def _describe_place(self, one: Launch) -> str:
        done = [gradient for place, gradient in self._ready if place < one.place]
        when = "after backward" if len(done) == len(self._ready) and one.phase != "backward" else "later"
        return f"{when}: {len(done)} of {len(self._ready)} gradients are ready" + f", the last is {done[-1]}" * bool(
            done
        )

    def _claim(self, condition: bool, expected: str, got: str, likely_cause: str = "") -> None:
        claim(condition, expected, got, likely_cause, **self._place)


def select(
    found: Sequence[Launch],
    ready: Sequence[tuple[int, str]],
    numels: Mapping[str, int],
    place: dict[str, Any],
    op: str | None,
    count: int | None,
) -> Launches:
    """Return the launches of one operation. Claim that there are `count` of them, if it is given."""
    chosen = [one for one in found if op in (None, one.op)]
    if count is not None and len(chosen) != count:
        others = f"; all of them: {summarize(found)}" if len(found) > len(chosen) else ""
        expected = f"{count} launch{'' if count == 1 else 'es'}" + (f" of {op}" if op else "")
        claim(False, expected, f"{summarize(chosen)}{others}", **place)
    return Launches(chosen, ready, numels, place)


def claim(condition: bool, expected: str, got: str, likely_cause: str = "", **place: Any) -> None:
    """Raise an AssertionError with these sentences, unless the condition holds."""
    if not condition:
        raise CheckFailed(Verdict(expected, got, likely_cause, **place))


def name(launch: Launch) -> str:
    """Return text such as: all_reduce #3 (fc2.weight, float32, 4096 B)"""
    return describe(vars(launch))


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
