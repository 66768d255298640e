"""The tables and the pictures of the ladder and of `brigade bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch
from rich import box
from rich.table import Table

from brigade.lab.bench import Bench, Row, Spread
from brigade.lab.ladder import FP32_BYTES, LOSS_TOLERANCE, PHASES, TORCH_DDP, Ladder

# Okabe and Ito's palette for all kinds of colour vision. The colours also differ in lightness, so they work in
# greyscale.
COLOURS = {
    "forward": "#8fcdf0",
    "backward": "#0072b2",
    "finish": "#e0e0e0",
    "copy": "#e0e0e0",
    "step": "#1a1a1a",
    "collective": "#e69f00",
}
NAMES = {  # legend labels that differ from the key
    "finish": "finish_grad_sync",
    "copy": "copies and divisions",
    "step": "optimizer step",
    "collective": "collective, launch to end",
}


def make_ladder_table(ladder: Ladder) -> Table:
    """Return a table with a row for each variant, at most 80 columns wide."""
    workload = ladder.workload
    title = (
        f"All variants: {ladder.world_size} ranks, {workload.rounds - workload.warmup} timed steps each, interleaved"
    )
    headings = (
        "step ms\nmedian",
        "step ms\nquartiles",
        "ratio to\ntorch DDP",
        "collectives\nper step",
        "MB sent\nper step",
        f"loss after\n{workload.rounds} steps",
    )
    table = make_empty_table(title, "variant", headings)
    for variant in ladder.variants:
        lower, upper = variant.quartiles_ms
        table.add_row(
            variant.label,
            f"{variant.median_ms:.1f}",
            f"{lower:.1f}-{upper:.1f}",
            f"{ladder.compute_ratio(variant):.2f}",
            f"{variant.collectives:g}",
            f"{variant.sent_bytes / 1e6:.2f}",
            f"{variant.loss:.5f}",
        )
    return table


def make_bench_tables(bench: Bench) -> list[Table]:
    """Return the tables that `brigade bench` shows, at most 80 columns wide."""
    return [make_sweep_table(bench)] if bench.is_sweep else [make_time_table(bench), make_memory_table(bench)]


def format_title(bench: Bench) -> str:
    """Return text such as: 2 ranks (gloo), 30 timed steps each, interleaved"""
    ladder = bench.ladder
    timed = ladder.workload.rounds - ladder.workload.warmup
    ranks = "1 rank" if ladder.world_size == 1 else f"{ladder.world_size} ranks"
    return f"{ranks} ({ladder.backend}), {timed} timed steps each, interleaved"


def make_empty_table(title: str, first: str, headings: Sequence[str]) -> Table:
    """Return an empty table with a column for names, called `first`, and a column for each heading."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column(first, no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def format_quartiles(spread: Spread, digits: int) -> str:
    """Return the quartiles as text, such as: 1.02-1.10"""
    return f"{format_number(spread.lower, digits)}-{format_number(spread.upper, digits)}"


def make_time_table(bench: Bench) -> Table:
    """Return a table of step times, with a row for each variant."""
    headings = ("step ms", "\nquartiles", "ratio to\ntorch DDP", "\nquartiles", "exposed\nms", "CPU\nratio")
    buckets = f"buckets of {bench.ladder.workload.bucket_mb:g} MiB"
    table = make_empty_table(f"Step time: {format_title(bench)}; {buckets}", "variant", headings)
    for row in bench.make_rows():
        table.add_row(
            row.variant,
            f"{row.step_ms.median:.1f}",
            format_quartiles(row.step_ms, 1),
            f"{row.ratio.median:.2f}",
            format_quartiles(row.ratio, 2),
            f"{row.exposed_ms.median:.1f}",
            f"{row.cpu_ratio.median:.2f}",
        )
    alone = bench.ladder.computation
    table.add_section()
    table.add_row(
        alone.label, f"{alone.median_ms:.1f}", format_quartiles(Spread(alone.median_ms, *alone.quartiles_ms), 1)
    )
    return table


