"""Graded checks of module 17: what a student's pair of a driver and a judge accepts and rejects."""

from __future__ import annotations

import ast
import json
import math
from dataclasses import dataclass, field
from functools import partial

import pytest

from brigade.checks.context import to_failure
from brigade.checks.expectations import expect
from brigade.checks.verdict import CheckFailed, Verdict
from brigade.course.modules import get_module
from brigade.course.syntax import parse_tree
from brigade.runner.ranks import PerRank, RankFailure
from m17_prove_it import causes, scenario
from m17_prove_it.implementations import UNDER_TEST, Implementation, choose

HALF, ALL = 60, 90  # percent of the wrong implementations that earn half and all of the points
WORLD_SIZES = (2, 3)
CALLS = 8  # of a driver in one run of ranks, whose records together must not become too long
JUDGE_S = 5.0


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
    """Expect a pair to accept all right implementations, and to reject a share of the wrong ones."""
    key = submission.sources, submission.conditions.uses_hidden
    if part not in TRIALS or TRIALS[part][0] != key:
        TRIALS[part] = key, try_all(submission, part)
    trials = TRIALS[part][1]
    right, wrong = ([trial for trial in trials if bool(trial.under_test.topic) == is_wrong] for is_wrong in (0, 1))
    for trial in right:
        for size, reason in trial.reasons.items():
            what = f"on {size} ranks, they reject {trial.under_test.sentence}: {reason}"
            expected = f"drive_{part} and judge_{part} accept every right implementation"
            expect(not reason, expected, what, partial(causes.explain_false_alarm, trial, trials))
    expected = f"judge_{part} rejects something that drive_{part} returns"
    expect(any(trial.is_judged for trial in wrong), expected, "it accepts everything", causes.ACCEPTS_ALL)
    survivors = [trial.under_test for trial in wrong if not trial.is_rejected]
    needed = math.ceil(percent * len(wrong) / 100)
    listed = "".join(sorted(f"\nsurvived: {each.sentence}" for each in survivors))
    what = f"they reject {len(wrong) - len(survivors)}{listed}"
    expected = f"drive_{part} and judge_{part} reject {needed} of {len(wrong)} wrong implementations"
    cause = causes.explain_survivors(survivors, [trial.under_test for trial in wrong])
    expect(len(wrong) - len(survivors) >= needed, expected, what, cause)


def try_all(submission, part):
    """Run the driver on all implementations in a random order, and then the judge. Return the trials.

    An implementation that is rejected on one number of ranks is not tried on others.
    """
    trials = [Trial(each) for each in choose(part, submission.sources, submission.conditions.uses_hidden)]
    submission.rng.shuffle(trials)  # the place of an implementation says nothing about it
    for size in read_world_sizes(submission, part):
        left = [trial for trial in trials if not trial.is_rejected]
        for trial, observed in run_drivers(submission, part, left, size):
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


def run_drivers(submission, part, trials, size):
    """Run the driver on `size` ranks. Return the trials that a judge has to decide, with what it gets.

    An implementation with which the driver fails is rejected. If a call fails that is not the first on its ranks, it is
    repeated on new ones, because the call before could be the cause.
    """
    waiting, observed = list(trials), []
    while waiting:
        packages = {f"p{place}": trial.under_test.sources for place, trial in enumerate(waiting[:CALLS])}
        jobs = [make_job(part, trial.under_test, package, size) for trial, package in zip(waiting, packages)]
        results = submission.run_until_failure(scenario.drive, jobs, packages=packages)
        failed = results.pop() if isinstance(results[-1], RankFailure) else None
        for trial, result in zip(waiting, results):
            what = {"values": list(result), "events": json.dumps(result.events), "output": result.output}
            observed.append((trial, what))
        waiting = waiting[len(results) :]
        if failed and not results:
            if failed.part or failed.kind == "deadline":
                raise to_failure(failed, submission.sources)
            waiting.pop(0).reasons[size] = "\n".join([failed.summary, *failed.lines[-4:]])
    return observed


def make_job(part, under_test, package, size):
    """Return the jobs of a driver's call: where each rank finds the implementation."""
    entry, wrapper = get_module(under_test.number), get_module(7)
    files = {"file": f"{entry.package}.{entry.name}", "wrapper_file": f"{wrapper.package}.{wrapper.name}"}
    own = {"part": part, "package": package, "name": UNDER_TEST[part][entry.number], "fault": under_test.fault}
    return PerRank([own | files] * size)


def run_judge(submission, part, observed):
    """Return why the judge, in a process of its own, rejects what a driver has returned, or "" if it accepts."""
    jobs = PerRank([observed | {"part": part}])
    [result] = submission.run_until_failure(scenario.judge, [jobs], usual_s=JUDGE_S)
    if not isinstance(result, RankFailure):
        return str(result[0])
    if result.part:
        raise to_failure(result, submission.sources)
    what = "\n".join([result.summary.replace("rank 0", f"judge_{part}", 1), *(result.lines[-1:] if result.own else ())])
    raise CheckFailed(Verdict(f"judge_{part} returns None, or raises AssertionError, within {JUDGE_S:g} s", what))
