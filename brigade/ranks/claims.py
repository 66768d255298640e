"""Claims about what a rank did in a step. A claim owns its condition, both sentences, its place and its usual cause.

A claim that is wrong raises CheckFailed, an AssertionError. `brigade.testing` offers these claims to everybody, and the
graded checks are written with them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

from brigade.ranks.events import (
    Event,
    Launch,
    count_launches,
    count_sent_bytes,
    describe,
    drop_flags,
    find_last_border,
    launches,
    list_ready_gradients,
    summarize,
)
from brigade.ranks.verdict import CheckFailed, Verdict, join_names

# The usual cause of a failure: a sentence, or a function that finds it in the launches that are not as claimed.
Cause = str | Callable[["Launches"], str]
NOT_SO = "not so for {these} of {all}"


class At:
    """Claims about what happened on a rank, in a step, with a parameter, as far as they are given.

    The message names this place in front of what happened. A cause is a sentence, or a function without arguments that
    looks for one after a failure.
    """

    def __init__(self, rank: int | None = None, step: int | None = None, parameter: str | None = None):
        self.place = {"rank": rank, "step": step, "parameter": parameter}

    def claim(self, expected: str, condition: bool, got: str, cause: Any = "", hypothesis: str = "") -> None:
        """Claim anything: a condition, and what to say if it is false. Then raise CheckFailed, an AssertionError."""
        if not condition:
            raise CheckFailed(Verdict(expected, got, evaluate(cause), hypothesis, **self.place))  # type: ignore[arg-type]

    def equal(self, sentence: str, actual: Any, wanted: Any, cause: Any = "") -> None:
        """Claim that two values are equal. In the sentence, {} becomes what is expected, or what it was instead."""
        shown, exact = show(actual), show(wanted)
        if shown == exact and actual != wanted:  # such as "3" and 3, or lists whose shown elements are equal
            shown, exact = repr(actual), repr(wanted)
        self.claim(sentence.replace("{}", exact), actual == wanted, sentence.replace("{}", shown), cause)

    def at_most(self, sentence: str, actual: float, limit: float, cause: Any = "") -> None:
        """Claim that a number is not above a limit. In the sentence, {} becomes "at most 3", or the number."""
        for digits in range(3, 18):  # 17 digits distinguish any two float64 numbers
            shown, most = show_number(actual, digits), show_number(limit, digits)
            if shown != most:
                break
        self.claim(sentence.replace("{}", f"at most {most}"), actual <= limit, sentence.replace("{}", shown), cause)


def show_number(number: float, digits: int) -> str:
    """Return a number with at least so many digits, and all digits in front of the point if they are at most 15."""
    whole = len(str(int(abs(number)))) if abs(number) < 1e15 else 0  # 0 for NaN, too
    return f"{number:.{max(digits, whole)}g}"


def show(value: Any) -> str:
    """Return a value as it is shown in a sentence: lists as their first elements, or "none"."""
    if isinstance(value, (list, tuple, set, range)):
        return join_names([show(each) for each in value], 8) or "none"
    return str(value).removeprefix("torch.")


def each_step(records: Sequence[Sequence[Event]], count: int, ranks: Iterable[int] | None = None) -> Iterator[Step]:
    """Yield the first `count` steps of each rank (default: all). `records` are the events of all ranks."""
    for rank in range(len(records)) if ranks is None else ranks:
        for number in range(count):
            yield Step(records[rank], rank, number)


class Step(At):
    """What one rank did in one step. `number` is that of `with step(number):`, and `events` the rank's whole record."""

    def __init__(self, events: Sequence[Event], rank: int, number: int | None):
        super().__init__(rank, number)
        self.events, self.rank, self.number = events, rank, number

    @cached_property
    def ready(self) -> list[tuple[int, str]]:
        """The position in the record and the parameter of each gradient, in the order of readiness."""
        return list_ready_gradients(self.events, self.number)

    @property
    def gradients(self) -> list[str]:
        """The names of the watched model's parameters, in the order in which their gradients became ready."""
        return [name for _, name in self.ready]

    def launches(self, op: str | None = None, *, count: int | None = None) -> Launches:
        """Return the launches of the step in order, without barriers; with `op`, only those of "all_reduce" etc.

        With `count`, claim that there are so many.
        """
        found = Launches(launches(self.events, self.number), self)
        chosen = found.where(lambda one: op in (None, one.op))
        others = f"; all of them: {summarize(found)}" if len(found) > len(chosen) else ""
        expected = count_launches(count or 0) + (f" of {op}" if op else "")
        return chosen.claim(expected, count in (None, len(chosen)), "{these}" + others)

    def bytes_sent(self) -> float:
        """Return how many bytes the rank sends in its launches with a ring algorithm, on average over the ranks.

        A reduce-scatter, an all-gather and an all-to-all of n bytes on N ranks count as n (N - 1) / N, an all-reduce as
        twice as much, as in nccl-tests/doc/PERFORMANCE.md.
        """
        return sum(count_sent_bytes(one.op, one.nbytes, len(one.ranks)) for one in self.launches())


