"""Redraw the measured pictures of all lessons, or of one lesson: python -m tools.figures 3

These are timeline.png, memory.png, module 7's views.png, module 11's checkpointing.png and module 16's wire.png. A
timeline shows a step of the module below a step of the previous core module, on the emulated link of
`timeline.WORKLOAD`. The site shows more runs in a live figure, from timeline.json. Modules 10 and 11 also have
memory.png: the bytes that are alive during a step.
"""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brigade.course.table.modules import ADVANCED, CORE_MODULES, MODULES, ROOT, Module, find_module, get_module
from brigade.course.table.submission import read
from brigade.lab.ladder import get_variant
from brigade.lab.memory import draw_step, measure_step
from brigade.lab.notebook_plots import draw_bars, draw_timelines
from brigade.lab.timeline import trace
from brigade.ranks.runner.ranks import run_ranks
from lessons.m07_cached_shards.measure.views import make_getters, measure_us
from lessons.m08_zero_optimizer.measure import memory
from lessons.m16_half_bytes.measure import wire
from tools.for_modules import run_for_modules
from tools.live_timelines import record_runs, store_live_steps
from tools.notebook_files import list_notebooks

VIEW_RANKS = (4, 8, 16, 32, 64, 128)
VIEW_NUMEL = 1_000_000  # the time does not depend on it
LINES = (  # they differ in marker and dash as well as in colour, from Okabe and Ito's palette
    {"color": "#0072b2", "marker": "o", "linestyle": "-"},
    {"color": "#d55e00", "marker": "s", "linestyle": "--"},
    {"color": "#009e73", "marker": "^", "linestyle": "-."},
    {"color": "#cc79a7", "marker": "D", "linestyle": (0, (3, 1, 1, 1))},
)
TOKENS = (1, 256)  # (sequences, tokens) of the picture with activation checkpointing


class Doubtful(Exception):
    """A timeline that was not written because it cannot be trusted."""


def draw_figures(number: str | None = None) -> int:
    """Draw the pictures of one module, or of all modules. Raise UserError if there is no such module.

    Return 1 if a timeline was not written because it cannot be trusted.
    """
    pictures = {}
    for entry in [get_module(number)] if number else MODULES:
        pictures |= list_pictures(entry)
    status = 0
    for path, draw_picture in pictures.items():
        try:
            said = draw_picture(path)
            print(f"{path.relative_to(ROOT)} written{f': {said}' if said else ''}")
        except Doubtful as doubt:
            status = 1
            print(f"{path.relative_to(ROOT)} not written: {doubt}")
    return status


def list_pictures(entry: Module) -> dict[Path, Callable[[Path], str | None]]:
    """Return the functions that draw a module's pictures."""
    special = {"CachedDDP": ("views", draw_views), "FullyShardedDDP": ("checkpointing", draw_checkpointing)}
    special |= {"HalfBytesDDP": ("wire", draw_wire), "ZeroOptimizer": ("memory", draw_kept)}
    drawings = dict(special[name] for name in entry.public if name in special)
    if entry.trains and "replica_group" not in entry.takes:
        before = [module for module in CORE_MODULES if module.number < entry.number]
        compared = [*before[-1:], entry]
        drawings["timeline"] = partial(draw_steps, compared)
        if entry.track == ADVANCED and "PrefetchedDDP" not in entry.public:  # it keeps what module 8 keeps
            drawings["memory"] = lambda path: draw_step(measure_step([*map(get_variant, compared)]), path)
    pictures = {entry.lesson / "pictures" / f"{name}.png": draw_picture for name, draw_picture in drawings.items()}
    if "timeline" in drawings:
        pictures[entry.lesson / "pictures" / "timeline.json"] = partial(store_runs, entry)
        pictures[list_notebooks(str(entry.number))[0]] = store_live_steps
    return pictures


def draw_steps(modules: Sequence[Module], path: Path) -> str:
    """Draw timelines of the modules. Return their lengths. Raise Doubtful."""
    timelines = trace([get_variant(module) for module in modules])
    if not (verdict := timelines[0].verdict).is_quiet:
        raise Doubtful(verdict.sentence)
    titles = [f"{line.label}, {module.idea}" for line, module in zip(timelines, modules, strict=True)]
    draw_timelines(timelines, titles).savefig(path)
    return " and ".join(line.lengths for line in timelines)


