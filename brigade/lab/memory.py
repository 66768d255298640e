"""Count the bytes that a rank keeps between two steps and during a step, and draw them: python -m brigade.lab.memory

    measured = measure()
    measured[4].variants[0].kept_bytes     bytes by kind of the first variant, on the fullest of 4 ranks
    curves = measure_step([get_variant(get_module(10))])
    draw_step(curves, Path("out/memory-10.png"))

Between steps, parameters, gradients and optimizer state are counted (see `memory_accounting.py`) after two steps of
AdamW. The picture also shows the peak of the second step, and the formulas of ZeRO stage 1 (arXiv 1910.02054). For P
fp32 parameters on N ranks, the formula gives 4P + 4P + 8P/N bytes: only the state is sharded.

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

from brigade.checks.tiny_lm import SIZES, Size, TinyLM
from brigade.course.modules import CORE_MODULES, ROOT, TARGETS, Module, find_module
from brigade.course.submission import Sources
from brigade.lab.bench import select_written
from brigade.lab.experiment import run_to_status
from brigade.lab.ladder import (
    PHASES,
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
from brigade.lab.on_ranks import FP32_BYTES, build_setup, take_step
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
# Bytes per parameter, by kind. Those of bf16 parameters are from Megatron-LM, at commit d98e8a64
# (docs/user-guide/features/dist_optimizer.md): the state consists of the fp32 main parameters and two moments.
PER_PARAMETER = {"float32": (4, 4, 8), "bfloat16": (2, 4, 12)}


def describe_formula(variant: Variant) -> str:
    """Return the formula for a variant's bytes on N ranks with P parameters, such as: 4P + 4P + 8P/N"""
    parameters, gradients, state = PER_PARAMETER[variant.dtype]
    return f"{parameters}P + {gradients}P + {state}P" + ("/N" if variant.optimizer else "")


def compute_bytes(variant: Variant, numel: int, world_size: int) -> Bytes:
    """Return the formula's bytes by kind on one of `world_size` ranks, for a model of `numel` parameters."""
    parameters, gradients, state = (nbytes * numel for nbytes in PER_PARAMETER[variant.dtype])
    return dict(zip(KINDS, (parameters, gradients, state // world_size if variant.optimizer else state)))


def sum_bytes(nbytes: Bytes) -> int:
    """Return the bytes of all kinds together."""
    return sum(nbytes.values())


def list_cases(entries: Sequence[Module] = CORE_MODULES) -> list[Variant]:
    """Return variants: first those that keep all state on every rank, then the others."""
    variants = [get_variant(entry) for entry in entries]
    sharded = Variant(f"{ZERO.number} ShardedOptimizer", None, (ZERO.package, "ShardedOptimizer"))
    divided = [sharded, get_variant(ZERO)] if ZERO in entries else []
    halves = [replace(one, label=f"{one.label}, bf16", dtype="bfloat16") for one in divided[1:]]
    return [*(one for one in variants if not one.optimizer), TORCH_DDP, *divided, TORCH_ZERO, *halves]


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
    variants = list_cases(entries)
    how = {"checks_losses": False, "deadline": DEADLINE_S}
    workload = replace(WORKLOAD, size=size)
    return {n: run_benchmark(workload, variants, sources, world_size=n, **how) for n in world_sizes}


def describe_memory(measured: dict[int, Ladder], variants: Sequence[Variant]) -> list[str]:
    """Return a line for each variant, at most 80 characters long: bytes per parameter, by kind, on the fullest rank."""
    lines = []
    for variant in variants:
        kept = [ladder.get_measurement(variant.label).kept_bytes.values() for ladder in measured.values()]
        numel = measured[1].model_bytes / FP32_BYTES
        sizes = [" + ".join(f"{nbytes / numel:.3g}" for nbytes in kinds) for kinds in kept]
        lines.append(f"{variant.label:<22}{''.join(f'{size:<14}' for size in sizes)} {describe_formula(variant)}")
    return lines


def draw_memory(measured: dict[int, Ladder], variants: Sequence[Variant], path: Path) -> None:
    """Draw a bar for each variant on the largest number of ranks, as a PNG file."""
    from brigade.lab.notebook_plots import draw_bars

    world_size = max(measured)
    rows = {}
    for variant, one in zip(variants, measured[world_size].variants):
        parts = {kind: nbytes / 1e6 for kind, nbytes in one.kept_bytes.items()}
        beyond = sum_bytes(one.peak_bytes) / 1e6 - sum(parts.values())
        rows[f"{one.label}: {describe_formula(variant)}"] = parts | {"more at the peak": beyond}
    title = f"Between steps, and at the peak of a step, on {world_size} ranks"
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_bars(rows, xlabel="MB on the fullest rank", title=title).savefig(path)


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
    from brigade.lab.notebook_plots import make_figure

    with make_figure(1.7 + 2.4 * len(curves), len(curves)) as (figure, panels):
        for curve, axes in zip(curves, panels):
            parts = [[point[kind] / 1e6 for point in curve.nbytes] for kind in COLOURS]
            style = {"colors": COLOURS.values(), "edgecolor": "#333333", "linewidth": 0.5}
            axes.stackplot(range(len(curve.nbytes)), parts, labels=COLOURS, step="post", **style)
            starts = [curve.phases.index(phase) for phase in ("forward", "backward", "finish")]
            axes.set_xticks(starts, ["forward", "backward", "finish, step"], ha="left")
            title = f"{curve.label}: at most {curve.peak / 1e6:.1f} MB, then {curve.between_steps / 1e6:.1f} MB"
            axes.set(title=title, ylabel="MB on rank 0", ylim=(0, 1.1 * max(one.peak for one in curves) / 1e6))
        figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def trace_memory(variant: dict, workload: dict) -> list[tuple[str, Bytes]]:
    """Return (phase, bytes by kind) for each point of the third training step. This runs in the ranks."""
    torch.manual_seed(0)
    model = TinyLM(Size(**workload["size"])).to(device())
    for block in model.blocks if workload["is_checkpointed"] else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    points: list[tuple[str, Bytes]] = []
    phases: list[str] = []
    with LiveMemory(model.parameters()) as memory:
        setup = build_setup(variant, model, workload)

        def note_memory(*_: object) -> None:
            nbytes = memory.count(**list_tensors_by_kind(model, setup.wrapper, setup.optimizer))
            points.append((phases[0], {REST: nbytes.pop("other"), **nbytes}))

        def enter_next_phase() -> None:
            del phases[: len(phases) > 1]
            note_memory()

        for module in model.modules():  # the wrapper's own hooks run first
            if not list(module.children()):
                module.register_forward_pre_hook(note_memory)
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(note_memory)
        tokens = torch.randint(model.size.vocabulary, workload["tokens"], device=device())
        for _ in range(3):
            points.clear()
            phases[:] = ["before", *PHASES]
            take_step(setup, tokens, tokens, enter_next_phase)
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
    variants = list_cases(entries)
    print("Bytes per parameter: parameters + gradients + state, after two steps of AdamW, on the fullest rank")
    print(f"{'':<22}{''.join(f'N = {n:<10}' for n in WORLD_SIZES)} formula, for P parameters")
    print("\n".join(describe_memory(measured, variants)))
    picture = PICTURE if target == "solutions" else ROOT / "out" / "memory.png"
    draw_memory(measured, variants, picture)
    print(f"{picture.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