class Launches(Sequence[Launch]):
    """Some launches of one step in order, and claims about them.

    A claim returns the launches, so more claims can follow, or it raises CheckFailed, an AssertionError.

    A launch has the fields of `events.Launch`, such as `op`, `dtype`, `numel` and `nbytes`. A claim's cause is
    a sentence, or a function that gets the launches which are not as claimed, with their `step`, and returns a
    sentence, or "". In `got`, {these} becomes a description of these launches, {first} of the first one, {place} of the
    time when it came, and {count} and {all} the number of them and of all.
    """

    def __init__(self, found: Iterable[Launch], step: Step):
        self._found, self.step = list(found), step

    def __getitem__(self, index: Any) -> Any:
        return self._found[index]

    def __len__(self) -> int:
        return len(self._found)

    def where(self, condition: Callable[[Launch], bool]) -> Launches:
        """Return the launches for which the condition is true."""
        return Launches(filter(condition, self), self.step)

    def without_flags(self) -> Launches:
        """Return the launches without those of a few elements, such as norms and flags (see `events.drop_flags`)."""
        return Launches(drop_flags(self), self.step)

    # ---- claims

    def claim(
        self, expected: str, condition: bool, got: str = "the step made {these}", cause: Cause = "", num_all: int = 0
    ) -> Launches:
        """Claim anything about these launches together."""
        if not condition:
            words = {"{these}": summarize(self), "{count}": str(len(self)), "{all}": str(num_all or len(self))}
            words |= {"{first}": name(self[0]), "{place}": describe_place(self[0], self.step.ready)} if self else {}
            for word, text in words.items():
                got = got.replace(word, text)
            self.step.claim(expected, False, got, explain(cause, self))
        return self

    def satisfy(
        self, expected: str, condition: Callable[[Launch], bool], cause: Cause = "", got: str = NOT_SO
    ) -> Launches:
        """Claim that a condition is true for each launch. `got` and `cause` are about those for which it is not."""
        wrong = self.where(lambda one: not condition(one))
        wrong.claim(expected, not wrong, got, cause, len(self))
        return self

    def are_none(self, expected: str, cause: Cause = "") -> Launches:
        """Claim that there is none of these launches."""
        return self.claim(expected, not self, cause=cause)

    def are_so_many(self, sentence: str, count: int, cause: Cause = "") -> Launches:
        """Claim that there are `count` launches. In the sentence, {} becomes "5 launches"."""
        expected = sentence.replace("{}", count_launches(count))
        return self.claim(expected, len(self) == count, cause=cause)

    def are_one_for_each(
        self,
        unit: str,
        op: str,
        numels: Sequence[int],
        setting: str = "",
        *,
        in_order: bool = True,
        cause: Cause = "",
    ) -> Launches:
        """Claim that there is one launch of `op` for each unit ("bucket", "parameter"), of so many elements.

        `setting` is added to what is expected, such as " (buckets_per_group=2)".
        """
        made, wanted = [(one.op, one.numel) for one in self], [(op, numel) for numel in numels]
        each = f"each of {len(numels)} {unit}s" if len(numels) > 1 else f"the only {unit}"
        order = ", in order" * (in_order and len(numels) > 1)
        expected = f"a step launches one {op} for {each}{order}, with {join_names(numels, 8)} elements{setting}"
        return self.claim(expected, made == wanted or not in_order and sorted(made) == sorted(wanted), cause=cause)

    def are_asynchronous(self, cause: Cause = "it is called without async_op=True.") -> Launches:
        """Claim that none of the calls waits for its own result."""
        got = "{first} waits inside the call"
        return self.satisfy("every launch is asynchronous", lambda one: not one.sync, cause, got)

    def are_awaited(self, cause: Cause = "its handle is dropped, or wait() is called on another one.") -> Launches:
        """Claim that the rank waits for each launch in the same step, and changes no tensor of it before."""
        expected = "every launch is awaited, and its tensors do not change before"
        self.satisfy(expected, lambda one: is_known(one) or bool(one.waits), cause, "nobody waits for {first}")
        in_step = self.where(lambda one: not is_known(one))
        in_step.satisfy(
            expected, lambda one: one.wait_steps[0] == one.step, "", "the rank waits for {first} after the step"
        )
        return self.satisfy(expected, is_unchanged, "", "a tensor of {first} changes between launch and wait")

    def come_during_backward(self, cause: Cause = "") -> Launches:
        """Claim that backward makes each launch."""
        border = find_last_border(self.step.events, self.step.number)  # of graded runs, after which a rank may lie
        is_late = border >= 0 and all(one.place > border for one in self)
        expected, got = "every launch comes during backward", "{these} came at another time"
        return self.satisfy(expected, lambda one: one.phase == "backward" and not is_late, cause, got)

    def do_not_block_backward(self, cause: Cause = "") -> Launches:
        """Claim that backward waits for none of the launches."""
        expected = "during backward, every launch is asynchronous, and the code does not wait on any handle"
        got = "backward waited for {these}"
        return self.satisfy(
            expected, lambda one: "backward" not in [*one.wait_phases, one.phase * one.sync], cause, got
        )

    def come_before_gradient(self, offset: int, cause: Cause = "") -> Launches:
        """Claim that communication overlaps with backward: each launch is made soon after its last gradient is ready.

        It comes before the gradient that is `offset` after its last one is ready: +1 means that nothing comes between,
        as in a hook, and +2 that one gradient may. Near the end of backward, where no such gradient follows, it must
        come during backward. The launches carry the gradients in the order in which they become ready; their sizes
        tell which. Padding makes this claim more lenient. Raise ValueError if no model is watched, or without a
        backward.
        """
        ready = self.step.ready
        if not ready:
            raise ValueError(
                "no gradient became ready: call watch(model) before wrapping, and run backward in the step"
            )
        watched = (event["numels"] for event in self.step.events if event["kind"] == "watched")
        numels = {name: numel for each in watched for name, numel in each.items()}
        ends = list(accumulate(numels[gradient] for _, gradient in ready))
        for index, (one, carried) in enumerate(zip(self, accumulate(one.numel for one in self), strict=True)):
            last = bisect_left(ends, carried)
            expected, in_time = f"launch {index} comes during backward", one.phase == "backward"
            if last + offset < len(ready):
                (_, own), (limit, after) = ready[last], ready[last + offset]
                expected = f"launch {index}, whose last gradient is that of {own}, comes before that of {after} is "
                expected, in_time = expected + "ready", one.place < limit
            Launches([one], self.step).claim(expected, in_time, "{first} comes {place}", cause)
        return self

    def have_dtype(self, dtype: Any, cause: Cause = "") -> Launches:
        """Claim that all launches carry this dtype, for example torch.bfloat16 or "bfloat16"."""
        wanted = str(dtype).removeprefix("torch.")
        for one in self:
            got = f"{{first}} carries {one.dtype}"
            Launches([one], self.step).claim(f"every launch carries {wanted}", one.dtype == wanted, got, cause)
        return self

    def carry(self, nbytes: int, setting: str = "", *, cause: Cause = "") -> Launches:
        """Claim that the launches carry `nbytes` bytes together, each counted once in full."""
        total = sum(one.nbytes for one in self)
        expected, got = f"the launches carry {nbytes} bytes together{setting}", f"{total} bytes in {{these}}"
        return self.claim(expected, total == nbytes, got, cause)


