"""Module 7's measured picture: how long it takes to get a shard, for 4 to 128 ranks."""

from __future__ import annotations

import platform
from pathlib import Path

import torch
from matplotlib.figure import Figure

from brigade.lab.plots import LINES
from lessons.m07_cached_shards.views import make_getters, measure_us

RANKS = (4, 8, 16, 32, 64, 128)
NUMEL = 1_000_000  # the time does not depend on it


def measure() -> dict[str, list[float]]:
    """Return, for each way to get a shard, the microseconds for each number of ranks in `RANKS`."""
    getters = [make_getters(torch.zeros(NUMEL), ranks) for ranks in RANKS]
    return {way: [measure_us(by_way[way]) for by_way in getters] for way in getters[0]}


def draw(times_us: dict[str, list[float]], path: Path) -> None:
    """Draw a line for each way to get a shard, with logarithmic axes, as a PNG file."""
    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    for (way, times), style in zip(times_us.items(), LINES):
        axes.plot(RANKS, times, markersize=6, **style)
        text = f"{way}: {float(f'{times[-1]:.2g}'):g} µs"
        axes.annotate(text, (RANKS[-1], times[-1]), (8, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    axes.set_xlabel("N, the number of ranks", fontsize=10)
    axes.set_ylabel("µs to get one shard", fontsize=10)
    axes.set_title(
        f"Fastest of 1000 samples, torch {torch.__version__.partition('+')[0]}, one {platform.machine()} core",
        loc="left",
        fontsize=10,
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    figure.savefig(path)
