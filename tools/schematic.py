"""Timelines of steps as the α–β model predicts them: the schematics at the top of the readings.

    timelines = make_timelines([get_variant(get_module(3)), get_variant(get_module(4))])
    draw(timelines, path)

Six equal layers train on two ranks. The programs are those of `brigade plan` (`program.py`). Nothing is measured, so
the picture is the same on every machine. Latency and copies take longer than usual, so that they are visible.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

from brigade.lab.ladder import Variant, is_hybrid
from brigade.lab.program import (
    OPTIMIZERS,
    Busy,
    Compute,
    Instruction,
    Launch,
    Machine,
    Program,
    Setting,
    Simulation,
    Wait,
    record,
    simulate,
)
from brigade.lab.timeline import Collective, Span, Timeline
from brigade.rank.emulated_link import Link

LAYERS = 6
LAYER_BYTES = 2**20
WORLD_SIZE = 2
FORWARD_MS, BACKWARD_MS = 5, 10  # for each layer
STEP_MS = 6  # for the whole model
COPY_MS = 1  # for each layer
ALPHA_MS, TRANSFER_MS = 8, 6  # an all-reduce takes α plus TRANSFER_MS for each layer
SETTING = Setting(
    [(layer > 0, [[LAYER_BYTES // 4]]) for layer in range(LAYERS)],  # for module 11, layer 0 is the root
    WORLD_SIZE,
    bucket_mb=2 * LAYER_BYTES / 2**20,  # two layers
    optimizer=OPTIMIZERS["adamw"],
    machine=Machine(
        1e-3 * LAYERS * FORWARD_MS,
        LAYERS * (1e-3 * BACKWARD_MS,),
        step_bytes_per_s=LAYERS * 7 * LAYER_BYTES / (1e-3 * STEP_MS),  # AdamW reads and writes 7 values per element
        copy_bytes_per_s=2 * LAYER_BYTES / (1e-3 * COPY_MS),  # a copy reads and writes
    ),
)
LINK = Link(1e-3 * ALPHA_MS / 2, LAYER_BYTES / (1e-3 * TRANSFER_MS))  # between two ranks, an all-reduce has 2 messages
# For module 14: two nodes of two ranks, with a shorter latency and a link between nodes that is three times slower.
NODES = {"world_size": 4, "node_size": 2}
TWO_LINKS = Link(
    LINK.latency_s / 8, LINK.bytes_per_s, Link(LINK.latency_s / 8, LINK.bytes_per_s / 3), NODES["node_size"]
)


def make_timelines(variants: Sequence[Variant]) -> list[Timeline]:
    """Return a timeline of each variant, with one rank that stands for all.

    If a variant gathers weights for the next forward, all timelines begin with backward and end with the next forward.
    """
    setting, link = SETTING, LINK
    if any(map(is_hybrid, variants)):
        setting, link = replace(SETTING, **NODES), TWO_LINKS
    programs = [*record(variants, setting).values()]
    first = [program.instructions[0] for program in programs]
    from_backward = any(isinstance(one, Launch) and one.phase == "step" for one in first)
    timelines = []
    for variant, program in zip(variants, programs):
        instructions = begin_with_backward(program) if from_backward else program.instructions
        simulation = simulate(instructions, link)
        timelines.append(make_timeline(variant.label, program, simulation, link))
    return timelines


def begin_with_backward(program: Program) -> list[Instruction]:
    """Return the program's instructions from backward on, followed by those before backward, of the next step."""
    first = next(i for i, one in enumerate(program.instructions) if isinstance(one, Compute) and one.kind == "backward")
    moved = sum(isinstance(one, Launch) for one in program.instructions[:first])
    rotated = [*program.instructions[first:], *program.instructions[:first]]
    count = len(program.launches)
    return [Wait((one.launch - moved) % count) if isinstance(one, Wait) else one for one in rotated]


def make_timeline(label: str, program: Program, simulation: Simulation, network: Link) -> Timeline:
    """Return a simulated step as a timeline. Waits, copies and divisions are its exposed time."""
    spans = []
    for (kind, _), same in itertools.groupby(simulation.busy, describe_kind):
        same = [*same]
        start_s, end_s = same[0].start_s, same[-1].end_s
        layers = [i for busy in same if isinstance(busy.instruction, Compute) for i in busy.instruction.param_indices]
        text = "" if len(layers) == LAYERS else join_numbers(layers)
        if end_s > start_s:
            spans.append(Span(0, kind, 1e3 * start_s, 1e3 * end_s, text))
    collectives = [
        Collective(
            0,
            launch.op,
            1e3 * start_s,
            1e3 * end_s,
            join_numbers(launch.param_indices),
            launched_ms=1e3 * launched_s,
            row=int(network.between((0, launch.last_rank)) is network.outer),
            latency_ms=1e3 * network.between((0, launch.last_rank)).seconds(launch.op, 0, launch.num_ranks),
        )
        for launch, launched_s, start_s, end_s in simulation.transfers
    ]
    memory = []
    if program.memory["parameters"] < LAYERS * LAYER_BYTES:
        memory = list_memory(simulation, "unit", "all_gather")
    elif program.memory["gradients"] < LAYERS * LAYER_BYTES:
        memory = list_memory(simulation, "bucket", "reduce_scatter")
    return Timeline(label, 1, spans, collectives, LINK, LAYERS * BACKWARD_MS, memory)


def describe_kind(busy: Busy) -> tuple[str, object]:
    """Return the kind of a period, and a value that differs from the next period's if the picture separates them."""
    if isinstance(busy.instruction, Wait):
        return "wait", busy.instruction
    kind = busy.instruction.kind
    return kind, busy.instruction.param_indices if kind == "backward" else ()


def join_numbers(layers: Sequence[int]) -> str:
    """Return the numbers of the layers as text, such as: 5 4"""
    return " ".join(map(str, layers))


def list_memory(simulation: Simulation, what: str, op: str) -> list[Span]:
    """Return when each unit of module 11 has full weights, or each bucket of module 10 is allocated.

    A unit has them from the launch of its all-gather until the last computation before the next one. A bucket is
    allocated from its first gradient until the wait for its reduce-scatter.
    """
    memory = []
    for number, (launch, launched_s, *_) in enumerate(simulation.transfers):
        if launch.op != op:
            continue
        layers = launch.param_indices
        later = [one for one in simulation.transfers[number + 1 :] if one.launch.op == op]
        again_s = [one.launched_s for one in later if one.launch.param_indices == layers] or [math.inf]
        computed = [busy for busy in simulation.busy if isinstance(busy.instruction, Compute)]
        if what == "bucket":
            [start_s] = [
                busy.end_s
                for busy in computed
                if busy.instruction.kind == "backward" and busy.instruction.param_indices == layers[:1]
            ]
            [end_s] = [busy.end_s for busy in simulation.busy if busy.instruction == Wait(number)]
        else:
            start_s = launched_s
            own = [busy for busy in computed if busy.instruction.param_indices == layers]
            end_s = max(busy.end_s for busy in own if launched_s <= busy.start_s < again_s[0])
        memory.append(Span(0, "memory", 1e3 * start_s, 1e3 * end_s, f"{what} {join_numbers(layers)}"))
    return memory
