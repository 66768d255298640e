"""The figures of the notebooks, large enough to be read from the back row.

A notebook shows a returned figure if it is the last value of a cell or is passed to `display`. The colours are from
Okabe and Ito's palette. Parts also differ in hatch or marker, so that they are distinct without colour.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from PIL import Image

from brigade.lab.ladder import Ladder, Spread, compute_spread
from brigade.lab.noise import Verdict
from brigade.lab.plots import COLOURS
from brigade.lab.timeline import Timeline
from brigade.lab.timeline_plot import compute_height, draw_panel, make_legend
from brigade.ranks.events import Event

Range = tuple[int, int]
Layout = tuple[Sequence[Range], Sequence[Range], int]  # ranges of parameters and buckets, and the number of elements

WIDTH = 12.0  # inches
SHOWN_DPI = 72  # pixels per inch on the page; the file has more, for projectors
SAVED_DPI = 100
BLACK, GREY, RED = "#1a1a1a", "#777777", "#d55e00"
LINES = (  # the first is the widest, so that lines that coincide are visible
    {"color": "#0072b2", "marker": "o", "linestyle": "-", "linewidth": 6},
    {"color": "#d55e00", "marker": "s", "linestyle": "--", "linewidth": 4},
    {"color": "#1a1a1a", "marker": "^", "linestyle": ":", "linewidth": 3},
    {"color": "#009e73", "marker": "D", "linestyle": "-.", "linewidth": 3},
)
PARTS = (  # of a stacked bar
    {"facecolor": COLOURS["backward"]},
    {"facecolor": COLOURS["collective"], "hatch": "/"},
    {"facecolor": COLOURS["forward"], "hatch": ".."},
    {"facecolor": COLOURS["finish"], "hatch": "x"},
)
CELLS: dict[str, dict[str, Any]] = {  # of a grid
    "plain": {"facecolor": "white"},
    "partial": {"facecolor": COLOURS["forward"]},
    "complete": {"facecolor": COLOURS["backward"]},
    "moving": {"facecolor": COLOURS["collective"], "hatch": "//"},
    "unused": {"facecolor": COLOURS["finish"]},
    "wrong": {"facecolor": RED, "hatch": "xx"},
}
STYLE: dict[Any, Any] = {
    "font.size": 18,
    "lines.linewidth": 3.5,
    "lines.markersize": 10,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


class LargeFigure(Figure):
    """A figure that a notebook shows as a small PNG file, with its title as alternative text.

    The metadata of the PNG file in the notebook also contains `values`, the number that the figure compares for each
    name, and the verdict on the machine. `make notebooks` reads them before it stores an output.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.values: dict[str, float] = {}
        self.verdict: Verdict | None = None

    def show_verdict(self, verdict: Verdict | None) -> None:
        """Remember the verdict on the machine, and show it above the figure if the machine was not quiet."""
        self.verdict = verdict
        if verdict and verdict.warning:
            self.suptitle(verdict.warning, color=RED, fontsize=18, x=0.01, ha="left")

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        drawn, reduced = io.BytesIO(), io.BytesIO()
        self.savefig(drawn, format="png")
        Image.open(drawn).convert("RGB").quantize(64).save(reduced, format="PNG", optimize=True)
        titles = [axes.get_title(side) for axes in self.axes for side in ("left", "right")]
        metadata = {"width": round(SHOWN_DPI * self.get_figwidth()), "alt": "; ".join(filter(None, titles))}
        verdict = {"quiet": self.verdict.describe()} if self.verdict else {}
        return reduced.getvalue(), metadata | {"values": self.values} | verdict


@contextmanager
def make_figure(height: float, rows: int = 1) -> Iterator[tuple[LargeFigure, Any]]:
    """Yield a figure and an array with the axes of each row, in the notebooks' style."""
    with matplotlib.rc_context(STYLE):
        figure = LargeFigure(figsize=(WIDTH, height), dpi=SAVED_DPI, layout="constrained")
        yield figure, figure.subplots(rows, sharex=True, squeeze=False)[:, 0]


