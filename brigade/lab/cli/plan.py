"""brigade plan: predict the step of each variant. Nothing imports torch before the command runs."""

from __future__ import annotations

import argparse
import functools
import math
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brigade.course.cli.console import console
from brigade.course.cli.options import ABOVE_ZERO, AT_LEAST_ONE, Range, add
from brigade.ranks.errors import UserError

if TYPE_CHECKING:
    from brigade.lab.devices import Device
    from brigade.lab.nccl import Fabric, Network

WIDTH = 80  # columns
PRECISION = {"fp32": "fp32 without TF32", "bf16": "bf16", "fp8": "fp8"}  # of the device's peak
NBYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
MAX_RANKS = 4096
RANKS = Range(int, lambda value: 1 <= value <= MAX_RANKS, f"1 to {MAX_RANKS} ranks")
EFFICIENCY = Range(float, lambda value: 0 < value <= 1, "above 0 and at most 1")
CARDS = Range(int, lambda value: 1 <= value <= MAX_RANKS, f"1 to {MAX_RANKS} cards")
NETWORKS = "nvlink3, nvlink4, nvlink5, pcie3, pcie4, 100gbe, 10gbe, or a rate in Gbit/s"
RATES = 0.01, 100_000.0  # in Gbit/s
TEXTS = Path(__file__).with_suffix(".txt.j2")  # what the command prints below its table


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade plan`."""
    model = "the model: tiny, small, medium, large, xl, gpt3-6.7b, gpt3-175b, llama3-8b and others (default: xl)"
    add(parser, "--model NAME", model, default="xl")
    add(parser, "--dp N", f"the number of data-parallel ranks, 1 to {MAX_RANKS} (default: 8)", RANKS, default=8)
    add(parser, "--tokens N", "tokens per rank per step (default: 4096)", AT_LEAST_ONE, default=4096)
    add(
        parser,
        "--sequence N",
        "tokens of a sequence (default: the model's context, if there are so many)",
        AT_LEAST_ONE,
    )
    micro = "micro-batches of a step, all but the last one in no_sync (default: 1)"
    add(parser, "--micro-batches N", micro, AT_LEAST_ONE, default=1)
    add(parser, "--recompute", "recompute the activations of each block during backward", action="store_true")
    add(parser, "--bucket-mb MB", "the size of the buckets in MiB (default: 25)", ABOVE_ZERO, default=25.0)
    dtype = "the dtype of the parameters; in bf16, module 11 keeps fp32 shards; fp8: products of a bf16 model"
    add(parser, "--dtype", f"{dtype} (default: fp32)", default="fp32", choices=("fp32", "bf16", "fp8"))
    device = "the GPU: h100, h200, b200, a100, l40s or t4 (default: h100)"
    add(parser, "--device", device, default="h100", choices=("h100", "h200", "b200", "a100", "l40s", "t4"))
    add(parser, "--link LINK", f"the network: {NETWORKS} of each card (default: 100gbe)", default="100gbe")
    nodes = "the ranks of a node; --link then connects nodes, and module 14 keeps a replica in each (default: no nodes)"
    add(parser, "--node-size N", nodes, RANKS)
    shards = "the ranks that share one replica with module 14 (default: the ranks of a node)"
    add(parser, "--shard-size N", shards, RANKS)
    efficiency = "the part of the cards' rate that collectives reach (default: 1; docs/plan.md says what was measured)"
    add(parser, "--network-efficiency X", efficiency, EFFICIENCY, default=1.0)
    add(parser, "--cards N", "the network cards of a node (default: one for each rank)", CARDS)
    add(parser, "--node-link LINK", "the link inside a node, as for --link (default: the device's)")
    peak = "the peak rate of a rank's device in TFLOPS (default: the device's; for an H100 with TF32, pass 494.7)"
    add(parser, "--tflops X", peak, ABOVE_ZERO)
    backward = "a measured time of backward in milliseconds (of one micro-batch), which replaces --tflops"
    add(parser, "--backward-ms X", backward, ABOVE_ZERO)


def run_plan(options: argparse.Namespace) -> int:
    """brigade plan: print the predicted step of each variant, with all assumptions."""
    from brigade.lab import error_bars, plan
    from brigade.lab.devices import CONTENTION, DEVICES
    from brigade.lab.program import Setting, record
    from brigade.lab.shapes import MODELS

    device = DEVICES[options.device]
    require_possible(options, [*MODELS], device)
    shape, micro_tokens = MODELS[options.model], options.tokens // options.micro_batches
    network, utilisation = make_network(options, device), device.get_utilisation(options.dtype)
    sequence = min(micro_tokens, options.sequence or shape.context)
    tflops = options.tflops or device.tflops[options.dtype]
    attention = tflops / device.tflops["bf16"] if options.dtype == "fp8" else 1.0  # it is computed in bf16
    flops = shape.count_forward_flops(micro_tokens, sequence, attention)
    recomputed = shape.count_recomputed_flops(micro_tokens, sequence, attention) if options.recompute else []

    def make_machine(fraction: float) -> plan.Machine:
        backward_s = options.backward_ms and options.backward_ms / 1e3
        rates = fraction * tflops * 1e12, device.memory_gbps * 1e9
        return plan.make_machine(flops, *rates, backward_s, recomputed, CONTENTION)

    machine = make_machine(utilisation.typical)
    dtype = plan.DTYPES[options.dtype]
    compute_dtype = dtype if options.dtype != "fp32" else None
    sizes = options.dp, options.bucket_mb, dtype, options.shard_size or options.node_size
    setting = Setting(shape.make_groups(), *sizes, compute_dtype=compute_dtype, micro_batches=options.micro_batches)
    has_nodes = options.node_size is not None
    programs = record([one for one in plan.list_variants() if has_nodes or not one.needs_nodes], setting)
    steps = plan.plan(programs, machine, network)
    ends = () if options.backward_ms else (utilisation.high, utilisation.low)
    fast_and_slow = [[step.step_s for step in plan.plan(programs, make_machine(end), network)] for end in ends]
    bounds = [
        error_bars.widen_range(fast_s, step.step_s, slow_s, network.count_nodes(range(options.dp)))
        for step, fast_s, slow_s in zip(steps if ends else (), *fast_and_slow, strict=True)
    ]
    ranks = f"{options.dp} rank" + "s" * (options.dp > 1)
    title = f"Predicted step of {options.model} on {ranks}" + (f" in nodes of {options.node_size}" if has_nodes else "")
    console.print(plan.make_plan_table(steps, title, has_nodes, bounds))
    fastest = min(steps, key=lambda step: step.step_s)
    utilisations = None if options.backward_ms else (utilisation.typical, utilisation.low)
    facts = {
        "changes": plan.rank_assumptions(fastest, plan.list_assumptions(machine, network, utilisations)),
        "activations_gb": [
            shape.count_activation_bytes(micro_tokens, NBYTES[options.dtype], recomputes) / 1e9
            for recomputes in (options.recompute, not options.recompute)
        ],
        "by_label": {step.label: step for step in steps},
        "precision": PRECISION[options.dtype],
        "errors": error_bars,
        "programs": programs,
    }
    facts |= {"options": options, "device": device, "network": network, "machine": machine, "setting": setting}
    facts |= {"utilisation": utilisation, "tflops": tflops, "sequence": sequence, "ranks": ranks, "fastest": fastest}
    console.print("\nAssumptions:")
    for text in format_texts(TEXTS.read_text(), facts):
        console.print(text, markup=False)
    return 0


def require_possible(options: argparse.Namespace, models: list[str], device: Device) -> None:
    """Raise UserError if the options contradict each other or the device."""
    if options.model not in models:
        raise UserError(
            f"--model {options.model}: expected one of {', '.join(models)}. All are dense: plans know no experts"
        )
    if options.dtype not in device.tflops and not options.tflops:
        raise UserError(
            f"--dtype {options.dtype}: a {device.name} has no such matrix products; pass their rate as --tflops"
        )
    if options.dp % (options.node_size or 1):
        raise UserError(f"--node-size {options.node_size}: {options.dp} ranks do not form such nodes")
    if options.shard_size and (not options.node_size or options.dp % options.shard_size):
        raise UserError(f"--shard-size {options.shard_size}: pass --node-size, and a --dp that it divides")
    if options.tokens % options.micro_batches:
        raise UserError(f"--micro-batches {options.micro_batches}: {options.tokens} tokens cannot be split so")
    if options.sequence and (micro_tokens := options.tokens // options.micro_batches) % options.sequence:
        raise UserError(f"--sequence {options.sequence}: {micro_tokens} tokens do not form such sequences")


def format_texts(template: str, facts: dict[str, Any]) -> list[str]:
    """Return the wrapped items and paragraphs of `TEXTS`, or of a part of it. A paragraph begins with an empty line."""
    from jinja2 import Environment

    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"n": format, "seconds": format_seconds}
    text = environment.from_string(template).render(facts)
    blocks = [" ".join(block.split()) for block in re.split(r"\n(?=- )|\n\n+", text)]
    fill = functools.partial(textwrap.fill, width=WIDTH, break_on_hyphens=False)  # an option stays on one line
    return [
        fill(block, subsequent_indent="  ") if block[0] == "-" else f"\n{fill(block)}" for block in filter(None, blocks)
    ]


def format_seconds(seconds: float) -> str:
    """Return the time with its unit, in seconds or milliseconds."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.3g} ms"


def make_network(options: argparse.Namespace, device: Device) -> Network:
    """Return the network that the options describe. Raise UserError for an unknown link, or one that has no use."""
    from brigade.lab.nccl import Network

    link, efficiency = read_link("--link", options.link), options.network_efficiency
    if options.node_link and not options.node_size:
        raise UserError(f"--node-link {options.node_link}: pass --node-size too, or there are no nodes")
    if options.cards and not options.node_size and not isinstance(link, float):
        raise UserError(f"--cards {options.cards}: on {options.link} without --node-size, there is only one node")
    few, many = sorted((options.cards or 1, options.node_size or 1))
    if options.cards and many % few:
        raise UserError(f"--cards {options.cards}: the {options.node_size} ranks of a node cannot share them evenly")
    if options.node_size:
        fabric = device.fabric if options.node_link is None else read_fabric(options.node_link, "--node-link")
        if not isinstance(link, float):
            link = 8 * link.gbps
        return Network(fabric, options.node_size, efficiency * link / 8, options.cards or options.node_size)
    if isinstance(link, float):  # each rank is a node
        return Network(device.fabric, 1, efficiency * link / 8, options.cards or 1)
    return Network(link, options.dp)


def read_link(option: str, text: str) -> Fabric | float:
    """Return the link inside a node, or the rate of a network card in Gbit/s, that an option describes.

    Raise UserError if the name is unknown.
    """
    from brigade.lab.plan import CARDS, FABRICS

    if text in FABRICS:
        return FABRICS[text]
    if text in CARDS:
        return CARDS[text]
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    low, high = RATES
    if not low <= rate <= high:
        raise UserError(f"{option} {text}: expected one of {NETWORKS} ({low:g} to {high:,.0f})")
    return rate


def read_fabric(text: str, option: str) -> Fabric:
    """Return the link inside a node with this name, or one with this rate that behaves like PCI Express."""
    from dataclasses import replace

    from brigade.lab.nccl import PCIE4

    link = read_link(option, text)
    return replace(PCIE4, name=f"{link:g} Gbit/s", gbps=link / 8) if isinstance(link, float) else link
