"""What a rank returns can cost points, but gain none: a check of a right answer fails with every forged result.

Each check runs once on the reference. Then it runs again on forged copies of what the ranks returned: each container is
emptied, shortened, lengthened or of another type, each value has another type, and each value is another one. What a
form refuses (`brigade/course/checks/forms.py`) does not reach the check, so only the rest is played.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_forging
import torch
from mutants import read_reference, run_on_text
from replay import Tape, replace_at, replace_values
from torch import Tensor

from brigade.course.checks import run
from brigade.course.checks.collect import Check, collect
from brigade.course.checks.context import CheckContext
from brigade.course.checks.forms import Anything, ListOf, OneOf, find_mistake
from brigade.course.checks.outcome import Outcome
from brigade.course.checks.run import Conditions
from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.ranks.claims import At
from brigade.ranks.runner.ranks import RankResults, take_own
from brigade.ranks.verdict import CheckFailed, Verdict

pytestmark = pytest.mark.usefixtures("use_switch")

# A scenario of training returns more than one check judges. These are, by module and check, the names of the results
# whose values the check does not judge, with the reason. No check lets the form of a result change.
INTERFACE = {"module", "process_group"}
TRAINING = INTERFACE | {"gradients", "start", "weights"}  # of `helpers/training.py`: other checks of the module do
# Where gradients are: `gradients_are_views` does, or the layout of another check.
PLACES = {"dtype", "numel", "offsets", "offsets (empty)", "padding (empty)"}
COPIES = {"allocated", "copied", "num_copies", "num_copies (empty)"}  # who counts fewer stays below the bound
LEFT = {"is_view", "last"}  # a gradient beside main_grad, and main_grads that no step used
VIEWS = {"num_views", "num_views (empty)"}  # a cause needs them
MEMORY = {"bare", "forward first", "forward last", "held (empty)", "known", "other", "sharded"}  # bytes
RETURNED = {"results", "results (empty)"}  # of `step` in module 12: `results` and `one_decision` do
REPORT = {"an answer"}  # a report may have other words, apart from those that the check demands
CONTENT = {"weights"}  # only `witness/content.py` reads them: an answer with wrong ones keeps its launches
NORM = {"norm_dtypes"}  # a norm in a wider dtype than the rank says is right, too
STEPS = {"calls", "flops (empty)", "is_loss (empty)"}  # of module 15: `flops` and `options` do
KEPT = {"kept_input", "kept_output", "kept_rest", "kept_twice"}  # `16 several_in_flight` judges them
UNJUDGED: dict[int, dict[str, set[str]]] = {
    0: {"ring_reduce_scatter": {"tensor"}},  # its other chunks, and all of it if this rank's chunk is empty
    1: {
        "branches_and_unused_parameters": TRAINING,
        "buffers_start_equal": {"a name"},  # parameters: the check before does
        "gradients_are_averaged": TRAINING - {"gradients"},
        "one_all_reduce_per_parameter": TRAINING,
        "several_steps": TRAINING - {"weights"},
        "subgroups": TRAINING,
    },
    2: {
        "branches_and_unused_parameters": TRAINING - {"weights"},
        "bytes_on_the_wire": TRAINING,
        "gradients_are_averaged": INTERFACE | {"weights"},
        "gradients_keep_shape_and_stride": TRAINING - {"gradients"},
        "mixed_dtypes": TRAINING - {"gradients"},
        "one_all_reduce_per_dtype": TRAINING,
        "steps_and_subgroups": {"gradients"},  # of later steps, whose weights it judges
    },
    3: {
        "every_handle_is_waited_on": TRAINING,
        "gradients_are_averaged": INTERFACE | {"weights"},
        "launches_are_asynchronous": TRAINING,
        "launches_follow_their_gradients": TRAINING,
        "no_sync_accumulates": TRAINING - {"weights"},
        "no_sync_restores_its_state": {"the result"},  # whether a second backward raised: both answers are right
        "steps_and_subgroups": {"gradients"},
    },
    4: {
        "buckets_overlap_with_backward": TRAINING,
        "gradients_are_averaged": TRAINING - {"gradients"},
        "launch_order_does_not_depend_on_ready_order": TRAINING,
        "no_sync_accumulates": TRAINING - {"weights"} | {"a name"},  # an unused parameter's gradient may be None
        "steps_and_subgroups": {"gradients"},
        "unused_parameters": TRAINING - {"weights"},
    },
    5: {
        "buckets_overlap_with_backward": PLACES - {"padding (empty)"} | {"weights"},
        "gradients_are_averaged": INTERFACE | {"weights"},
        "gradients_are_views": COPIES | {"dtype", "padding (empty)", "weights"},
        "main_grad_accumulates_in_fp32": LEFT,
        "one_buffer_per_dtype": TRAINING - {"gradients"} | PLACES - {"dtype"},
        "steps_and_subgroups": TRAINING - {"weights"} | {"a name"},
        "zero_grad_in_any_form": PLACES,
    },
    6: {
        "bucket_group": {"params"},  # buckets of no group, after a move
        "coalesce_refuses_mixtures": {"raised", "unchanged (empty)"},  # each block judges one of the two
        "gradients_are_averaged": INTERFACE | {"weights"},
        "groups_overlap_with_backward": TRAINING,
        "launches_and_volume": TRAINING,
        "steps_and_subgroups": TRAINING - {"weights"} | PLACES | LEFT | {"a name", "last (empty)"},
    },
    7: {  # `views_follow_the_buffer` judges tensors and what is alive, and a cause needs the number of views
        "gradients_are_averaged": INTERFACE | {"gradients"},
        "launches_are_those_of_module_6": VIEWS | {"num_alive (empty)", "tensors"},
        "steady_step_makes_no_view": VIEWS | {"num_alive (empty)", "tensors"},
        "steps_and_subgroups": TRAINING - {"weights"} | PLACES | {"a name"},
        "views_follow_the_buffer": VIEWS,
    },
    8: {
        "sharded_clipping": NORM,
        "sharded_state_is_shared": {"owned", "owned (empty)"},  # a cause needs it
        "zero_clipping": NORM,
        "zero_equals_unsharded": {"a name", "a layer-wise LARS"},  # what the refusal of an optimizer says
        "zero_state_is_shared": CONTENT | {"state_bytes (empty)"},  # 1 byte is less than allowed
        "zero_volume": CONTENT | {"gather_grads (empty)"},  # a cause needs it
    },
    10: {  # a gradient that no step used may be None
        "accumulation": {"after a step in no_sync with a forward that is thrown away before the finish"},
        "equals_unsharded": NORM,
        "gradient_memory": {"left (empty)"},  # a cause needs it
        "live_buckets": {"constructed", "finished", "hooks", "left (empty)"},  # fewer bytes than allowed pass
        "volume_and_dtypes": CONTENT | {"after", "before"},  # a cause needs them
    },
    11: {
        "checkpoints": {"mask"},  # a buffer, of which each rank has its own
        "each_rank_has_its_part": {"shards", "storages (empty)"},  # padding, and what a cause needs
        "gathers_and_reductions_overlap": {"trained"},  # as CONTENT
        "mixed_precision_memory": MEMORY | {"alive", "weights"},  # fewer bytes than allowed pass
        "unusual_orders": {"refusal"},  # in any words
        "weights_are_freed": MEMORY,  # fewer bytes than allowed pass
    },
    12: {  # `results` and `one_decision` judge what a step returns
        "tokens_weigh_equally": RETURNED,
        "results": RETURNED | {"weights"},  # of the rank that is alone in another group
        "idle_ranks": RETURNED,
        "clipping": RETURNED,
        "one_decision": {"results", "weights", "changed", "left"},  # the last two are judged in skipped steps
        "run": {"reads (empty)"},  # one batch ahead is allowed
        "iterable_raises": {"num_steps", "num_steps (empty)"},  # a cause needs it
    },
    13: dict.fromkeys(
        ("calls_that_differ", "circles", "jobs_folders_and_pages", "missing_and_extra_calls", "program")
        + ("ranks_that_stop", "stuck", "unseen"),
        REPORT,
    ),
    14: {
        "traffic": {"an answer (empty)"},  # a byte is less than the rounding that is allowed
        "same_start": {"module"},  # only its group is judged
        "collectives": {"trained"},  # as CONTENT
        "overlap": {"trained"},  # as CONTENT
        "unusual_orders": {"refusal"},  # in any words
    },
    15: dict.fromkeys(("equals_one_process", "launches", "overlap", "resharding"), STEPS)
    | dict.fromkeys(("momentum", "state_dict"), STEPS | {"weights"})
    | {"flops": STEPS - {"flops (empty)"} | {"weights"}, "options": {"flops (empty)"}},
    16: {
        "error_does_not_grow": KEPT,
        "exact_values": KEPT,
        "gradients": {"an answer (empty)", "weights"},  # few bytes may stay, as in `scratch`
        "launches_overlap": TRAINING,
        "one_all_to_all": KEPT,
        "scratch": {"after (empty)", "during", "without (empty)"},  # few bytes may stay, and a cause needs the others
        "several_in_flight": {"kept_input", "kept_output"},  # of a rank alone
    },
    17: {  # why a judge rejects a wrong implementation
        f"{part}{more}": {"the result"}
        for part in ("average", "awaited", "order", "accumulated", "sharded")
        for more in ("", "_thoroughly")
    },
}
SAMPLE = {(0, "test_ring_all_gather"), (4, "test_bucket_rule"), (15, "test_assignment"), (12, "test_assignment")}
ALL_CHECKS = [
    pytest.param(check, id=f"{check.module}-{check.name.removeprefix('test_')}") for check in collect(MODULES)
]


def run_by_default(is_chosen: Callable[[Check], bool]) -> list[Any]:
    """Return all checks as arguments of a test, which takes the others only with --everything."""
    return [
        pytest.param(check, id=case.id, marks=[pytest.mark.extended] * (not is_chosen(check)))
        for case in ALL_CHECKS
        for check in case.values
    ]


CHECKS = run_by_default(lambda check: (check.module, check.name) in SAMPLE)
FIRST_CHECKS = run_by_default(lambda check: check.place == 1)
Place = tuple[Any, ...]  # the keys and the numbers that lead to a value in the result of a rank


def list_places(value: Any, place: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield the place and the value of each container and of each value in it."""
    yield place, value
    if isinstance(value, (list, tuple, dict)):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from list_places(value[key], (*place, key))


