"""The α–β model of a link in two settings with few parameters, for sliders.

    simulate_buckets(link, 8, bucket_bytes=25e6)               overlap: bucket size against latency
    simulate_prefetch(plan_schedule, link, 8, prefetch=1)      module 11: memory against exposed communication

`link` is an `emulated_link.Link`: α is its `latency_s`, in seconds per message, and β its `bytes_per_s`. Copies take no
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from brigade.lab.plan_config import OPTIMIZERS, Machine, Setting
from brigade.lab.schedules import Compute, Launch, Program
from brigade.rank.emulated_link import Link

PlanSchedule = Callable[[int, int, bool], Sequence[tuple[str, int]]]

GRAD_BYTES = 400e6  # 100 million parameters in fp32
BACKWARD_S = 0.1
NUM_UNITS = 5  # of module 11: the root and four blocks
BLOCK_BYTES = 100e6
ROOT_BYTES = 25e6
FORWARD_S = 0.05


class Transfer(NamedTuple):
    """A collective that was launched at `launched_s` and occupied the link from `start_s` to `end_s`."""

    launch: Launch
    launched_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class BucketStep:
    """A backward with an all-reduce for each of `num_buckets` buckets, until the last one is complete."""

    num_buckets: int
    backward_s: float
    transfers: list[Transfer]
    end_s: float

    @property
    def exposed_s(self) -> float:
        """How much longer the step takes than without communication."""
        return self.end_s - self.backward_s


@dataclass(frozen=True)
class Allocation:
    """The whole weights of one unit have memory from `start_s` to `end_s`."""

    unit: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PrefetchStep:
    """Forward and backward of module 11. `computed` contains (unit, start, end), forward first; times in seconds."""

    computed: list[tuple[int, float, float]]
    transfers: list[Transfer]
    allocations: list[Allocation]
    peak_bytes: float
    compute_s: float
    end_s: float

    @property
    def exposed_s(self) -> float:
        """How much longer the step takes than without communication."""
        return self.end_s - self.compute_s


def make_program(world_size: int) -> Program:
    """Return an empty program on a machine whose memory takes no time."""
    machine = Machine(0.0, (), step_bytes_per_s=math.inf, copy_bytes_per_s=math.inf)
    return Program(Setting([], world_size, bucket_mb=0.0, optimizer=OPTIMIZERS["sgd"], machine=machine))


def replay(program: Program, link: Link) -> tuple[list[tuple[float, float]], list[Transfer], float]:
    """Return when the rank computes, when the link carries each collective, and the end."""
    now, link_free = 0.0, 0.0
    computed: list[tuple[float, float]] = []
    transfers: list[Transfer] = []
    for instruction in program.instructions:
        if isinstance(instruction, Compute):
            computed.append((now, now + instruction.seconds))
            now += instruction.seconds
        elif isinstance(instruction, Launch):
            start_s = max(now, link_free)
            link_free = start_s + link.seconds(instruction.op, instruction.nbytes, program.setting.world_size)
            transfers.append(Transfer(instruction, now, start_s, link_free))
        else:
            now = max(now, transfers[instruction.launch].end_s)
    return computed, transfers, now


def perform_actions(
    program: Program, actions: Sequence[tuple[str, int]], unit_bytes: Sequence[float], compute_s: Sequence[float]
) -> list[int]:
    """Perform the actions of a pass of module 11, with one reduction on its way. Return the numbers of the reductions.

    `unit_bytes` and `compute_s` are the bytes of each unit's weights, and the seconds that it computes in this pass.
    """
    gathers, reductions = {}, []
    for action, unit in actions:
        if action == "gather":
            gathers[unit] = program.launch("all_gather", unit_bytes[unit])
        elif action == "reduce":
            program.wait(*reductions[-1:])
            reductions.append(program.launch("reduce_scatter", unit_bytes[unit]))
        else:
            if unit in gathers:  # backward has the root from forward
                program.wait(gathers[unit])
            program.compute(compute_s[unit])
    return reductions


def simulate_buckets(
    link: Link,
    world_size: int,
    bucket_bytes: float,
    grad_bytes: float = GRAD_BYTES,
    backward_s: float = BACKWARD_S,
) -> BucketStep:
    """Simulate a backward with K equal buckets of at most `bucket_bytes`, which become ready at equal distances."""
    num_buckets = math.ceil(grad_bytes / bucket_bytes)
    program = make_program(world_size)
    for _ in range(num_buckets):
        program.compute(backward_s / num_buckets)
        program.launch("all_reduce", grad_bytes / num_buckets)
    program.wait(*range(num_buckets))
    _, transfers, end_s = replay(program, link)
    return BucketStep(num_buckets, backward_s, transfers, end_s)


def simulate_prefetch(
    plan_schedule: PlanSchedule,
    link: Link,
    world_size: int,
    prefetch: int,
    num_units: int = NUM_UNITS,
    block_bytes: float = BLOCK_BYTES,
    root_bytes: float = ROOT_BYTES,
    forward_s: float = FORWARD_S,
) -> PrefetchStep:
    """Simulate forward and backward of module 11 with its `plan_schedule`.

    All units but the root, which is unit 0, have equal sizes; none is empty. Units compute in proportion to their
    bytes, and backward
    takes twice as long as forward, which takes `forward_s`. A unit has memory from the launch of its gather until it
    has computed; the root keeps its memory until the end of backward.
    """
    unit_bytes = [root_bytes] + [block_bytes] * (num_units - 1)
    shares = [nbytes / sum(unit_bytes) for nbytes in unit_bytes]
    program = make_program(world_size)
    plans = [plan_schedule(num_units, prefetch, backward) for backward in (False, True)]
    for actions, pass_s in zip(plans, (forward_s, 2 * forward_s)):
        reductions = perform_actions(program, actions, unit_bytes, [share * pass_s for share in shares])
    program.wait(*reductions)
    spans, transfers, end_s = replay(program, link)
    next_span, next_transfer = iter(spans), iter(transfers)
    computed, allocations, begins_s = [], [], {}
    for backward, actions in enumerate(plans):
        for action, unit in actions:
            if action == "compute":
                computed.append((unit, *next(next_span)))
                if unit or backward:
                    allocations.append(Allocation(unit, begins_s.pop(unit), computed[-1][-1]))
            else:
                transfer = next(next_transfer)
                if action == "gather":
                    begins_s[unit] = transfer.launched_s
    peak_bytes = max(
        sum(unit_bytes[other.unit] for other in allocations if other.start_s <= one.start_s < other.end_s)
        for one in allocations
    )
    return PrefetchStep(computed, transfers, allocations, peak_bytes, 3 * forward_s, end_s)
