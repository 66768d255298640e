"""`make soak --all` runs every program once per seed, and reports the checks whose result depends on the seed."""

import pytest

from brigade.checks import run
from brigade.course.modules import get_module
from brigade.grade.isolation import may_isolate
from brigade.runner import ranks
from brigade.sandbox import enter
from tools import soak


def test_results_that_depend_on_the_seed_are_found(tmp_path, monkeypatch, capsys):
    """A program is run again only for new seeds. Wrong results are reported even if all seeds agree."""
    runs = []

    def run_on_text(check, text, conditions):
        runs.append(conditions.seed)
        lucky = check.name == "test_broadcasts" and conditions.seed == 1
        return run.Outcome(check, status="passed" if lucky or check.name == "test_frozen" else "failed")

    monkeypatch.setattr(soak, "run_on_text", run_on_text)
    monkeypatch.setattr(soak, "prepare", lambda: None)
    monkeypatch.setattr(soak, "collect", lambda entries: [Named("test_broadcasts"), Named("test_frozen")])
    program = soak.Program(get_module(1), "a mutant", {}, fails=("test_broadcasts", "test_frozen"))
    expected = [
        "module 1, a mutant, test_broadcasts: failed with seed 0; passed with seed 1",
        "module 1, a mutant, test_frozen: passed with seed 0, 1",
    ]
    out = tmp_path / "soak.jsonl"
    assert soak.run([program], [0], out) == ["module 1, a mutant, test_frozen: passed with seed 0"]
    assert soak.run([program], [0, 1], out) == expected
    assert runs == [0, 0, 1, 1]


@pytest.mark.skipif(not may_isolate(), reason="isolation needs root")
def test_results_that_depend_on_isolation_are_found(tmp_path, monkeypatch):
    """Every check runs with gloo and isolated, on one server. The usual way's results are not repeated."""
    runs = []

    def run_on_text(check, text, conditions):
        [rank] = ranks.run_ranks(enter.probe, world_size=1)
        runs.append((conditions.seed, rank["uid"] > 0, ranks.SERVER._process.pid))
        return run.Outcome(check, status="passed" if rank["uid"] else "failed")

    monkeypatch.setattr(soak, "run_on_text", run_on_text)
    monkeypatch.setattr(soak, "collect", lambda entries: [Named("test_frozen")])
    program = soak.Program(get_module(1), "a mutant", {})
    out = tmp_path / "soak.jsonl"
    assert soak.run([program], [0], out) == []
    expected = ["module 1, a mutant, test_frozen: failed with seed 0, 1; passed with seed 0 isolated, 1 isolated"]
    assert soak.run([program], [0, 1], out, isolated=True) == expected
    assert [(seed, way) for seed, way, _ in runs] == [(0, False), (0, True), (1, False), (1, True)]
    assert len({server for _, _, server in runs[1:]}) == 1


class Named:
    def __init__(self, name):
        self.name = name
