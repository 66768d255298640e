"""Redraw the pictures of all lessons, or of one lesson: python -m tools.figures 3

Computed pictures are the same on every machine: the concept diagrams of `diagrams.py`, and the schematic.png of each
module that trains. A schematic shows a step as the α–β model predicts it. Measured pictures are timeline.png,
memory.png, module 7's views.png and module 16's wire.png. A timeline shows real runs on the emulated link of
`timeline.WORKLOAD`, on which all-reducing all gradients takes 0.8 times as long as backward. Advanced modules also have
memory.png: the bytes that are alive during a step. In timelines and schematics, a step of the module is below a step of
the previous core module.
"""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure

from brigade.course.modules import (
    ADVANCED,
    CORE_MODULES,
    MODULES,
    ROOT,
    TRAINING_MODULES,
    Module,
    find_module,
    get_module,
)
from brigade.course.submission import read
from brigade.lab import memory
from brigade.lab.ladder import Variant, get_variant, is_hybrid
from brigade.lab.timeline import trace
from brigade.lab.timeline_plot import describe_lengths, draw
from brigade.runner.ranks import run_ranks
from lessons.m07_cached_shards.views import make_getters, measure_us
from lessons.m16_half_bytes import wire
from tools.diagrams import DIAGRAMS, STANDALONE
from tools.schematic import make_timelines

VIEW_RANKS = (4, 8, 16, 32, 64, 128)
VIEW_NUMEL = 1_000_000  # the time does not depend on it
LINES = (  # they differ in marker and dash as well as in colour, from Okabe and Ito's palette
    {"color": "#0072b2", "marker": "o", "linestyle": "-"},
    {"color": "#d55e00", "marker": "s", "linestyle": "--"},
    {"color": "#009e73", "marker": "^", "linestyle": "-."},
    {"color": "#cc79a7", "marker": "D", "linestyle": (0, (3, 1, 1, 1))},
)
TOKENS = (1, 256)  # (sequences, tokens) of the picture with activation checkpointing


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.figures",
        description="Redraw the readings' pictures: the concept diagrams, schematic.png from the cost model, and "
        "timeline.png, memory.png, module 7's views.png and module 16's wire.png from real runs.",
        epilog="Example: python -m tools.figures 3",
    )
    parser.add_argument("number", nargs="?", metavar="N", help="the module's number (default: all modules)")
    parser.add_argument("--computed", action="store_true", help="draw only the pictures that need no run")
    options = parser.parse_args()
    return run_to_status("figures", lambda: draw_figures(options.number, options.computed))


def draw_figures(number: str | None = None, only_computed: bool = False) -> int:
    """Draw the pictures of one module, or of all modules. Raise CourseError if there is no such module.

    Return 1 if a timeline was not written because it cannot be trusted.
    """
    entries = [get_module(number)] if number else MODULES
    status = 0
    for path, draw_diagram in STANDALONE if not number else ():
        draw_diagram(path)
    for module, name, draw_diagram in DIAGRAMS:
        if (entry := get_module(str(module))) in entries:
            path = entry.lesson / f"{name}.png"
            draw_diagram(path)
            print(f"{path.relative_to(ROOT)} written")
    if (entry := find_module("HalfBytesDDP")) in entries and not only_computed:
        run = partial(run_ranks, packages={"submission": read("solutions", entry.number).sources})
        draw_wire(wire.measure_all(run), entry.lesson / "wire.png")
        print(f"{(entry.lesson / 'wire.png').relative_to(ROOT)} written")
    for entry in TRAINING_MODULES:
        if entry not in entries:
            continue
        compared = list_compared(entry)
        variants = [get_variant(module) for module in compared]
        titles = [f"{variant.label}, {module.idea}" for module, variant in zip(compared, variants)]
        kinds = (
            {"schematic": make_timelines}
            if only_computed or is_hybrid(variants[-1])
            else {"schematic": make_timelines, "timeline": trace}
        )
        if "CachedDDP" in entry.public:
            kinds.pop("schematic")  # its two halves would be equal
        for name, make in kinds.items():
            path = entry.lesson / f"{name}.png"
            timelines = make(variants)
            if doubts := [f"{line.label}: {line.doubt}" for line in timelines if line.doubt]:
                status = 1
                print(f"{path.relative_to(ROOT)} not written, because the machine was busy ({'; '.join(doubts)})")
                continue
            draw(timelines, path, titles)
            print(f"{path.relative_to(ROOT)} written: {describe_lengths(timelines)}")
        if "CachedDDP" in entry.public and not only_computed:
            path = entry.lesson / "views.png"
            draw_views(measure_views(), path)
            print(f"{path.relative_to(ROOT)} written")
        if "FullyShardedDDP" in entry.public and not only_computed:
            path = entry.lesson / "checkpointing.png"
            draw_checkpointing(variants[-1], path)
            print(f"{path.relative_to(ROOT)} written")
        if entry.track == ADVANCED and not only_computed:
            path = entry.lesson / "memory.png"
            memory.draw_step(memory.measure_step(variants), path)
            print(f"{path.relative_to(ROOT)} written")
    return status


