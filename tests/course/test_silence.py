"""What only a rank reports can cost points, but gain none: a wrong answer still fails with a forged record.

The switch performs launches, waits and borders, so these events are true. A rank could leave out, repeat or move all
others. Each mutant runs once; then its checks run again on forged copies of its record.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from mutants import list_mutants
from replay import Tape, replace_events

from brigade.course.checks import context, expectations
from brigade.course.checks.collect import collect
from brigade.course.checks.context import find_contradictory_record as examine
from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.ranks import claims
from brigade.ranks.events import Event
from brigade.ranks.runner.ranks import RankResults

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
PHASED = {6, "test_no_sync_restores_its_state"}  # where ranks also say other phases; elsewhere, nobody has searched all
# Beside those of ONLY_WATCHED; the other mutants run with --everything.
SAMPLE = "only the next bucket is checked", "everything launched in finish_grad_sync", "the step before is not awaited"
SAMPLE += ("the flag of no_sync is in the class",)
Forge = Callable[[list[Event]], list[Event]]
WasRead = type("WasRead", (BaseException,), {})
LENIENT = dict.fromkeys(("expect_forms", "find_missing_content"), lambda *_: None)
MUTANTS = [
    pytest.param(entry, mutant, id=f"{entry.number}-{mutant.name.replace(' ', '-')}",
                 marks=[pytest.mark.extended] * (mutant.name not in {*SAMPLE, *ONLY_WATCHED.values()}))
    for entry in MODULES
    for mutant in list_mutants(entry)
]  # fmt: skip


@pytest.fixture(autouse=True)
def fail_at_a_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """End a check at the first record that contradicts itself: it fails in any case, and there are many replays."""

    def fail(*args: Any) -> None:
        if failure := examine(*args):
            raise failure

    monkeypatch.setattr(context, "find_contradictory_record", fail)
    for name in ("evaluate", "explain"):  # nor does a cause matter
        monkeypatch.setattr(claims, name, lambda *_: "")
    monkeypatch.setattr(expectations, "explain_tensors", lambda *_: ("", ""))


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


def relabel(own: list[Event], kinds: Collection[str], old: str, new: str) -> list[Event]:
    return [event | {"phase": new} if event["phase"] == old and event["kind"] in kinds else event for event in own]


def list_forgeries(events: Sequence[Event]) -> Iterator[tuple[str, str, Forge]]:
    """Yield a kind of events, what happens to them, and a function of one rank's record."""
    kinds, phases = ({event[name] for event in events} for name in ("kind", "phase"))
    used = {event["phase"] for event in events if event["kind"] in ("launch", "wait")}
    for kind in sorted(kinds - PERFORMED):
        for how, change in CHANGES.items():
            if kind != "race" or "moved" not in how:  # which needs its launch, and is as good anywhere after it
                yield kind, how, partial(change, kind=kind)
        if kind == "step":
            yield kind, "one launch later", partial(postpone_steps, until="launch")
            yield kind, "one launch later, but not the first", partial(postpone_steps, until="launch", first=1)
            yield kind, "one step later", partial(postpone_steps, until="step")
    yield "memory", "of no parameter", lambda own: [e | {"memory": None} if e["kind"] == "launch" else e for e in own]
    for old, new in itertools.product(sorted(used), sorted(phases)):
        for these in ({"launch"}, {"wait"}, kinds):
            yield "label", f"{new}, not {old}", partial(relabel, kinds=these, old=old, new=new)
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


class Unread:
    """A record that ends the check as soon as it is read."""

    def stop(self, *_: Any) -> Any:
        raise WasRead

    __len__ = __iter__ = __getitem__ = __bool__ = __eq__ = __getattr__ = stop


def find_gains(tape: Tape) -> list[tuple[str, str]]:
    """Return which forgeries let the check pass on this tape.

    A check that fails before it reads a record fails with every record. Forgeries with equal records are one. If a
    forgery contradicts the borders of the check's first run, the rest does not matter.
    """
    first: list[Any] = []

    def change(results: RankResults, forge: Callable[[list[Event]], Any]) -> RankResults:
        return replace_events(results, [*map(forge, results.events)])

    def play(forge: Callable[[list[Event]], Any], **instead: Callable[..., Any]) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            for name, function in instead.items():
                patch.setattr(context, name, function)
            return tape.play(lambda results: change(results, forge)).passed

    def note_first(scenario: Any, _: Any, args: Any) -> None:
        if len(tape.played) == 1:
            first.append((scenario, args))

    def list_records(forge: Forge) -> list[list[Event]]:
        return [forge(own) for results in tape.list_results() for own in results.events]

    def passes(forge: Forge) -> bool:
        """Judge forms, which are those of the mutant, and contents only if the rest passes."""
        for scenario, args in first:
            if examine(scenario, [change(results, forge) for results in tape.runs[tape.played[0]]], args):
                return False
        if (forged := list_records(forge)) in tried:
            return False
        tried.append(forged)
        return play(forge, **LENIENT) and play(forge)

    tried = [list_records(lambda own: own)]
    try:
        assert not play(lambda own: Unread(), **LENIENT, find_contradictory_record=note_first)
        return []
    except WasRead:
        forgeries = list_forgeries([event for own in tried[0] for event in own])
    chosen = [one for one in forgeries if one[0] != "label" or {tape.check.module, tape.check.name} & PHASED]
    return [(kind, how) for kind, how, forge in chosen if passes(forge)]


def make_tape(number: int, name: str, texts: dict[str, str]) -> Tape:
    [check] = [check for check in collect([get_module(number)]) if check.name == name]
    tape = Tape(check, texts)
    outcome = tape.play()
    assert outcome.status == "failed", outcome.verdict
    return tape


@pytest.mark.parametrize(("entry", "mutant"), MUTANTS)
def test_a_wrong_answer_gains_nothing(entry, mutant):
    """A check that a mutant fails passes with a forged record only if ONLY_WATCHED says so, and with its mutant."""
    for name in mutant.checks:
        gains = find_gains(make_tape(entry.number, name, mutant.apply()))
        shown = {kind: by for (*check, kind), by in ONLY_WATCHED.items() if check == [entry.number, name]}
        assert {kind for kind, _ in gains} <= {*shown, *["everything"] * bool(shown)}, (name, gains)
        assert {kind for kind in shown if shown[kind] == mutant.name} <= {kind for kind, _ in gains}


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
