"""Count the gathers and reductions of modules 8 to 11, and how many of them overlap with computation.

`measure_overlap` takes one step of each module and counts launches in the record and, on GPUs, kernels with
torch.profiler. `predict_overlap` counts them in the module's program (`program.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from brigade.checks.tiny_lm import Size, TinyLM
from brigade.course.modules import get_module
from brigade.events import launches
from brigade.lab.ladder import Variant, Workload, get_variant, read_reference
from brigade.lab.on_ranks import build_setup, synchronize, take_step
from brigade.lab.program import OPTIMIZERS, Compute, Launch, Machine, Setting, Wait, list_groups, record
from brigade.rank import recording
from brigade.rank.api import device
from brigade.runner.ranks import run_ranks

Kernel = tuple[str, float, float]  # its name, and the times at which it started and ended
Counts = dict[str, tuple[int, int]]  # by operation: how often it ran, and how often it overlapped with computation

OPERATIONS = {"all_gather": "AllGather", "reduce_scatter": "ReduceScatter"}  # and the names of their kernels
VARIANTS = tuple(get_variant(get_module(number)) for number in (8, 9, 10, 11))


def count_overlaps(kernels: Sequence[Kernel]) -> Counts | None:
    """Count NCCL's kernels that ran at the same time as a kernel that computes. Return None if there are no kernels."""
    if not kernels:
        return None
    computing = [kernel for kernel in kernels if not kernel[0].startswith(("nccl", "Mem"))]
    counts = {}
    for op, part in OPERATIONS.items():
        own = [
            kernel for kernel in kernels if kernel[0].startswith("nccl") and "Kernel" in kernel[0] and part in kernel[0]
        ]
        overlapped = [one for one in own if any(start < one[2] and one[1] < end for _, start, end in computing)]
        counts[op] = (len(own), len(overlapped))
    return counts


def predict_overlap(variant: Variant, setting: Setting) -> Counts:
    """Count the launches of the variant's program after which the rank computes before it waits for them."""
    instructions = record([variant], setting)[variant.label].instructions
    waits = {one.launch: place for place, one in reversed(list(enumerate(instructions))) if isinstance(one, Wait)}
    launched = [(place, one.op) for place, one in enumerate(instructions) if isinstance(one, Launch)]
    counts = dict.fromkeys(OPERATIONS, (0, 0))
    for number, (place, op) in enumerate(launched):
        between = instructions[place : waits.get(number, len(instructions))]
        overlaps = any(isinstance(one, Compute) and one.kind in ("forward", "backward") for one in between)
        counts[op] = (counts[op][0] + 1, counts[op][1] + overlaps)
    return counts


def make_setting(workload: Workload, world_size: int) -> Setting:
    """Return the setting of the workload. Times do not matter, because only the order of instructions counts."""
    with torch.device("meta"):
        model = TinyLM(workload.size)
    machine = Machine(1.0, (1.0,) * len(list(model.parameters())), 1.0, 1.0)
    return Setting(list_groups(model), world_size, workload.bucket_mb, OPTIMIZERS["sgd"], machine)


def measure_overlap(**how: Any) -> list[str]:
    """Run one step of each variant on two ranks (`how`: see `RunOptions`). Return a table in Markdown."""
    workload = Workload()
    variants = [asdict(variant) for variant in VARIANTS]
    how |= {"world_size": 2, "packages": {"submission": read_reference()}}
    results = run_ranks(profile_steps, asdict(workload), variants, **how)
    setting = make_setting(workload, how["world_size"])
    lines = [
        "| variant | operation | launches | predicted | kernels | overlapped | predicted |",
        "|---|---|---|---|---|---|---|",
    ]
    for number, variant in enumerate(VARIANTS):
        launched = [launch.op for launch in launches(results.events[0], number)]
        predicted, seen = predict_overlap(variant, setting), results[0][number]
        for op in OPERATIONS:
            kernels = ("", "") if seen is None else seen[op]
            cells = (variant.label, op, launched.count(op), predicted[op][0], *kernels, predicted[op][1])
            lines.append(f"| {' | '.join(map(str, cells))} |")
    if None in results[0]:
        lines += ["", "torch.profiler sees no kernels here, so only the launches were counted."]
    return lines


def profile_steps(workload: dict, variants: list[dict]) -> list[Counts | None]:
    """Take three steps of each variant, and return what the profiler counts in the last. This runs in the ranks."""
    from torch.profiler import ProfilerActivity, profile

    counts = []
    size = Size(**workload["size"])
    tokens = torch.randint(size.vocabulary, (workload["batch_size"], workload["time"]), device=device())
    for number, variant in enumerate(variants):
        setup = build_setup(variant, TinyLM(size).to(device()), workload)
        for _ in range(2):
            take_step(setup, tokens, tokens)
            if setup.overlaps:
                setup.wrapper.finish_param_sync()
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device().type == "cuda")
        with profile(activities=activities) as profiler:
            recording.note("step", step=number)
            if setup.overlaps:  # as the previous step would have done if it had not been synchronised
                setup.wrapper.start_param_sync()
                setup.optimizer.step = lambda: None  # it would gather again
            take_step(setup, tokens, tokens)
            recording.note("step", step=None)
            synchronize()
        on_gpu = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        counts.append(count_overlaps([(one.name, one.time_range.start, one.time_range.end) for one in on_gpu]))
    return counts