def draw_lines(
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    xlabel: str,
    ylabel: str,
    title: str,
    points: Mapping[str, tuple[Sequence[float], Sequence[float]]] | None = None,
    verticals: Mapping[str, Sequence[float]] | None = None,
    log: str = "",
    xticks: Mapping[float, str] | None = None,
    are_steps: bool = False,
    with_values: bool = False,
    from_zero: bool = True,
) -> LargeFigure:
    """Draw curves. `curves` contains the x and y values of each curve, by name.

    `points` have markers instead of a line, and the colours of the curves in the same order. `verticals` contains the x
    positions of dotted lines, by label. `log` names the axes with a logarithmic scale: "x", "y" or "xy". If
    `are_steps`, a curve keeps each value until its next point. If `with_values`, each point is labelled with its y
    value. A linear y axis begins at 0 if `from_zero`. The figure's `values` are the last y values.
    """
    points = points or {}
    with make_figure(5.5) as (figure, [axes]):
        for style, (name, (x, y)) in zip(LINES[: len(curves)], curves.items(), strict=True):
            marker = style["marker"] if len(x) <= 20 and not points else ""
            drawstyle = "steps-post" if are_steps else "default"
            axes.plot(x, y, **style | {"marker": marker}, drawstyle=drawstyle, label=name)
            for each_x, each_y in zip(x, y, strict=True) if with_values else ():
                text = f"{each_y:.1f}" if each_y < 10 else f"{each_y:.0f}"
                axes.annotate(text, (each_x, each_y), (0, 12), textcoords="offset points", ha="center")
        for style, (name, (x, y)) in zip(LINES[: len(points)], points.items(), strict=True):
            axes.plot(x, y, **style | {"linestyle": ""}, markersize=12, label=name)
        for label, positions in (verticals or {}).items():
            for position in positions:
                line = axes.axvline(position, color=COLOURS["collective"], linewidth=3, linestyle=":", zorder=0)
            line.set_label(label)
        set_scales(axes, log, from_zero)
        if xticks:
            axes.set_xticks([*xticks], [*xticks.values()])
        axes.margins(y=0.15 if with_values else 0.05)
        axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
        figure.values = {name: float(y[-1]) for name, (_, y) in {**curves, **points}.items()}
        longest = max(len(label) for label in axes.get_legend_handles_labels()[1])
        figure.legend(loc="outside lower center", ncols=3 if longest < 25 else 2 if longest < 35 else 1)
    return figure


def set_scales(axes: Axes, log: str, from_zero: bool) -> None:
    """Make the axes in `log` logarithmic, with ticks such as 0.1, 0.3 and 1. A linear x axis has integer ticks."""
    lowest, highest = axes.dataLim.intervaly
    if "y" in log:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 3) if highest < 1000 * lowest else (1,)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
    elif from_zero:
        axes.set_ylim(bottom=0)
    if "x" in log:
        axes.set_xscale("log")
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.minorticks_off()


