"""Compare a step of a module with a step of the previous module, both from the same submission.

The timed steps alternate on the emulated link of `ladder.EMULATED`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from rich.table import Table

from brigade.course.table.modules import CORE_MODULES, Module
from brigade.lab.ladder import EMULATED, Ladder, Variant, get_variant, run_benchmark
from brigade.lab.plots import format_exposed, make_empty_table
from brigade.ranks.texts import Sources

# Its reader is waiting, so a slow or busy machine measures fewer rounds.
WORKLOAD = replace(EMULATED, batch_size=16, rounds=10, warmup=2, limit_s=15.0)
DEADLINE_S = 60.0  # for the whole comparison


def get_variants(entry: Module) -> list[Variant]:
    """Return the variants of the previous module, if there is one, and of this module."""
    return [get_variant(module) for module in CORE_MODULES if module.number <= entry.number][-2:]


def count_steps(entry: Module) -> int:
    """Return how often `compare_with_previous` calls `on_step`."""
    return WORKLOAD.rounds * (len(get_variants(entry)) + 1)


def compare_with_previous(entry: Module, sources: Sources, on_step: Callable[[], None] | None = None) -> Ladder:
    """Measure a step of the previous module and of this module on two ranks. This takes a few seconds.

    Raise RankFailure if the previous module does not run.
    """
    how = {"deadline": DEADLINE_S, "on_step": on_step}
    return run_benchmark(WORKLOAD, get_variants(entry), sources, checks_losses=False, **how)


def make_table(results: Ladder, previous: int) -> Table:
    """Return a table with a row for each variant, at most 80 columns wide.

    `previous` is the number of the module that the last row is compared with, or 0 if there is none.
    """
    headings = (
        "launches",
        "MB\nsent",
        "exposed\nms",
        "\nquartiles",
        "MB\ncopied",
        "MB\nnew",
        "new\nviews",
        "MB of\nstate",
    )
    title = f"Compared with module {previous}: one step" if previous else "One step"
    table = make_empty_table(f"{title} on an emulated link", "", headings)
    for row in results.variants:
        exposed = results.compute_exposed(row)
        table.add_row(
            row.label,
            f"{row.collectives:g}",
            f"{row.sent_bytes / 1e6:.2f}",
            format_exposed(results, row, 0),
            f"{exposed.lower:.0f} to {exposed.upper:.0f}",
            f"{row.copied_bytes / 1e6:.2f}",
            f"{row.allocated_bytes / 1e6:.2f}",
            f"{row.new_views}",
            f"{row.kept_bytes['optimizer state'] / 1e6:.2f}",
        )
    return table


def describe_doubts(results: Ladder) -> str:
    """Return sentences about a machine that was not quiet, or about times that are not significant, or "".

    An exposed time is not significant if its lower quartile is below 0, and a difference is not significant if the
    quartiles overlap.
    """
    spreads = {one.label: results.compute_exposed(one) for one in results.variants}
    doubts = [
        f"The exposed time of {label} is not significant: its lower quartile is below 0."
        for label, spread in spreads.items()
        if spread.lower < 0
    ]
    if len(spreads) > 1 and max(s.lower for s in spreads.values()) <= min(s.upper for s in spreads.values()):
        doubts.append("The difference between the exposed times is not significant: their quartiles overlap.")
    if not results.verdict.is_quiet:
        doubts = [results.verdict.sentence]
    longer = "`brigade bench --comm-ratio 0.8` measures for longer: about two minutes."
    return " ".join([*doubts, longer] if doubts else [])
