"""What only a rank reports can cost points, but gain none: a wrong answer still fails with a forged record.

The switch performs launches, waits and borders, so these events are true. A rank could leave out, repeat or move all
others. Each mutant runs once; then its checks run again on forged copies of its record.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from mutants import find_mutant, list_mutants
from replay import Tape, replace_events

from brigade.course.checks import context
from brigade.course.checks.collect import collect
from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.ranks.events import Event

pytestmark = pytest.mark.usefixtures("use_switch")
PERFORMED = {"launch", "wait", "done", "complete", "connect", "connected", "border", "end", "call", "called"}

# The checks that pass if a rank forges events of a kind, with a mutant that shows it.
ONLY_WATCHED: dict[tuple[int, str, str], str] = {
    (3, "test_launches_are_asynchronous", "memory"): "weights reduced instead of gradients",
    (3, "test_launches_follow_their_gradients", "memory"): "weights reduced instead of gradients",
    (3, "test_every_handle_is_waited_on", "race"): "divided during the transfer",
    (6, "test_launches_and_volume", "race"): "divided while the launch is running",
    (9, "test_groups_that_no_forward_used", "write"): "the step before is awaited after the write",
    (16, "test_several_in_flight", "race"): "one scratch buffer for all reductions",
}
# Checks of bytes and views, which `docs/security.md` counts too.
MEASURED = {
    (5, "test_gradients_are_views"),
    (7, "test_steady_step_makes_no_view"),
    (11, "test_mixed_precision_memory"),
    (15, "test_momentum"),
}
SAMPLE = {  # the other mutants run with --everything
    "only the next bucket is checked",
    "everything launched in finish_grad_sync",
    "the step before is not awaited",
}
Forge = Callable[[list[Event]], list[Event]]
MUTANTS = [
    pytest.param(entry, mutant, id=f"{entry.number}-{mutant.name.replace(' ', '-')}",
                 marks=[pytest.mark.extended] * (mutant.name not in SAMPLE))
    for entry in MODULES
    for mutant in list_mutants(entry)
]  # fmt: skip


@pytest.fixture(autouse=True)
def fail_at_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a check at the first record that contradicts itself: it fails in any case, and there are many replays."""
    find = context.find_contradictory_record

    def fail(*args: Any) -> None:
        if failure := find(*args):
            raise failure

    monkeypatch.setattr(context, "find_contradictory_record", fail)


def drop(own: list[Event], kind: str, chosen: slice) -> list[Event]:
    dropped = {id(event) for event in [event for event in own if event["kind"] == kind][chosen]}
    return [event for event in own if id(event) not in dropped]


def reverse(own: list[Event], kind: str) -> list[Event]:
    backwards = [event for event in own if event["kind"] == kind]
    return [backwards.pop() if event["kind"] == kind else event for event in own]


CHANGES: dict[str, Callable[[list[Event], str], list[Event]]] = {  # of all events of a kind
    "dropped": lambda own, kind: drop(own, kind, slice(None)),
    "without the first": lambda own, kind: drop(own, kind, slice(1)),
    "without the last": lambda own, kind: drop(own, kind, slice(-1, None)),
    "repeated": lambda own, kind: [event for event in own for _ in range(1 + (event["kind"] == kind))],
    "reversed": reverse,
    "moved to the beginning": lambda own, kind: sorted(own, key=lambda event: event["kind"] != kind),
    "moved to the end": lambda own, kind: sorted(own, key=lambda event: event["kind"] == kind),
}


def list_forgeries(kinds: set[str]) -> Iterator[tuple[str, str, Forge]]:
    """Yield the kind, what happens to its events, and a function of one rank's record."""
    for kind in sorted(kinds):
        for how, change in CHANGES.items():
            if kind != "race" or "moved" not in how:  # which needs its launch, and is as good anywhere after it
                yield kind, how, partial(change, kind=kind)
        if kind == "step":
            yield kind, "one launch later", partial(postpone_steps, until="launch")
            yield kind, "one launch later, but not the first", partial(postpone_steps, until="launch", first=1)
            yield kind, "one step later", partial(postpone_steps, until="step")
    yield "memory", "of no parameter", lambda own: [e | {"memory": None} if e["kind"] == "launch" else e for e in own]
    yield "everything", "dropped", lambda own: [event for event in own if event["kind"] in PERFORMED]