def draw_bars(
    rows: Mapping[str, Mapping[str, float]],
    *,
    xlabel: str,
    title: str,
    spread: Mapping[str, Spread] | None = None,
) -> LargeFigure:
    """Draw one stacked bar for each row, and write the values of its parts at the end of the bar.

    `spread` contains the median and the quartiles of what the whole bar shows, by row. The figure's `values` are the
    sums of the rows.
    """
    with make_figure(1.9 + 0.62 * len(rows)) as (figure, [axes]):
        figure.values = {row: float(sum(parts.values())) for row, parts in rows.items()}
        names = [*dict.fromkeys(name for parts in rows.values() for name in parts)]
        places, ends = range(len(rows)), [0.0] * len(rows)
        for name, style in zip(names, itertools.cycle(PARTS)):
            values = [parts.get(name, 0.0) for parts in rows.values()]
            axes.barh(places, values, 0.66, ends, edgecolor="black", label=name, **style)
            ends = [end + value for end, value in zip(ends, values, strict=True)]
        if spread:
            spreads = [spread[label] for label in rows]
            reach = [[one.median - one.lower for one in spreads], [one.upper - one.median for one in spreads]]
            medians = [one.median for one in spreads]
            axes.errorbar(medians, places, xerr=reach, fmt="D", color=BLACK, linewidth=2, capsize=6)
            ends = [max(end, one.upper) for end, one in zip(ends, spreads, strict=True)]
        texts = [" + ".join(f"{float(f'{value:.3g}'):g}" for value in parts.values()) for parts in rows.values()]
        for place, end, text in zip(places, ends, texts, strict=True):
            axes.annotate(text, (end, place), (10, 0), textcoords="offset points", va="center")
        axes.set_yticks(places, [*rows])
        axes.invert_yaxis()
        axes.margins(x=max(map(len, texts)) / 30)  # room for the longest text
        axes.set_xlim(left=0)
        axes.grid(visible=False, axis="y")
        axes.set(xlabel=xlabel, title=title)
        handles, labels = axes.get_legend_handles_labels()
        figure.legend(handles[: len(names)], labels[: len(names)], loc="outside lower center", ncols=len(names))
    return figure


def draw_step_times(results: Ladder, title: str, labels: Sequence[str] | None = None) -> LargeFigure:
    """Draw the median step of each variant. A part of it is the exposed communication time, as in the table.

    A bar is as long as the variant's own step. After a noisy run, an exposed time can be negative; it is drawn as 0.
    """
    labels = labels or [variant.label for variant in results.variants]
    rows, spread = {}, {}
    for label, variant in zip(labels, results.variants, strict=True):
        spread[label] = compute_spread(variant.step_ms)
        exposed = max(0.0, results.compute_exposed(variant).median)
        hidden = spread[label].median - exposed
        rows[label] = {"computation and hidden communication": hidden, "exposed communication": exposed}
    xlabel = "time of one training step (ms); lines: quartiles"
    figure = draw_bars(rows, xlabel=xlabel, title=title, spread=spread)
    figure.show_verdict(results.verdict)
    return figure


def draw_grid(
    rows: Mapping[str, Sequence[tuple[object, str]]],
    *,
    title: str,
    columns: Sequence[object],
    xlabel: str = "",
    meanings: Mapping[str, str] | None = None,
) -> LargeFigure:
    """Draw a table of boxes, each given as a text and a key of `CELLS`. The legend explains the keys in `meanings`."""
    with make_figure(1.7 + 0.72 * len(rows)) as (figure, [axes]):
        for y, boxes in enumerate(rows.values()):
            for x, (text, kind) in enumerate(boxes):
                axes.add_patch(Rectangle((x + 0.04, y + 0.1), 0.92, 0.8, edgecolor="black", **CELLS[kind]))
                paper = {"facecolor": "white", "edgecolor": "none", "pad": 2} if "hatch" in CELLS[kind] else None
                ink = "white" if kind == "complete" else "black"
                axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=ink, bbox=paper)
        axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0), xlabel=xlabel, title=title)
        axes.set_xticks([x + 0.5 for x in range(len(columns))], columns)
        axes.set_yticks([y + 0.5 for y in range(len(rows))], [*rows])
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        if meanings:
            handles = [Patch(edgecolor="black", label=text, **CELLS[kind]) for kind, text in meanings.items()]
            figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def draw_layouts(layouts: Mapping[int, Layout]) -> LargeFigure:
    """Draw the buffer of module 5 for each number of ranks. A layout is (param_ranges, bucket_ranges, numel)."""
    with make_figure(0.8 + 2.6 * len(layouts), rows=len(layouts)) as (figure, panels):
        for axes, (dp_size, (param_ranges, bucket_ranges, numel)) in zip(panels, layouts.items(), strict=True):
            axes.add_patch(Rectangle((0, 0), numel, 1, facecolor=COLOURS["finish"], hatch="//", edgecolor=GREY))
            for i, (start, end) in enumerate(param_ranges):
                axes.add_patch(Rectangle((start, 0), end - start, 1, facecolor=COLOURS["forward"], edgecolor="black"))
                axes.text((start + end) / 2, 0.5, i, ha="center", va="center")
            for number, (start, end) in enumerate(bucket_ranges):
                axes.add_patch(Rectangle((start, 0), end - start, 1, fill=False, edgecolor="black", linewidth=5))
                axes.text(start + 6, 1.1, f"bucket {number}: {start} to {end}", fontsize=15)
                for rank in range(1, dp_size):
                    border = start + rank * (end - start) // dp_size
                    axes.axvline(border, 0.02, 0.74, color=RED, linewidth=3.5, linestyle=":")
            used = sum(end - start for start, end in param_ranges)
            axes.set(ylim=(0, 1.35), yticks=[], xlim=(-4, max(layout[2] for layout in layouts.values()) + 4))
            axes.set_title(f"N = {dp_size}: {numel} elements for {used} gradient elements")
            axes.grid(visible=False)
            axes.spines["left"].set_visible(False)
        panels[-1].set_xlabel("element of the buffer; hatched: padding; dotted: borders between the N shards")
    return figure


