"""Module 17 tries students' checks. Whatever a driver or a judge does, it gets one sentence."""

from __future__ import annotations

import re

import pytest
import test_m17_prove_it
from mutants import find_mutant, list_variants, run_on_text

from brigade.checks.collect import collect
from brigade.checks.run import Conditions, run_check
from brigade.course.modules import ROOT, get_module
from brigade.course.submission import read
from m17_prove_it import implementations
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


def test_without_the_reference_a_student_tests_modules_of_their_own(without_solutions):
    sources = read("solutions", 17)
    assert run_check(CHECKS["test_average"], "solutions", Conditions(), sources=sources).passed
    [wrong] = find_mutant(1, "summed, not averaged").apply().values()
    name = "m01_naive_ddp.naive_ddp"
    mine = sources | {name: (sources[name][0], wrong)}
    outcome = run_check(CHECKS["test_average"], "solutions", Conditions(), sources=mine)
    assert re.search(r"module 1: .*\bstep 0\b", outcome.verdict.got)
