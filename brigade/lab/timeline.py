"""One training step as a timeline: what each rank computed, and when each of its collectives was under way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from brigade.events import launches
from brigade.lab.ladder import PHASES, Rung, Workload, measured, reference, run_rungs, step_number
from brigade.lab.plots import COLOURS, NAMES
from brigade.models import Size
from brigade.submission import Sources

# Few parameters, large ones and a short batch: the collectives can be told apart, and take about as long as backward.
WORKLOAD = Workload(
    size=Size(d_model=256, d_ff=704, layers=2, heads=4, vocabulary=256), batch_size=4, rounds=25, bucket_mb=2.0
)


@dataclass(frozen=True)
class Span:
    """What one rank did from `start_ms` to `end_ms`, counted from the start of the step.

    `kind` is one of `ladder.PHASES`, or the operation of a collective such as "all_reduce"; then `row` counts from 0
    the collectives that were under way at once.
    """

    rank: int
    kind: str
    start_ms: float
    end_ms: float
    row: int = 0


@dataclass(frozen=True)
class Timeline:
    """One step of one rung: the one whose length is the median of all that were timed."""

    label: str
    spans: list[Span]

    @property
    def end_ms(self) -> float:
        return max(span.end_ms for span in self.spans)

    def collectives(self, rank: int) -> list[Span]:
        return [span for span in self.spans if span.rank == rank and span.kind not in PHASES]


def trace(
    rungs: Sequence[Rung],
    sources: Sources | None = None,
    *,
    workload: Workload = WORKLOAD,
    world_size: int = 2,
) -> list[Timeline]:
    """Runs the rungs in turns, in one run of ranks, and returns a timeline for each.

    `ladder.TORCH_DDP` may be among the rungs; `sources` are by default the solutions. Raises as `ladder.run_ladder`.
    """
    results = run_rungs(workload, rungs, reference() if sources is None else sources, world_size=world_size)
    timelines = []
    for rung in rungs:
        found = measured(workload, rungs, rung, results)
        lengths = found.step_ms
        turn = sorted(range(len(lengths)), key=lengths.__getitem__)[(len(lengths) - 1) // 2]
        step = step_number(rungs, rung, workload.warmup + turn)
        marks = [rounds[turn] for rounds in found.marks]
        zero = min(times[0] for times in marks)
        spans = []
        for rank, times in enumerate(marks):
            for phase, start, end in zip(PHASES, times, times[1:]):
                spans.append(Span(rank, phase, 1e3 * (start - zero), 1e3 * (end - zero)))
            rows: list[float] = []  # when the last collective of each row ended
            for launch in launches(results.events[rank], step):
                if launch.end is None:  # torch gave no future that would tell
                    continue
                row = next((i for i, end in enumerate(rows) if end <= launch.start), len(rows))
                rows[row : row + 1] = [launch.end]
                spans.append(Span(rank, launch.op, 1e3 * (launch.start - zero), 1e3 * (launch.end - zero), row))
        timelines.append(Timeline(rung.label, spans))
    return timelines


def draw(timelines: Sequence[Timeline], path: Path, titles: Sequence[str] | None = None) -> None:
    """Draws the timelines below each other on one time axis, as a PNG file 900 pixels wide."""
    figure = Figure(figsize=(9, 0.85 + 2.3 * len(timelines)), dpi=100, layout="constrained")
    panels = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
    for axes, timeline, title in zip(panels, timelines, titles or [t.label for t in timelines]):
        draw_panel(axes, timeline)
        axes.set_title(title, loc="left", fontsize=10)
    panels[-1].set_xlim(0, 1.01 * max(timeline.end_ms for timeline in timelines))
    panels[-1].set_xlabel("time since the step began (ms)")
    names = [*PHASES, "collective"]
    handles = [Patch(facecolor=COLOURS[name], edgecolor="#777777", label=NAMES.get(name, name)) for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(names), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def draw_panel(axes: Axes, timeline: Timeline) -> None:
    """Two lanes for each rank, from the top: computation, and the collectives under way."""
    ticks: dict[str, float] = {}
    for rank in sorted({span.rank for span in timeline.spans}):
        top = 2.6 * rank
        ticks |= {f"rank {rank} computes": top + 0.3, f"rank {rank} communicates": top + 1.3}
        depth = 1 + max((span.row for span in timeline.collectives(rank)), default=0)
        for span in timeline.spans:
            place, height, colour = top, 0.6, COLOURS.get(span.kind, COLOURS["collective"])
            if span.kind not in PHASES:
                height = 1.2 / depth
                place = top + 0.7 + span.row * height
            if span.rank == rank:
                length = span.end_ms - span.start_ms
                axes.barh(
                    place, length, height, span.start_ms, align="edge", color=colour, edgecolor="white", linewidth=0.4
                )
        end = top + 2.1
    axes.set_yticks([*ticks.values()], [*ticks], fontsize=9)
    axes.set_ylim(end, -0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