def draw_launch_order(events_of_ranks: Sequence[Sequence[Event]], phase: str) -> LargeFigure:
    """Draw the events "gradient" and "launched" of each rank in a phase, in order. Both have the field `bucket`."""
    kinds = {"gradient": "plain", "launched": "moving"}
    ranks = [[one for one in own if one["phase"] == phase and one["kind"] in kinds] for own in events_of_ranks]
    rows = {f"rank {i}": [(one["bucket"], kinds[one["kind"]]) for one in own] for i, own in enumerate(ranks)}
    columns = [""] * max(map(len, rows.values()))
    meanings = {"plain": "a gradient of this bucket is ready", "moving": "the bucket is launched"}
    return draw_grid(rows, title=phase, columns=columns, xlabel="events in backward, in order", meanings=meanings)


def draw_timelines(timelines: Sequence[Timeline], titles: Sequence[str], most_ranks: int | None = None) -> LargeFigure:
    """Draw the timelines one below the other, on one time axis. The length of each step is below its title.

    The figure's `values` are these lengths, in ms. If `most_ranks` is given, draw only the first ranks.
    """
    world_size = timelines[0].world_size
    num_ranks = min(world_size, most_ranks or world_size)
    drawn = [replace(timeline, world_size=num_ranks) for timeline in timelines]
    heights = [*map(compute_height, drawn)]
    with matplotlib.rc_context(STYLE | {"font.size": 12, "axes.titlesize": 13}):
        height = 1.4 + sum(0.64 + 0.4 * height for height in heights)
        figure = LargeFigure(figsize=(WIDTH, height), dpi=SAVED_DPI, layout="constrained")
        panels = figure.subplots(len(timelines), sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, timeline, shown, title in zip(panels, timelines, drawn, titles, strict=True):
            draw_panel(axes, shown)
            axes.set_title(f"{title}\n{timeline.lengths}")
        place = "" if timelines[0].link else " on GPUs"
        some = f"; ranks 0 to {num_ranks - 1} of {world_size}" if num_ranks < world_size else ""
        xlabel = f"time (ms){place}{some}"
        panels[-1].set(xlim=(0, 1.01 * max(timeline.end_ms for timeline in timelines)), xlabel=xlabel)
        figure.values = {title: timeline.end_ms for title, timeline in zip(titles, timelines, strict=True)}
        figure.show_verdict(timelines[0].verdict)  # which all timelines of a run share, as the note
        if timelines[0].note:
            figure.suptitle(timelines[0].note, color=RED, fontsize=18, x=0.01, ha="left")
        handles = make_legend(timelines)
        figure.legend(handles=handles, loc="outside lower center", ncols=-(-len(handles) // 2))
    return figure
