"""The capstone: all strategies of its engine train like one process, with the collectives that its table names."""

import importlib.util

import pytest

from brigade.course.table.modules import ROOT

FOLDER = ROOT / "lessons" / "capstone"
SPEC = importlib.util.spec_from_file_location("engine", FOLDER / "engine.py")
engine = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(engine)


@pytest.mark.parametrize("name", engine.STRATEGIES)
def test_a_strategy_trains_as_one_process_does(name):
    difference, calls, sent = engine.measure(name)  # of a step with two micro-batches
    assert difference < 1e-12
    modules = f"modules {name}" if "," in name else f"module {name}"
    row = f"{modules}: {', '.join(f'{n} {op}' for op, n in calls.items())}; {sent:.2f} times"
    assert row in (FOLDER / "README.md").read_text()
