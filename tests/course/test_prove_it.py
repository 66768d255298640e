"""Module 17 tries students' checks. Whatever a driver or a judge does, it gets one sentence."""

from __future__ import annotations

import marshal
import random
import re
from types import CodeType

import pytest
import test_m17_prove_it
from mutants import find_mutant, list_variants, run_on_text

from brigade.course.checks.collect import collect
from brigade.course.checks.run import Conditions, run_check
from brigade.course.table.modules import ROOT, get_module
from brigade.course.table.submission import read
from brigade.ranks.ipc import wire
from brigade.ranks.runner import ranks
from brigade.ranks.texts import compile_code, find_sources
from m17_prove_it import blind, faults, implementations
from m17_prove_it.faults import FAULTS
from m17_prove_it.hidden import HIDDEN

ENTRY = get_module(17)
CHECKS = {check.name: check for check in collect([ENTRY])}
SOLUTION = (ROOT / "solutions" / ENTRY.path).read_text()
PARTS = tuple(implementations.UNDER_TEST)


def replace(function, *lines):
    """Return the reference with another body of one of its functions."""
    argument = "observed" if function.startswith("judge") else "wrap"
    body = "".join(f"    {line}\n" for line in lines)
    return f"{SOLUTION}\n\nright = {function}\ncalls = []\n\n\ndef {function}({argument}):\n{body}"


@pytest.fixture
def few(monkeypatch):
    """Try two implementations on two ranks: a right one and a wrong one."""
    choose = implementations.choose
    monkeypatch.setattr(test_m17_prove_it, "choose", lambda *arguments: choose(*arguments)[:2])
    monkeypatch.setattr(test_m17_prove_it, "WORLD_SIZES", (2,))


def run_average(text, **conditions):
    return run_on_text(CHECKS["test_average"], text, Conditions(**conditions))


JUDGES = {
    "raise AssertionError": "the pair rejects every implementation",
    "return None": "the judge raises no AssertionError",
    "calls.append(1); assert len(calls) == 1": "the judge raises no AssertionError",  # each has a process of its own
    "raise ValueError('no')": "judge_average raised ValueError: no",
    "raise SystemExit": "judge_average raised SystemExit",
    "import os; os._exit(0)": "judge_average",
    "return True": "judge_average returned a bool; a judge that accepts returns None",
    "raise NotImplementedError('module 17, part (b)')": "module 17, part (b) is written",
    "assert False, 'x' * 10_000_000": "they reject",
}


@pytest.mark.parametrize("line", JUDGES)
def test_a_judge_that_does_not_judge_gets_one_sentence(line, few):
    outcome = run_average(replace("judge_average", line))
    assert outcome.status in ("failed", "not written") and JUDGES[line] in str(outcome.verdict), outcome.verdict
    assert len(str(outcome.verdict)) < 1500 and "Traceback" not in str(outcome.verdict)


def test_a_judge_that_does_not_end_is_ended(monkeypatch, few):
    monkeypatch.setattr(test_m17_prove_it, "JUDGE_S", 0.5)
    outcome = run_average(replace("judge_average", "while True: pass"))
    assert outcome.status == "failed" and "judge_average" in outcome.verdict.expected


def test_a_judge_that_prints_megabytes_is_cut_and_judges(few):
    outcome = run_average(replace("judge_average", "print('x' * 10_000_000)", "right(observed)"))
    assert outcome.passed and all(len(text) < 30_000 for text in outcome.printed)


DRIVERS = {
    "return object()": "they reject",
    "raise RuntimeError('no')": "raised RuntimeError: no",
    "dist.get_rank() or dist.barrier()": "rank 0 waits in barrier",
    "while True: pass": "every rank finishes within the time limit",
    "raise NotImplementedError('module 17, part (a)')": "module 17, part (a) is written",
}


@pytest.mark.parametrize("line", DRIVERS)
def test_a_driver_that_fails_on_right_implementations_gets_one_sentence(line, few):
    outcome = run_average(replace("drive_average", line), deadline_s=1.0 if "while" in line else None)
    assert outcome.status in ("failed", "not written") and DRIVERS[line] in str(outcome.verdict), outcome.verdict


@pytest.mark.parametrize("sizes", ["(2, 5)", "[2, 3]", "(True,)", "()", "(1, 2, 3, 4)", "tuple(range(2, 4))"])
def test_numbers_of_ranks_are_read_and_not_computed(sizes):
    outcome = run_average(f"{SOLUTION}\nWORLD_SIZES_AVERAGE = {sizes}\n")
    expected = "WORLD_SIZES_AVERAGE is a tuple of one to three numbers from 1 to 4"
    assert outcome.status == "failed" and outcome.verdict.expected == expected


