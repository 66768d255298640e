"""Timelines of steps as the α–β model predicts them: the schematics at the top of the readings.

    timelines = make_timelines([get_variant(get_module(3)), get_variant(get_module(4))])
    draw(timelines, path)

Six equal layers train on two ranks. The schedules are those of `brigade plan` (`schedules.py`). Nothing is measured, so
the picture is the same on every machine. Latency and copies take longer than usual, so that they are visible.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from brigade.lab.ladder import Variant
from brigade.lab.plan_config import OPTIMIZERS, Machine, Setting
from brigade.lab.schedules import Compute, Program, Rule, Simulation, Wait, get_rule, run_prefetched_forward, simulate
from brigade.lab.timeline import EXPOSED, Collective, Span, Timeline
from brigade.rank.emulated_link import Link

LAYERS = 6
LAYER_BYTES = 2**20
WORLD_SIZE = 2
FORWARD_MS, BACKWARD_MS = 5, 10  # for each layer
STEP_MS = 6  # for the whole model
COPY_MS = 1  # for each layer
ALPHA_MS, TRANSFER_MS = 8, 6  # an all-reduce takes α plus TRANSFER_MS for each layer
SETTING = Setting(
    [nn.Parameter(torch.empty(LAYER_BYTES // 4, device="meta")) for _ in range(LAYERS)],
    WORLD_SIZE,
    bucket_mb=2 * LAYER_BYTES / 2**20,  # two layers
    optimizer=OPTIMIZERS["adamw"],
    machine=Machine(
        1e-3 * LAYERS * FORWARD_MS,
        LAYERS * (1e-3 * BACKWARD_MS,),
        step_bytes_per_s=LAYERS * 7 * LAYER_BYTES / (1e-3 * STEP_MS),  # AdamW reads and writes 7 values per element
        copy_bytes_per_s=2 * LAYER_BYTES / (1e-3 * COPY_MS),  # a copy reads and writes
    ),
    units=[[layer] for layer in range(LAYERS)],  # layer 0 is the root
)
LINK = Link(1e-3 * ALPHA_MS / 2, LAYER_BYTES / (1e-3 * TRANSFER_MS))  # between two ranks, an all-reduce has 2 messages


def make_timelines(variants: Sequence[Variant]) -> list[Timeline]:
    """Return a timeline of each variant, with one rank that stands for all.

    If a variant gathers weights for the next forward, all timelines begin with backward and end with the next forward.
    """
    from_backward = any(get_rule(variant).forward is run_prefetched_forward for variant in variants)
    timelines = []
    for variant in variants:
        rule, program = get_rule(variant), Program(SETTING)
        for part in (rule.run, rule.forward) if from_backward else (rule.forward, rule.run):
            part(program)
        timelines.append(make_timeline(variant.label, rule, simulate(program, LINK)))
    return timelines


def make_timeline(label: str, rule: Rule, simulation: Simulation) -> Timeline:
    """Return a simulated step as a timeline. Waits, copies and divisions are its exposed time."""
    spans = []
    for instruction, start_s, end_s in simulation.busy:
        computes = isinstance(instruction, Compute)
        kind, layers = (instruction.kind, instruction.param_indices) if computes else ("wait", ())
        if end_s > start_s:
            spans.append(Span(0, kind, 1e3 * start_s, 1e3 * end_s, join_numbers(layers)))
    collectives = [
        Collective(
            0,
            launch.op,
            number,
            None,
            "float32",
            launch.nbytes,
            1,
            "",
            launched_ms=1e3 * launched_s,
            start_ms=1e3 * start_s,
            end_ms=1e3 * end_s,
            waited_ms=None,
            row=0,
            line=None,
            label=join_numbers(launch.param_indices),
            latency_ms=1e3 * LINK.seconds(launch.op, 0, WORLD_SIZE),
        )
        for number, (launch, launched_s, start_s, end_s) in enumerate(simulation.transfers)
    ]
    memory = []
    if rule.grads_in_shards:
        memory = list_bucket_memory(simulation)
    elif rule.state == "units":
        memory = list_unit_memory(simulation)
    exposed_ms = sum(span.end_ms - span.start_ms for span in spans if span.kind in EXPOSED)
    return Timeline(label, 1, spans, collectives, exposed_ms, LINK, LAYERS * BACKWARD_MS, memory)


def join_numbers(layers: Sequence[int]) -> str:
    """Return the numbers of the layers as text, such as: 5 4"""
    return " ".join(map(str, layers))


def list_bucket_memory(simulation: Simulation) -> list[Span]:
    """Return when each bucket of module 10 is allocated: from its first gradient to the wait for its reduce-scatter."""
    memory = []
    for number, (launch, *_) in enumerate(simulation.transfers):
        if launch.op == "reduce_scatter":
            first = launch.param_indices[:1]
            [start_s] = [
                end_s
                for work, _, end_s in simulation.busy
                if isinstance(work, Compute) and work.kind == "backward" and work.param_indices == first
            ]
            [end_s] = [end_s for work, _, end_s in simulation.busy if work == Wait(number)]
            memory.append(make_memory_span("bucket", launch.param_indices, start_s, end_s))
    return memory


def list_unit_memory(simulation: Simulation) -> list[Span]:
    """Return when each unit of module 11 has full weights: from an all-gather until the computation that frees them."""
    memory = []
    gathers = [transfer for transfer in simulation.transfers if transfer.launch.op == "all_gather"]
    for index, (launch, launched_s, *_) in enumerate(gathers):
        again = [later.launched_s for later in gathers[index + 1 :] if later.launch == launch]
        ends = [
            end_s
            for work, start_s, end_s in simulation.busy
            if isinstance(work, Compute)
            and work.param_indices == launch.param_indices
            and start_s >= launched_s
            and (not again or start_s < again[0])
        ]
        memory.append(make_memory_span("unit", launch.param_indices, launched_s, ends[-1]))
    return memory


def make_memory_span(what: str, layers: Sequence[int], start_s: float, end_s: float) -> Span:
    """Return the period in which a bucket or a unit with these layers is allocated."""
    return Span(0, "memory", 1e3 * start_s, 1e3 * end_s, f"{what} {join_numbers(layers)}")