def postpone_steps(own: list[Event], until: str, first: int = 0) -> list[Event]:
    """Return a record whose steps from number `first` on begin after their first event of the kind `until`.

    They begin when the next step did, if there is no such event in between.
    """
    late: list[Event] = []
    waiting: list[Event] = []
    for event in own:
        if event["kind"] == "step":
            late, waiting = late + waiting, [event]
            if first:
                late, waiting, first = late + waiting, [], first - 1
            continue
        late.append(event)
        if event["kind"] == until:
            late, waiting = late + waiting, []
    return late + waiting


def find_gains(tape: Tape, chosen: str = "") -> list[tuple[str, str]]:
    """Return which forgeries let the check pass on this tape: all, or only those of a chosen kind."""
    records = [own for results in tape.list_results() for own in results.events]

    def play(forge: Forge) -> bool:
        return tape.play(lambda results: replace_events(results, [*map(forge, results.events)])).passed

    def passes(forge: Forge) -> bool:
        """Judge forms, which are those of the mutant, and contents only if the rest passes."""
        is_new = any(forge(own) != own for own in records)
        with pytest.MonkeyPatch.context() as patch:
            for name in ("expect_forms", "find_missing_content"):
                patch.setattr(context, name, lambda *_: None)
            passed = is_new and play(forge)
        return passed and play(forge)

    reported = {event["kind"] for own in records for event in own} - PERFORMED
    forgeries = [one for one in list_forgeries(reported) if chosen in ("", one[0])]
    return [(kind, how) for kind, how, forge in forgeries if passes(forge)]


def make_tape(number: int, name: str, texts: dict[str, str]) -> Tape:
    [check] = [check for check in collect([get_module(number)]) if check.name == name]
    tape = Tape(check, texts)
    outcome = tape.play()
    assert outcome.status == "failed", outcome.verdict
    return tape


@pytest.mark.parametrize(("entry", "mutant"), MUTANTS)
def test_a_wrong_answer_gains_nothing(entry, mutant):
    """A check that a mutant fails passes with a forged record only if ONLY_WATCHED says so."""
    for name in mutant.checks:
        known = {kind for number, check, kind in ONLY_WATCHED if (number, check) == (entry.number, name)}
        known |= {"everything"} if known else set()
        gains = find_gains(make_tape(entry.number, name, mutant.apply()))
        assert {kind for kind, _ in gains} <= known, (name, gains)


@pytest.mark.parametrize(("number", "name", "kind"), ONLY_WATCHED)
def test_what_is_only_watched_can_be_forged(number, name, kind):
    """The list is exact: with its mutant, each check of the list passes if events of the kind are forged."""
    mutant = find_mutant(number, ONLY_WATCHED[number, name, kind])
    assert find_gains(make_tape(number, name, mutant.apply()), kind)


def test_the_page_lists_what_can_be_forged():
    """`docs/security.md` has exactly these checks, with their points and the sum."""
    page = (ROOT / "docs/security.md").read_text()
    [section] = re.findall(r"^## Only watched\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"module (\d+): `(test_\w+)` \((\d+)\)", section)
    listed = {(int(number), name): int(points) for number, name, points in rows}
    points = {(check.module, check.name): check.points for check in collect(MODULES)}
    assert listed == {key: points[key] for key in {*MEASURED, *(key[:2] for key in ONLY_WATCHED)}}
    own, text = sum(number for (module, _), number in points.items() if module == 17), " ".join(page.split())
    assert f"They have {sum(listed.values())} points" in text
    assert f"module 17, which have {own} points. So {sum(listed.values()) + own} points are" in text
