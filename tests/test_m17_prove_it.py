"""Graded checks of module 17: what a student's pair of a driver and a judge accepts and rejects."""

from __future__ import annotations

import ast
import builtins
import json
import math
from dataclasses import dataclass, field

import pytest

from brigade.course.checks.context import EXPECTED, to_failure
from brigade.course.checks.expectations import expect
from brigade.course.table.listing import find_part
from brigade.course.table.modules import get_module
from brigade.course.table.submission import select_files
from brigade.ranks.runner.ranks import PerRank, RankFailure
from brigade.ranks.syntax import parse_tree
from brigade.ranks.verdict import CheckFailed, Verdict
from m17_prove_it import causes, scenario
from m17_prove_it.implementations import Implementation, choose

HALF, ALL = 60, 90  # percent of the wrong implementations that earn half and all of the points
WORLD_SIZES = (2, 3)
JUDGE_S = 5.0
NOT_NAMED = "a right implementation. Which one, and why, is only said after the deadline"
HIDDEN = "one that only the grader has, about "


@pytest.mark.parts("Parts (a) and (b): averages")
@pytest.mark.points(2)
def test_average(submission):
    """`average` accepts every right wrapper of modules 1 and 2, and rejects 60 % of the wrong ones."""
    expect_share(submission, "average", HALF)


@pytest.mark.needs("test_average")
@pytest.mark.points(2)
def test_average_thoroughly(submission):
    """`average` rejects 90 % of the wrong ones."""
    expect_share(submission, "average", ALL)


@pytest.mark.parts("Parts (c) and (d): races and overlap")
@pytest.mark.points(2)
def test_awaited(submission):
    """`awaited` accepts every right wrapper of module 3, and rejects 60 % of the wrong ones."""
    expect_share(submission, "awaited", HALF)


@pytest.mark.needs("test_awaited")
@pytest.mark.points(2)
def test_awaited_thoroughly(submission):
    """`awaited` rejects 90 % of the wrong ones."""
    expect_share(submission, "awaited", ALL)


@pytest.mark.parts("Parts (e) and (f): the order of launches")
@pytest.mark.points(2)
def test_order(submission):
    """`order` accepts every right wrapper of module 4, and rejects 60 % of the wrong ones."""
    expect_share(submission, "order", HALF)


@pytest.mark.needs("test_order")
@pytest.mark.points(2)
def test_order_thoroughly(submission):
    """`order` rejects 90 % of the wrong ones."""
    expect_share(submission, "order", ALL)


@pytest.mark.parts("Parts (g) and (h): accumulation")
@pytest.mark.points(2)
def test_accumulated(submission):
    """`accumulated` accepts every right wrapper of modules 3 to 5, and rejects 60 % of the wrong ones."""
    expect_share(submission, "accumulated", HALF)


@pytest.mark.needs("test_accumulated")
@pytest.mark.points(2)
def test_accumulated_thoroughly(submission):
    """`accumulated` rejects 90 % of the wrong ones."""
    expect_share(submission, "accumulated", ALL)


@pytest.mark.parts("Parts (i) and (j): shards")
@pytest.mark.points(2)
def test_sharded(submission):
    """`sharded` accepts every right optimizer of module 8, and rejects 60 % of the wrong ones."""
    expect_share(submission, "sharded", HALF)


@pytest.mark.needs("test_sharded")
@pytest.mark.points(2)
def test_sharded_thoroughly(submission):
    """`sharded` rejects 90 % of the wrong ones."""
    expect_share(submission, "sharded", ALL)


# ---- what a pair does with every implementation


@dataclass
class Trial:
    """What a pair did with one implementation: on each number of ranks, why it is rejected, or ""."""

    under_test: Implementation
    reasons: dict[int, str] = field(default_factory=dict)
    is_judged: bool = False  # whether it was the judge that rejected it

    @property
    def is_rejected(self):
        return any(self.reasons.values())


TRIALS = {}  # of the last pair of each part, because two checks ask for them


