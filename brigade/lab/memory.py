"""Count the bytes that a rank keeps between two steps and during a step, and draw them: python -m brigade.lab.memory

    measured = measure()
    measured[4].variants[0].kept_bytes     bytes by kind of the first variant, on the fullest of 4 ranks
    curves = measure_step([get_variant(get_module(10))])
    draw_step(curves, Path("out/memory-10.png"))

Between steps, parameters, gradients and optimizer state are counted (see `memory_accounting.py`) after two steps of
AdamW. The picture also shows the peak of the second step, and the formulas of ZeRO stage 1 (arXiv 1910.02054). For P
fp32 parameters on N ranks, the formula gives 4P + 4P + 8P/N bytes: only the state is sharded. Every rank keeps all
gradients, both in the formula and here, although it needs only 1/N of them after the reduce-scatter. Stage 2 frees the
rest.

During a step (`brigade trace N --memory`), the bytes are counted from storages (`rank/memory.py`) at every gradient
hook, before every layer's forward, and after the phases of the step. The ranks use the strict process group, in which
a handle keeps no memory after its wait. Everything that is not a parameter, a gradient or optimizer state counts as
"activations and buckets", including the full buckets of module 10.

Ranks and `brigade plan` import this file, so matplotlib is imported where it is used.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from brigade.checks.tiny_lm import SIZES, Size, TinyLM, language_loss
from brigade.course.modules import CORE_MODULES, ROOT, TARGETS, Module, find_module
from brigade.course.submission import Sources
from brigade.lab.bench import select_written
from brigade.lab.experiment import run_to_status
from brigade.lab.ladder import (
    TORCH_DDP,
    TORCH_ZERO,
    Ladder,
    Variant,
    Workload,
    get_variant,
    read_reference,
    run_benchmark,
)
from brigade.lab.memory_accounting import KINDS, Bytes, list_tensors_by_kind
from brigade.lab.on_ranks import FP32_BYTES, build_setup
from brigade.rank.api import device
from brigade.rank.memory import LiveMemory
from brigade.runner.ranks import run_ranks

WORLD_SIZES = (1, 2, 4)
WORKLOAD = Workload(batch_size=4, time=8, rounds=2, warmup=0, learning_rate=1e-3, optimizer="AdamW")
ZERO = find_module("ZeroOptimizer")
PICTURE = ZERO.lesson / "memory.png"
DEADLINE_S = 120.0
REST = "activations and buckets"
TOKENS = (1, 16)  # (sequences, tokens) of `measure_step`: few, so that activations do not hide the rest
COLOURS = dict(zip((*KINDS, REST), ("#0072b2", "#e69f00", "#009e73", "#cccccc")))  # from Okabe and Ito's palette
HATCHES = dict(zip((*KINDS, REST), ("", "////", "....", "")))


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
) -> dict[int, Ladder]:
    """Train every variant of `list_cases(entries)` for two steps on each number of ranks, and count the bytes.

    `sources` are the submission's modules (default: the solutions). Raise RankFailure or CourseError as
    `run_benchmark` does.
    """
    variants = [variant for variant, _ in list_cases(entries)]
    how = {"checks_losses": False, "deadline": DEADLINE_S}
    workload = replace(WORKLOAD, size=size)
    return {n: run_benchmark(workload, variants, sources, world_size=n, **how) for n in world_sizes}


def describe_memory(measured: dict[int, Ladder], formulas: Sequence[Formula]) -> list[str]:
    """Return a line for each variant, at most 80 characters long: bytes per parameter, by kind, on the fullest rank."""
    lines = []
    for *variants, formula in zip(*(ladder.variants for ladder in measured.values()), formulas):
        numel = measured[1].model_bytes / FP32_BYTES
        sizes = [" + ".join(f"{nbytes / numel:.3g}" for nbytes in one.kept_bytes.values()) for one in variants]
        lines.append(f"{variants[0].label:<22}{''.join(f'{size:<14}' for size in sizes)} {formula.text}")
    return lines


def draw_memory(measured: dict[int, Ladder], formulas: Sequence[Formula], path: Path) -> None:
    """Draw a bar for each variant, in one panel per number of ranks above 1, as a PNG file 900 pixels wide."""
    from matplotlib.figure import Figure

    ladders = {n: ladder for n, ladder in measured.items() if n > 1}
    labels = [one.label for one in measured[1].variants]
    positions = range(len(labels))[::-1]  # matplotlib counts upwards
    figure = Figure(figsize=(9, 1.6 + 0.4 * len(labels)), dpi=100, layout="constrained")
    panels = figure.subplots(1, len(ladders), sharex=True, sharey=True, squeeze=False)[0]
    widest = max(sum_bytes(one.peak_bytes) / 1e6 for ladder in ladders.values() for one in ladder.variants)
    for axes, (n, ladder) in zip(panels, ladders.items()):
        starts = [0.0] * len(labels)
        for kind in KINDS:
            lengths = [one.kept_bytes[kind] / 1e6 for one in ladder.variants]
            axes.barh(positions, lengths, 0.66, starts, color=COLOURS[kind], edgecolor="white", label=kind)
            starts = [start + length for start, length in zip(starts, lengths)]
        peaks = [sum_bytes(one.peak_bytes) / 1e6 for one in ladder.variants]
        more = [peak - start for peak, start in zip(peaks, starts)]
        style = {"color": "white", "edgecolor": "#555555", "hatch": "////", "linewidth": 0.8}
        axes.barh(positions, more, 0.66, starts, label="more at the peak of a step", **style)
        numel = ladder.model_bytes // FP32_BYTES
        expected = [sum_bytes(formula.compute_bytes(numel, n)) / 1e6 for formula in formulas]
        marks = {"s": 28, "marker": "D", "color": "#d55e00", "edgecolor": "white", "linewidth": 0.8, "zorder": 3}
        axes.scatter(expected, positions, label="formula", **marks)
        for position, start, peak in zip(positions, starts, peaks):
            axes.text(peak + 0.03 * widest, position, f"{start:.1f} → {peak:.1f}", va="center", fontsize=10)
        axes.set_title(f"{n} ranks: MB between steps → at the peak", loc="left", fontsize=10)
        axes.set_xlim(0, 1.35 * widest)
        axes.set_xlabel("MB on the fullest rank")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_yticks(positions, labels)
    (formula, *handles), (_, *names) = panels[0].get_legend_handles_labels()
    names.append(f"formula: {' or '.join(dict.fromkeys(formula.text for formula in formulas))}")
    figure.legend([*handles, formula], names, loc="outside lower center", ncols=3, frameon=False, fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


@dataclass(frozen=True)
class Curve:
    """The bytes by kind at several points of a variant's step. `phases[i]` and `nbytes[i]` belong to point i."""

    label: str
    phases: list[str]
    nbytes: list[Bytes]

    @property
    def peak(self) -> int:
        """The largest number of bytes that are alive at a point."""
        return max(map(sum_bytes, self.nbytes))

    @property
    def between_steps(self) -> int:
        """The bytes that are alive after the step."""
        return sum_bytes(self.nbytes[-1])


