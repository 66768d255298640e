"""A check judges the largest answers that a rank may send within seconds, and so do the functions that look for causes.

Each check runs once on the reference. Then it judges its results again, with one list, dict or text of them as large as
`RunOptions.most_values` allows. Nothing but this limit bounds the grader's work on an answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mutants import read_reference
from replay import Tape, replace_at, replace_values
from test_forging import run_by_default

from brigade.course.checks.collect import Check
from brigade.course.table.modules import get_module
from brigade.ranks.ipc import wire
from brigade.ranks.runner.options import MOST_LETTERS, MOST_VALUES
from brigade.ranks.runner.ranks import RankResults
from m13_post_mortem.scenario import examine

CPU_S = 10.0  # of processor time for one answer, besides what the check needs for the right one
SAMPLE = {"bucket_rule", "layout_rule", "assignment", "first_difference", "grid", "groups"}
CHECKS = run_by_default(lambda check: check.name.removeprefix("test_") in SAMPLE)
Path = tuple[Any, ...]  # the keys that lead to a part of a value


def list_parts(value: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield the lists, dicts and texts in a value. Of a list or dict, look into the first two elements only."""
    if isinstance(value, (list, tuple, dict, str)):
        yield path, value
    if isinstance(value, (list, tuple, dict)):
        for key in list(value if isinstance(value, dict) else range(len(value)))[:2]:
            yield from list_parts(value[key], (*path, key))


def enlarge(part: Any, room: int) -> Iterator[Any]:
    """Yield large parts of the same type: with copies of its elements, with numbers, with letters, and with lists."""
    if isinstance(part, str):
        yield "x" * MOST_LETTERS
        return
    elements = list(part.values()) if isinstance(part, dict) else [*part]
    for element in [*elements[:1], 0, "x", [1]]:
        count = room // max(1, measure(element) + isinstance(part, dict))
        if isinstance(part, dict):
            yield {f"{number}": element for number in range(count)}
        else:
            yield type(part)([element] * count)


def measure(value: Any) -> int:
    """Return the number of values in a value."""
    allowance = wire.Allowance()
    wire.decode(wire.encode(value), allowance)
    return wire.MOST_VALUES - allowance.values


def time_cpu(function: Callable[[], Any]) -> float:
    """Return the processor time that a function needs in this process."""
    started = time.process_time()
    function()
    return time.process_time() - started


@pytest.mark.parametrize("check", CHECKS)
def test_the_largest_answers_are_judged_quickly(check: Check, few_cases: None) -> None:
    tape = Tape(check, read_reference(get_module(check.module)))
    tape.play()
    usual_s = time_cpu(tape.play)
    first = next(iter(tape.list_results()), RankResults([None], [[]], [""]))
    most = vars(examine)["most_values"] if check.module == 13 else MOST_VALUES
    room = max(0, most - measure(first[0]))
    shapes = set()
    for path, part in list_parts(first[0]):
        shape = (tuple(type(key) for key in path), type(part))
        if shape in shapes:
            continue
        shapes.add(shape)
        for large in enlarge(part, room):

            def forge(results: RankResults, path: Path = path, large: Any = large) -> RankResults:
                try:
                    return replace_values(results, [replace_at(value, path, large) for value in results])
                except (LookupError, TypeError):  # of another call
                    return results

            took_s = time_cpu(lambda: tape.play(forge))
            assert took_s < usual_s + CPU_S, (path, type(part), str(large)[:100])
