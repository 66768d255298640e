"""The message of a failed check states the fact first, then the mistake that explains it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from brigade.course.checks.diagnose.evidence import Evidence
from brigade.course.checks.expectations import expect_equal, format_distinct
from brigade.ranks.events import Launch
from brigade.ranks.verdict import CheckFailed, Verdict

Tensors = dict[str, "Tensor | None"]


def expected_tensors() -> Tensors:
    values = torch.arange(15) * 7919 % 101 / 16 - 3  # exact in every dtype that is used here
    return {"weight": values[:12].view(3, 4), "bias": values[12:]}


def times(factor: float, only: str = "") -> Tensors:
    return {name: value * (factor if only in name else 1.0) for name, value in expected_tensors().items()}


def verdict(actual: list[Tensors], expected: Tensors | None = None, **options: Any) -> Verdict:
    with pytest.raises(CheckFailed) as caught:
        expect_equal("gradients are the average", actual, expected or expected_tensors(), **options)
    return caught.value.verdict


def change(name: str, index: tuple[int, ...], value: float) -> Tensors:
    tensors = expected_tensors()
    tensors[name][index] = value
    return tensors


def flatten(tensors: Tensors) -> Tensor:
    return torch.cat([tensors["weight"].flatten(), tensors["bias"]])


def split(flat: Tensor) -> Tensors:
    return {"weight": flat[:12].view(3, 4), "bias": flat[12:]}


def swap(flat: Tensor) -> Tensor:
    return torch.cat([flat[12:], flat[:12]])


RIGHT = expected_tensors()
LATE = RIGHT | {"bias": torch.full((3,), float("nan"))}
OTHER = {name: value + 1 for name, value in RIGHT.items()}
ODD = {name: value.flip(0) * 0.4371 + 1 for name, value in RIGHT.items()}
EXACT = {name: value.double() * torch.pi for name, value in RIGHT.items()}
NOTHING: Tensors = dict.fromkeys(RIGHT)
OWN = [times(0.3), OTHER]
HYPOTHESES = {"something else.": [RIGHT, RIGHT], "each rank still has its own.": OWN}
AVG = Launch(0, [0, 1], "all_reduce", "float32", 3, 12, 1, False, "AVG", *[None] * 4, "backward", 0, 0, 0.0)
BLOCKING = [replace(AVG, sync=True)]
NORM = {"norm": torch.tensor([339494.03125], dtype=torch.float64)}


def describe_situations() -> dict[str, Verdict]:
    return {
        "summed, 2 ranks": verdict([times(2)] * 2),
        "summed, 3 ranks": verdict([times(3)] * 3),
        "divided twice": verdict([times(1 / 3)] * 3),
        "divided by the world, where the group is smaller": verdict(
            [times(2 / 6)] * 2, ranks=[1, 3], evidence=Evidence(world_size=6)
        ),
        "divided again after ReduceOp.AVG": verdict([times(1 / 2)] * 2, evidence=Evidence(launched=[AVG])),
        "the same in a smaller group": verdict([times(1 / 2)] * 2, evidence=Evidence(launched=[AVG], world_size=4)),
        "two mistakes with one factor": verdict([times(1 / 2)] * 2, ranks=[1, 3], evidence=Evidence(world_size=4)),
        "divided by 2, whatever the group": verdict([times(3 / 2)] * 3),
        "one tensor counted twice": verdict([times(2, only="bias")] * 3),
        "another factor": verdict([times(0.7)] * 2),
        "divided by the wrong number": verdict([times(0.4)] * 2),
        "a factor on one rank": verdict([RIGHT, times(2)]),
        "NaN": verdict([RIGHT, change("bias", (1,), float("nan"))]),
        "NaN, 2 handles without a wait": verdict([LATE], evidence=Evidence(launched=[AVG] * 3, unawaited=[AVG] * 2)),
        "NaN, no handle with a wait": verdict([LATE], evidence=Evidence(launched=[AVG] * 3, unawaited=[AVG] * 3)),
        "NaN, all handles with a wait": verdict([LATE], evidence=Evidence(launched=[AVG] * 3)),
        "a mistake in the record comes first": verdict([times(2)] * 2, evidence=Evidence(mistake="the wrong group.")),
        "all gone, after a synchronous launch": verdict([NOTHING] * 2, evidence=Evidence(launched=BLOCKING)),
        "all gone": verdict([NOTHING] * 2),
        "parts in the wrong places": verdict([split(swap(flatten(RIGHT)))] * 2),
        "entry i of one rank added to entry j of the other": verdict(
            [split((flatten(times(0.4)) + swap(flatten(times(1.6)))) / 2)] * 2
        ),
        "None on one rank": verdict([RIGHT, RIGHT | {"bias": None}]),
        "a hypothesis that matches": verdict(OWN, hypotheses=HYPOTHESES),
        "a hypothesis that matches on the wrong rank": verdict([RIGHT, OWN[1]], hypotheses=HYPOTHESES),
        "a hypothesis that does not match": verdict(OWN[::-1], hypotheses=HYPOTHESES),
        "rounded to float32": verdict([{name: v.float().double() for name, v in EXACT.items()}] * 2, EXACT),
        "not rounded": verdict([{name: v * (1 + 1e-6 * v.abs()) for name, v in EXACT.items()}] * 2, EXACT),
        "ranks that disagree": verdict([RIGHT, ODD]),
        "no known cause": verdict([ODD, ODD]),
        "one wrong entry, on two ranks": verdict([RIGHT, *[change("weight", (1, 2), 1.0)] * 2]),
        "a wrong shape": verdict([RIGHT | {"weight": torch.zeros(12)}]),
        "a missing name": verdict([{"weight": RIGHT["weight"]}]),
        "an infinite entry": verdict([change("bias", (0,), float("inf"))]),
        "something instead of None": verdict([{"w": torch.ones(3)}], {"w": None}),
        "a wrong count": verdict([{"n": torch.tensor(6)}], {"n": torch.tensor(5)}, tolerance=0.0),
        "a wrong imaginary part": verdict([{"w": torch.tensor([1.0, 2.0 + 3j])}], {"w": torch.tensor([1.0, 2.0])}),
        "two numbers that differ in the tenth digit": verdict([{"norm": NORM["norm"] * (1 + 1e-9)}], NORM),
    }


def test_messages(snapshot):
    """Every message states the fact first, and a cause only if the numbers or the record prove it."""
    snapshot("feedback", "\n".join(f"# {name}\n{failed}\n" for name, failed in describe_situations().items()))


# ---- what is right passes


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-10), (torch.bfloat16, 2**-7)])
def test_the_tolerance_is_relative_to_the_largest_entry(dtype, limit):
    expected = {"w": torch.tensor([100.0, 0.0, 1.0], dtype=torch.float64).to(dtype)}
    for index, factor, fits in ((1, 0.8, True), (2, 0.8, True), (1, 2.5, False)):
        shifted = expected["w"].clone()
        shifted[index] += 100 * limit * factor
        if fits:
            expect_equal("...", [{"w": shifted}], expected)
        else:
            verdict([{"w": shifted}], expected)


def test_a_hypothesis_that_gives_the_right_values_explains_nothing():
    """Values that are wrong by little more than rounding agree with the right ones, and with such a hypothesis."""
    nearly_right = [times(1 + 5e-5)] * 2
    assert not verdict(nearly_right, hypotheses={"each rank still has its own.": [RIGHT] * 2}).likely_cause
    assert verdict(nearly_right, hypotheses={"it is scaled.": nearly_right}).likely_cause == "it is scaled."


def test_a_tensor_that_cancels_may_keep_the_rounding_of_its_terms():
    expected = {"large": torch.tensor([1000.0]), "small": torch.tensor([1e-6])}
    actual = {"large": torch.tensor([1000.0]), "small": torch.tensor([6e-5])}
    expect_equal("...", [actual], expected)  # 1/100 of the largest entry of all
    alone = {"small": expected["small"]}
    verdict([actual], alone)
    expect_equal("...", [actual], alone, scale={"small": 10.0})


def test_none_is_zero_on_both_sides():
    zero = {"w": torch.zeros(3)}
    expect_equal("...", [{"w": None}, zero, {}], zero)
    expect_equal("...", [{"w": None}, zero, {}], {"w": None})


@pytest.mark.parametrize(
    ("numbers", "texts"),
    [
        ((339494.03125, 339494.0312), ["339494.03125", "339494.0312"]),
        ((339494.03125, 339494.03125), ["339494", "339494"]),
        ((0.1, 0.1 + 2**-56), ["0.10000000000000001", "0.10000000000000002"]),
        ((1.0, float("nan")), ["1", "nan"]),
        ((True, 3), ["1", "3"]),
        ((-0.0, 1e9), ["-0", "1e+09"]),
    ],
)
def test_unequal_numbers_print_differently(numbers, texts):
    formatted = format_distinct(*numbers)
    assert (len(set(formatted)) == 1) == (len(set(map(repr, map(float, numbers)))) == 1)
    assert formatted == texts


def test_an_imaginary_part_is_wrong():
    """A complex gradient whose real part is right is not the gradient."""
    expected: Tensors = {"weight": torch.tensor([1.0, 2.0])}
    expect_equal("equal", [{"weight": torch.tensor([1.0 + 0j, 2.0])}], expected)
    verdict([{"weight": torch.tensor([1.0 + 0j, 2.0 + 3j])}], expected)
