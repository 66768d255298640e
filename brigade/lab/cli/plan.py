"""brigade plan: predict the step of each variant. Nothing imports torch before the command runs."""

from __future__ import annotations

import argparse
import math
import textwrap
from typing import TYPE_CHECKING

from brigade.course.cli.console import console
from brigade.course.cli.options import ABOVE_ZERO, AT_LEAST_ONE, Range, add
from brigade.ranks.errors import UserError

if TYPE_CHECKING:
    from brigade.lab.devices import Device
    from brigade.lab.nccl import Fabric, Network
    from brigade.lab.plan import PlannedStep
    from brigade.lab.shapes import Shape

WIDTH = 80  # columns
PRECISION = {"fp32": "fp32 without TF32", "bf16": "bf16", "fp8": "fp8"}  # of the device's peak
NBYTES = {"fp32": 4, "bf16": 2, "fp8": 2}
MAX_RANKS = 4096
RANKS = Range(int, lambda value: 1 <= value <= MAX_RANKS, f"1 to {MAX_RANKS} ranks")
EFFICIENCY = Range(float, lambda value: 0 < value <= 1, "above 0 and at most 1")
CARDS = Range(int, lambda value: 1 <= value <= MAX_RANKS, f"1 to {MAX_RANKS} cards")
NETWORKS = "nvlink3, nvlink4, nvlink5, pcie3, pcie4, 100gbe, 10gbe, or a rate in Gbit/s"
RATES = 0.01, 100_000.0  # in Gbit/s


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
    from brigade.lab import plan
    from brigade.lab.devices import CONTENTION, DEVICES
    from brigade.lab.program import Setting, record
    from brigade.lab.shapes import MODELS

    if options.model not in MODELS:
        raise UserError(
            f"--model {options.model}: expected one of {', '.join(MODELS)}. All are dense: plans know no experts"
        )
    device, shape = DEVICES[options.device], MODELS[options.model]
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
    micro_tokens = options.tokens // options.micro_batches
    if options.sequence and micro_tokens % options.sequence:
        raise UserError(f"--sequence {options.sequence}: {micro_tokens} tokens do not form such sequences")
    network = make_network(options, device)
    sequence = min(micro_tokens, options.sequence or shape.context)
    tflops = options.tflops or device.tflops[options.dtype]
    utilisation = device.get_utilisation(options.dtype)
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
    bounds = []
    if not options.backward_ms:
        bounds = [plan.plan(programs, make_machine(end), network) for end in (utilisation.high, utilisation.low)]

    peak = "" if options.tflops else f" ({device.name}, {PRECISION[options.dtype]})"
    source = f"at {utilisation.typical:.0%} of {tflops:,g} TFLOPS{peak}"
    ranks = f"{options.dp} rank" + ("" if options.dp == 1 else "s")
    micro = f" in {options.micro_batches} micro-batches" if options.micro_batches > 1 else ""
    of_micro = " of a micro-batch" if micro else ""
    recomputes = ", and recomputes each block except its last matrix" if options.recompute else ""
    part = f"{machine.forward_s / sum(machine.backward_s):.0%} as long" if options.recompute else "half as long"
    assumptions = [
        f"{options.model} has {setting.numel / 1e9:,.3f} billion parameters in {dtype} and trains with AdamW.",
        f"The step runs on {ranks}, with {options.tokens:,} tokens per rank{micro}, in sequences of {sequence:,}.",
        f"Backward{of_micro} takes {format_seconds(sum(machine.backward_s))}, "
        f"{'as measured' if options.backward_ms else source}{recomputes}. "
        f"Forward takes {part}, {format_seconds(machine.forward_s)}.",
    ]
    if bounds:
        assumptions.append(
            f"The range is that of {utilisation.high:.0%} to {utilisation.low:.0%} of the peak. "
            f"Source: {utilisation.source}."
        )
    assumptions += [
        f"While the network is busy, computation takes {CONTENTION:.0%} longer.",
        f"The optimizer and the copies are limited by a memory bandwidth of {device.memory_gbps:,} GB/s.",
        *describe_network(options, network),
        f"The bucket size is {options.bucket_mb:g} MiB. Gradients become ready from the last layer to the first.",
        "The plan describes rank 0. The memory is that of parameters, gradients and optimizer state between two steps.",
        describe_activations(shape, micro_tokens, options),
    ]
    if options.link.startswith("nvlink") and options.dp > 8 and not has_nodes:
        assumptions.append("NVLink connects the 8 GPUs of a node. A ring of more ranks also crosses a slower network.")
    if options.dtype != "fp32":
        assumptions.append(
            f"In {options.dtype}, module 11 keeps its shards in fp32, 16/N bytes per parameter, and gathers bf16. "
            "Modules 5 to 8 accumulate and reduce gradients in fp32, and ZeroOptimizer keeps fp32 main parameters. "
            "Everything else, including the optimizer state, is in bf16, which saves memory but loses precision."
        )
    assumptions += [f"Not planned: {label}: {why}." for label, why in programs.items() if isinstance(why, str)]
    where = f" in nodes of {options.node_size}" if has_nodes else ""
    title = f"Predicted step of {options.model} on {ranks}{where}"
    console.print(plan.make_plan_table(steps, title, has_nodes, bounds))
    console.print("\nAssumptions:")
    for item in assumptions:
        console.print(textwrap.fill(f"- {item}", WIDTH, subsequent_indent="  "), markup=False)
    utilisations = None if options.backward_ms else (utilisation.typical, utilisation.low)
    fastest = min(steps, key=lambda step: step.step_s)
    changes = plan.rank_assumptions(fastest, plan.list_assumptions(machine, network, utilisations))
    for text in (
        describe_error(
            fastest.communication_share, network.count_nodes(range(options.dp)), options.backward_ms is not None
        ),
        f"What matters most for the fastest variant ({fastest.label}): "
        + "; ".join(f"with {text}, its step is {change:+.0%}" for change, text in changes[:3]).replace("-", "−")
        + ".",
        describe_buckets(steps),
        describe_fit(steps, options.model, device),
    ):
        if text:
            console.print("\n" + textwrap.fill(text, WIDTH), markup=False)
    return 0


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


