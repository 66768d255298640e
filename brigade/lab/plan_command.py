"""What `brigade plan` does with its options: checks them, plans, and prints a table with all assumptions, or JSON."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from dataclasses import asdict

from rich.console import Console

from brigade.course.modules import CourseError
from brigade.lab import plan
from brigade.lab.ladder import course_rungs
from brigade.lab.links import NAMED
from brigade.lab.plan_config import OPTIMIZERS, Setting
from brigade.rank.emulated_link import Link

WIDTH = 80  # columns
PRECISION = {"fp32": "fp32 without TF32", "bf16": "bf16"}  # of the device's peak


def run(options: argparse.Namespace) -> int:
    """brigade plan"""
    check(options)
    model = plan.model_of(plan.MODELS[options.model], options.dtype)
    time = min(options.tokens, model.size.context)
    flops = plan.backward_flops(model, options.tokens, time)
    tflops = options.tflops or plan.DEVICE_TFLOPS[options.dtype]
    backward_s = options.backward_ms and options.backward_ms / 1e3
    machine = plan.machine_of(flops, options.mfu * tflops * 1e12, plan.DEVICE_MEMORY_GBPS * 1e9, backward_s)
    optimizer = OPTIMIZERS[options.optimizer]
    setting = Setting(list(model.parameters()), options.dp, options.bucket_mb, optimizer, machine)
    link = link_of(options)
    found, missing = [], [f"{one.label}, for want of a rule" for one in course_rungs() if one not in plan.rungs()]
    for rung in plan.rungs():
        try:
            found += plan.plan(setting, link, [rung])
        except CourseError as reason:  # without solutions, bucket rules are the student's own
            missing.append(f"{rung.label}: {reason}")
    if backward_s:
        source = "as measured"
    else:
        source = f"{options.mfu:.0%} of {tflops:,g} TFLOPS" + (
            "" if options.tflops else f" ({plan.DEVICE}, {PRECISION[options.dtype]})"
        )
    ranks = f"{options.dp} rank" + ("" if options.dp == 1 else "s")
    assumptions = [
        f"{options.model}: {setting.numel / 1e9:,.3f} billion parameters in {options.dtype}, {optimizer.label}",
        f"{ranks}, {options.tokens:,} tokens each in a step, in sequences of {time:,}",
        f"computation: backward {shown(sum(machine.backward_s))}, {source}; forward {shown(machine.forward_s)}, half "
        f"as long; optimizer and copies at {plan.DEVICE_MEMORY_GBPS:,} GB/s",
        f"link: {link_name(options)}{link.bytes_per_s / 1e9:,.4g} GB/s in each direction and "
        f"{link.latency_s * 1e6:g} us for each message, between neighbours in a ring of all ranks; one collective "
        "after the other",
        f"buckets of {options.bucket_mb:g} MiB; gradients become ready from the last layer to the first",
        "memory: parameters, gradients and optimizer state between two steps, on the fullest rank; no activations",
    ]
    if options.dtype == "bf16":
        assumptions.append(
            "bf16: modules 5 to 8 accumulate and reduce gradients in fp32, and 8 ZeroOptimizer keeps fp32 masters; "
            "everything else is in bf16, the optimizer's state too, which saves memory and loses precision"
        )
    assumptions += [f"not planned: {one}" for one in missing]
    if options.json:
        rungs = [asdict(one) | {"held_bytes": one.held_bytes} for one in found]
        print(json.dumps({"options": options_of(options), "assumptions": assumptions, "rungs": rungs}, indent=2))
        return 0
    console = Console(highlight=False, soft_wrap=True)
    console.print(plan.plan_table(found, f"One step of {options.model} on {ranks}, as predicted"))
    console.print("\nAssumed:")
    for one in assumptions:
        console.print(textwrap.fill(f"- {one}", WIDTH, subsequent_indent="  "), markup=False)
    for one in warnings(options, found):
        console.print("\n" + textwrap.fill(one, WIDTH), markup=False)
    return 0


def check(options: argparse.Namespace) -> None:
    """Raises CourseError when there is no plan for these options."""

    def refuse(name: str, wanted: str) -> None:
        raise CourseError(f"--{name.replace('_', '-')} {getattr(options, name)}: it takes {wanted}")

    if options.model not in plan.MODELS:
        refuse("model", f"one of {', '.join(plan.MODELS)}")
    if options.link not in NAMED:
        refuse("link", f"one of {', '.join(NAMED)}")
    if not 1 <= options.dp <= plan.MAX_RANKS:
        refuse("dp", f"1 to {plan.MAX_RANKS} ranks")
    if options.latency_us is not None and not 0 <= options.latency_us < math.inf:
        refuse("latency_us", "a number that is not negative")
    if not 0 < options.mfu <= 1:
        refuse("mfu", "a number above 0, at most 1")
    for name in ("tokens", "bucket_mb", "bandwidth_gbps", "tflops", "backward_ms"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            refuse(name, "a number above 0")


def link_of(options: argparse.Namespace) -> Link:
    """The link of that name, with the numbers that the options give instead of its own."""
    named = NAMED[options.link]
    return Link(
        named.latency_s if options.latency_us is None else options.latency_us / 1e6,
        named.bytes_per_s if options.bandwidth_gbps is None else options.bandwidth_gbps * 1e9 / 8,
    )


def link_name(options: argparse.Namespace) -> str:
    """For what comes before its numbers, if those are the named link's own."""
    own = options.latency_us is None and options.bandwidth_gbps is None
    return f"{NAMED[options.link].what}, " if own else ""


def options_of(options: argparse.Namespace) -> dict[str, object]:
    return {name: value for name, value in vars(options).items() if name not in ("run", "command", "json")}


def shown(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{1e3 * seconds:,.3g} ms"


def warnings(options: argparse.Namespace, found: list[plan.Planned]) -> list[str]:
    """What a reader should know before believing the numbers."""
    said = []
    least = min(found, key=lambda one: one.held_bytes)
    if least.held_bytes > plan.DEVICE_MEMORY_GB * 1e9:
        said.append(
            f"A rank needs {least.held_bytes / 1e9:,.0f} GB at the least ({least.label}); an {plan.DEVICE} has "
            f"{plan.DEVICE_MEMORY_GB} GB. Data parallelism alone cannot train {options.model}. Real systems divide "
            "gradients and weights too (ZeRO 2 and 3, FSDP), and the model itself (tensor and pipeline parallelism); "
            "then each data-parallel rank has a part of these gradients to average."
        )
    if options.link == "nvlink4" and options.dp > 8:
        said.append("NVLink joins the 8 GPUs of a node: a ring of more ranks also crosses a slower network.")
    return said
