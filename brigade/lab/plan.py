"""`brigade plan`: predict the cost of a training step with each variant, from shapes alone.

    steps = plan(record(variants, setting), machine, link)

A rank computes for as long as its floating-point operations and its memory traffic take, and launches collectives as
the variant's own code does (`program.py`). A collective starts when all earlier ones are complete, and takes as long as
a ring algorithm (`emulated_link.Link`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from brigade.checks.tiny_lm import SIZES, Block, Size, TinyLM
from brigade.course.modules import TRAINING_MODULES
from brigade.lab.ladder import SHARDED_OPTIMIZER, TORCH, TORCH_DDP, Variant, get_variant
from brigade.lab.memory_accounting import KINDS
from brigade.lab.program import Machine, Program, simulate
from brigade.rank.emulated_link import Link, count_sent_bytes

if TYPE_CHECKING:
    from rich.table import Table

# Models for plans only. The layers, d_model, heads and context are those of arXiv 2005.14165, table 2.1. GPT-3's
# feed-forward network has two matrices of width 4 d_model. SwiGLU has three, which have the same total size if each is
# 8/3 d_model wide. The head and the embedding are not tied here.
GPT3 = {
    "gpt3-6.7b": Size(d_model=4096, d_ff=10_944, layers=32, heads=32, vocabulary=50_257, context=2048),
    "gpt3-175b": Size(d_model=12_288, d_ff=32_768, layers=96, heads=96, vocabulary=50_257, context=2048),
}
MODELS = SIZES | GPT3
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}

# NVIDIA H100 Tensor Core GPU datasheet, SXM. Its rates for Tensor Cores are "with sparsity"; dense matrices reach half.
# fp32 is the rate without Tensor Cores: torch does not use TF32 for matrices unless it is allowed (since torch 1.12,
# `torch.backends.cuda.matmul.allow_tf32`). With TF32, an H100 reaches 494.7 TFLOPS.
DEVICE = "H100"
DEVICE_TFLOPS = {"fp32": 67.0, "bf16": 989.4}
DEVICE_MEMORY_GB = 80
DEVICE_MEMORY_GBPS = 3350  # gigabytes per second
UTILISATION = 0.4  # the fraction of the peak that computation reaches

# Names, latencies and rates of links. Rates are nominal, in one direction: NVLink 4 from the H100 datasheet (900 GB/s
# in both together); PCI Express 4.0 with 16 lanes of 16 GT/s and 128b/130b encoding; Ethernet from its name. Latencies
# are those that NCCL assumes for one message of a ring with its Simple protocol, on NVLink, PCI and network: `hwLat` in
# its src/graph/tuning.cc, commit b6475625. The 8.4 us that NCCL adds once per launch are left out.
NETWORK_LATENCY_S = 14e-6
LINKS = {
    "nvlink4": ("NVLink 4", Link(3.4e-6, 450e9)),
    "pcie4": ("PCI Express 4.0 x16", Link(5.7e-6, 16e9 * 16 * (128 / 130) / 8)),
    "100gbe": ("100 Gbit/s Ethernet", Link(NETWORK_LATENCY_S, 100e9 / 8)),
    "10gbe": ("10 Gbit/s Ethernet", Link(NETWORK_LATENCY_S, 10e9 / 8)),
}


@dataclass(frozen=True)
class PlannedStep:
    """The predicted step of one variant. `outer_bytes` are those of `sent_bytes` that go to other nodes.

    `exposed_s` is how much longer the step takes than this variant's own computation.
    """

    label: str
    program: Program
    step_s: float
    exposed_s: float
    sent_bytes: float
    outer_bytes: float

    @property
    def memory_bytes(self) -> int:
        """The bytes that rank 0 keeps between two steps."""
        return sum(self.program.memory.values())


def make_model(size: Size) -> TinyLM:
    """Return a model of this size on the meta device."""
    with torch.device("meta"):
        return TinyLM(size)


def count_backward_flops(model: TinyLM, tokens: int, time: int) -> list[int]:
    """Return the floating-point operations that backward needs for each gradient, in the order of registration.

    A matrix of n elements takes 2n operations per token during forward and 4n during backward. Causal attention over
    sequences of `time` tokens takes 2 * d_model * time operations per token during forward. During backward, it takes
    twice as many before the gradient of v is ready. Everything else counts as zero.
    """
    flops = dict.fromkeys(model.parameters(), 0)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            flops[module.weight] += 4 * module.weight.numel() * tokens
        elif isinstance(module, Block):
            flops[module.v.weight] += 4 * model.size.d_model * time * tokens
    return list(flops.values())


def make_machine(
    flops: Sequence[int], flops_per_s: float, memory_bytes_per_s: float, backward_s: float | None = None
) -> Machine:
    """Return the speed of a rank that performs `flops` during backward and half as many during forward.

    If `backward_s` is given, backward takes that long, and its parts are proportional to `flops`.
    """
    backward_s = sum(flops) / flops_per_s if backward_s is None else backward_s
    shares = tuple(backward_s * part_flops / sum(flops) for part_flops in flops)
    return Machine(backward_s / 2, shares, memory_bytes_per_s, memory_bytes_per_s)


def list_variants() -> list[Variant]:
    """Return all variants: first the course's, in the order of the modules, then torch's."""
    own = [*map(get_variant, TRAINING_MODULES), SHARDED_OPTIMIZER]
    return [*sorted(own, key=lambda variant: (int(variant.label.split()[0]), variant.label)), *TORCH]


def plan(programs: dict[str, Program | str], machine: Machine, link: Link) -> list[PlannedStep]:
    """Return the predicted step of each program. Leave out the variants without a program."""
    steps = []
    for label, program in programs.items():
        if isinstance(program, str):
            continue
        sent = [(count_sent_bytes(one.op, one.nbytes, one.num_ranks), one.last_rank) for one in program.launches]
        outer = sum(nbytes for nbytes, last in sent if link.between((0, last)) is link.outer)
        step_s, own_s = (simulate(program.instructions, machine, network) for network in (link, None))
        exposed_s = max(0.0, step_s - own_s)  # rounding could make it negative
        steps.append(PlannedStep(label, program, step_s, exposed_s, sum(nbytes for nbytes, _ in sent), outer))
    return steps


def format_size(number: float) -> str:
    """Return a number as text with one decimal place, or with none if it is 100 or more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def make_plan_table(steps: Sequence[PlannedStep], title: str, has_nodes: bool) -> Table:
    """Return a table with a row for each variant, at most 80 columns wide.

    If there are nodes, it shows the bytes sent inside a node and to other nodes, instead of launches and all bytes.
    """
    from brigade.lab.plots import make_empty_table

    torch_s = next(step.step_s for step in steps if step.label == TORCH_DDP.label)
    time_unit, seconds = ("s", 1.0) if torch_s >= 1 else ("ms", 1e-3)
    digits = 1 if torch_s / seconds >= 10 else 3
    size_unit, size = ("GB", 1e9) if max(step.memory_bytes for step in steps) >= 1e10 else ("MB", 1e6)
    headings = [f"step\n{time_unit}", "ratio to\ntorch DDP", f"exposed\n{time_unit}"]
    sizes = ["inside", "between", "state", "memory"] if has_nodes else ["sent", "state", "memory"]
    headings += [*(["launches"] if not has_nodes else []), *(f"{what}\n{size_unit}" for what in sizes)]
    table = make_empty_table(title, "variant", headings)
    for step in steps:
        sent = [step.sent_bytes - step.outer_bytes, step.outer_bytes] if has_nodes else [step.sent_bytes]
        table.add_row(
            step.label,
            f"{step.step_s / seconds:,.{digits}f}",
            f"{step.step_s / torch_s:.2f}",
            f"{step.exposed_s / seconds:,.{digits}f}",
            *([f"{len(step.program.launches):,}"] if not has_nodes else []),
            *(format_size(nbytes / size) for nbytes in (*sent, step.program.memory[KINDS[-1]], step.memory_bytes)),
        )
    return table
