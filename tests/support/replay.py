"""Run a check once on real ranks, then again and again on what they returned and recorded, with something forged.

`CheckContext._start` is the only place where a check starts ranks. A `Tape` keeps what it returned, by the seed that it
drew. A replay that takes another path through the check starts the ranks of that path, and puts them on the tape too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from mutants import Texts, run_on_text

from brigade.course.checks.collect import Check
from brigade.course.checks.context import CheckContext
from brigade.course.checks.outcome import Outcome
from brigade.course.checks.run import Conditions
from brigade.ranks.events import Event
from brigade.ranks.runner.ranks import RankFailure, RankResults, take_own

START = CheckContext._start


class Tape:
    """What the ranks of one submission did in one check."""

    def __init__(self, check: Check, texts: Texts, conditions: Conditions | None = None):
        self.check, self.texts, self.conditions = check, texts, conditions or Conditions()
        self.runs: dict[int, list[RankResults] | RankFailure] = {}  # by seed
        self.played: list[int] = []  # the seeds of the runs of the last play

    def play(self, forge: Callable[[RankResults], RankResults] = lambda results: results) -> Outcome:
        """Run the check with the forged results of each call. Look for no cause that needs other ranks."""

        def start(context: CheckContext, *args: Any, **options: Any) -> list[RankResults]:
            before = context.rng.getstate()
            seed = context.rng.randrange(2**63)
            self.played.append(seed)
            if seed not in self.runs:
                context.rng.setstate(before)
                try:
                    self.runs[seed] = run = START(context, *args, **options)
                    for results, given in zip(run, args[1], strict=True):
                        results.forms = [args[0].make_form(*take_own(given, rank)) for rank in range(len(results))]
                except RankFailure as failure:
                    self.runs[seed] = failure
            run = self.runs[seed]
            if isinstance(run, RankFailure):
                raise run
            return [forge(results) for results in run]

        self.played = []
        self.check.function.__globals__.get("TRIALS", {}).clear()  # what module 17's checks keep for each other
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(CheckContext, "_start", start)
            patch.setattr(CheckContext, "try_run", lambda *args, **options: None)
            return run_on_text(self.check, self.texts, self.conditions)

    def list_results(self) -> list[RankResults]:
        """Return the results of all calls that did not fail."""
        return [results for run in self.runs.values() if isinstance(run, list) for results in run]


def replace_values(results: RankResults, values: Sequence[Any]) -> RankResults:
    """Return results with the same events, and other values."""
    copied = copy.copy(results)
    copied[:] = values
    return copied


def replace_events(results: RankResults, events: list[list[Event]]) -> RankResults:
    """Return results with the same values, and other events."""
    copied = copy.copy(results)
    copied.events = events
    return copied


def replace_at(value: Any, place: tuple[Any, ...], forged: Any) -> Any:
    """Return a copy of a value with another value at this place: the keys and numbers that lead to it."""
    if not place:
        return forged
    key, *rest = place
    if isinstance(value, dict):
        return value | {key: replace_at(value[key], tuple(rest), forged)}
    return type(value)([*value[:key], replace_at(value[key], tuple(rest), forged), *value[key + 1 :]])
