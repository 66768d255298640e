"""The notebooks run with eight ranks, and their figures can be read then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import hang_guard
import pytest
from matplotlib.patches import Rectangle

from brigade.course.table.modules import MODULES, ROOT
from brigade.lab.notebook_plots import LargeFigure, draw_bars, draw_launch_order, make_figure
from brigade.ranks.events import Event
from tools.notebook_figures import list_faults, list_names, shorten

RANKS = 8


def draw_text(*texts: tuple[float, float, str]) -> LargeFigure:
    """Return a figure with texts at these places, each between 0 and 1."""
    with make_figure(3) as (figure, [axes]):
        axes.set_axis_off()
        for x, y, text in texts:
            axes.text(x, y, text, transform=figure.transFigure)
    return figure


def draw_box(width: float, height: float) -> LargeFigure:
    """Return a figure with a box of these sizes, relative to its axes."""
    with make_figure(3) as (figure, [axes]):
        axes.add_patch(Rectangle((0, 0), width, height))
        axes.set(xlim=(0, 1), ylim=(0, 1), xticks=[], yticks=[], title="box")
    return figure


def draw_stacked(parts: int) -> LargeFigure:
    """Return a bar with this number of parts, as notebook 8 had one for each rank."""
    return draw_bars({"state": {f"rank {i}": 6.96 for i in range(parts)}}, xlabel="MB", title="state")


def test_a_long_time_is_written_as_it_is_read():
    [axes] = draw_bars({"module 1": {"computation": 902.0, "exposed": 1084.0}}, xlabel="ms", title="").axes
    assert [text.get_text() for text in axes.texts] == ["902 + 1080"]


@pytest.mark.parametrize(
    ("draw", "fault"),
    [
        (lambda: draw_text((0.1, 0.5, "here"), (0.5, 0.5, "there")), ""),
        (lambda: draw_text((0.1, 0.5, "here"), (0.11, 0.51, "there")), "'here' overlaps 'there'"),
        (lambda: draw_text((0.97, 0.5, "cut off")), "'cut off' is cut off"),
        (lambda: draw_text((0.5, 0.98, "cut off")), "'cut off' is cut off"),
        (lambda: draw_box(0.5, 0.6), ""),
        (lambda: draw_box(0.5, 0.001), "a box of 'box' is 0."),
        (lambda: draw_box(0.0005, 0.5), "a box of 'box' is 0."),
        (lambda: draw_stacked(2), ""),
        (lambda: draw_stacked(RANKS), "'rank 7' is cut off"),
        (
            lambda: draw_bars({f"rank {i}": {"MB": 1.0} for i in range(30)}, xlabel="", title=""),
            "it is 1476 pixels high",
        ),
        (lambda: draw_bars({"all hidden": {"computation": 80.0, "exposed": 0.001}}, xlabel="ms", title=""), ""),
    ],
)
def test_what_nobody_can_read_is_a_fault(draw: Callable[[], LargeFigure], fault: str) -> None:
    faults = list_faults(draw())
    assert any(one.startswith(fault) for one in faults) if fault else not faults, faults


def test_the_order_of_launches_can_be_read_on_eight_ranks() -> None:
    kinds = ("gradient", "gradient", "launched") * 4
    events: list[Event] = [{"kind": kind, "bucket": i // 3, "phase": "backward"} for i, kind in enumerate(kinds)]
    assert not list_faults(draw_launch_order([events] * RANKS, "backward"))


def test_a_notebook_does_little() -> None:
    assert (
        shorten("trace(workload=replace(WORKLOAD, rounds=7))") == "trace(workload=replace(WORKLOAD, rounds=4, time=32))"
    )
    [cell] = (ROOT / "notebooks").glob("02_*.ipynb")
    assert "largest = 2**30" in cell.read_text(), "1 GiB takes minutes on simulated GPUs"


@pytest.mark.extended
@pytest.mark.parametrize("name", list_names())
def test_a_notebook_runs_with_eight_ranks_and_its_figures_can_be_read(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.notebook_figures", "--name", name, "--ranks", RANKS, "--out", tmp_path]
    done = hang_guard.run([str(part) for part in command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_all_notebooks_are_named() -> None:
    names = {path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")}
    assert set(list_names()) == names and list_names([MODULES[3].number]) == ["03_overlapped_ddp"]