def measure_step(
    variants: Sequence[Variant],
    sources: Sources | None = None,
    *,
    size: Size = SIZES["tiny"],
    bucket_mb: float = 0.25,
    world_size: int = 2,
    tokens: tuple[int, int] = TOKENS,
    is_checkpointed: bool = False,
) -> list[Curve]:
    """Train each variant for two steps of SGD with momentum, then return rank 0's bytes in the third step.

    If `is_checkpointed`, backward computes the activations of each block again. `bucket_mb` is in MiB. Raise
    RankFailure or CourseError as `run_ranks` does. torch DDP runs in mode "record", because a strict group cannot see
    where DDP's reducer waits.
    """
    workload = {"size": asdict(size), "bucket_mb": bucket_mb, "learning_rate": 0.01, "optimizer": "SGD"}
    workload |= {"node_size": None, "tokens": tokens, "is_checkpointed": is_checkpointed}
    packages = {"submission": read_reference() if sources is None else sources}
    curves = []
    for variant in variants:
        mode = "record" if variant.wrapper and variant.wrapper[0] == "torch" else "strict"
        how = {"world_size": world_size, "mode": mode, "packages": packages, "deadline": DEADLINE_S}
        points = run_ranks(trace_memory, asdict(variant), workload, **how)[0]
        curves.append(Curve(variant.label, *map(list, zip(*points))))
    return curves