def draw_checkpointing(variant: Variant, path: Path) -> None:
    """Draw the memory of a step with and without activation checkpointing, as a PNG file."""
    curves = []
    for name, is_checkpointed in (("Without", False), ("With", True)):
        [curve] = memory.measure_step([variant], tokens=TOKENS, is_checkpointed=is_checkpointed)
        curves.append(replace(curve, label=f"{name} activation checkpointing of each block"))
    memory.draw_step(curves, path)


def draw_wire(errors: dict[str, Sequence[float]], path: Path) -> None:
    """Draw the error of each way to reduce against the number of ranks, as a PNG file."""
    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    styles = (("#d55e00", "s", "--", 11), ("#0072b2", "^", ":", 6), ("#009e73", "o", "-", 6))
    for (name, values), (colour, marker, line, size) in zip(errors.items(), styles):
        label = f"{name}, {wire.WAYS[name][1]}n (N − 1)/N bytes"
        look = {"color": colour, "marker": marker, "linestyle": line, "markersize": size}
        axes.plot(wire.RANKS, [1e3 * value for value in values], label=label, fillstyle="none", **look)
    axes.set_xticks(wire.RANKS)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N, the number of ranks", fontsize=10)
    axes.set_ylabel("error, in thousandths", fontsize=10)
    title = "Relative error of the average over N ranks, and the bytes that a rank sends of n normal values"
    axes.set_title(title, loc="left", fontsize=10)
    axes.legend(frameon=False, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    figure.savefig(path)


def list_compared(entry: Module) -> list[Module]:
    """Return the modules in a module's pictures: the core module before it, if there is one, and the module itself.

    Module 14 is compared with module 11.
    """
    if is_hybrid(get_variant(entry)):
        return [find_module("FullyShardedDDP"), entry]
    return [*[module for module in CORE_MODULES if module.number < entry.number][-1:], entry]


def measure_views() -> dict[str, list[float]]:
    """Return, for each way to get a shard, the microseconds for each number of ranks in `VIEW_RANKS`."""
    getters = [make_getters(torch.zeros(VIEW_NUMEL), ranks) for ranks in VIEW_RANKS]
    return {way: [measure_us(by_way[way]) for by_way in getters] for way in getters[0]}


def draw_views(times_us: dict[str, list[float]], path: Path) -> None:
    """Draw a line for each way to get a shard, with logarithmic axes, as a PNG file."""
    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    for (way, times), style in zip(times_us.items(), LINES, strict=True):
        axes.plot(VIEW_RANKS, times, markersize=6, **style)
        text = f"{way}: {float(f'{times[-1]:.2g}'):g} µs"
        axes.annotate(text, (VIEW_RANKS[-1], times[-1]), (8, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(VIEW_RANKS, [str(ranks) for ranks in VIEW_RANKS])
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


if __name__ == "__main__":
    sys.exit(main())
