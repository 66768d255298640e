"""The ladder's table and its picture."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from matplotlib.figure import Figure
from rich import box
from rich.table import Table

from brigade.lab.ladder import LOSS_TOLERANCE, PHASES, TORCH_ZERO, Ladder, quartiles

# From Okabe and Ito's colours for all kinds of colour vision; their lightness differs, so that they work in grey too.
COLOURS = {
    "forward": "#8fcdf0",
    "backward": "#0072b2",
    "finish": "#e0e0e0",
    "step": "#1a1a1a",
    "collective": "#e69f00",
}
NAMES = {  # where a legend needs more than the key
    "finish": "finish_grad_sync",
    "step": "optimizer step",
    "collective": "collective, launch to end",
}


def ladder_table(ladder: Ladder) -> Table:
    """A row for each rung, 80 columns wide at most."""
    workload = ladder.workload
    table = Table(
        title=f"The ladder: {ladder.world_size} ranks, {workload.rounds - workload.warmup} timed steps each, in turns",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=0,
        show_edge=False,
    )
    table.add_column("rung", no_wrap=True)
    for heading in (
        "step ms\nmedian",
        "step ms\nquartiles",
        "ratio to\ntorch DDP",
        "collectives\nper step",
        "MB sent\nper step",
    ):
        table.add_column(heading, justify="right")
    table.add_column(f"loss after\n{workload.rounds} steps", justify="right")
    for rung in ladder.rungs:
        lower, upper = rung.quartiles_ms
        table.add_row(
            rung.label,
            f"{rung.median_ms:.1f}",
            f"{lower:.1f}-{upper:.1f}",
            f"{ladder.ratio(rung):.2f}",
            f"{rung.collectives:g}",
            f"{rung.sent_bytes / 1e6:.2f}",
            f"{rung.loss:.5f}",
        )
    return table


def zero_sentence(ladder: Ladder) -> str:
    """How the course's last rung compares with torch's way to do the same, medians and quartiles over rounds."""
    mine = ladder.rungs[-3]
    cells = []
    for ratios in (ladder.ratios(mine, TORCH_ZERO.label), ladder.cpu_ratios(mine, TORCH_ZERO.label)):
        lower, upper = quartiles(ratios)
        cells.append(f"{median(ratios):.2f} [{lower:.2f}-{upper:.2f}]")
    return f"{mine.label} against {TORCH_ZERO.label}: step time {cells[0]}, CPU time {cells[1]}"


def ratio_table(ladder: Ladder) -> Table:
    """Step time and processor time of each rung as multiples of torch DDP's, medians and quartiles over rounds."""
    table = Table(
        title=f"Ratios to torch DDP within a round: {ladder.workload.rounds - ladder.workload.warmup} rounds, "
        f"buckets of {ladder.workload.bucket_mb:g} MiB",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_edge=False,
    )
    table.add_column("rung", no_wrap=True)
    for heading in ("step time\nmedian", "\nquartiles", "CPU time\nmedian", "\nquartiles"):
        table.add_column(heading, justify="right")
    for rung in ladder.rungs:
        cells = []
        for ratios in (ladder.ratios(rung), ladder.cpu_ratios(rung)):
            cells += [f"{median(ratios):.2f}", "-".join(f"{value:.2f}" for value in quartiles(ratios))]
        table.add_row(rung.label, *cells)
    return table


def verdict(ladder: Ladder) -> str:
    """One sentence on the losses, for a ladder of which no rung is wrong."""
    return (
        f"One process that trains on the whole batch has a loss of {ladder.truth:.5f} too: all losses are equal "
        f"within {LOSS_TOLERANCE:g}."
    )


def ladder_picture(ladder: Ladder, path: Path) -> None:
    """Draws where the time of a step goes, one bar for each rung, as a PNG file.

    A bar is made of each phase's median; the marker is the table's median, of the slowest rank, and lies further right.
    """
    rungs = ladder.rungs[::-1]  # matplotlib counts upwards
    figure = Figure(figsize=(9, 1.7 + 0.5 * len(rungs)), dpi=100, layout="constrained")
    axes = figure.subplots()
    places = range(len(rungs))
    starts = [0.0] * len(rungs)
    for phase in PHASES:
        lengths = [rung.phase_ms(phase) for rung in rungs]
        axes.barh(places, lengths, 0.62, starts, color=COLOURS[phase], edgecolor="white", label=NAMES.get(phase, phase))
        starts = [start + length for start, length in zip(starts, lengths)]
    medians = [rung.median_ms for rung in rungs]
    reach = [
        [m - r.quartiles_ms[0] for m, r in zip(medians, rungs)],
        [r.quartiles_ms[1] - m for m, r in zip(medians, rungs)],
    ]
    axes.errorbar(
        medians,
        places,
        xerr=reach,
        fmt="D",
        color="#d55e00",
        markersize=5,
        capsize=4,
        label="whole step: median, quartiles",
    )
    ends = max(rung.quartiles_ms[1] for rung in rungs)
    for place, rung in enumerate(rungs):
        plural = "collective" if rung.collectives == 1 else "collectives"
        axes.text(ends * 1.04, place, f"{rung.collectives:g} {plural}", va="center", fontsize=10)
    axes.set_yticks(places, [rung.label for rung in rungs])
    axes.set_xlim(0, ends * 1.25)
    axes.set_xlabel("time of one training step (ms)")
    axes.set_title(f"The ladder on {ladder.world_size} ranks: medians of {len(rungs[0].step_ms)} steps", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
