"""Count the bytes that are alive on a rank during a step, and draw them: `brigade trace N --memory`

    curves = measure_step([get_variant(get_module(10))])
    draw_step(curves, Path("out/memory-10.png"))

The bytes are counted from storages (`rank/memory.py`) at every gradient hook, before every layer's forward, and after
the phases of the step. The ranks use the strict process group, in which a handle keeps no memory after its wait.
Everything that is not a parameter, a gradient or optimizer state counts as "activations and buckets", including the
full buckets of module 10.

Ranks import this file, so matplotlib is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from brigade.course.checks.tiny_lm import SIZES, Size, TinyLM
from brigade.lab.engine import find_engine
from brigade.lab.ladder import PHASES, Variant, read_reference
from brigade.lab.memory_accounting import KINDS, Bytes, list_tensors_by_kind
from brigade.lab.timed_step import take_step
from brigade.ranks.rank.api import device
from brigade.ranks.rank.memory import LiveMemory
from brigade.ranks.runner.ranks import run_ranks
from brigade.ranks.texts import Sources

DEADLINE_S = 120.0
REST = "activations and buckets"
TOKENS = (1, 16)  # (sequences, tokens) of `measure_step`: few, so that activations do not hide the rest
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cccccc")  # from Okabe and Ito's
COLOURS = dict(zip((*KINDS, REST), PALETTE, strict=True))


@dataclass(frozen=True)
class Curve:
    """The bytes by kind at several points of a variant's step. `phases[i]` and `nbytes[i]` belong to point i."""

    label: str
    phases: list[str]
    nbytes: list[Bytes]

    @property
    def peak(self) -> int:
        """The largest number of bytes that are alive at a point."""
        return max(sum(point.values()) for point in self.nbytes)

    @property
    def between_steps(self) -> int:
        """The bytes that are alive after the step."""
        return sum(self.nbytes[-1].values())


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
    RankFailure or UserError as `run_ranks` does. torch DDP runs in mode "record", because a strict group cannot see
    where DDP's reducer waits.
    """
    workload = {"size": asdict(size), "bucket_mb": bucket_mb, "learning_rate": 0.01, "optimizer": "SGD"}
    workload |= {"node_size": None, "tokens": tokens, "is_checkpointed": is_checkpointed}
    packages = {"submission": read_reference() if sources is None else sources}
    curves = []
    for variant in variants:
        mode = "record" if variant.is_torch else "strict"
        how = {"world_size": world_size, "mode": mode, "packages": packages, "deadline": DEADLINE_S}
        points = run_ranks(trace_memory, asdict(variant), workload, **how)[0]
        curves.append(Curve(variant.label, *map(list, zip(*points, strict=True))))
    return curves


def draw_step(curves: Sequence[Curve], path: Path) -> None:
    """Draw one panel for each curve, with equal scales, as a PNG file."""
    from brigade.lab.notebook_plots import make_figure

    with make_figure(1.7 + 2.4 * len(curves), len(curves)) as (figure, panels):
        for curve, axes in zip(curves, panels, strict=True):
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
    nodes = [get_gradient_edge(parameter).node for parameter in model.parameters()]
    points: list[tuple[str, Bytes]] = []
    phases: list[str] = []
    with LiveMemory(model.parameters()) as memory:
        engine = find_engine(variant)(variant, model, workload)

        def note_memory(*_: object) -> None:
            nbytes = memory.count(**list_tensors_by_kind(engine))
            points.append((phases[0], {REST: nbytes.pop("other"), **nbytes}))

        def enter_next_phase() -> None:
            del phases[: len(phases) > 1]
            note_memory()

        for module in model.modules():  # the wrapper's own hooks run first
            if not list(module.children()):
                module.register_forward_pre_hook(note_memory)
        for node in nodes:  # after the wrapper's own hooks
            node.register_hook(note_memory)
        tokens = torch.randint(model.size.vocabulary, workload["tokens"], device=device())
        for _ in range(3):
            points.clear()
            phases[:] = ["before", *PHASES]
            take_step(engine, tokens, tokens, mark=enter_next_phase)
    return points
