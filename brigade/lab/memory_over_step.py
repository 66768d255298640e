"""Draw the bytes that are alive on a rank throughout one training step: `brigade trace N --memory`.

    curves = measure([get_variant(get_module(10))])
    draw(curves, Path("out/memory-10.png"))

The bytes are counted from storages (`rank/memory.py`) at every gradient hook, before every layer's forward, and after
the phases of the step. The ranks use the strict process group, in which a handle keeps no memory after its wait.
Everything that is not a parameter, a gradient or optimizer state counts as "activations and buckets", including the
full buckets of module 10.

Ranks import this file, so matplotlib is imported where it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from brigade.checks.tiny_lm import SIZES, Size, TinyLM, language_loss
from brigade.course.submission import Sources
from brigade.lab import memory_accounting
from brigade.lab.ladder import Variant, read_reference
from brigade.lab.memory_accounting import KINDS, list_tensors_by_kind
from brigade.lab.on_ranks import build_setup
from brigade.rank.api import device
from brigade.rank.memory import LiveMemory
from brigade.runner.ranks import run_ranks

REST = "activations and buckets"
COLOURS = memory_accounting.COLOURS | {REST: "#cccccc"}
HATCHES = dict(zip((*KINDS, REST), ("", "////", "....", "")))
TOKENS = (1, 16)  # (sequences, tokens): few, so that activations do not hide the rest
DEADLINE_S = 120.0


@dataclass(frozen=True)
class Curve:
    """The bytes by kind at several points of a variant's step. `phases[i]` and `nbytes[i]` belong to point i."""

    label: str
    phases: list[str]
    nbytes: list[dict[str, int]]

    @property
    def peak(self) -> int:
        """The largest number of bytes that are alive at a point."""
        return max(sum(point.values()) for point in self.nbytes)

    @property
    def between_steps(self) -> int:
        """The bytes that are alive after the step."""
        return sum(self.nbytes[-1].values())


def measure(
    variants: Sequence[Variant],
    sources: Sources | None = None,
    *,
    size: Size = SIZES["tiny"],
    bucket_mb: float = 0.25,
    world_size: int = 2,
    deadline: float = DEADLINE_S,
    tokens: tuple[int, int] = TOKENS,
    is_checkpointed: bool = False,
) -> list[Curve]:
    """Train each variant for two steps of SGD with momentum, then return rank 0's bytes in the third step.

    If `is_checkpointed`, backward computes the activations of each block again. `bucket_mb` is in MiB. Raise
    RankFailure or CourseError as `run_ranks` does. torch DDP runs in mode "record", because a strict group cannot see
    where DDP's reducer waits.
    """
    curves = []
    workload = {"size": asdict(size), "bucket_mb": bucket_mb, "learning_rate": 0.01, "optimizer": "SGD"}
    workload["node_size"] = None
    for variant in variants:
        points = run_ranks(
            trace_memory,
            asdict(variant),
            workload | {"tokens": tokens, "is_checkpointed": is_checkpointed},
            world_size=world_size,
            mode="record" if variant.wrapper and variant.wrapper[0] == "torch" else "strict",
            packages={"submission": read_reference() if sources is None else sources},
            deadline=deadline,
        )[0]
        phases, nbytes = zip(*points)
        curves.append(Curve(variant.label, list(phases), list(nbytes)))
    return curves


def draw(curves: Sequence[Curve], path: Path) -> None:
    """Draw one panel for each curve, with equal scales, as a PNG file."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(9, 0.8 + 2.1 * len(curves)), dpi=100, layout="constrained")
    panels = figure.subplots(len(curves), 1, sharey=True, squeeze=False)
    for curve, axes in zip(curves, panels[:, 0]):
        places = range(len(curve.nbytes))
        lower = [0.0] * len(curve.nbytes)
        for kind in COLOURS:
            upper = [below + point[kind] / 1e6 for below, point in zip(lower, curve.nbytes)]
            axes.fill_between(
                places,
                lower,
                upper,
                step="post",
                facecolor=COLOURS[kind],
                hatch=HATCHES[kind],
                edgecolor="#333333",
                lw=0.5,
            )
            lower = upper
        for place, (before, phase) in enumerate(zip(curve.phases, curve.phases[1:]), 1):
            if phase != before:
                axes.axvline(place, color="#333333", linestyle=":", lw=1)
        labels = {phase: (phase, "left", 3) for phase in curve.phases if phase not in ("finish", "step")}
        if short := [phase for phase in ("finish", "step") if phase in curve.phases]:  # one label, on the left
            labels[short[0]] = ", ".join(short), "right", -3
        for phase, (label, side, offset) in labels.items():
            place = curve.phases.index(phase), 1
            coordinates = "data", "axes fraction"
            axes.annotate(label, place, (offset, -2), coordinates, "offset points", va="top", ha=side, fontsize=9)
        axes.set_title(
            f"{curve.label}: at most {curve.peak / 1e6:.1f} MB, {curve.between_steps / 1e6:.1f} MB between steps",
            loc="left",
            fontsize=10,
        )
        axes.set_xlim(0, len(curve.nbytes) - 1)
        axes.set_ylim(0, 1.15 * max(curve.peak for curve in curves) / 1e6)
        axes.set_ylabel("MB on rank 0")
        axes.set_xticks([])
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("points of one step: before each layer's forward, and after each gradient")
    handles = [Patch(facecolor=COLOURS[kind], hatch=HATCHES[kind], edgecolor="#333333", label=kind) for kind in COLOURS]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


# The code below runs in the ranks.


def trace_memory(variant: dict, workload: dict) -> list[tuple[str, dict[str, int]]]:
    """Return (phase, bytes by kind) for each point of the third training step."""
    torch.manual_seed(0)
    model = TinyLM(Size(**workload["size"])).to(device())
    for block in model.blocks if workload["is_checkpointed"] else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    points: list[tuple[str, dict[str, int]]] = []
    phase = "forward"
    with LiveMemory(model.parameters()) as memory:
        setup = build_setup(variant, model, workload)

        def note_memory() -> None:
            nbytes = memory.count(**list_tensors_by_kind(model, setup.wrapper, setup.optimizer))
            points.append((phase, {REST: nbytes.pop("other"), **nbytes}))

        watch(model, note_memory)
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


def watch(model: nn.Module, note_memory: Callable[[], None]) -> None:
    """Register hooks that call `note_memory` before each layer's forward and after each gradient.

    The wrapper's own hooks run first.
    """
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_pre_hook(lambda *_: note_memory())
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda *_: note_memory())
