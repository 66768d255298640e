"""Count the bytes that each variant keeps on a rank between two steps, and draw them: python -m brigade.lab.memory

    measured = measure()
    measured[0].find_fullest(4)     bytes by kind of the first variant, on the fullest of 4 ranks

Parameters, gradients and optimizer state are counted in the ranks (see `memory_accounting.py`), after two steps of
AdamW. The picture also shows the peak of the second step, and the formulas of ZeRO stage 1 (arXiv 1910.02054). For P
fp32 parameters on N ranks, the formula gives 4P + 4P + 8P/N bytes: only the state is sharded. Every rank keeps all
gradients, both in the formula and here, although it needs only 1/N of them after the reduce-scatter. Stage 2 frees the
rest.

rich and matplotlib are imported where they are used, because `brigade plan` needs only the formulas.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brigade.checks.tiny_lm import SIZES, Size
from brigade.course.modules import CORE_MODULES, ROOT, TARGETS, Module, find_module
from brigade.course.submission import Sources
from brigade.lab.bench import select_written
from brigade.lab.experiment import run_to_status
from brigade.lab.ladder import TORCH_DDP, TORCH_ZERO, Variant, Workload, get_variant, read_reference, run_variants
from brigade.lab.memory_accounting import COLOURS, KINDS, Bytes
from brigade.lab.on_ranks import FP32_BYTES

if TYPE_CHECKING:
    from rich.table import Table

WORLD_SIZES = (1, 2, 4)
WORKLOAD = Workload(batch_size=4, time=8, rounds=2, warmup=0, learning_rate=1e-3, optimizer="AdamW")
ZERO = find_module("ZeroOptimizer")
PICTURE = ZERO.lesson / "memory.png"
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Formula:
    """A formula for memory, in bytes per parameter. If `is_divided`, the ranks shard the state, but nothing else."""

    parameters: int
    gradients: int
    state: int
    is_divided: bool

    @property
    def text(self) -> str:
        """The formula as text, such as: 4P + 4P + 8P/N"""
        return f"{self.parameters}P + {self.gradients}P + {self.state}P" + ("/N" if self.is_divided else "")

    def compute_bytes(self, numel: int, world_size: int) -> Bytes:
        """Return the bytes by kind on one of `world_size` ranks, for a model of `numel` parameters."""
        state = self.state * numel / (world_size if self.is_divided else 1)
        return dict(zip(KINDS, (self.parameters * numel, self.gradients * numel, round(state))))


WHOLE = Formula(4, 4, 8, is_divided=False)
STAGE_1 = Formula(4, 4, 8, is_divided=True)
# For bf16 parameters and fp32 gradients, from Megatron-LM, docs/user-guide/features/dist_optimizer.md at d98e8a64:
# 6 + 12 / N. The state consists of the fp32 main parameters and two moments.
STAGE_1_BF16 = Formula(2, 4, 12, is_divided=True)


@dataclass(frozen=True)
class VariantBytes:
    """The bytes counted for a variant, whose model has `numel` parameters, and the expected formula.

    `by_world_size[n][r]` are the bytes that rank r of n keeps between steps, by kind, and `peaks[n][r]` are its bytes
    at the peak of a step.
    """

    label: str
    formula: Formula
    numel: int
    by_world_size: dict[int, list[Bytes]]
    peaks: dict[int, list[Bytes]]

    def find_fullest(self, world_size: int) -> Bytes:
        """Return the bytes by kind of the rank that keeps the most bytes."""
        return max(self.by_world_size[world_size], key=sum_bytes)

    def find_peak_mb(self, world_size: int) -> float:
        """Return the largest number of MB that a rank has at the peak of a step."""
        return max(map(sum_bytes, self.peaks[world_size])) / 1e6

    def compute_expected(self, world_size: int) -> Bytes:
        """Return the bytes by kind that the formula predicts."""
        return self.formula.compute_bytes(self.numel, world_size)


def sum_bytes(nbytes: Bytes) -> int:
    """Return the bytes of all kinds together."""
    return sum(nbytes.values())


def list_cases(entries: Sequence[Module] = CORE_MODULES) -> list[tuple[Variant, Formula]]:
    """Return variants with their formulas: first those that keep all state on every rank, then the others."""
    variants = [get_variant(entry) for entry in entries]
    sharded = Variant(f"{ZERO.number} ShardedOptimizer", None, (ZERO.package, "ShardedOptimizer"))
    divided = [sharded, get_variant(ZERO)] if ZERO in entries else []
    return [
        *((variant, WHOLE) for variant in (*(variant for variant in variants if not variant.optimizer), TORCH_DDP)),
        *((variant, STAGE_1) for variant in (*divided, TORCH_ZERO)),
        *((replace(one, label=f"{one.label}, bf16", dtype="bfloat16"), STAGE_1_BF16) for one in divided[1:]),
    ]


def measure(
    size: Size = SIZES["tiny"],
    world_sizes: Sequence[int] = WORLD_SIZES,
    sources: Sources | None = None,
    *,
    entries: Sequence[Module] = CORE_MODULES,
    on_step: Callable[[], None] | None = None,
) -> list[VariantBytes]:
    """Train every variant of `list_cases(entries)` for two steps on each number of ranks, and count the bytes.

    `sources` are the submission's modules (default: the solutions). `on_step` is called when a step begins. Raise
    RankFailure or CourseError as `run_variants` does.
    """
    cases = list_cases(entries)
    variants = [variant for variant, _ in cases]
    sources = read_reference() if sources is None else sources
    workload = replace(WORKLOAD, size=size)
    how = {"deadline": DEADLINE_S, "on_step": on_step}
    results = {n: run_variants(workload, variants, sources, world_size=n, **how) for n in world_sizes}
    kept, peaks = (
        [{n: [rank[what][variant.label] for rank in ranks] for n, ranks in results.items()} for variant in variants]
        for what in ("kept", "peaks")
    )
    numel = results[world_sizes[0]][0]["model_bytes"] // FP32_BYTES
    return [
        VariantBytes(variant.label, formula, numel, *found) for (variant, formula), *found in zip(cases, kept, peaks)
    ]


def make_memory_table(measured: Sequence[VariantBytes]) -> Table:
    """Return a table, at most 80 columns wide: a row for each case, and each formula below its cases."""
    from brigade.lab.plots import make_empty_table

    world_sizes = list(measured[0].by_world_size)
    title = f"MB on the fullest rank after two steps of AdamW, P = {measured[0].numel} parameters"
    headings = [f"{kind}\nN={n}" for kind in ("state", "total") for n in world_sizes]
    table = make_empty_table(title, "variant", ["para-\nmeters", "gradi-\nents", *headings])
    parameters, gradients, state = KINDS

    def add_row(label: str, find_bytes: Callable[[int], Bytes], **style: Any) -> None:
        by_world_size = [*map(find_bytes, world_sizes)]
        numbers = [by_world_size[-1][parameters], by_world_size[-1][gradients]]
        numbers += [*(nbytes[state] for nbytes in by_world_size), *map(sum_bytes, by_world_size)]
        table.add_row(label, *(f"{number / 1e6:.2f}" for number in numbers), **style)

    for entry, following in zip(measured, [*measured[1:], None]):
        add_row(entry.label, entry.find_fullest)
        if not following or following.formula != entry.formula:
            add_row(entry.formula.text, entry.compute_expected, style="italic", end_section=True)
    return table


def draw_memory(measured: Sequence[VariantBytes], path: Path) -> None:
    """Draw a bar for each case, in one panel per number of ranks above 1, as a PNG file 900 pixels wide."""
    from matplotlib.figure import Figure

    rows = measured[::-1]  # matplotlib counts upwards
    world_sizes = [n for n in rows[0].peaks if n > 1]
    figure = Figure(figsize=(9, 1.6 + 0.4 * len(rows)), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(world_sizes), sharex=True, sharey=True, squeeze=False)[0]
    widest = max(entry.find_peak_mb(n) for entry in rows for n in world_sizes)
    positions = range(len(rows))
    for axes, n in zip(panels, world_sizes):
        starts = [0.0] * len(rows)
        for kind in KINDS:
            lengths = [entry.find_fullest(n)[kind] / 1e6 for entry in rows]
            axes.barh(positions, lengths, 0.66, starts, color=COLOURS[kind], edgecolor="white", label=kind)
            starts = [start + length for start, length in zip(starts, lengths)]
        peaks = [entry.find_peak_mb(n) for entry in rows]
        more = [peak - start for peak, start in zip(peaks, starts)]
        style = {"color": "white", "edgecolor": "#555555", "hatch": "////", "linewidth": 0.8}
        axes.barh(positions, more, 0.66, starts, label="more at the peak of a step", **style)
        axes.scatter(
            [sum_bytes(entry.compute_expected(n)) / 1e6 for entry in rows],
            positions,
            s=28,
            marker="D",
            color="#d55e00",
            edgecolor="white",
            linewidth=0.8,
            zorder=3,
            label="formula",
        )
        for position, start, peak in zip(positions, starts, peaks):
            axes.text(peak + 0.03 * widest, position, f"{start:.1f} → {peak:.1f}", va="center", fontsize=10)
        axes.set_title(f"{n} ranks: MB between steps → at the peak", loc="left", fontsize=10)
        axes.set_xlim(0, 1.35 * widest)
        axes.set_xlabel("MB on the fullest rank")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(positions, [entry.label for entry in rows])
    (formula, *handles), (_, *names) = panels[0].get_legend_handles_labels()
    formulas = dict.fromkeys(entry.formula.text for entry in measured)
    names.append(f"formula: {' or '.join(formulas)}")
    figure.legend([*handles, formula], names, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m brigade.lab.memory",
        description="Count the bytes that every variant keeps on 1, 2 and 4 ranks, print them with the formulas of "
        "ZeRO, and draw out/memory.png (for the solutions: the reading's picture). This takes "
        "about 20 seconds on two cores.",
        epilog="Example: python -m brigade.lab.memory",
    )
    parser.add_argument("--target", default="lessons", metavar="DIR", help=TARGETS)
    target = parser.parse_args().target
    return run_to_status("memory", lambda: show_memory(target))


def show_memory(target: str) -> int:
    """Measure the target's variants, print the table and write the picture. Return the exit status."""
    from rich.console import Console

    from brigade.lab.experiment import show_progress

    console = Console(highlight=False, soft_wrap=True)
    entries, sources, left_out = select_written(target, CORE_MODULES)
    for sentence in left_out:
        console.print(sentence, markup=False)
    num_steps = WORKLOAD.rounds * len(list_cases(entries)) * len(WORLD_SIZES)
    with show_progress("training steps", num_steps) as advance:
        measured = measure(sources=sources, entries=entries, on_step=advance)
    console.print(make_memory_table(measured))
    picture = PICTURE if target == "solutions" else ROOT / "out" / "memory.png"
    draw_memory(measured, picture)
    console.print(f"{picture.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
