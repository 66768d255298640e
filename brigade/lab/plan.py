"""`brigade plan`: what a training step costs with each variant, from shapes alone, for any model and number of ranks.

    found = plan(model, "tiny", world_size=8, ...)

A rank computes for as long as its floating-point operations and its memory traffic take, and launches by the rule of
the variant (`schedules.py`). A collective starts when those before it have finished, and takes the time of a ring
(`emulated_link.Link`). Nothing runs and no memory is allocated: the model is on the meta device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from brigade.lab.ladder import COMPUTATION, FP32_BYTES, TORCH_DDP, Variant
from brigade.lab.links import PEAK_FLOPS
from brigade.lab.memory import list_cases
from brigade.lab.memory_accounting import KINDS, Bytes
from brigade.lab.models import SIZES, Block, Size, TinyLM
from brigade.lab.plan_config import Machine, Setting
from brigade.lab.schedules import get_rule, make_program, select_with_rule, simulate
from brigade.rank.emulated_link import Link, count_sent_bytes

if TYPE_CHECKING:
    from rich.table import Table

# For plans only. Layers, d_model, heads, context: arXiv 2005.14165, table 2.1. GPT-3's feed-forward has two matrices of
# 4 d_model, SwiGLU has three: of 8/3 d_model each they are as large. Head and embedding are not tied here.
GPT3 = {
    "gpt3-6.7b": Size(d_model=4096, d_ff=10_944, layers=32, heads=32, vocabulary=50_257, context=2048),
    "gpt3-175b": Size(d_model=12_288, d_ff=32_768, layers=96, heads=96, vocabulary=50_257, context=2048),
}
MODELS = SIZES | GPT3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


# NVIDIA H100 Tensor Core GPU datasheet, SXM. Its rates for Tensor Cores are "with sparsity"; dense matrices have half.
# fp32 is the rate without Tensor Cores: torch does not use TF32 for matrices unless it is allowed (since torch 1.12,
# `torch.backends.cuda.matmul.allow_tf32`). With TF32 an H100 has 494.7.
DEVICE = "H100"
DEVICE_TFLOPS = {"fp32": 67.0, "bf16": PEAK_FLOPS / 1e12}
DEVICE_MEMORY_GB = 80
DEVICE_MEMORY_GBPS = 3350  # gigabytes per second


@dataclass(frozen=True)
class PlannedStep:
    """The predicted step of one variant.

    `sent_bytes` is the mean over ranks. `held` is what the fullest rank keeps between two steps, by kind. `exposed_s`
    is how much longer the step takes than computation alone.
    """

    label: str
    launches: int
    sent_bytes: float
    step_s: float
    exposed_s: float
    memory: Bytes

    @property
    def memory_bytes(self) -> int:
        return sum(self.memory.values())


def make_model(size: Size, dtype: str = "fp32") -> TinyLM:
    """The model on the meta device."""
    with torch.device("meta"):
        return TinyLM(size).to(DTYPES[dtype])


def count_backward_flops(model: TinyLM, tokens: int, time: int) -> list[int]:
    """Floating-point operations of backward up to the gradient of each parameter, in the order of registration.

    A matrix of n elements takes 2n for each token in forward and twice that in backward; causal attention over
    sequences of `time` tokens 2 d_model time, also twice; it comes before the gradient of v. The rest counts as none.
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
    """A rank that does `flops` in backward, half as many in forward; or takes `backward_s`, divided in proportion."""
    backward_s = sum(flops) / flops_per_s if backward_s is None else backward_s
    shares = tuple(backward_s * one / sum(flops) for one in flops)
    return Machine(backward_s / 2, shares, memory_bytes_per_s, memory_bytes_per_s)


def list_variants() -> list[Variant]:
    """All that can be planned: the cases of `memory.py` that have a rule, those of the course first."""
    found = {variant.label: variant for variant in select_with_rule(case.variant for case in list_cases())}
    return [found[label] for label in sorted(found)]


def plan(setting: Setting, link: Link, chosen: Sequence[Variant] | None = None) -> list[PlannedStep]:
    """A row for each variant, all of `variants()` by default."""
    alone_s = simulate(make_program(COMPUTATION, setting), link)
    found = []
    for variant in list_variants() if chosen is None else chosen:
        program = make_program(variant, setting)
        step_s = simulate(program, link)
        sent = sum(count_sent_bytes(one.op, one.nbytes, setting.world_size) for one in program.launches)
        found.append(
            PlannedStep(
                variant.label, len(program.launches), sent, step_s, step_s - alone_s, count_kept_bytes(variant, setting)
            )
        )
    return found


def count_kept_bytes(variant: Variant, setting: Setting) -> Bytes:
    """Bytes by kind on the fullest rank between two steps, counted as `memory.py` counts them; padding included."""
    rule, numel, itemsize = get_rule(variant), setting.numel, setting.itemsize
    needs_buffer = rule.params_in_buffer or rule.grads_in_buffer or rule.state == "shards"
    buffer_bytes = sum(setting.layout_buckets.nbytes) if needs_buffer else 0  # of fp32
    parameters = buffer_bytes * itemsize // FP32_BYTES if rule.params_in_buffer else numel * itemsize
    gradients = buffer_bytes if rule.grads_in_buffer else rule.grad_copies * numel * itemsize
    if rule.grads_in_buffer and itemsize < FP32_BYTES and rule.state != "shards":
        gradients += numel * itemsize  # rounded copies, which a plain optimizer reads
    values = setting.optimizer.values
    if rule.state == "shards":
        masters = itemsize < FP32_BYTES
        state = buffer_bytes * (values + masters) // setting.world_size
    else:
        state = values * (max(setting.owned_bytes) if rule.state == "parameters" else numel * itemsize)
    return dict(zip(KINDS, (parameters, gradients, state)))


def make_plan_table(found: Sequence[PlannedStep], title: str) -> Table:
    """A row for each variant; 80 columns wide at most."""
    from rich import box
    from rich.table import Table

    torch_s = next(one.step_s for one in found if one.label == TORCH_DDP.label)
    time_unit, seconds = ("s", 1.0) if torch_s >= 1 else ("ms", 1e-3)
    digits = 1 if torch_s / seconds >= 10 else 3
    size_unit, size = ("GB", 1e9) if max(one.memory_bytes for one in found) >= 1e10 else ("MB", 1e6)
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("variant", no_wrap=True)
    for heading in (
        f"step\n{time_unit}",
        "of torch\nDDP's",
        f"exposed\n{time_unit}",
        "launches",
        f"sent\n{size_unit}",
        f"state\n{size_unit}",
        f"memory\n{size_unit}",
    ):
        table.add_column(heading, justify="right", no_wrap=True)
    for one in found:
        table.add_row(
            one.label,
            f"{one.step_s / seconds:,.{digits}f}",
            f"{one.step_s / torch_s:.2f}",
            f"{one.exposed_s / seconds:,.{digits}f}",
            f"{one.launches:,}",
            f"{one.sent_bytes / size:,.1f}",
            f"{one.memory[KINDS[-1]] / size:,.1f}",
            f"{one.memory_bytes / size:,.1f}",
        )
    return table