def generalize(place: Place) -> str:
    """Return a place with a star for each number and "a name" for each name of a parameter: "gradients, *, a name"."""
    keys = ("*" if type(key) is int else "a name" if {*key} & {*".("} or key[-1:].isdigit() else key for key in place)
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
    elif isinstance(value, Tensor):
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
    if isinstance(value, Tensor) and value.numel():
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


def list_forgeries(calls: list[RankResults]) -> Iterator[tuple[str, str, int, list[Any]]]:
    """Yield where a value was forged and how, the number of the call, and what the ranks of this call then return.

    Of the places that differ only in numbers and names of parameters, take the first and the last of all calls, also of
    those whose value is empty, 0 or False. A whole result that may be anything is not forged: the submission itself
    judges what its driver in module 17 returns.
    """
    places: dict[str, list[tuple[int, int, Place, Any]]] = {}
    for number, results in enumerate(calls):
        for rank, (form, result) in enumerate(zip(results.forms, results, strict=True)):
            for place, value in () if isinstance(form, Anything) else list_places(result):
                kind = f"{'' if isinstance(value, Tensor) or value else 'empty '}{type(value).__name__}"
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
    """Return the last name in the place of a value that is not judged, marked if its form is not, or if it is empty."""
    place, kind = gain.split(" (")[:2]
    keys = [key for key in place.split(", ") if key != "*"]
    name = ([key for key in keys if key != "a name"] or keys or ["an answer"])[-1]
    return name + " (form)" * ("form:" in gain) + " (empty)" * kind.startswith("empty")


