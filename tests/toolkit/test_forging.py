"""What a rank returns can cost points, but gain none: a check of a right answer fails with every forged result.

Each check runs once on the reference. Then it runs again on forged copies of what the ranks returned: each container is
emptied, shortened, lengthened or of another type, each value has another type, and each value is another one. What a
form refuses (`brigade/course/checks/forms.py`) does not reach the check, so only the rest is played.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mutants import read_reference
from replay import Tape, replace_values

from brigade.course.checks import run
from brigade.course.checks.collect import Check, collect
from brigade.course.checks.context import CheckContext
from brigade.course.checks.forms import ListOf, OneOf, find_mistake
from brigade.course.checks.outcome import Outcome
from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.grader.witness.witness import GraderWitness
from brigade.ranks.claims import At
from brigade.ranks.runner.ranks import RankResults
from brigade.ranks.runner.server import SERVER
from brigade.ranks.verdict import CheckFailed, Verdict

# A scenario of training returns more than one check judges, because causes need it. These are the names of the results
# whose values, or the lengths of whose lists, a check does not judge, because another check of its module does.
MEASURED = {
    "copied_bytes",
    "fp32_bytes",
    "grad_bytes",
    "groups",
    "losses",
    "num_foreign",
    "state_bytes",
}  # by module 8's training
UNJUDGED: dict[tuple[int, str], set[str]] = {
    (12, "test_tokens_weigh_equally"): {"results"},
    (12, "test_results"): {"results", "weights"},  # results of the rank that is alone in another group
    (12, "test_idle_ranks"): {"results"},
    (12, "test_clipping"): {"results"},
    (12, "test_one_decision"): {"results", "weights", "changed", "left"},  # the last two are judged in skipped steps
    (12, "test_iterable_raises"): {"*"},  # the number of steps of a call that raises is returned for causes
    (1, "test_branches_and_unused_parameters"): {"gradients", "interface", "start", "weights"},
    (1, "test_buffers_start_equal"): {"*"},
    (1, "test_gradients_are_averaged"): {"interface", "start", "weights"},
    (1, "test_one_all_reduce_per_parameter"): {"gradients", "interface", "start", "weights"},
    (1, "test_several_steps"): {"gradients", "interface", "start"},
    (1, "test_subgroups"): {"gradients", "interface", "start", "weights"},
    (2, "test_branches_and_unused_parameters"): {"gradients", "interface", "start"},
    (2, "test_bytes_on_the_wire"): {"gradients", "interface", "start", "weights"},
    (2, "test_gradients_are_averaged"): {"interface", "weights"},
    (2, "test_gradients_keep_shape_and_stride"): {"interface", "start", "weights"},
    (2, "test_mixed_dtypes"): {"interface", "start", "weights"},
    (2, "test_one_all_reduce_per_dtype"): {"gradients", "interface", "start", "weights"},
    (2, "test_steps_and_subgroups"): {"gradients"},
    (3, "test_every_handle_is_waited_on"): {"gradients", "interface", "start", "weights"},
    (3, "test_gradients_are_averaged"): {"interface", "weights"},
    (3, "test_launches_are_asynchronous"): {"gradients", "interface", "start", "weights"},
    (3, "test_launches_follow_their_gradients"): {"gradients", "interface", "start", "weights"},
    (3, "test_no_sync_accumulates"): {"gradients", "interface", "start"},
    (3, "test_no_sync_restores_its_state"): {"the result"},
    (3, "test_steps_and_subgroups"): {"gradients"},
    (4, "test_buckets_overlap_with_backward"): {"gradients", "interface", "start", "weights"},
    (4, "test_gradients_are_averaged"): {"interface", "start", "weights"},
    (4, "test_launch_order_does_not_depend_on_ready_order"): {"gradients", "interface", "start", "weights"},
    (4, "test_no_sync_accumulates"): {"*", "gradients", "interface", "start"},
    (4, "test_steps_and_subgroups"): {"gradients"},
    (4, "test_unused_parameters"): {"gradients", "interface", "start"},
    (8, "test_sharded_clipping"): {"losses", "norm_dtypes", "num_others", "sizes"},
    (8, "test_sharded_equals_unsharded"): {"losses", "num_others", "sizes"},
    (8, "test_sharded_groups_and_schedulers"): {"losses"},
    (8, "test_sharded_launches"): {"left", "losses", "num_others", "sizes", "weights"},
    (8, "test_sharded_state_is_shared"): {"*"},
    (8, "test_zero_equals_unsharded"): MEASURED | {"*", "a layer-wise LARS"},
    # A step returns weights, FLOPs, and what its closure did: each check judges one of these.
    (15, "test_equals_one_process"): {"steps"},
    (15, "test_launches"): {"steps"},
    (15, "test_overlap"): {"steps"},
    (15, "test_flops"): {"steps"},
    (15, "test_options"): {"steps"},
    (15, "test_momentum"): {"steps"},
    (15, "test_state_dict"): {"steps"},
    (15, "test_resharding"): {"steps"},
    (5, "test_gradients_are_averaged"): {"interface", "weights"},
    (5, "test_gradients_are_views"): {"bare", "buffers", "ddp", "weights"},
    (7, "test_gradients_are_averaged"): {"gradients", "interface"},
    (7, "test_steady_step_makes_no_view"): {"num_alive", "num_views", "tensors"},
    (7, "test_views_follow_the_buffer"): {"num_views"},
    (7, "test_launches_are_those_of_module_6"): {"num_alive", "num_views", "tensors"},
    (16, "test_launches_overlap"): {"gradients", "interface", "start", "weights"},
    (16, "test_zero_optimizer"): MEASURED | {"gather_grads", "is_optimizer"},
    (10, "test_gradient_memory"): {"left"},  # it is returned for causes
    (10, "test_live_buckets"): {"constructed", "finished", "hooks", "left"},  # it judges records of the same runs
    (10, "test_equals_unsharded"): {
        "fp32_bytes",
        "grad_bytes",
        "groups",
        "losses",
        "norm_dtypes",
        "num_foreign",
        "state_bytes",
    },
    (16, "test_error_does_not_grow"): {"*"},
    (16, "test_exact_values"): {"*"},
    (16, "test_gradients"): {"*", "weights"},
    (16, "test_one_all_to_all"): {"*"},
    (16, "test_scratch"): {"after", "during", "without"},
    (16, "test_several_in_flight"): {"*"},
    # Measured numbers, and results that other checks of the module judge.
    (5, "test_main_grad_accumulates_in_fp32"): {"last", "steps"},
    (5, "test_one_buffer_per_dtype"): {"buffers", "interface", "start", "weights"},
    (5, "test_steps_and_subgroups"): {"*", "gradients", "interface", "start"},
    (6, "test_bucket_group"): {"moved", "params"},
    (6, "test_coalesce_refuses_mixtures"): {"*"},
    (6, "test_gradients_are_averaged"): {"interface", "weights"},
    (6, "test_groups_overlap_with_backward"): {"gradients", "interface", "start", "weights"},
    (6, "test_launches_and_volume"): {"gradients", "interface", "start", "weights"},
    (10, "test_accumulation"): MEASURED
    | {"after a step in no_sync with a forward that is thrown away before the finish"},
    (10, "test_volume_and_dtypes"): MEASURED | {"after", "before", "gather_grads", "is_optimizer", "weights"},
    (11, "test_each_rank_has_its_part"): {"shards", "storages"},
    (14, "test_same_start"): {"interface"},
}
SAMPLE = {(0, "test_ring_reduce_scatter"), (4, "test_bucket_rule"), (15, "test_assignment"), (12, "test_assignment")}
CHECKS = [
    pytest.param(
        check,
        id=f"{entry.number}-{check.name.removeprefix('test_')}",
        marks=[pytest.mark.extended] * ((entry.number, check.name) not in SAMPLE),
    )
    for entry in MODULES
    for check in collect([entry])
]
Place = tuple[Any, ...]  # the keys and the numbers that lead to a value in the result of a rank


@pytest.fixture(autouse=True)
def use_switch(few_cases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SERVER, "witness", GraderWitness)


def list_places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield the place and the value of each container and of each value in it."""
    yield place, value
    if isinstance(value, (list, tuple, dict)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from list_places(value[key], (*place, key))


def generalize(place: Place) -> str:
    """Return a place with a star for each number and for each name of a parameter, such as "gradients, *, *"."""
    keys = ("*" if type(key) is int or "." in key or key[-1:].isdigit() else key for key in place)
    return ", ".join(keys) or "the result"


def forge_form(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield values of another form, with a word for each."""
    if isinstance(value, (list, tuple, dict)):
        items = list(value.items() if isinstance(value, dict) else value)
        make: Callable[..., Any] = type(value)
        if items:
            yield "emptied", make()
            yield "shortened", make(items[:-1])
            more = ("more", items[-1][1]) if isinstance(value, dict) else items[-1]
            yield "lengthened", make([*items, more])
        yield "retyped", tuple(value) if isinstance(value, list) else items
    elif isinstance(value, torch.Tensor):
        yield "complex", value.to(torch.complex128)
        yield "retyped", value.to(torch.int16 if value.dtype != torch.int16 else torch.float64)
        yield "listed", value.flatten().tolist()
        yield "emptied", value.new_empty((0, *value.shape))
        yield "lengthened", value[None].expand(2, *value.shape).contiguous()
    elif value is not None:
        yield "retyped", str(value) if not isinstance(value, str) else [value]
        if isinstance(value, (int, float)) and math.isfinite(value):
            yield "retyped", float(value) if isinstance(value, int) else int(value)


def forge_value(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield other values, and None, with a word for each."""
    if value is not None:
        yield "None", None
    if isinstance(value, torch.Tensor) and value.numel():
        if value.dtype.is_floating_point:
            yield "NaN", torch.full_like(value, math.nan)
        yield "another", ~value if value.dtype == torch.bool else 10 * value + 1
    elif isinstance(value, bool):
        yield "another", not value
    elif isinstance(value, (int, float)):
        yield "another", 10 * value + 1
        if isinstance(value, float):
            yield "NaN", math.nan
    elif isinstance(value, str):
        yield "another", f"{value}?"
    elif isinstance(value, torch.dtype):
        yield "another", torch.int16 if value != torch.int16 else torch.float64


def replace_at(value: Any, place: Place, forged: Any) -> Any:
    """Return a copy of a value with another value at this place."""
    if not place:
        return forged
    key, *rest = place
    if isinstance(value, dict):
        return value | {key: replace_at(value[key], tuple(rest), forged)}
    return type(value)([*value[:key], replace_at(value[key], tuple(rest), forged), *value[key + 1 :]])


def list_forgeries(calls: list[RankResults]) -> Iterator[tuple[str, str, int, list[Any]]]:
    """Yield where a value was forged and how, the number of the call, and what the ranks of this call then return.

    Of the places that differ only in numbers and names of parameters, take the first and the last of all calls.
    """
    places: dict[str, list[tuple[int, int, Place, Any]]] = {}
    for number, results in enumerate(calls):
        for rank, result in enumerate(results):
            for place, value in list_places(result):
                kind = type(value).__name__
                places.setdefault(f"{generalize(place)} ({kind})", []).append((number, rank, place, value))
    for pattern, same in places.items():
        for number, rank, place, value in {id(one): one for one in (same[0], same[-1])}.values():
            for is_form, forge in ((True, forge_form), (False, forge_value)):
                for how, forged in forge(value):
                    values = [*calls[number]]
                    values[rank] = replace_at(values[rank], place, forged)
                    if not find_mistake(calls[number].forms[rank], values[rank]):
                        yield pattern, f"form: {how}" if is_form else how, number, values


def find_gains(calls: list[RankResults], play: Callable[[Callable[[RankResults], RankResults]], Outcome]) -> set[str]:
    """Return which forgeries a check does not notice, or notices only by an unexpected exception."""
    gains = set()
    for pattern, how, forged_call, values in list_forgeries(calls):
        number = -1

        def forge(results: RankResults, forged_call: int = forged_call, values: list[Any] = values) -> RankResults:
            nonlocal number
            number += 1
            return replace_values(results, values) if number == forged_call else results

        outcome = play(forge)
        if outcome.status != "failed":
            gains.add(f"{pattern}: {how}" + f" ({outcome.verdict})" * (outcome.status != "passed"))
    return gains


def name_gain(gain: str) -> str:
    """Return the name of a result whose values are not judged, marked if the lengths of its lists are not judged."""
    return gain.split(" (")[0].split(", ")[0] + " (lists)" * ("form:" in gain)


@pytest.mark.parametrize("check", CHECKS)
def test_no_forged_result_passes(check):
    tape = Tape(check, read_reference(get_module(check.module)))
    outcome = tape.play()
    assert outcome.passed, outcome.verdict
    gains = find_gains(tape.list_results(), tape.play)
    assert {name_gain(gain) for gain in gains} == UNJUDGED.get((check.module, check.name), set())


def pair_shorter(asked: list[Any], answers: list[Any]) -> bool:
    """Judge as `zip` does: what has no counterpart is not compared."""
    return all(answers[place] == one for place, one in enumerate(asked[: len(answers)]))


LENGTHS = {f"the result (list): form: {how}" for how in ("emptied", "shortened", "lengthened")}


@pytest.mark.parametrize(
    ("asked", "form", "judge", "gains"),
    [
        ([1, 2], [int, int], lambda asked, answers: asked == answers, set()),
        ([1, 2], ListOf(int), lambda asked, answers: asked == answers, set()),
        ([1, 2], [int, int], pair_shorter, set()),
        ([1, 2], ListOf(int), pair_shorter, LENGTHS),
        ([1, 2], OneOf([int, int], (int, int)), lambda asked, answers: asked == [*answers],
         {"the result (list): form: retyped"}),
        ([1, 2], [int, int], lambda asked, answers: asked[1:] == answers[1:], {"* (int): another"}),
        ([0.5], [float], lambda asked, answers: not answers[0] > 1, {"* (float): NaN"}),
        ([0.5], [OneOf(float, str, None)], lambda asked, answers: str(answers[0])[:3] == "0.5",
         {"* (float): form: retyped"}),
    ],
)  # fmt: skip
def test_a_lenient_check_is_found(asked, form, judge, gains):
    """Each kind of forgery has been seen to pass a check that is too lenient."""
    results = RankResults([asked], [[]], [""])
    results.forms = [form]
    check = Check(4, "test_x", "Title.", 1, "", 1, function=lambda submission: None)

    def play(forge):
        answers = forge(results)[0]
        try:
            At().claim("the answers are right", judge(asked, answers), "they are not")
        except (CheckFailed, ValueError) as failed:
            return Outcome(check, "failed", Verdict("", str(failed)))
        return Outcome(check, "passed")

    assert find_gains([results], play) == gains


def test_a_scenario_without_a_form_is_refused():
    def scenario():
        pass

    with pytest.raises(TypeError, match="scenario does not state what it returns"):
        CheckContext({}).run(scenario, world_size=1)


def test_a_pair_that_a_check_did_not_foresee_gets_a_sentence(monkeypatch):
    monkeypatch.setattr(run, "HAS_SOLUTIONS", False)
    check = Check(4, "test_x", "Title.", 1, "", 1, function=lambda submission: [*zip([1], [1, 2], strict=True)])
    outcome = run.run_check(check, "solutions", run.Conditions(1))
    assert outcome.ending == "unexamined" and not outcome.score
    assert outcome.reason.got.endswith("because lists that belong together have different lengths")


def test_pairs_are_never_lenient():
    """Ruff demands `strict` for each `zip` of the checks, and nothing says that it is False."""
    files = [path for folder in ("brigade", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert not [path for path in files if "strict=" + "False" in path.read_text()]