def make_memory_table(bench: Bench) -> Table:
    """Return a table of time, traffic and memory, with a row for each variant."""
    memory = [f"{kind}\n{when}" for when in ("peak", "kept") for kind in ("param", "grad", "state")]
    headings = ("step\nms", "laun-\nches", "MB\nsent", *memory)
    table = make_empty_table("Launches and MB sent per step, and MB of memory on the fullest rank", "variant", headings)
    table.caption = "Peak: on one token per rank; gradients include buckets. Kept: between steps."
    table.caption_justify = "left"
    for row in bench.make_rows():
        peak = (row.peak_param_mb, row.peak_grad_mb, row.peak_state_mb)
        kept = (row.param_mb, row.grad_mb, row.state_mb)
        megabytes = (format_number(value, 2) for value in (row.sent_mb, *peak, *kept))
        table.add_row(row.variant, format_number(row.step_ms.median, 1), f"{row.collectives:g}", *megabytes)
    return table


def format_number(value: float, digits: int) -> str:
    """Return a number with `digits` decimal places, or with none if the text would be longer than five characters."""
    text = f"{value:.{digits}f}"
    return text if len(text) <= 5 else f"{value:.0f}"


def make_sweep_table(bench: Bench) -> Table:
    """Return a table with a row for each variant and bucket size."""
    headings = ("step ms", "\nquartiles", "ratio to\ntorch DDP", "exposed\nms", "collectives\nper step")
    table = make_empty_table(f"Bucket sizes: {format_title(bench)}", "variant, buckets", headings)
    rows = bench.make_rows()
    for row, following in zip(rows, [*rows[1:], None]):
        table.add_row(
            row.variant,
            f"{row.step_ms.median:.1f}",
            format_quartiles(row.step_ms, 1),
            f"{row.ratio.median:.2f}",
            f"{row.exposed_ms.median:.1f}",
            f"{row.collectives:g}",
            end_section=following is not None
            and remove_bucket_size(following.variant) != remove_bucket_size(row.variant),
        )
    return table


def remove_bucket_size(label: str) -> str:
    """Return the label of a sweep's variant without its bucket size."""
    return label.rpartition(", ")[0]


def describe_losses(ladder: Ladder) -> str:
    """Return one sentence about the losses, for a ladder in which no loss is wrong."""
    return (
        f"All losses equal that of one process that trains on the whole batch, {ladder.expected_loss:.5f}, within "
        f"{LOSS_TOLERANCE:g}."
    )