@pytest.mark.extended
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("line", ["raise AssertionError", "return None"])
def test_a_judge_with_one_verdict_earns_nothing(part, line):
    """Even with a good driver, and on the mutants of a grading run."""
    text = replace(f"judge_{part}", line)
    for name in (f"test_{part}", f"test_{part}_thoroughly"):
        assert run_on_text(CHECKS[name], text, Conditions(uses_hidden=True)).status == "failed"


@pytest.mark.extended
@pytest.mark.parametrize("answer", ["the reference", "another style"])
@pytest.mark.parametrize("part", PARTS)
def test_right_answers_earn_all_points_in_a_grading_run(part, answer):
    text = SOLUTION if answer == "the reference" else (ENTRY.tests / "alternative.py").read_text()
    for name in (f"test_{part}", f"test_{part}_thoroughly"):
        outcome = run_on_text(CHECKS[name], text, Conditions(uses_hidden=True))
        assert outcome.passed, outcome.verdict


def test_the_lists_of_implementations_are_complete():
    """Each part has five public wrong ones, and hidden ones that exist. Every public fault is in a list."""
    names = set()
    for part in PARTS:
        public = [name for each in implementations.PUBLIC[part].values() for name in each]
        assert len(public) == 5 and {*implementations.PUBLIC[part], *HIDDEN[part]} <= {
            *implementations.UNDER_TEST[part]
        }
        names |= {*public}
        for number, mutants in HIDDEN[part].items():
            assert all(find_mutant(number, name) for name in mutants)
        variants = [
            each.name for number in implementations.UNDER_TEST[part] for each in list_variants(get_module(number))
        ]
        assert {*implementations.VARIANTS[part]} <= {*variants}
    assert names == FAULTS.keys()


@pytest.fixture
def without_solutions(monkeypatch):
    """Let module 17 find no reference, as in the student edition."""
    monkeypatch.setattr(implementations, "HAS_SOLUTIONS", False)
    test_m17_prove_it.TRIALS.clear()
    yield
    test_m17_prove_it.TRIALS.clear()


@pytest.mark.parametrize("part", [PARTS[0], *(pytest.param(part, marks=pytest.mark.extended) for part in PARTS[1:])])
def test_without_the_reference_there_are_three_right_implementations_of_a_module(part, without_solutions):
    chosen = implementations.choose(part, read("solutions", 17), False, random.Random(0))
    assert [each.topic for each in chosen].count("") == 3 * len(implementations.UNDER_TEST[part])
    for name in (f"test_{part}", f"test_{part}_thoroughly"):
        assert run_on_text(CHECKS[name], SOLUTION, Conditions()).passed


def test_without_the_reference_an_exact_comparison_is_a_false_alarm(without_solutions, monkeypatch):
    monkeypatch.setattr(test_m17_prove_it, "WORLD_SIZES", (2,))
    outcome = run_average(SOLUTION.replace("rtol=1e-4, atol=1e-5", "rtol=0, atol=0"))
    assert outcome.status == "failed" and "rounded in another way" in outcome.verdict.got, outcome.verdict


def test_without_the_reference_a_student_tests_modules_of_their_own(without_solutions):
    sources = read("solutions", 17)
    wrong = find_mutant(1, "summed, not averaged").apply()["naive_ddp.py"]
    name = "m01_naive_ddp.naive_ddp"
    mine = sources | {name: (sources[name][0], wrong)}
    outcome = run_check(CHECKS["test_average"], "solutions", Conditions(), sources=mine)
    assert re.search(r"module 1\b[^:]*: .*\bstep 0\b", outcome.verdict.got)


# ---- what a rank knows


def collect_requests(part, monkeypatch, seed=0):
    """Return what enters the ranks of the drivers and of the judges in a grading run. None of these are started."""
    requests, real = {"drive": [], "judge": []}, ranks.run_calls

    def run_calls(function, args_per_call, **options):
        if function.__name__ not in requests:  # a rank compiles the submission
            return real(function, args_per_call, **options)
        name, own = find_sources(function)
        how = ranks.RunOptions(**options)
        made = ranks.make_requests(name, function.__qualname__, args_per_call, {**own, **how.packages}, how)
        requests[function.__name__] += [wire.decode(wire.encode(request)) for request in made]
        values = [""] * how.world_size
        return [ranks.RankResults(values, [[] for _ in values], values)]

    monkeypatch.setattr(ranks, "run_calls", run_calls)
    test_m17_prove_it.TRIALS.clear()
    outcome = run_on_text(CHECKS[f"test_{part}"], SOLUTION, Conditions(seed=seed, uses_hidden=True))
    test_m17_prove_it.TRIALS.clear()
    assert outcome.verdict.got == "it accepts everything"
    return requests


def list_codes(request):
    """Return all code objects in a request, by the name of the module."""
    found = {}
    for package, sources in request["packages"].items():
        for name, (_, _, code) in sources.items():
            waiting = [marshal.loads(code)] if code else []
            found[f"{package}.{name}"] = codes = []
            while waiting:
                codes.append(waiting.pop())
                waiting += [each for each in codes[-1].co_consts if isinstance(each, CodeType)]
    return found