def describe_network(options: argparse.Namespace, network: Network) -> list[str]:
    """Return sentences about the network."""
    inside = f"the link of a rank ({network.fabric.name}) carries {network.fabric.gbps:,.4g} GB/s in each direction"
    tuner = "Collectives take as long as NCCL's tuner expects: the best of rings, trees, NVLS and PAT (docs/plan.md)."
    if network.card_gbps is None:
        return [f"All ranks are in one node: {inside}. {tuner} They run one at a time."]
    rate = f"{network.card_gbps:,.4g} GB/s in each direction"
    if network.ranks_per_node == 1:
        cards = f"{network.cards} network cards" if network.cards > 1 else "one network card"
        return [f"Each rank is a node with {cards} of {rate}. {tuner} They run one at a time."]
    cards = f"{network.cards} network card" + ("s" if network.cards > 1 else "")
    return [
        f"A node has {network.ranks_per_node} ranks and {cards} of {rate}. Inside it, {inside}.",
        f"{tuner} A group over several nodes uses the cards of its ranks. One collective inside nodes and one between "
        "nodes can run at the same time.",
    ]


def describe_activations(shape: Shape, tokens: int, options: argparse.Namespace) -> str:
    """Return a sentence about the memory of activations."""
    nbytes = NBYTES[options.dtype]
    whole, little = (shape.count_activation_bytes(tokens, nbytes, recomputes) / 1e9 for recomputes in (False, True))
    kept, other = (little, whole) if options.recompute else (whole, little)
    without = "without" if options.recompute else "with"
    return f"Activations need {kept:,.1f} GB more ({other:,.1f} GB {without} --recompute)."


