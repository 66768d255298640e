"""The capstone: all strategies of its engine train like one process, and its table has the numbers of docs/plan.md."""

import importlib.util
import json

import pytest

from brigade.checks.tiny_lm import make_tiny_lm
from brigade.cli.main import main
from brigade.course.modules import ROOT
from solutions.m14_hybrid_sharded.hybrid_sharded import plan_traffic

FOLDER = ROOT / "lessons" / "capstone"
SPEC = importlib.util.spec_from_file_location("engine", FOLDER / "engine.py")
engine = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(engine)

CALLS = {  # in a step with two micro-batches
    "4, 5": {"all_reduce": 1},
    "6, 7": {"all_gather": 1, "reduce_scatter": 1},
    "8, 9": {"all_gather": 1, "reduce_scatter": 1},
    "10": {"all_gather": 1, "reduce_scatter": 2},
    "11": {"all_gather": 2, "reduce_scatter": 2},
    "14": {"all_gather": 2, "all_reduce": 1, "reduce_scatter": 2},
}


@pytest.mark.parametrize("name", engine.STRATEGIES)
def test_a_strategy_trains_as_one_process_does(name):
    difference, calls, sent = engine.measure(name)
    assert difference < 1e-12 and calls == CALLS[name]
    assert f"modules {name}: {', '.join(f'{n} {op}' for op, n in calls.items())}; {sent:.2f} times" in read()


def test_the_sketch_has_at_most_sixty_lines():
    sketch, _, _ = (FOLDER / "engine.py").read_text().partition("\n# ---- try it")
    assert sum(bool(line.strip()) for line in sketch.splitlines()) <= 60


def test_the_table_has_the_numbers_of_the_plan():
    """In docs/plan.md, a cell that equals the one above is "="."""
    rows, above = {}, []
    for cells in list_rows((ROOT / "docs" / "plan.md").read_text().partition("## What each idea leaves unchanged")[2]):
        above = [old if cell == "=" else cell for cell, old in zip(cells, above or cells)]
        if above[0].partition(" ")[0].isdigit():
            number, (launches, sent, exposed, _, *kept) = above[0].partition(" ")[0], above[1:]
            rows.setdefault(number, [number, launches, sent, exposed, *kept])
    *shown, hybrid = [cells for cells in list_rows(read()) if len(cells) == 7 and cells[0].isdigit()]
    assert shown == [row for number, row in rows.items() if int(number) >= 4] and hybrid[0] == "14"


@pytest.mark.extended
def test_module_14_is_module_11_in_the_node_and_an_all_reduce_per_unit(capsys):
    """It has two nodes of four ranks, and XL has 48 units and the root."""
    main(["plan", "--model", "xl", "--dp", "4", "--json"])
    [inner] = [row for row in json.loads(capsys.readouterr().out)["variants"] if row["label"].startswith("11 ")]
    numel = sum(parameter.numel() for parameter in make_tiny_lm("xl", "meta").parameters())
    sent = f"{inner['sent_bytes'] / 1e9:.2f} + {plan_traffic(numel, 2, 4, 1).outer / 1e9:.2f}"
    kept = [f"{nbytes / 1e9:.2f}" for nbytes in inner["memory"].values()]
    assert ["14", str(inner["launches"] + 49), sent, "not planned", *kept] in list_rows(read())


def list_rows(text):
    """Return the cells of the rows of the tables in a text."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def read():
    return (FOLDER / "README.md").read_text()