def draw_step(curves: Sequence[Curve], path: Path) -> None:
    """Draw one panel for each curve, with equal scales, as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.8 + 2.1 * len(curves)), dpi=100, layout="constrained")
    panels = figure.subplots(len(curves), 1, sharey=True, squeeze=False)[:, 0]
    for curve, axes in zip(curves, panels):
        lower = [0.0] * len(curve.nbytes)
        for kind, colour in COLOURS.items():
            upper = [below + point[kind] / 1e6 for below, point in zip(lower, curve.nbytes)]
            style = {"facecolor": colour, "hatch": HATCHES[kind], "edgecolor": "#333333", "lw": 0.5, "label": kind}
            axes.fill_between(range(len(lower)), lower, upper, step="post", **style)
            lower = upper
        for place, (before, phase) in enumerate(zip(curve.phases, curve.phases[1:]), 1):
            if phase != before:
                axes.axvline(place, color="#333333", linestyle=":", lw=1)
        labels = {phase: (phase, "left", 3) for phase in curve.phases if phase not in ("finish", "step")}
        if short := [phase for phase in ("finish", "step") if phase in curve.phases]:  # one label, on the left
            labels[short[0]] = ", ".join(short), "right", -3
        for phase, (label, side, offset) in labels.items():
            coordinates = (curve.phases.index(phase), 1), (offset, -2), ("data", "axes fraction"), "offset points"
            axes.annotate(label, *coordinates, va="top", ha=side, fontsize=9)
        title = f"{curve.label}: at most {curve.peak / 1e6:.1f} MB, {curve.between_steps / 1e6:.1f} MB between steps"
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_xlim(0, len(curve.nbytes) - 1)
        axes.set_ylim(0, 1.15 * max(curve.peak for curve in curves) / 1e6)
        axes.set_ylabel("MB on rank 0")
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("points of one step: before each layer's forward, and after each gradient")
    handles, _ = panels[-1].get_legend_handles_labels()
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def trace_memory(variant: dict, workload: dict) -> list[tuple[str, Bytes]]:
    """Return (phase, bytes by kind) for each point of the third training step. This runs in the ranks."""
    torch.manual_seed(0)
    model = TinyLM(Size(**workload["size"])).to(device())
    for block in model.blocks if workload["is_checkpointed"] else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    points: list[tuple[str, Bytes]] = []
    phase = "forward"
    with LiveMemory(model.parameters()) as memory:
        setup = build_setup(variant, model, workload)

        def note_memory(*_: object) -> None:
            nbytes = memory.count(**list_tensors_by_kind(model, setup.wrapper, setup.optimizer))
            points.append((phase, {REST: nbytes.pop("other"), **nbytes}))

        for module in model.modules():  # the wrapper's own hooks run first
            if not list(module.children()):
                module.register_forward_pre_hook(note_memory)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(note_memory)
        tokens = torch.randint(model.size.vocabulary, workload["tokens"], device=device())
        for _ in range(3):
            points.clear()
            phase = "forward"
            note_memory()
            setup.optimizer.zero_grad()
            note_memory()
            loss = language_loss(setup.wrapper(tokens), tokens)
            phase = "backward"
            note_memory()
            loss.backward()
            del loss
            phase = "finish"
            note_memory()
            if hasattr(setup.wrapper, "finish_grad_sync"):
                setup.wrapper.finish_grad_sync()
            phase = "step"
            note_memory()
            setup.optimizer.step()
            note_memory()
    return points


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
    """Measure the target's variants, print the bytes and write the picture. Return the exit status."""
    entries, sources, left_out = select_written(target, CORE_MODULES)
    print("\n".join([*left_out, "Training on 1, 2 and 4 ranks ..."]), flush=True)
    measured = measure(sources=sources, entries=entries)
    formulas = [formula for _, formula in list_cases(entries)]
    print("Bytes per parameter: parameters + gradients + state, after two steps of AdamW, on the fullest rank")
    print(f"{'':<22}{''.join(f'N = {n:<10}' for n in WORLD_SIZES)} formula, for P parameters")
    print("\n".join(describe_memory(measured, formulas)))
    picture = PICTURE if target == "solutions" else ROOT / "out" / "memory.png"
    draw_memory(measured, formulas, picture)
    print(f"{picture.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
