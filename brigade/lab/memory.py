"""The picture of memory: what each variant keeps on a rank between two steps, in bytes: python -m brigade.lab.memory

    found = measure()
    found[0].fullest(4)     bytes by kind of the first variant, on that of 4 ranks which holds most

Parameters, gradients and optimizer state are counted in the ranks (`memory_accounting.py` says how), after two
steps of AdamW.
Beside that stand the formulas of ZeRO (arXiv 1910.02054), stage 1. In fp32 they are, for P parameters on N ranks,
4P + 4P + 8P/N bytes: only the state is divided. Gradients are not freed, neither there nor here: after the
reduce-scatter a rank needs 1/N of them and keeps all. Stage 2 is about that.

Ranks import this file, so rich and matplotlib are imported where they are used.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from brigade.course.modules import MODULES, ROOT, TARGETS, Module, find_module
from brigade.course.submission import Sources
from brigade.lab.bench import select_written
from brigade.lab.ladder import FP32_BYTES, TORCH_DDP, TORCH_ZERO, Variant, get_variant, load_class, read_reference
from brigade.lab.memory_accounting import KINDS, Bytes, kept_bytes
from brigade.lab.models import SIZES, Size, TinyLM, language_loss
from brigade.lab.script import ended
from brigade.rank import recording
from brigade.runner.ranks import run_ranks

if TYPE_CHECKING:
    from rich.table import Table

WORLD_SIZES = (1, 2, 4)
BUCKET_MB = 1.0  # MiB
ZERO = find_module("ZeroOptimizer")
PICTURE = ZERO.lesson / "memory.png"
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Formula:
    """Bytes per parameter. The state may be divided by the number of ranks, the rest is on every rank."""

    parameters: int
    gradients: int
    state: int
    divided: bool

    @property
    def text(self) -> str:
        """Such as: 4P + 4P + 8P/N"""
        return f"{self.parameters}P + {self.gradients}P + {self.state}P" + ("/N" if self.divided else "")

    def held(self, numel: int, world_size: int) -> Bytes:
        """Bytes by kind on one of `world_size` ranks, for a model of `numel` parameters."""
        state = self.state * numel / (world_size if self.divided else 1)
        return dict(zip(KINDS, (self.parameters * numel, self.gradients * numel, round(state))))


WHOLE = Formula(4, 4, 8, divided=False)
STAGE_1 = Formula(4, 4, 8, divided=True)
# For bf16 parameters and fp32 gradients, from Megatron-LM, docs/user-guide/features/dist_optimizer.md at d98e8a64:
# 6 + 12 / N. The state is an fp32 copy of the parameters, the master, and two moments.
STAGE_1_BF16 = Formula(2, 4, 12, divided=True)


@dataclass(frozen=True)
class Case:
    """A variant, the dtype of the model's parameters, and the formula for both."""

    variant: Variant
    formula: Formula
    dtype: str = "float32"

    @property
    def label(self) -> str:
        return self.variant.label + (", bf16" if self.dtype == "bfloat16" else "")


@dataclass(frozen=True)
class Held:
    """What was counted for a case: `held[n][r]` are the bytes by kind on rank r of n. `numel` is the model's."""

    case: Case
    numel: int
    held: dict[int, list[Bytes]]

    def fullest(self, world_size: int) -> Bytes:
        """Those of the rank that holds most."""
        return max(self.held[world_size], key=total)

    def expected(self, world_size: int) -> Bytes:
        return self.case.formula.held(self.numel, world_size)


def total(held: Bytes) -> int:
    """All kinds together."""
    return sum(held.values())


def cases(entries: Sequence[Module] = MODULES) -> list[Case]:
    """Those that keep all state on every rank, then those that divide it: of these modules, and torch's."""
    variants = [get_variant(entry) for entry in entries]
    sharded = Variant(f"{ZERO.number} ShardedOptimizer", None, (ZERO.package, "ShardedOptimizer"))
    divided = [sharded, get_variant(ZERO)] if ZERO in entries else []
    return [
        *(Case(variant, WHOLE) for variant in (*(variant for variant in variants if not variant.optimizer), TORCH_DDP)),
        *(Case(variant, STAGE_1) for variant in (*divided, TORCH_ZERO)),
        *(Case(variant, STAGE_1_BF16, "bfloat16") for variant in divided[1:]),
    ]


