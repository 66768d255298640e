"""The picture of module 11: what its schedule does, and which units have memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from brigade.lab.plots import COLOURS

Action = tuple[str, int]
COMPUTE_S = {False: 2.0, True: 4.0}  # by whether it is backward; a transfer takes 1.5
TRANSFER_S = 1.5


def simulate(plan: Callable[[int, int, bool], Sequence[Action]], num_units: int, prefetch: int) -> list[tuple]:
    """Return bars (lane, unit, start, end) of one step: lanes "compute", "gather", "reduce" and "memory".

    The link carries one transfer at a time. A unit computes when it is gathered and the previous one has computed.
    """
    bars, now, link_free = [], 0.0, 0.0
    begins: dict[int, float] = {}  # when a unit got its memory
    ready: dict[int, float] = {}  # when its gather was complete
    for backward in (False, True):
        for action, unit in plan(num_units, prefetch, backward):
            if action == "compute":
                start = max(now, ready.get(unit, 0.0))
                now = start + COMPUTE_S[backward] * (0.5 if unit == 0 else 1.0)
                bars.append(("compute", unit, start, now))
                if unit or backward:
                    bars.append(("memory", unit, begins.pop(unit), now))
                continue
            start = max(now, link_free)
            link_free = start + TRANSFER_S
            bars.append((action, unit, start, link_free))
            if action == "gather":
                begins[unit], ready[unit] = start, link_free
    return bars


def draw_schedule(plan: Callable[[int, int, bool], Sequence[Action]], path: Path, num_units: int = 5) -> None:
    """Draw one step with prefetch=1 as a PNG file: computation, the link, and the units that have memory."""
    bars = simulate(plan, num_units, 1)
    lanes = ["compute", "link", *(f"unit {unit}" if unit else "root" for unit in range(num_units))]
    figure = Figure(figsize=(9, 3.4), dpi=100, layout="constrained")
    axes = figure.subplots()
    for lane, unit, start, end in bars:
        row = {"compute": 0, "gather": 1, "reduce": 1, "memory": 2 + unit}[lane]
        colour = {"compute": "forward", "gather": "collective", "reduce": "backward", "memory": "forward"}[lane]
        edge = "#777777"
        axes.barh(row, end - start, left=start, height=0.8, color=COLOURS[colour], edgecolor=edge, linewidth=0.8)
        if lane != "memory":
            text = f"{'r' if lane == 'reduce' else ''}{unit}"
            ink = "black" if lane == "compute" else "white"
            axes.text((start + end) / 2, row, text, ha="center", va="center", fontsize=8, color=ink)
    middle = next(start for lane, unit, start, _ in bars[::-1] if lane == "compute" and unit == num_units - 1)
    axes.axvline(middle, color="#777777", linestyle=":", linewidth=1)
    axes.text(middle, -0.75, "backward ", fontsize=9, ha="left")
    axes.text(0, -0.75, "forward", fontsize=9, ha="left")
    axes.axhline(1.5, color="#777777", linewidth=0.8)
    axes.set_yticks(range(len(lanes)), lanes)
    axes.set_ylim(len(lanes) - 0.4, -1.1)
    axes.set_xticks([])
    axes.set_xlabel("time")
    axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
