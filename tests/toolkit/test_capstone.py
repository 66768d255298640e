"""The capstone: all strategies of its engine train like one process, and its table has the numbers of docs/plan.md."""

import importlib.util

import pytest

from brigade.course.modules import ROOT, get_module
from brigade.lab import plan
from brigade.lab.ladder import get_variant
from brigade.lab.program import record
from brigade.rank.emulated_link import Link

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
            number, (_, sent, exposed, _, *kept) = above[0].partition(" ")[0], above[1:]
            rows.setdefault(number, ([number, sent, *kept], exposed))
    tables = list_rows(read())
    *shown, hybrid = [cells for cells in tables if len(cells) == 5 and cells[0].isdigit()]
    assert shown == [rows[number][0] for number in ("5", "7", "9", "10", "11")] and hybrid[0] == "14"
    assert ["exposed (s)", *(rows[number][1] for number in ("5", "7", "8", "9"))] in tables


@pytest.mark.extended
def test_module_14_has_the_numbers_of_a_plan_with_two_nodes():
    model, link = plan.make_model(plan.MODELS["xl"]), Link(1e-6, 1e9, outer=Link(1e-6, 1e9), node_size=4)
    machine = plan.make_machine(plan.count_backward_flops(model, 1, 1), 1.0, 1.0)
    setting = plan.make_setting(model, 8, 25.0, machine, node_size=4)
    [step] = plan.plan(record([get_variant(get_module(14))], setting), link)
    inner = step.sent_bytes - step.outer_bytes
    sent, *kept = (f"{nbytes / 1e9:.2f}" for nbytes in (inner, *step.program.memory.values()))
    cells = ["14", f"{sent} + {step.outer_bytes / 1e9:.2f}", *kept]
    assert cells in list_rows(read())


def list_rows(text):
    """Return the cells of the rows of the tables in a text."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]


def read():
    return (FOLDER / "README.md").read_text()