@pytest.mark.parametrize("check", CHECKS)
def test_no_forged_result_passes(check):
    tape = Tape(check, read_reference(get_module(check.module)))
    outcome = tape.play()
    assert outcome.passed, outcome.verdict
    gains = find_gains(tape.list_results(), tape.play)
    unjudged = UNJUDGED.get(check.module, {}).get(check.name.removeprefix("test_"), set())
    assert {name_gain(gain) for gain in gains} == unjudged, gains


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
        (["a", "", "b"], [str] * 3, lambda asked, answers: asked[::2] == answers[::2], {"* (empty str): another"}),
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


EVERYTHING = {  # in which ways values of a type are forged
    "emptied shortened lengthened retyped None": ([[1]], [(1,)], [{"a": 1}]),
    "complex retyped listed emptied lengthened NaN another None": ([torch.ones(2)],),
    "retyped another None": ([1], [True], ["a"], [torch.float32]),
    "retyped another NaN None": ([0.5],),
}


@pytest.mark.parametrize(("ways", "value"), [(ways, value) for ways in EVERYTHING for value in EVERYTHING[ways]])
def test_a_check_that_accepts_everything_is_found_in_each_way(ways, value, monkeypatch):
    monkeypatch.setattr(test_forging, "find_mistake", lambda form, value: "")
    results = RankResults([value], [[]], [""])
    results.forms = [[Anything()]]
    check = Check(4, "test_x", "Title.", 1, "", 1, function=lambda submission: None)
    gains = find_gains([results], lambda forge: Outcome(check, "passed" if forge(results) else "failed"))
    kind = type(value[0]).__name__
    assert {gain.split(": ")[-1] for gain in gains if gain.startswith(f"* ({kind})")} == set(ways.split())


@pytest.mark.parametrize("answer", [[], (), {}, None], ids=str)
@pytest.mark.parametrize("check", FIRST_CHECKS)
def test_ranks_that_answer_nothing_earn_nothing(check, answer, monkeypatch):
    """Each check says what it asked for and what came. Ranks that were asked for None have answered with None."""
    asked = []

    def start(context: CheckContext, scenario: Any, args_per_call: Any, world_size: int, *args: Any, **options: Any):
        forms = [scenario.make_form(*take_own(given, rank)) for given in args_per_call for rank in range(world_size)]
        asked.extend(form for form in forms if find_mistake(form, answer))
        nothing = ([answer] * world_size, [[]] * world_size, [""] * world_size)
        return [RankResults(*nothing, [[]] * world_size) for _ in args_per_call]

    monkeypatch.setattr(CheckContext, "_start", start)
    outcome = run_on_text(check, read_reference(get_module(check.module)), Conditions())
    assert outcome.status == "failed" and not outcome.score
    if asked:
        assert outcome.reason.expected == "each rank returns what it was asked for"
        assert re.search("came|is missing|asked for", outcome.reason.got), outcome.reason.got


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