def store_runs(entry: Module, path: Path) -> str:
    """Store the runs of the module's live figure. Return their names. The sentence about them is a person's, and stays.

    Raise Doubtful instead of replacing runs of a quiet machine by those of a busy one. The figure shows the warning.
    """
    runs, verdict = record_runs(entry)
    stored = json.loads(path.read_text()) if path.exists() else {"sentence": "", "warning": verdict.warning}
    if verdict.warning and not stored["warning"]:
        raise Doubtful(verdict.sentence)
    lines = ",\n".join(json.dumps(run, separators=(",", ":")) for run in runs)
    sentence, warning = map(json.dumps, (stored["sentence"], verdict.warning))
    path.write_text(f'{{"sentence": {sentence},\n"warning": {warning}, "runs": [\n{lines}\n]}}\n')
    return "; ".join(run["name"] for run in runs)


def draw_kept(path: Path) -> None:
    """Draw what a rank keeps between two steps of AdamW, and at the peak of a step, as a PNG file."""
    world_size = 4
    sources = read("solutions", find_module("ZeroOptimizer").number)
    rows = {}
    for one in memory.measure(partial(run_ranks, packages={"submission": sources}), world_size).variants:
        rows[one.label] = {kind: nbytes / 1e6 for kind, nbytes in one.kept_bytes.items()}
        rows[one.label]["more at the peak"] = sum(one.peak_bytes.values()) / 1e6 - sum(rows[one.label].values())
    draw_bars(rows, xlabel="MB on the fullest rank", title=f"AdamW on {world_size} ranks").savefig(path)


def draw_checkpointing(path: Path) -> None:
    """Draw the memory of a step of module 11 with and without activation checkpointing, as a PNG file."""
    curves = []
    for name, is_checkpointed in (("Without", False), ("With", True)):
        variant = replace(
            get_variant(find_module("FullyShardedDDP")), label=f"{name} activation checkpointing of each block"
        )
        curves += measure_step([variant], tokens=TOKENS, is_checkpointed=is_checkpointed)
    draw_step(curves, path)


def make_axes(title: str, ylabel: str) -> tuple[Figure, Axes]:
    """Return a figure with axes for lines against the number of ranks."""
    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlabel("N, the number of ranks", fontsize=10)
    axes.set_ylabel(ylabel, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    return figure, axes


def draw_wire(path: Path) -> None:
    """Draw the error of each way to reduce against the number of ranks, as a PNG file."""
    sources = read("solutions", find_module("HalfBytesDDP").number)
    errors = wire.measure_all(partial(run_ranks, packages={"submission": sources}))
    title = "Relative error of the average over N ranks, and the bytes that a rank sends of n normal values"
    figure, axes = make_axes(title, "error, in thousandths")
    styles = (("#d55e00", "s", "--", 11), ("#0072b2", "^", ":", 6), ("#009e73", "o", "-", 6))
    for (name, values), (colour, marker, line, size) in zip(errors.items(), styles, strict=True):
        label = f"{name}, {wire.WAYS[name][1]}n (N − 1)/N bytes"
        look = {"color": colour, "marker": marker, "linestyle": line, "markersize": size}
        axes.plot(wire.RANKS, [1e3 * value for value in values], label=label, fillstyle="none", **look)
    axes.set_xticks(wire.RANKS)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=10)
    figure.savefig(path)


def draw_views(path: Path) -> None:
    """Draw the time of each way to get a shard against the number of ranks, as a PNG file."""
    by_ranks = [make_getters(torch.zeros(VIEW_NUMEL), ranks) for ranks in VIEW_RANKS]
    version = torch.__version__.partition("+")[0]
    title = f"Fastest of 1000 samples, torch {version}, one {platform.machine()} core"
    figure, axes = make_axes(title, "µs to get one shard")
    for way, style in zip(by_ranks[0], LINES, strict=True):
        times = [measure_us(getters[way]) for getters in by_ranks]
        axes.plot(VIEW_RANKS, times, markersize=6, **style)
        text = f"{way}: {float(f'{times[-1]:.2g}'):g} µs"
        axes.annotate(text, (VIEW_RANKS[-1], times[-1]), (8, 0), textcoords="offset points", va="center", fontsize=10)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(VIEW_RANKS, [str(ranks) for ranks in VIEW_RANKS])
    axes.set_yticks([0.1, 1, 10, 100], ["0.1", "1", "10", "100"])
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(run_for_modules("figures", __doc__, draw_figures))