def expect_share(submission, part, percent):
    """Expect a pair to accept all right implementations, and to reject a share of the wrong ones.

    When it is graded, the message names no implementation that students do not have, and contains no text from a
    driver or a judge, who have seen its code and its data.
    """
    is_graded = submission.conditions.uses_hidden
    key = submission.sources, is_graded
    if part not in TRIALS or TRIALS[part][0] != key:
        TRIALS[part] = key, try_all(submission, part)
    trials = TRIALS[part][1]
    right, wrong = ([trial for trial in trials if bool(trial.under_test.topic) == is_wrong] for is_wrong in (0, 1))
    for trial in right:
        for size, reason in trial.reasons.items():
            named = f"{trial.under_test.sentence}: {reason}"
            what = f"on {size} ranks, they reject {NOT_NAMED if is_graded else named}"
            expected = f"drive_{part} and judge_{part} accept every right implementation"
            cause = causes.explain_pair(trial, trials)
            expect(not reason, expected, what, cause or ("" if is_graded else causes.explain_demand(trial)))
    expected = f"judge_{part} rejects something that drive_{part} returns"
    expect(any(trial.is_judged for trial in wrong), expected, "it accepts everything", causes.ACCEPTS_ALL)
    survivors = [trial.under_test for trial in wrong if not trial.is_rejected]
    needed = math.ceil(percent * len(wrong) / 100)
    named = [HIDDEN + each.topic if each.is_hidden else each.sentence for each in survivors]
    listed = "".join(f"\nsurvived: {name}" for name in sorted(named))
    what = f"they reject {len(wrong) - len(survivors)}{listed}"
    expected = f"drive_{part} and judge_{part} reject {needed} of {len(wrong)} wrong implementations"
    cause = causes.explain_survivors(survivors, [trial.under_test for trial in wrong])
    expect(len(wrong) - len(survivors) >= needed, expected, what, cause)


def try_all(submission, part):
    """Run the driver on all implementations in a random order, and then the judge. Return the trials.

    Each trial has ranks of its own, so no process meets two implementations. One that is rejected on one number of
    ranks is not tried on others.
    """
    rng, uses_hidden = submission.rng, submission.conditions.uses_hidden
    trials = [Trial(each) for each in choose(part, submission.sources, uses_hidden, rng)]
    rng.shuffle(trials)
    for size in read_world_sizes(submission, part):
        for trial in [trial for trial in trials if not trial.is_rejected]:
            observed, trial.reasons[size] = run_driver(submission, part, trial.under_test, size)
            if observed:
                trial.reasons[size] = run_judge(submission, part, observed)
                trial.is_judged = trial.is_rejected
        if any(trial.is_rejected and not trial.under_test.topic for trial in trials):
            break  # a false alarm, which loses the part
    return trials


def read_world_sizes(submission, part):
    """Return the numbers of ranks for a part, which the submission may choose. Only its text is read."""
    entry, name, sizes = get_module(17), f"WORLD_SIZES_{part.upper()}", WORLD_SIZES
    text = submission.sources[f"{entry.package}.{entry.name}"][1]
    for node in parse_tree(text).body:
        targets = [*getattr(node, "targets", ()), getattr(node, "target", None)]
        if name in [getattr(target, "id", None) for target in targets]:
            try:
                sizes = ast.literal_eval(getattr(node, "value", None))
            except (ValueError, TypeError, MemoryError, RecursionError):
                sizes = ()
            is_right = type(sizes) is tuple and 0 < len(sizes) <= 3
            is_right = is_right and all(type(size) is int and 1 <= size <= 4 for size in sizes)
            expected = f"{name} is a tuple of one to three numbers from 1 to 4"
            expect(is_right, expected, f"it is {ast.get_source_segment(text, node)[:60]}")
    return [1] if submission.conditions.is_debugged else list(dict.fromkeys(sizes))


def run(submission, function, jobs, packages, **options):
    """Run a driver or a judge. It can import nothing but module 17's own files and these packages."""
    packages = {"submission": select_files(get_module(17), submission.sources), **packages}
    [result] = submission.run_until_failure(function, [PerRank(jobs)], packages=packages, **options)
    if submission.conditions.uses_hidden:
        submission.output = []  # it could describe an implementation
    if isinstance(result, RankFailure) and find_part(result):
        raise to_failure(result, submission.sources)
    return result


def run_driver(submission, part, under_test, size):
    """Run the driver on `size` ranks. Return what the judge gets, or None and why the driver fails."""
    result = run(submission, scenario.drive, [{"part": part}] * size, {scenario.UNDER_TEST: under_test.package})
    if not isinstance(result, RankFailure):
        return {"values": list(result), "events": json.dumps(result.events), "output": result.output}, ""
    if result.kind != "deadline":
        return None, "\n".join([result.summary, *result.lines[-4:]])
    if submission.conditions.uses_hidden:
        raise CheckFailed(Verdict(EXPECTED[result.kind], f"drive_{part} did not end", ending=result.kind))
    raise to_failure(result, submission.sources)


def run_judge(submission, part, observed):
    """Return why the judge, in a process of its own, rejects what a driver has returned, or "" if it accepts."""
    result = run(submission, scenario.judge, [observed | {"part": part}], {}, usual_s=JUDGE_S)
    if not isinstance(result, RankFailure):
        return result[0][: scenario.MOST]
    what = "\n".join([result.summary.replace("rank 0", f"judge_{part}", 1), *(result.lines[-1:] if result.own else ())])
    if submission.conditions.uses_hidden:
        error = result.error if result.error in dir(builtins) else "an exception"
        what = f"judge_{part} raised {error}" if result.kind == "exception" else f"judge_{part} did not end"
    raise CheckFailed(Verdict(f"judge_{part} returns None, or raises AssertionError, within {JUDGE_S:g} s", what))