def measure(
    size: Size = SIZES["tiny"],
    world_sizes: Sequence[int] = WORLD_SIZES,
    sources: Sources | None = None,
    *,
    entries: Sequence[Module] = MODULES,
    on_case: Callable[[], None] | None = None,
) -> list[Held]:
    """Trains every case of `entries` for two steps on each number of ranks, and counts.

    `sources` are the submission's modules, by default the solutions; `on_case` is called as each case begins. Raises
    RankFailure or CourseError as `run_ranks` does.
    """

    def follow(rank: int, event: dict) -> None:
        if on_case and rank == 0 and event["kind"] == "case":
            on_case()

    chosen = cases(entries)
    found = {
        world_size: run_ranks(
            count_all,
            asdict(size),
            [asdict(case.variant) | {"dtype": case.dtype} for case in chosen],
            world_size=world_size,
            packages={"submission": read_reference() if sources is None else sources},
            seed=0,
            deadline=DEADLINE_S,
            on_event=follow,
        )
        for world_size in world_sizes
    }
    with torch.device("meta"):
        numel = sum(parameter.numel() for parameter in TinyLM(size).parameters())
    return [
        Held(case, numel, {n: [rank[place] for rank in ranks] for n, ranks in found.items()})
        for place, case in enumerate(chosen)
    ]


def memory_table(found: Sequence[Held]) -> Table:
    """A row for each case, and for each formula a row below the cases it is for; 80 columns wide at most."""
    from brigade.lab.plots import bench_table

    world_sizes = list(found[0].held)
    title = f"MB on the fullest rank after two steps of AdamW, P = {found[0].numel} parameters"
    headings = [f"{kind}\nN={n}" for kind in ("state", "total") for n in world_sizes]
    table = bench_table(title, "variant", ["para-\nmeters", "gradi-\nents", *headings])
    for place, one in enumerate(found):
        table.add_row(one.case.label, *cells([one.fullest(n) for n in world_sizes]))
        if one is found[-1] or found[place + 1].case.formula != one.case.formula:
            expected = cells([one.expected(n) for n in world_sizes])
            table.add_row(one.case.formula.text, *expected, style="italic", end_section=True)
    return table


def cells(held: Sequence[Bytes]) -> list[str]:
    """Parameters and gradients for the last number of ranks; state and total for each."""
    parameters, gradients, state = KINDS
    numbers = [held[-1][parameters], held[-1][gradients], *(one[state] for one in held), *map(total, held)]
    return [f"{number / 1e6:.2f}" for number in numbers]


