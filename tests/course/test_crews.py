"""Checks share ranks, and no outcome depends on it."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from mutants import find_mutant, run_on_text

from brigade.course.checks.collect import collect
from brigade.course.checks.run import Conditions, run_checks
from brigade.course.table.modules import ROOT, get_module
from brigade.ranks.runner.crew import Crew
from brigade.ranks.runner.server import SERVER

ENTRY = get_module(1)
SERVED = {  # what a submission could keep in its module, and do when it wraps a model
    "a group that has ended": ("GROUP = dist.group.WORLD", "assert GROUP is dist.group.WORLD"),
    "a count of its models": ("models = []", "models.append(1); assert len(models) < 3"),
    "nothing": ("", ""),
}


@pytest.fixture
def forked(monkeypatch):
    """Return a list to which each fork adds the number of its ranks."""
    numbers, fork = [], SERVER.fork
    monkeypatch.setattr(SERVER, "fork", lambda ends, *more: numbers.append(len(ends) // 2) or fork(ends, *more))
    return numbers


@pytest.mark.parametrize("state", SERVED)
def test_what_fails_on_used_ranks_is_tried_on_new_ones(state, forked, tmp_path):
    shutil.copytree(ROOT / "solutions" / ENTRY.package, tmp_path / ENTRY.package)
    path = tmp_path / ENTRY.package / ENTRY.path.name
    kept, used = SERVED[state]
    begin, text = "        super().__init__(module, process_group)\n", path.read_text()
    assert text.count(begin) == 1
    path.write_text(text.replace(begin, f"{begin}        {used}\n").replace("\nclass ", f"\n{kept}\n\n\nclass ", 1))
    outcomes = [*run_checks(collect([ENTRY]), tmp_path, Conditions(2))]
    assert [outcome.status for outcome in outcomes] == ["passed"] * 7
    assert sum(forked) <= 5 if state == "nothing" else sum(forked) > 20


@pytest.mark.parametrize("name", ["frozen parameters not broadcast", "synchronised in the first step only"])
def test_a_mistake_fails_the_same_checks_for_the_same_reasons(name):
    mutant, how = find_mutant(1, name), Conditions(4)
    crew = Crew()
    for check in collect([ENTRY]):
        alone, among = (run_on_text(check, mutant.apply(), conditions) for conditions in (how, replace(how, crew=crew)))
        assert (alone.status, alone.verdict) == (among.status, among.verdict)
        assert bool(crew.ranks) == among.passed
    crew.end()