@pytest.mark.parametrize("part", PARTS)
def test_nothing_that_enters_a_rank_names_a_mistake(part, monkeypatch):
    requests = collect_requests(part, monkeypatch)
    told = {*FAULTS, *(name for mutants in HIDDEN[part].values() for name in mutants)}
    told |= {name for name, value in vars(faults).items() if getattr(value, "__module__", "") == faults.__name__}
    told |= {"Wrong", "quiet", "blocks", "work", "is_awaited", "launched"}  # local names and attributes
    told -= {"trainable"}  # a name in several modules
    plain = {compile_code(*source) for source in read("solutions", 8).values()}  # earlier modules
    seen = set()
    for request in requests["drive"]:
        assert request["calls"] == [[{"part": part}]] and request["function"] == "drive"
        codes = list_codes(request)
        packages = {name: sources for name, sources in request["packages"].items() if name != "implementation"}
        assert {name: [*sources] for name, sources in packages.items()} == {
            "m17_prove_it": ["scenario"],
            "submission": ["m17_prove_it.prove_it"],
        }
        blobs = {name: code for name, (_, _, code) in request["packages"]["implementation"].items()}
        own = [name for name, code in blobs.items() if code not in plain]
        assert own[-1] == "under_test" and len(own) > 1 and None not in blobs.values()
        for code in (code for name in own for code in codes[f"implementation.{name}"]):
            texts = {*code.co_names, *code.co_varnames, *code.co_freevars, code.co_name}
            texts |= {constant for constant in code.co_consts if isinstance(constant, str)}
            assert not texts & told, texts & told
        seen.add(tuple((name, path) for name, (path, *_) in request["packages"]["implementation"].items()))
    assert len(seen) == len(implementations.UNDER_TEST[part])  # the files of a module have the same names
    for request in requests["judge"]:
        assert [*request["packages"]] == ["m17_prove_it", "submission"]
        assert request["calls"][0][0].keys() == {"part", "values", "events", "output"}


def test_two_runs_have_no_function_of_a_right_implementation_in_common():
    """So a driver that knows the code of the right ones recognises none of them, unless it undoes the disguise."""

    def list_functions(seed):
        everything = implementations.choose("awaited", {}, True, random.Random(seed))
        for each in everything if not seed else (each for each in everything if not each.topic):
            texts = {name: text for name, (_, text) in each.package.items() if name[:3] in ("m03", "und")}
            for name, text in texts.items():
                waiting = [compile(text, name, "exec")]
                while waiting:
                    code = waiting.pop()
                    waiting += [one for one in code.co_consts if isinstance(one, CodeType)]
                    if code.co_flags & 2 and code.co_name[0] != "<":  # a function with a name
                        yield code.co_code, repr(code.co_consts), code.co_varnames

    one, other = set(list_functions(0)), set(list_functions(1))
    assert len(one) > 100 and len(other) > 10 and not one & other


@pytest.mark.parametrize("number", range(1, 9))
def test_a_disguised_text_is_the_same_program(number):
    """Attributes, parameters and imported names stay. Only local names and one statement in each function differ."""
    for name, (_, text) in read("solutions", 8).items():
        if not name.startswith(get_module(number).package):
            continue
        disguised = blind.disguise(text, random.Random(1))
        assert disguised != text and '"""' not in disguised
        tree, other = (blind.parse_tree(one) for one in (text, disguised))
        kept = [{n.attr for n in blind.ast.walk(each) if isinstance(n, blind.ast.Attribute)} for each in (tree, other)]
        names = [{n.arg for n in blind.ast.walk(each) if isinstance(n, blind.ast.arg)} for each in (tree, other)]
        assert kept[0] == kept[1] and names[0] == names[1]


GRADED = Conditions(uses_hidden=True)


def test_feedback_of_a_grading_run_names_no_implementation(monkeypatch):
    """A driver and a judge may write anything into messages and output. None of it comes back from the grader."""
    secret = "the hash of what was met"
    monkeypatch.setattr(test_m17_prove_it, "WORLD_SIZES", (2,))
    for function, lines in {
        "judge_average": f"print({secret!r}); raise AssertionError({secret!r})",
        "drive_average": f"print({secret!r}); raise RuntimeError({secret!r})",
        "judge_awaited": f"raise type({secret!r}, (Exception,), {{}})({secret!r})",
    }.items():
        test_m17_prove_it.TRIALS.clear()
        name = f"test_{function.split('_')[1]}"
        outcome = run_on_text(CHECKS[name], replace(function, lines), GRADED)
        told = f"{outcome.verdict} {outcome.verdict.message} {outcome.printed}"
        assert outcome.status == "failed" and secret not in told, told
        assert "reference" not in told and "module" not in told.replace("module 17", ""), told
