"""The tables of `brigade bench` and of the demo, and the colours of all pictures."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from rich import box
from rich.table import Table

from brigade.lab.ladder import LOSS_TOLERANCE, Ladder, Measurement, Spread, compute_spread
from brigade.lab.memory_accounting import KINDS

# Okabe and Ito's palette for all kinds of colour vision. The colours also differ in lightness, so they work in
# greyscale.
COLOURS = {
    "forward": "#8fcdf0",
    "backward": "#0072b2",
    "finish": "#e0e0e0",
    "step": "#1a1a1a",
    "collective": "#e69f00",
}
NAMES = {  # legend labels that differ from the key
    "finish": "finish_grad_sync",
    "step": "optimizer step",
    "wait": "waits",
}
CAPTION_WIDTH = 60  # characters; the table of times is wider


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


def format_exposed(ladder: Ladder, one: Measurement, digits: int) -> str:
    """Return a variant's exposed time in ms as text. A negative one is noise, so it counts as 0."""
    return f"{max(0.0, ladder.compute_exposed(one).median):.{digits}f}"


def make_time_table(ladder: Ladder) -> Table:
    """Return a table of step times, with a row for each variant, and the verdict on the machine below it."""
    headings = ("step ms", "\nquartiles", "ratio to\ntorch DDP", "\nquartiles", "exposed\nms")
    is_swept = any(one.bucket_mb is not None for one in ladder.variants)
    buckets = "" if is_swept else f"; buckets of {ladder.workload.bucket_mb:g} MiB"
    table = make_empty_table(f"Step time: {describe_ranks(ladder)}{buckets}", "variant", headings)
    for one in ladder.variants:
        ratio = compute_spread(ladder.compute_ratios(one))
        table.add_row(
            one.label,
            f"{one.median_ms:.1f}",
            format_quartiles(compute_spread(one.step_ms), 1),
            f"{ratio.median:.2f}",
            format_quartiles(ratio, 2),
            format_exposed(ladder, one, 1),
        )
    table.caption, table.caption_justify = textwrap.fill(ladder.verdict.sentence, CAPTION_WIDTH), "left"
    table.caption_style = "" if ladder.verdict.is_quiet else "bold"
    alone = ladder.computation
    table.add_section()
    table.add_row(alone.label, f"{alone.median_ms:.1f}", format_quartiles(compute_spread(alone.step_ms), 1))
    return table


def make_memory_table(ladder: Ladder) -> Table:
    """Return a table of time, traffic and memory, with a row for each variant."""
    memory = [f"{kind}\n{when}" for when in ("peak", "kept") for kind in ("param", "grad", "state")]
    has_nodes = ladder.workload.node_size is not None
    headings = ("step\nms", "laun-\nches", "MB\nsent", *memory)
    if has_nodes:
        headings = ("laun-\nches", "MB\nsent", "to other\nnodes", *memory)
    table = make_empty_table("Launches and MB sent per step, and MB of memory on the fullest rank", "variant", headings)
    table.caption = "Peak: on one token per rank; gradients include buckets. Kept: between steps."
    table.caption_justify = "left"
    for one in ladder.variants:
        sent = [one.sent_bytes, *([one.outer_bytes] if has_nodes else [])]
        by_kind = [nbytes[kind] for nbytes in (one.peak_bytes, one.kept_bytes) for kind in KINDS]
        megabytes = (format_number(nbytes / 1e6, 2) for nbytes in (*sent, *by_kind))
        step_ms = [] if has_nodes else [format_number(one.median_ms, 1)]
        table.add_row(one.label, *step_ms, f"{one.collectives:g}", *megabytes)
    return table


def make_training_table(ladder: Ladder) -> Table:
    """Return the table of the capstone: loss, speed, exposed time, bytes per step and memory, for each variant."""
    from_scratch = f"loss after\n{ladder.workload.rounds} steps\nfrom scratch"  # not that of the training before
    headings = (from_scratch, "tokens\nper s", "exposed\nms", "MB\nsent", "MB at\npeak")
    table = make_empty_table(describe_ranks(ladder), "variant", headings)
    num_tokens = ladder.workload.batch_size * ladder.workload.time
    for one in ladder.variants:
        table.add_row(
            one.label,
            f"{one.losses[0]:.4f}",
            f"{1e3 * num_tokens / one.median_ms:.0f}",
            format_exposed(ladder, one, 1),
            format_number(one.sent_bytes / 1e6, 2),
            format_number(sum(one.peak_bytes.values()) / 1e6, 2),
        )
    table.caption, table.caption_justify = textwrap.fill(ladder.verdict.sentence, CAPTION_WIDTH), "left"
    table.caption_style = "" if ladder.verdict.is_quiet else "bold"
    return table


def format_number(value: float, digits: int) -> str:
    """Return a number with `digits` decimal places, or with none if the text would be longer than five characters."""
    text = f"{value:.{digits}f}"
    return text if len(text) <= 5 else f"{value:.0f}"


def describe_losses(ladder: Ladder) -> str:
    """Return one sentence about the losses, for a ladder in which no loss is wrong."""
    if math.isnan(ladder.expected_loss):
        return "The losses are not compared with those of one process."
    return (
        f"All losses equal that of one process that trains on the whole batch, {ladder.expected_loss:.5f}, within "
        f"{LOSS_TOLERANCE:g}."
    )


def describe_place(ladder: Ladder) -> str:
    """Return where the ranks have run, such as: 2 ranks on the CPU (gloo), emulated link"""
    link = ", emulated link" if ladder.link else ""
    return f"{ladder.world_size} ranks on {ladder.device} ({ladder.backend}){link}"


def describe_ranks(ladder: Ladder) -> str:
    """Return text such as: 2 ranks (gloo), 30 timed steps each, interleaved"""
    ranks = "1 rank" if ladder.world_size == 1 else f"{ladder.world_size} ranks"
    dtype = "" if ladder.dtype == "float32" else f", {ladder.dtype}"
    order = "interleaved" if ladder.is_interleaved else "in sequence"
    return f"{ranks} ({ladder.backend}{dtype}), {len(ladder.computation.step_ms)} timed steps each, {order}"