# ---- conditions for `where` and `satisfy`


def in_phase(*phases: str) -> Callable[[Launch], bool]:
    """Return whether a launch was made in one of these phases, as a condition."""
    return lambda launch: launch.phase in phases


def before(place: int) -> Callable[[Launch], bool]:
    """Return whether a launch was made before a position in the record, as a condition."""
    return lambda launch: launch.place < place


def after(place: int) -> Callable[[Launch], bool]:
    """Return whether a launch was made after a position in the record, as a condition."""
    return lambda launch: launch.place > place


def is_awaited_in_step(launch: Launch) -> bool:
    """Return whether the rank waited for a launch in its step."""
    return launch.step in launch.wait_steps


def is_unchanged(launch: Launch) -> bool:
    """Return whether the tensors of a launch did not change between launch and wait."""
    return not launch.raced


def evaluate(value: Any) -> Any:
    """Return a value, or the result of a function that was passed instead."""
    return value() if callable(value) else value


def explain(cause: Cause, launched: Launches) -> str:
    """Return a cause as a sentence."""
    return cause(launched) if callable(cause) else cause


def is_known(launch: Launch) -> bool:
    """Return whether the rank knew that a launch was complete before it waited, if it did."""
    return launch.sync or launch.is_polled


def name(launch: Launch) -> str:
    """Return text such as: all_reduce #3 (fc2.weight, float32, 4096 B)"""
    return describe(vars(launch))


def describe_place(launch: Launch, ready: Sequence[tuple[int, str]]) -> str:
    """Say how many gradients were ready before a launch."""
    done = [gradient for place, gradient in ready if place < launch.place]
    when = "after backward" if len(done) == len(ready) and launch.phase != "backward" else "later"
    last = f", the last is {done[-1]}" if done else ""
    return f"{when}: {len(done)} of {len(ready)} gradients are ready{last}"