def describe_error(share: float, num_nodes: int, is_calibrated: bool) -> str:
    """Return a sentence about the error of plans in which communication costs `share` of the step."""
    from brigade.lab.error_bars import ERROR_BARS, FEW, LARGE, SMALL, name_calibrated, name_nodes

    large, small = ERROR_BARS[LARGE], ERROR_BARS[SMALL]
    kind = name_calibrated(share, num_nodes)
    bar = ERROR_BARS[kind]
    costs = f"Communication costs {share:.0%} of the fastest variant's step"
    runs = f"{bar.count} published run{'s' * (bar.count != 1)} like this ({kind.removeprefix('calibrated, ')})"
    if bar.count >= FEW:
        calibrated = (
            f"{costs}. Of {runs}, measured on fewer GPUs with the same micro-batch and sequence length, "
            f"{bar.too_short} were planned too short. The median error of a step is {bar.median:.0%}, and nine of ten "
            f"are within {bar.most:.0%}."
        )
    else:
        calibrated = (
            f"{costs}. This is outside of what we compared: we have {runs}, planned up to {bar.most:.0%} too short. "
            "Expect the step to take longer, and measure it."
        )
    if is_calibrated:
        text = calibrated
    else:
        guessed = ERROR_BARS[f"guessed, {name_nodes(num_nodes)}"]
        text = (
            f"Of {guessed.count} published runs on {name_nodes(num_nodes)} whose computation was guessed, the median "
            f"error of a step is {guessed.median:.0%}, and nine of ten are within {guessed.most:.0%}. Measure backward "
            f"on one node with your micro-batch and sequence length, and pass --backward-ms. Then: {calibrated}"
        )
    return (
        f"How wrong is this? {text} Collectives of 256 MiB or more: {large.median:.0%} ({large.most:.0%}); smaller "
        f"ones: {small.median:.0%} ({small.most:.0%}), nearly always slower than planned (docs/plan.md)."
    )


def describe_buckets(steps: list[PlannedStep]) -> str:
    """Return a sentence that says whether buckets are faster than one flat all-reduce, and why, or an empty one."""
    by_label = {step.label: step for step in steps}
    flat, bucketed = by_label.get("2 FlatDDP"), by_label.get("torch DDP")
    if flat is None or bucketed is None or not flat.sent_bytes or len(bucketed.program.launches) == 1:
        return ""
    gain = flat.step_s / bucketed.step_s - 1
    word = "shorter" if gain >= 0 else "longer"
    overlap = (
        f"{format_seconds(flat.exposed_s)} of communication are exposed with one all-reduce, and "
        f"{format_seconds(bucketed.exposed_s)} with {len(bucketed.program.launches):,} buckets during backward"
    )
    why = f"{overlap}." if gain >= 0 else f"{overlap}, whose latencies cost more than overlap saves: try larger ones."
    return f"Buckets make the step {abs(1 - bucketed.step_s / flat.step_s):.0%} {word} than one flat all-reduce: {why}"


def format_seconds(seconds: float) -> str:
    """Return the time with its unit, in seconds or milliseconds."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.3g} ms"


def describe_fit(steps: list[PlannedStep], model: str, device: Device) -> str:
    """Return a sentence about the variants that leave memory for activations, or the reason why no variant fits."""
    limit = f"the {device.memory_gb:g} GB of {'an' if device.name[0] in 'AHL' else 'a'} {device.name}"
    fitting = [step.label for step in steps if step.memory_bytes < device.memory_gb * 1e9]
    if len(fitting) == len(steps):
        return f"Every variant keeps less than {limit}. Activations need memory too."
    if fitting:
        return f"Variants that need less than {limit}, before activations: {', '.join(fitting)}. The others do not fit."
    least = min(steps, key=lambda step: step.memory_bytes)
    return (
        f"No variant fits: a rank needs at least {least.memory_bytes / 1e9:,.0f} GB ({least.label}), more than "
        f"{limit}. Data parallelism alone cannot train {model}: the model itself has to be split, too (tensor and "
        "pipeline parallelism)."
    )
