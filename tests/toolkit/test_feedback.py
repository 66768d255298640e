"""The message of a failed check states the fact first, then the mistake that explains it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from brigade.checks.diagnose.evidence import Evidence, find_leftover
from brigade.checks.expectations import (
    expect,
    expect_equal,
    expect_gradients,
    expect_start,
    expect_weights,
    format_distinct,
    join_names,
)
from brigade.checks.reference import Case
from brigade.checks.verdict import CheckFailed, Verdict

Tensors = dict[str, "Tensor | None"]


def expected_tensors() -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {"weight": torch.randn(3, 4, generator=generator), "bias": torch.randn(3, generator=generator)}


def times(factor: float, only: str = "") -> Tensors:
    return {name: value * (factor if only in name else 1.0) for name, value in expected_tensors().items()}


def verdict(actual: list[Tensors], expected: Tensors | None = None, **options: Any) -> Verdict:
    with pytest.raises(CheckFailed) as caught:
        expect_equal("gradients are the average", actual, expected or expected_tensors(), **options)
    return caught.value.verdict


# ---- the cause


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_summed_not_averaged(world_size):
    failed = verdict([times(world_size)] * world_size)
    cause = f"every gradient is exactly {world_size}× too large: it is summed over the ranks but not divided by"
    assert failed.likely_cause.startswith(cause)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_divided_twice(world_size):
    failed = verdict([times(1 / world_size)] * world_size)
    assert failed.likely_cause == f"every gradient is exactly {world_size}× too small: it is divided twice."


def test_divided_by_the_world_where_the_group_is_smaller():
    failed = verdict([times(2 / 6)] * 2, ranks=[1, 3], evidence=Evidence(world_size=6))
    assert "divided by the world size (6) instead of the group size (2)" in failed.likely_cause
    assert failed.described.startswith("rank 1, weight")


def test_divided_twice_where_one_division_was_the_collectives():
    failed = verdict([times(1 / 2)] * 2, evidence=Evidence(uses_avg=True))
    assert (
        failed.likely_cause
        == "every gradient is exactly 2× too small: it is divided again after ReduceOp.AVG has divided it."
    )
    assert "ReduceOp.AVG" in verdict([times(1 / 2)] * 2, evidence=Evidence(uses_avg=True, world_size=4)).likely_cause


def test_two_mistakes_with_one_factor_are_both_named():
    cause = verdict([times(1 / 2)] * 2, ranks=[1, 3], evidence=Evidence(world_size=4)).likely_cause
    assert "the world size" in cause and "or it is divided by 2 twice." in cause


def test_divided_by_two_whatever_the_group():
    assert "divided by 2, but the group has 3 ranks" in verdict([times(3 / 2)] * 3).likely_cause


def test_counted_twice():
    failed = verdict([times(2, only="bias")] * 3)
    assert failed.likely_cause == "the tensor is exactly 2× too large: it is counted twice."


def test_another_factor():
    assert "0.7× the expected value" in verdict([times(0.7)] * 2).likely_cause


def test_a_factor_of_one_rank_is_found_too():
    assert "2× too large" in verdict([expected_tensors(), times(2)]).likely_cause


def test_nan_is_a_result_nobody_waited_for():
    late = expected_tensors()
    late["bias"][1] = float("nan")
    failed = verdict([expected_tensors(), late])
    assert "does not wait on" in failed.likely_cause
    assert failed.described == f"rank 1, bias: entry 1 is nan, expected {expected_tensors()['bias'][1].item():.6g}"


@pytest.mark.parametrize(
    ("num_unawaited", "message"),
    [
        (2, "does not wait on 2 of its 3 handles"),
        (3, "does not wait on any of its 3 handles"),
        (0, "reads or copies the result before the wait"),
    ],
)
def test_nan_where_the_record_knows_of_the_handles(num_unawaited, message):
    wrong = expected_tensors() | {"bias": torch.full((3,), float("nan"))}
    cause = verdict([wrong], evidence=Evidence(num_unawaited=num_unawaited, num_handles=3)).likely_cause
    assert message in cause and ("does not wait" in cause) == bool(num_unawaited)


def test_a_mistake_in_the_record_comes_first():
    assert verdict([times(2)] * 2, evidence=Evidence(mistake="the wrong group.")).likely_cause == "the wrong group."


def test_gradients_that_are_all_gone():
    nothing: Tensors = dict.fromkeys(expected_tensors())
    assert "p.grad was overwritten" in verdict([nothing] * 2, evidence=Evidence(has_sync_launch=True)).likely_cause
    assert "p.grad was overwritten" not in verdict([nothing] * 2).likely_cause


def test_pieces_in_the_wrong_places():
    entries = torch.cat([expected_tensors()["bias"], expected_tensors()["weight"].flatten()])
    shifted = {"weight": entries[:12].view(3, 4), "bias": entries[12:]}
    assert "in the wrong places" in verdict([shifted] * 2).likely_cause


def test_sums_that_are_right_in_places_that_are_not():
    """Two ranks average the parameters in different orders: entry i of one rank is added to entry j of the other."""
    own = [times(0.4), times(1.6)]
    first, other = (torch.cat([tensors["weight"].flatten(), tensors["bias"]]) for tensors in own)
    swapped = torch.cat([other[3:], other[:3]])
    mixed = (first + swapped) / 2
    shuffled = {"weight": mixed[:12].view(3, 4), "bias": mixed[12:]}
    assert "the ranks order the parameters differently" in verdict([shuffled, shuffled]).likely_cause


def test_none_where_a_gradient_belongs():
    missing = expected_tensors() | {"bias": None}
    failed = verdict([expected_tensors(), missing])
    assert "rank 1, bias: the tensor is None" in failed.described
    assert "None on a rank is left out of the average" in failed.likely_cause


def test_a_hypothesis_is_named_if_its_values_match():
    own = [times(0.3), {name: value + 1 for name, value in expected_tensors().items()}]
    hypotheses = {"something else.": [expected_tensors(), expected_tensors()], "each rank still has its own.": own}
    assert verdict(own, hypotheses=hypotheses).likely_cause == "each rank still has its own."
    assert verdict([expected_tensors(), own[1]], hypotheses=hypotheses).likely_cause == "each rank still has its own."
    assert verdict([own[1], own[0]], hypotheses=hypotheses).likely_cause != "each rank still has its own."


def test_values_that_pass_through_a_narrower_dtype():
    exact = {name: value.double() * torch.pi for name, value in expected_tensors().items()}
    rounded = {name: value.float().double() for name, value in exact.items()}
    failed = verdict([rounded, rounded], exact)
    assert failed.likely_cause.startswith("the values are rounded to float32") and "float64" in failed.likely_cause
    entry, wanted = failed.described.splitlines()[0].partition("entry ")[2].split(" is ")[1].split(", expected ")
    assert entry != wanted, "as many digits as differ"
    wrong = {name: value * (1 + 1e-6 * torch.rand_like(value)) for name, value in exact.items()}
    assert "rounded" not in verdict([wrong, wrong], exact).likely_cause


def test_ranks_that_disagree():
    actual = [expected_tensors(), {name: value.flip(0) + 1 for name, value in expected_tensors().items()}]
    assert "the ranks have different values of weight" in verdict(actual).likely_cause


def test_no_cause_is_invented():
    wrong = {name: value.flip(0) * torch.rand(1) + 1 for name, value in expected_tensors().items()}
    failed = verdict([wrong, wrong])
    assert failed.likely_cause == "" and "cause" not in str(failed)


# ---- the fact


def test_the_first_wrong_entry_is_shown_and_the_others_counted():
    wrong = expected_tensors()
    wrong["weight"][1, 2] += 1.0
    failed = verdict([expected_tensors(), wrong, wrong])
    want = expected_tensors()["weight"][1, 2].item()
    assert failed.expected == "gradients are the average"
    first, second = failed.described.splitlines()
    assert first == f"rank 1, weight: entry 6 is {want + 1:.6g}, expected {want:.6g}."
    assert second == "On ranks 1 and 2, 1 of 2 tensors is wrong: weight"
    assert [line[:14].strip() for line in str(failed).splitlines()] == ["Expected:", "Got:", "", "Likely cause:"]


def test_a_wrong_shape():
    failed = verdict([expected_tensors() | {"weight": torch.zeros(12)}])
    assert "The shape of weight is (3, 4)" in failed.expected and "shape is (12,)" in failed.described


def test_a_missing_name_is_wrong():
    assert "rank 0, bias: the tensor is None" in verdict([{"weight": expected_tensors()["weight"]}]).described


def test_an_infinite_entry_is_wrong():
    wrong = expected_tensors()
    wrong["bias"][0] = float("inf")
    assert "bias: entry 0 is inf" in verdict([wrong]).described


def test_expect():
    expect(True, "it holds", "it does")
    with pytest.raises(CheckFailed) as caught:
        expect(False, "one launch", "rank 0: two\nrank 1: one", "one of them launches twice.")
    assert str(caught.value).splitlines() == [
        "Expected:     one launch",
        "Got:          rank 0: two",
        "              rank 1: one",
        "Likely cause: one of them launches twice.",
    ]


def test_names_are_joined():
    assert join_names(["a", "b"]) == "a and b"
    assert join_names(range(6)) == "0, 1, 2, 3 and 2 more"


# ---- what is right passes


def test_equal_tensors_pass():
    expect_equal("...", [expected_tensors()] * 3, expected_tensors())
    expect_equal("...", [expected_tensors()] * 3, expected_tensors(), tolerance=0.0)


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
    assert verdict([{"w": torch.ones(3)}], {"w": None}).described == "rank 0, w: entry 0 is 1, expected 0"


def test_tensors_that_are_empty_or_integers():
    expected = {"empty": torch.zeros(0, 3), "count": torch.tensor(5), "mask": torch.tensor([True, False])}
    expect_equal("...", [expected], expected, tolerance=0.0)
    assert "count: entry 0 is 6" in verdict([expected | {"count": torch.tensor(6)}], expected, tolerance=0.0).described


# ---- on a case


def results_of(case: Case, gradients: list[Tensors]) -> list[dict]:
    weights, _ = case.train()
    return [{"gradients": [gradients[rank]], "weights": weights} for rank in range(case.world_size)]


@pytest.mark.parametrize("model", ["Plain", "Tied", "Buffers", "MixedDtypes", "Transposed"])
def test_the_expected_values_of_a_case_pass(model):
    case = Case(random.Random(3), model, 3, steps=2)
    results = results_of(case, [case.gradients()] * 3)
    expect_gradients(results, case)
    expect_start([case.start()] * 3, case)
    expect_weights(results, case)


def test_an_average_in_the_gradients_own_dtype_passes():
    """A correct answer may sum in float32 or bfloat16, and may divide before or after the sum."""
    for seed in range(8):
        case = Case(random.Random(seed), "Plain", 4)
        own = [case.gradients([rank]) for rank in range(4)]
        summed = {name: sum(gradients[name] for gradients in own) / 4 for name in own[0]}
        divided = {name: sum(gradients[name] / 4 for gradients in own) for name in own[0]}
        expect_gradients(results_of(case, [summed, divided] * 2), case)


def failure_of(function: Any, results: list, case: Case) -> Verdict:
    with pytest.raises(CheckFailed) as caught:
        function(results, case)
    return caught.value.verdict


def test_a_gradient_that_stayed_the_ranks_own():
    case = Case(random.Random(3), "Plain", 2)
    results = results_of(case, [case.gradients([rank]) for rank in range(2)])
    failed = failure_of(expect_gradients, results, case)
    assert "each rank still has its own gradient" in failed.likely_cause
    assert "average over ranks 0 and 1" in failed.expected


def test_only_the_groups_ranks_are_judged():
    case = Case(random.Random(3), "Plain", 4, group=[1, 3])
    nothing: Tensors = dict.fromkeys(case.gradients())
    expect_gradients(results_of(case, [nothing, case.gradients()] * 2), case)
    halved = {name: value / 2 for name, value in case.gradients().items()}
    failed = failure_of(expect_gradients, results_of(case, [nothing, halved] * 2), case)
    assert "divided by the world size (4)" in failed.likely_cause
    assert failed.described.startswith("rank 1, ")


def test_a_start_that_is_the_ranks_own_or_the_worlds():
    case = Case(random.Random(3), "Buffers", 3, group=[1, 2])
    failed = failure_of(expect_start, case.states, case)
    assert failed.described.startswith("rank 2, ") and "still has its own" in failed.likely_cause
    assert "rank 0 of the world" in failure_of(expect_start, [case.states[0]] * 3, case).likely_cause
    assert "the last rank" in failure_of(expect_start, [case.states[2]] * 3, case).likely_cause


def test_a_broadcast_that_ignores_the_group_is_named_by_the_gradients_too():
    case = Case(random.Random(3), "Plain", 3, group=[1, 2])
    results = results_of(case, [case.gradients([0])] * 3)
    for start, cause in (
        (case.states[0], "the broadcast in the constructor ignores process_group."),
        (case.states[2], "the broadcast starts from the wrong rank."),
    ):
        failed = failure_of(expect_gradients, [result | {"start": start} for result in results], case)
        assert failed.likely_cause.startswith("rank 1 ") and failed.likely_cause.endswith(cause)
    starts = [case.states[rank] for rank in range(3)]
    failed = failure_of(expect_gradients, [r | {"start": s} for r, s in zip(results, starts)], case)
    assert failed.likely_cause.startswith("rank 2 and rank 1 start with different weights")


def test_one_buffer_that_was_not_broadcast():
    case = Case(random.Random(3), "Buffers", 2)
    start = [case.start(), case.start() | {"scratch": case.states[1]["scratch"]}]
    failed = failure_of(expect_start, start, case)
    assert failed.described.startswith("rank 1, scratch") and "still has its own" in failed.likely_cause
    expect_start(start, case, "parameters")
    with pytest.raises(CheckFailed, match="starts with the buffers of"):
        expect_start(start, case, "buffers")


# ---- causes that the record shows


def record(*steps: str) -> list[dict[str, Any]]:
    """Return a record with one step for each text.

    In a text, "r" is a ready gradient, "l" a launch, and "f" the start of finish_grad_sync.
    """
    fields = ("dtype", "numel", "nbytes", "parts", "sync", "reduce_op", "peer", "line", "name", "memory")
    launch = {"op": "all_reduce", "time": 0.0} | dict.fromkeys(fields)
    events = []
    for step, text in enumerate(steps):
        events += [{"kind": "step", "step": step}, {"kind": "phase", "phase": "backward"}]
        for sign in text:
            phase = "finish" if sign == "f" else events[-1]["phase"]
            kind = {"r": "ready", "l": "launch", "f": "phase"}[sign]
            events.append(
                {"kind": kind, "phase": phase, "index": len(events), "name": "weight"} | (launch if sign == "l" else {})
            )
    return events


@pytest.mark.parametrize(
    ("steps", "cause"),
    [
        (["rlrlf", "rlrlf"], ""),
        (["rlrlf"], ""),
        ([], ""),
        (
            ["rlrlf", "rlrlf", "rrf"],
            "in step 2, the number of all_reduce launches was 0, but it was 2 at the same point in step 0",
        ),
        (["rlrlf", "rlrf", "rlrlf"], "in step 1, the number of all_reduce launches was 1, but it was 2 at"),
        (
            ["rrlfl", "rlrfl"],
            "was launched when 1 gradient was ready, but in step 0 it was launched when 2 gradients were ready",
        ),
        (
            ["rrfll", "rrllf"],
            "was launched when 2 gradients were ready, but in step 0 it was launched in finish_grad_sync",
        ),
        (["rlrlf", "rl"], ""),  # the rank failed before the second launch was due
        (["rlrlf", "rlr"], ""),
        (["rlrlf", "rr"], "launches was 0, but it was 1 at"),
        (["rrflll", "rrf"], ""),
    ],
)
def test_launches_show_state_left_over_from_a_step(steps, cause):
    description = find_leftover(record(*steps))
    assert cause in description if cause else not description


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


def test_messages_print_unequal_numbers_differently():
    exact = {"norm": torch.tensor([339494.03125], dtype=torch.float64)}
    failed = verdict([{"norm": exact["norm"] * (1 + 1e-9)}], exact)
    assert "is 339494.032, expected 339494.031" in failed.described