def memory_picture(found: Sequence[Held], path: Path) -> None:
    """Draws a bar for each case, in a panel for each number of ranks, as a PNG file 900 pixels wide."""
    from matplotlib.figure import Figure

    from brigade.lab.plots import COLOURS

    # Forward reads the parameters, backward makes the gradients, the step uses the state: the ladder's colours.
    colours = dict(zip(KINDS, (COLOURS["forward"], COLOURS["backward"], COLOURS["step"])))
    rows = found[::-1]  # matplotlib counts upwards
    world_sizes = list(rows[0].held)
    figure = Figure(figsize=(9, 1.3 + 0.36 * len(rows)), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(world_sizes), sharex=True, sharey=True, squeeze=False)[0]
    widest = max(total(one.fullest(n)) / 1e6 for one in rows for n in world_sizes)
    places = range(len(rows))
    for axes, n in zip(panels, world_sizes):
        starts = [0.0] * len(rows)
        for kind in KINDS:
            lengths = [one.fullest(n)[kind] / 1e6 for one in rows]
            axes.barh(places, lengths, 0.66, starts, color=colours[kind], edgecolor="white", label=kind)
            starts = [start + length for start, length in zip(starts, lengths)]
        axes.scatter(
            [total(one.expected(n)) / 1e6 for one in rows],
            places,
            s=28,
            marker="D",
            color="#d55e00",
            edgecolor="white",
            linewidth=0.8,
            zorder=3,
            label="formula",
        )
        for place, end in zip(places, starts):
            axes.text(end + 0.05 * widest, place, f"{end:.1f}", va="center", fontsize=9)
        axes.set_title("1 rank" if n == 1 else f"{n} ranks", loc="left", fontsize=10)
        axes.set_xlim(0, 1.22 * widest)
        axes.set_xlabel("MB on a rank")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(places, [one.case.label for one in rows])
    handles = dict(zip(*panels[0].get_legend_handles_labels()[::-1]))
    formulas = dict.fromkeys(one.case.formula.text for one in found)
    figure.legend(
        [handles[name] for name in (*KINDS, "formula")],
        [*KINDS, f"formula: {' or '.join(formulas)}"],
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=9,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


# What follows runs in the ranks.


def count_all(size: dict, variants: list[dict]) -> list[Bytes]:
    """For each case the bytes by kind that this rank holds."""
    found = []
    for variant in variants:
        recording.note("case")
        torch.manual_seed(0)  # module 8's ShardedOptimizer wants weights that are equal already
        found.append(count(variant, TinyLM(Size(**size)).to(getattr(torch, variant["dtype"]))))
    return found


def count(variant: dict, model: nn.Module) -> Bytes:
    """Trains the model for two steps as the variant says, and counts what is held then."""
    wrapper, buckets = model, []
    if variant["wrapper"]:
        wrapper_class = load_class(*variant["wrapper"])
        options = {
            "bucket_cap_mb": BUCKET_MB,
            "bucket_numel": int(BUCKET_MB * 2**20 / FP32_BYTES),
            "grad_dtype": torch.float32,
        }
        accepted = inspect.signature(wrapper_class).parameters
        wrapper = wrapper_class(model, **{name: value for name, value in options.items() if name in accepted})
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.register_comm_hook(buckets, see_bucket)
    optimizer = optimizer_of(variant, model, wrapper)
    tokens = torch.randint(model.size.vocabulary, (1, 8))
    for _ in range(2):
        buckets.clear()
        optimizer.zero_grad()
        language_loss(wrapper(tokens), tokens).backward()
        if hasattr(wrapper, "finish_grad_sync"):
            wrapper.finish_grad_sync()
        optimizer.step()
    return kept_bytes(model, wrapper, optimizer, buckets)


def see_bucket(buckets, bucket):  # torch refuses annotations that are strings, as they are in this file
    """A communication hook of torch DDP that does what DDP does without one, and keeps its flat tensors in sight."""
    buckets.append(bucket.buffer())
    return allreduce_hook(None, bucket)


def optimizer_of(variant: dict, model: nn.Module, wrapper: nn.Module) -> torch.optim.Optimizer:
    """AdamW, whole or divided as the variant says."""
    if not variant["optimizer"]:
        return torch.optim.AdamW(model.parameters())
    divides_buckets = variant["wrapper"] and variant["optimizer"][0] != "torch"
    return load_class(*variant["optimizer"])(
        wrapper if divides_buckets else model.parameters(), torch.optim.AdamW, lr=1e-3
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m brigade.lab.memory",
        description="Counts the bytes that every variant keeps on 1, 2 and 4 ranks, prints them beside the formulas of "
        "ZeRO and draws out/memory.png, for the solutions the reading's picture. About 20 seconds on two cores.",
        epilog="Example: python -m brigade.lab.memory",
    )
    parser.add_argument("--target", default="lessons", metavar="DIR", help=TARGETS)
    target = parser.parse_args().target
    return ended("memory", lambda: show(target))


def show(target: str) -> int:
    from rich.console import Console

    from brigade.lab.script import show_progress

    console = Console(highlight=False, soft_wrap=True)
    entries, sources, left_out = select_written(target, MODULES)
    for sentence in left_out:
        console.print(sentence, markup=False)
    with show_progress("variants", len(cases(entries)) * len(WORLD_SIZES)) as advance:
        found = measure(sources=sources, entries=entries, on_case=advance)
    console.print(memory_table(found))
    picture = PICTURE if target == "solutions" else ROOT / "out" / "memory.png"
    memory_picture(found, picture)
    console.print(f"{picture.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
