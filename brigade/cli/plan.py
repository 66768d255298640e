"""brigade plan: predict the step of each variant. Nothing imports torch before the command runs."""

from __future__ import annotations

import argparse
import json
import textwrap
from collections.abc import Collection
from dataclasses import asdict
from typing import TYPE_CHECKING

from brigade.cli.console import console
from brigade.cli.options import ABOVE_ZERO, FRACTION, NOT_NEGATIVE, Range, add
from brigade.course.modules import CourseError
from brigade.lab.links import NAMED, UTILISATION

if TYPE_CHECKING:
    from brigade.lab.plan import PlannedStep
    from brigade.rank.emulated_link import Link

WIDTH = 80  # columns
PRECISION = {"fp32": "fp32 without TF32", "bf16": "bf16"}  # of the device's peak
MAX_RANKS = 4096
RANKS = Range(int, lambda value: 1 <= value <= MAX_RANKS, f"1 to {MAX_RANKS} ranks")
TOKENS = Range(int, lambda value: value > 0, "a number above 0")


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade plan`."""
    model = "the model: tiny, small, medium, large, xl, gpt3-6.7b or gpt3-175b (default: xl)"
    add(parser, "--model NAME", model, default="xl")
    add(parser, "--dp N", f"the number of data-parallel ranks, 1 to {MAX_RANKS} (default: 8)", RANKS, default=8)
    add(parser, "--tokens N", "tokens per rank per step (default: 4096)", TOKENS, default=4096)
    add(parser, "--bucket-mb MB", "the size of the buckets in MiB (default: 25)", ABOVE_ZERO, default=25.0)
    add(parser, "--dtype", "the dtype of the parameters (default: fp32)", default="fp32", choices=("fp32", "bf16"))
    optimizer = "the optimizer; sgd has momentum (default: adamw)"
    add(parser, "--optimizer", optimizer, default="adamw", choices=("adamw", "sgd"))
    link = f"the link between neighbours: {', '.join(NAMED)} (default: 100gbe)"
    add(parser, "--link NAME", link, default="100gbe")
    nodes = "the ranks of a node; --link then connects nodes, and module 14 keeps a replica in each (default: no nodes)"
    add(parser, "--node-size N", nodes, RANKS)
    add(parser, "--node-link NAME", "the link inside a node (default: nvlink4)", default="nvlink4")
    rate = "the rate in each direction in Gbit/s (default: the rate of --link)"
    add(parser, "--bandwidth-gbps X", rate, ABOVE_ZERO)
    latency = "the latency of each message in microseconds (default: the latency of --link)"
    add(parser, "--latency-us X", latency, NOT_NEGATIVE)
    peak = "the peak rate of a rank's device in TFLOPS (default: that of an H100, 67 in fp32 or 989.4 in bf16; "
    add(parser, "--tflops X", peak + "for TF32, pass 494.7)", ABOVE_ZERO)
    part = f"the fraction of the peak that computation reaches (default: {UTILISATION})"
    add(parser, "--mfu X", part, FRACTION, default=UTILISATION)
    backward = "a measured time of backward in milliseconds, which replaces --tflops and --mfu"
    add(parser, "--backward-ms X", backward, ABOVE_ZERO)
    add(parser, "--json", "print JSON instead of a table")


def run_plan(options: argparse.Namespace) -> int:
    """brigade plan: print the predicted step of each variant, with all assumptions."""
    from brigade.lab import plan
    from brigade.lab.ladder import is_hybrid
    from brigade.lab.program import OPTIMIZERS, Setting, list_groups, record

    check_name("--model", options.model, plan.MODELS)
    check_name("--link", options.link, NAMED)
    check_name("--node-link", options.node_link, NAMED)
    if options.dp % (options.node_size or 1):
        raise CourseError(f"--node-size {options.node_size}: {options.dp} ranks do not form such nodes")
    has_nodes = options.node_size is not None
    model = plan.make_model(plan.MODELS[options.model], options.dtype)
    time = min(options.tokens, model.size.context)
    flops = plan.count_backward_flops(model, options.tokens, time)
    tflops = options.tflops or plan.DEVICE_TFLOPS[options.dtype]
    backward_s = options.backward_ms and options.backward_ms / 1e3
    machine = plan.make_machine(flops, options.mfu * tflops * 1e12, plan.DEVICE_MEMORY_GBPS * 1e9, backward_s)
    optimizer = OPTIMIZERS[options.optimizer]
    dtype = str(plan.DTYPES[options.dtype]).removeprefix("torch.")
    setting = Setting(list_groups(model), options.dp, options.bucket_mb, optimizer, machine, dtype, options.node_size)
    link = make_link(options)
    variants = [one for one in plan.list_variants() if has_nodes or not is_hybrid(one)]
    programs = record(variants, setting)
    steps = plan.plan(programs, link)
    missing = [f"{label}: {reason}" for label, reason in programs.items() if isinstance(reason, str)]
    if backward_s:
        source = "as measured"
    else:
        source = f"at {options.mfu:.0%} of {tflops:,g} TFLOPS" + (
            "" if options.tflops else f" ({plan.DEVICE}, {PRECISION[options.dtype]})"
        )
    ranks = f"{options.dp} rank" + ("" if options.dp == 1 else "s")
    assumptions = [
        f"{options.model} has {setting.numel / 1e9:,.3f} billion parameters in {options.dtype} and trains with "
        f"{optimizer.label}.",
        f"The step runs on {ranks}, with {options.tokens:,} tokens per rank in sequences of {time:,}.",
        f"Backward takes {format_seconds(sum(machine.backward_s))}, {source}. Forward takes half as long, "
        f"{format_seconds(machine.forward_s)}.",
        f"The optimizer and the copies are limited by a memory bandwidth of {plan.DEVICE_MEMORY_GBPS:,} GB/s.",
        *describe_links(options, link),
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
    assumptions += [f"Not planned: {item}." for item in missing]
    if options.json:
        variants = [asdict(item) | {"memory_bytes": item.memory_bytes} for item in steps]
        print(
            json.dumps(
                {"options": collect_options(options), "assumptions": assumptions, "variants": variants}, indent=2
            )
        )
        return 0
    where = f" in nodes of {options.node_size}" if has_nodes else ""
    console.print(plan.make_plan_table(steps, f"Predicted step of {options.model} on {ranks}{where}", has_nodes))
    console.print("\nAssumptions:")
    for item in assumptions:
        console.print(textwrap.fill(f"- {item}", WIDTH, subsequent_indent="  "), markup=False)
    console.print("\n" + textwrap.fill(describe_fit(steps, options.model), WIDTH), markup=False)
    if has_nodes and options.dp > options.node_size:
        console.print("\n" + textwrap.fill(plan.compare_with_hybrid(setting, link), WIDTH), markup=False)
    return 0


def check_name(option: str, name: str, known: Collection[str]) -> None:
    """Raise CourseError if the name is unknown."""
    if name not in known:
        raise CourseError(f"{option} {name}: expected one of {', '.join(known)}")


def make_link(options: argparse.Namespace) -> Link:
    """Return the link that --link names. Other options can override its rate and its latency.

    If there are nodes, it is the outer link of the one that --node-link names.
    """
    from brigade.rank.emulated_link import Link

    named, inside = NAMED[options.link], NAMED[options.node_link]
    link = Link(
        named.latency_s if options.latency_us is None else options.latency_us / 1e6,
        named.bytes_per_s if options.bandwidth_gbps is None else options.bandwidth_gbps * 1e9 / 8,
    )
    if options.node_size is None:
        return link
    return Link(inside.latency_s, inside.bytes_per_s, outer=link, node_size=options.node_size)


def describe_links(options: argparse.Namespace, link: Link) -> list[str]:
    """Return sentences about the links."""

    def describe(link: Link, name: str) -> str:
        rate = f"{link.bytes_per_s / 1e9:,.4g} GB/s in each direction"
        return f"{name}carries {rate}, and each message has a latency of {link.latency_s * 1e6:g} us"

    if not link.outer:
        return [
            f"All ranks form one ring. The link between neighbours {describe(link, name_link(options))}. Collectives "
            "run one at a time."
        ]
    return [
        f"A node has {link.node_size} ranks. Inside it, the link between neighbours "
        f"{describe(link, f'({NAMED[options.node_link].what}) ')}.",
        f"The link of each rank to other nodes {describe(link.outer, name_link(options))}. A collective whose ranks "
        "are in several nodes uses only this link. Each link carries one collective at a time.",
    ]


def name_link(options: argparse.Namespace) -> str:
    """Return the link's name in parentheses if no option overrides its rate or latency, else ""."""
    own = options.latency_us is None and options.bandwidth_gbps is None
    return f"({NAMED[options.link].what}) " if own else ""


def collect_options(options: argparse.Namespace) -> dict[str, object]:
    """Return the options that describe the plan, by name."""
    return {name: value for name, value in vars(options).items() if name not in ("run", "command", "json")}


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
