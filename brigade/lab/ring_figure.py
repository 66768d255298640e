"""The picture of module 0: the chunks that travel around a ring."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from brigade.lab.plots import COLOURS


def list_ring_states(size: int) -> list[list[list[int]]]:
    """Return the states of a ring all-reduce on `size` ranks: before it, and after each step.

    `state[rank][chunk]` is the number of ranks whose values are in this chunk of this rank.
    """
    states = [[[1] * size for _ in range(size)]]
    for step in range(2 * (size - 1)):
        before = states[-1]
        after = [list(chunks) for chunks in before]
        for rank in range(size):
            chunk = (rank - step - 2) % size
            own = before[rank][chunk] if step < size - 1 else 0  # the second phase replaces values
            after[rank][chunk] = own + before[rank - 1][chunk]
        states.append(after)
    return states


def draw_ring(path: Path, size: int = 4) -> None:
    """Draw the chunks of all ranks before a ring all-reduce and after each of its steps, as a PNG file."""
    states = list_ring_states(size)
    figure = Figure(figsize=(9, 3.1), dpi=100, layout="constrained")
    axes = figure.subplots()
    for column, state in enumerate(states):
        left = column * (size + 1.0)
        for rank in range(size):
            for chunk, count in enumerate(state[rank]):
                has_arrived = column and (rank - column - 1) % size == chunk
                colour = COLOURS["backward"] if count == size else COLOURS["forward"] if count > 1 else "white"
                axes.add_patch(Rectangle((left + chunk, rank), 1, 1, facecolor=colour, edgecolor="#777777", zorder=1))
                if has_arrived:
                    edge = COLOURS["collective"]
                    box = Rectangle((left + chunk + 0.08, rank + 0.08), 0.84, 0.84, fill=False, edgecolor=edge, lw=3)
                    axes.add_patch(box)
                ink = "white" if count == size else "black"
                axes.text(left + chunk + 0.5, rank + 0.52, count, ha="center", va="center", color=ink, fontsize=10)
        axes.text(left + size / 2, -0.25, f"step {column}" if column else "before", ha="center", fontsize=10)
        for chunk in range(size):
            axes.text(left + chunk + 0.5, size + 0.5, chunk, ha="center", color="#555555", fontsize=10)
    for first, name in (
        (1, "ring_reduce_scatter: add the received chunk"),
        (size, "ring_all_gather: copy the received chunk"),
    ):
        start, end = first * (size + 1.0), (first + size - 1) * (size + 1.0) - 1
        axes.plot([start, end], [-1.0, -1.0], color="#777777", linewidth=1)
        axes.text((start + end) / 2, -1.25, name, ha="center", fontsize=10)
    names = [f"rank {rank}" for rank in range(size)]
    axes.set_yticks([rank + 0.5 for rank in range(size)] + [size + 0.35], [*names, "chunk"])
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.set_xlim(-0.1, len(states) * (size + 1.0) - 0.9)
    axes.set_ylim(size + 0.7, -2.1)
    axes.spines[:].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