def draw_ladder(ladder: Ladder, path: Path) -> None:
    """Draw how long each phase of a step takes, with one bar for each variant, as a PNG file.

    The phases of a bar are those of the slowest rank, scaled so that the bar ends at the median step time. The hatched
    part is the additional time that forward and backward take compared with computation alone.
    """
    variants = ladder.variants[::-1]  # matplotlib counts upwards
    figure = Figure(figsize=(9, 2.2 + 0.45 * len(variants)), dpi=100, layout="constrained")
    axes = figure.subplots()
    alone = ladder.computation
    alone_ms = alone.compute_phase_parts_ms()
    for position, variant in enumerate(variants):
        start = 0.0
        for phase, length in variant.compute_phase_parts_ms().items():
            style = {"color": COLOURS[phase], "edgecolor": "white"}
            axes.barh(position, length, 0.62, start, **style)
            beyond = length - alone_ms[phase] if phase in ("forward", "backward") else 0.0
            if beyond > 0.01 * variant.median_ms:
                axes.barh(position, beyond, 0.62, start + length - beyond, hatch="////", **style)
            start += length
    medians = [variant.median_ms for variant in variants]
    reach = [
        [m - r.quartiles_ms[0] for m, r in zip(medians, variants)],
        [r.quartiles_ms[1] - m for m, r in zip(medians, variants)],
    ]
    steps = axes.errorbar(medians, range(len(variants)), xerr=reach, fmt="D", color="#d55e00", markersize=5, capsize=4)
    line = axes.axvline(alone.median_ms, color="#777777", linewidth=1, linestyle=":", zorder=0)
    columns = [("ratio to\ntorch DDP", "launches\nper step")]
    columns = [(f"{ladder.compute_ratio(variant):.2f}", f"{variant.collectives:g}") for variant in variants] + columns
    for position, texts in enumerate(columns):
        for offset, text in zip((65, 130), texts):  # points to the right of the axes
            place = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "ha": "right"}
            axes.annotate(text, (1, position), (offset, 0), va="center", fontsize=10, **place)
    axes.set_yticks(range(len(variants)), [variant.label for variant in variants])
    axes.set_xlim(0, 1.02 * max(variant.quartiles_ms[1] for variant in variants))
    axes.set_ylim(-0.6, len(variants) + 0.4)
    axes.set_xlabel("time of one training step (ms)")
    figure.suptitle(describe_setting(ladder), x=0.01, ha="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [Patch(facecolor=COLOURS[phase], label=NAMES.get(phase, phase)) for phase in PHASES]
    handles.append(
        Patch(facecolor="white", edgecolor="black", hatch="////", label="more than computation alone (waits, hooks)")
    )
    names = [*(handle.get_label() for handle in handles), "whole step: median, quartiles", alone.label]
    figure.legend([*handles, steps, line], names, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def describe_setting(ladder: Ladder) -> str:
    """Return lines about the ranks, the model and the link."""
    lines = [
        f"{ladder.world_size} ranks ({ladder.backend}), medians of {len(ladder.computation.step_ms)} steps; "
        f"TinyLM with {ladder.model_bytes / FP32_BYTES / 1e6:.2f} million parameters in fp32"
    ]
    if ladder.link:
        lines.append(
            f"Emulated link: {ladder.link.description}\nAll-reduce of all gradients: {1e3 * ladder.link_s:.0f} ms; "
            f"backward alone: {1e3 * ladder.backward_s:.0f} ms"
        )
    return "\n".join(lines)


def draw_bench(bench: Bench, path: Path) -> None:
    """Draw the bench as a PNG file, with bars for a ladder or lines for a sweep."""
    if bench.is_sweep:
        draw_sweep(bench, path)
    else:
        draw_ladder(bench.ladder, path)


# Lines differ in marker and dash as well as in colour. The colours are again from Okabe and Ito's palette.
LINES = (
    {"color": "#0072b2", "marker": "o", "linestyle": "-"},
    {"color": "#d55e00", "marker": "s", "linestyle": "--"},
    {"color": "#009e73", "marker": "^", "linestyle": "-."},
    {"color": "#cc79a7", "marker": "D", "linestyle": (0, (5, 1, 1, 1, 1, 1))},
    {"color": "#56b4e9", "marker": "v", "linestyle": (0, (1, 1))},
)
TORCH_LINE = {"color": "#1a1a1a", "marker": "x", "linestyle": "-"}


def draw_sweep(bench: Bench, path: Path) -> None:
    """Draw step time against bucket size: a line of medians for each variant, with bars from quartile to quartile."""
    families: dict[str, list[Row]] = {}
    for row in bench.make_rows():
        families.setdefault(remove_bucket_size(row.variant), []).append(row)
    figure = Figure(figsize=(9, 5), dpi=100, layout="constrained")
    axes = figure.subplots()
    for index, (name, rows) in enumerate(families.items()):
        style = TORCH_LINE if name == TORCH_DDP.label else LINES[index % len(LINES)]
        shift = 1.03 ** (index - (len(families) - 1) / 2)  # keeps the bars apart
        spreads = [row.step_ms for row in rows]
        axes.errorbar(
            [row.bucket_mb * shift for row in rows],
            [spread.median for spread in spreads],
            yerr=[
                [spread.median - spread.lower for spread in spreads],
                [spread.upper - spread.median for spread in spreads],
            ],
            capsize=3,
            markersize=6,
            elinewidth=1,
            label=name,
            **style,
        )
    alone = bench.ladder.computation.median_ms
    axes.axhline(alone, color="#777777", linewidth=1, linestyle=":", label=bench.ladder.computation.label)
    sizes = sorted({row.bucket_mb for row in bench.make_rows()})
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{size:g}" for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("size of the buckets (MiB)")
    axes.set_ylabel("time of one training step (ms)")
    axes.set_title(f"{format_title(bench)}: medians and quartiles", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=min(5, len(families) + 1), frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
