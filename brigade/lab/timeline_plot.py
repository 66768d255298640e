"""Draw the panels of timelines (see `notebook_plots.draw_timelines`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from brigade.lab.ladder import PHASES
from brigade.lab.plots import COLOURS, NAMES
from brigade.lab.timeline import EXPOSED, Timeline

Style = dict[str, Any]
STYLES: dict[str, Style] = {kind: {"facecolor": colour, "edgecolor": "white"} for kind, colour in COLOURS.items()}
STYLES |= {
    "wait": {"facecolor": "#ffffff", "edgecolor": "#999999", "hatch": "////"},
    "exposed": {"facecolor": "#d55e00"},
    # Collectives: shades of one colour, and hatches in case the shades look alike.
    "all_reduce": {"facecolor": COLOURS["collective"], "edgecolor": "#6b4a00"},
    "reduce_scatter": {"facecolor": "#f7cf7c", "edgecolor": "#6b4a00", "hatch": "////"},
    "all_gather": {"facecolor": "#fff3d6", "edgecolor": "#6b4a00", "hatch": "..."},
    "reduce": {"facecolor": "#f7cf7c", "edgecolor": "#6b4a00", "hatch": "\\\\\\\\"},
    "broadcast": {"facecolor": "#fff3d6", "edgecolor": "#6b4a00", "hatch": "xxx"},
}
OTHER: Style = {"facecolor": "#ffffff", "edgecolor": "#6b4a00"}  # of other collectives
BACKWARD_END: Style = {"color": "black", "marker": "", "linestyle": "--", "linewidth": 1.2}
LAUNCHED: Style = {"color": "black", "marker": "v", "markersize": 4, "linestyle": "none"}
LANES = 2.75  # the distance from one rank to the next


def compute_height(timeline: Timeline) -> float:
    """Return the height of a timeline's panel, in units in which the lane of computation has the height 0.8."""
    return LANES * timeline.world_size - 0.35


def make_legend(timelines: Sequence[Timeline]) -> list[Artist]:
    """Return the legend's entries for everything that the timelines contain."""
    ops = {collective.kind for timeline in timelines for collective in timeline.launched}

    def make_patch(kind: str) -> Patch:
        label = NAMES.get(kind, kind.replace("_", "-"))
        return Patch(**STYLES.get(kind, OTHER), linewidth=0.4 if kind in COLOURS else None, label=label)

    handles: list[Artist] = [make_patch(kind) for kind in (*PHASES, "wait", "exposed")]
    handles += [Line2D([], [], **BACKWARD_END, label="end of backward"), Line2D([], [], **LAUNCHED, label="launch")]
    known = filter(ops.__contains__, STYLES)
    return handles + [make_patch(kind) for kind in (*known, *sorted(ops - STYLES.keys()))]


def draw_panel(axes: Axes, timeline: Timeline) -> None:
    """Draw two lanes for each rank: computation, and running collectives below it.

    The exposed times and the launches are between the two lanes of a rank.
    """
    ticks: dict[str, float] = {}

    def draw_block(start: float, end: float, top: float, height: float, kind: str, linewidth: float = 0.0) -> None:
        style = STYLES.get(kind, OTHER)
        axes.barh(top, end - start, height, start, align="edge", linewidth=linewidth, **style)

    for rank in range(timeline.world_size):
        top = LANES * rank
        ticks |= {f"rank {rank} computes": top + 0.4, f"rank {rank} communicates": top + 1.75}
        for span in timeline.spans:
            if span.rank == rank:
                draw_block(span.start_ms, span.end_ms, top, 0.8, span.kind, 0.4)
                if span.kind in EXPOSED:
                    draw_block(span.start_ms, span.end_ms, top + 0.84, 0.12, "exposed")
        ends = [span.end_ms for span in timeline.spans if span.rank == rank and span.kind == "backward"]
        collectives = timeline.get_collectives(rank)
        depth = 1 + max((collective.row for collective in collectives), default=0)  # rows share the lane's height
        for collective in collectives:
            lane = top + 1.25 + collective.row / depth
            draw_block(collective.start_ms, collective.end_ms, lane, 1 / depth, collective.kind, 0.7)
        launched = [collective.launched_ms for collective in collectives]
        axes.plot(launched, [top + 1.1] * len(launched), **LAUNCHED)
        axes.plot(2 * [max(ends)], [top - 0.1, top + 2.35], **BACKWARD_END)
    axes.set_yticks([*ticks.values()], [*ticks])
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(compute_height(timeline), -0.15)
    axes.grid(visible=False, axis="y")
