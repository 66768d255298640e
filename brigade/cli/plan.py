"""brigade plan: predict the step of each variant. Nothing imports torch before the command runs."""

from __future__ import annotations

import argparse
import math
import textwrap
from typing import TYPE_CHECKING

from brigade.cli.console import console
from brigade.cli.options import ABOVE_ZERO, AT_LEAST_ONE, Range, add
from brigade.course.modules import CourseError

if TYPE_CHECKING:
    from brigade.lab.plan import PlannedStep
    from brigade.rank.emulated_link import Link

WIDTH = 80  # columns
PRECISION = {"fp32": "fp32 without TF32", "bf16": "bf16"}  # of the device's peak
MAX_RANKS = 4096
RANKS = Range(int, lambda value: 1 <= value <= MAX_RANKS, f"1 to {MAX_RANKS} ranks")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade plan`."""
    model = "the model: tiny, small, medium, large, xl, gpt3-6.7b or gpt3-175b (default: xl)"
    add(parser, "--model NAME", model, default="xl")
    add(parser, "--dp N", f"the number of data-parallel ranks, 1 to {MAX_RANKS} (default: 8)", RANKS, default=8)
    add(parser, "--tokens N", "tokens per rank per step (default: 4096)", AT_LEAST_ONE, default=4096)
    add(parser, "--bucket-mb MB", "the size of the buckets in MiB (default: 25)", ABOVE_ZERO, default=25.0)
    add(parser, "--dtype", "the dtype of the parameters (default: fp32)", default="fp32", choices=("fp32", "bf16"))
    link = "the link between neighbours: nvlink4, pcie4, 100gbe, 10gbe, or a rate in Gbit/s (default: 100gbe)"
    add(parser, "--link LINK", link, default="100gbe")
    nodes = "the ranks of a node; --link then connects nodes, and module 14 keeps a replica in each (default: no nodes)"
    add(parser, "--node-size N", nodes, RANKS)
    add(parser, "--node-link LINK", "the link inside a node (default: nvlink4)", default="nvlink4")
    peak = "the peak rate of a rank's device in TFLOPS (default: that of an H100, 67 in fp32 or 989.4 in bf16; "
    add(parser, "--tflops X", peak + "for TF32, pass 494.7)", ABOVE_ZERO)
    backward = "a measured time of backward in milliseconds, which replaces --tflops"
    add(parser, "--backward-ms X", backward, ABOVE_ZERO)


def run_plan(options: argparse.Namespace) -> int:
    """brigade plan: print the predicted step of each variant, with all assumptions."""
    from brigade.lab import plan
    from brigade.lab.ladder import is_hybrid
    from brigade.lab.program import Setting, list_groups, record

    if options.model not in plan.MODELS:
        raise CourseError(f"--model {options.model}: expected one of {', '.join(plan.MODELS)}")
    name, link = read_link("--link", options.link)
    inner_name, inner = read_link("--node-link", options.node_link)
    if options.dp % (options.node_size or 1):
        raise CourseError(f"--node-size {options.node_size}: {options.dp} ranks do not form such nodes")
    model = plan.make_model(plan.MODELS[options.model])
    time = min(options.tokens, model.size.context)
    tflops = options.tflops or plan.DEVICE_TFLOPS[options.dtype]
    machine = plan.make_machine(
        plan.count_backward_flops(model, options.tokens, time),
        plan.UTILISATION * tflops * 1e12,
        plan.DEVICE_MEMORY_GBPS * 1e9,
        options.backward_ms and options.backward_ms / 1e3,
    )
    dtype = plan.DTYPES[options.dtype]
    setting = Setting(list_groups(model), options.dp, options.bucket_mb, dtype, options.node_size)
    has_nodes = options.node_size is not None
    programs = record([one for one in plan.list_variants() if has_nodes or not is_hybrid(one)], setting)
    network = plan.Link(inner.latency_s, inner.bytes_per_s, link, options.node_size) if has_nodes else link
    steps = plan.plan(programs, machine, network)

    device = "" if options.tflops else f" ({plan.DEVICE}, {PRECISION[options.dtype]})"
    source = "as measured" if options.backward_ms else f"at {plan.UTILISATION:.0%} of {tflops:,g} TFLOPS{device}"
    ranks = f"{options.dp} rank" + ("" if options.dp == 1 else "s")
    links = [
        f"All ranks form one ring. The link between neighbours {describe_link(name, link)}. Collectives run one at a "
        "time."
    ]
    if has_nodes:
        links = [
            f"A node has {options.node_size} ranks. Inside it, the link between neighbours "
            f"{describe_link(inner_name, inner)}.",
            f"The link of each rank to other nodes {describe_link(name, link)}. A collective whose ranks are in "
            "several nodes uses only this link. Each link carries one collective at a time.",
        ]
    assumptions = [
        f"{options.model} has {setting.numel / 1e9:,.3f} billion parameters in {options.dtype} and trains with AdamW.",
        f"The step runs on {ranks}, with {options.tokens:,} tokens per rank in sequences of {time:,}.",
        f"Backward takes {format_seconds(sum(machine.backward_s))}, {source}. Forward takes half as long, "
        f"{format_seconds(machine.forward_s)}.",
        f"The optimizer and the copies are limited by a memory bandwidth of {plan.DEVICE_MEMORY_GBPS:,} GB/s.",
        *links,
        f"The bucket size is {options.bucket_mb:g} MiB. Gradients become ready from the last layer to the first.",
        "The plan describes rank 0. Its memory includes parameters, gradients and optimizer state between two "
        "steps, but no activations.",
    ]
    if options.link == "nvlink4" and options.dp > 8 and not has_nodes:
        assumptions.append("NVLink connects the 8 GPUs of a node. A ring of more ranks also crosses a slower network.")
    if options.dtype == "bf16":
        assumptions.append(
            "In bf16, modules 5 to 8 accumulate and reduce gradients in fp32, and module 8's ZeroOptimizer keeps fp32 "
            "main parameters. Everything else, including the optimizer state, is in bf16, which saves memory but loses "
            "precision."
        )
    assumptions += [f"Not planned: {label}: {why}." for label, why in programs.items() if isinstance(why, str)]
    where = f" in nodes of {options.node_size}" if has_nodes else ""
    console.print(plan.make_plan_table(steps, f"Predicted step of {options.model} on {ranks}{where}", has_nodes))
    console.print("\nAssumptions:")
    for item in assumptions:
        console.print(textwrap.fill(f"- {item}", WIDTH, subsequent_indent="  "), markup=False)
    console.print("\n" + textwrap.fill(describe_fit(steps, options.model), WIDTH), markup=False)
    return 0


def read_link(option: str, text: str) -> tuple[str, Link]:
    """Return the name and the link that an option describes, by name or by its rate in Gbit/s.

    Raise CourseError if the name is unknown.
    """
    from brigade.lab.plan import LINKS, NETWORK_LATENCY_S, Link

    if text in LINKS:
        return LINKS[text]
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not 0 < rate < math.inf:
        raise CourseError(f"{option} {text}: expected one of {', '.join(LINKS)}, or a rate in Gbit/s")
    return f"{rate:g} Gbit/s", Link(NETWORK_LATENCY_S, rate * 1e9 / 8)


def describe_link(name: str, link: Link) -> str:
    """Return what a link carries, as the end of a sentence."""
    rate = f"{link.bytes_per_s / 1e9:,.4g} GB/s in each direction"
    return f"({name}) carries {rate}, and each message has a latency of {link.latency_s * 1e6:g} us"


def format_seconds(seconds: float) -> str:
    """Return the time with its unit, in seconds or milliseconds."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.3g} ms"


def describe_fit(steps: list[PlannedStep], model: str) -> str:
    """Return a sentence about the variants that leave memory for activations, or the reason why no variant fits."""
    from brigade.lab import plan

    limit = f"the {plan.DEVICE_MEMORY_GB} GB of an {plan.DEVICE}"
    fitting = [step.label for step in steps if step.memory_bytes < plan.DEVICE_MEMORY_GB * 1e9]
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
