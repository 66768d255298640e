"""The α–β model of a link in two settings with few parameters, for the sliders of notebooks and pages.

    simulate_buckets(link, 8, bucket_bytes=25e6)               overlap: bucket size against latency
    simulate_prefetch(plan_schedule, link, 8, prefetch=1)      module 11: memory against exposed communication

`link` is an `emulated_link.Link`: α is its `latency_s`, in seconds per message, and β its `bytes_per_s`. Copies take no
time. `site/_static/cost_model.js` is the same model in a browser, and `tests/toolkit/test_browser.py` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from brigade.lab.program import Compute, Instruction, Launch, Transfer, Wait, simulate
from brigade.rank.emulated_link import Link

PlanSchedule = Callable[[int, int, bool], Sequence[tuple[str, int]]]

GRAD_BYTES = 400e6  # 100 million parameters in fp32
BACKWARD_S = 0.1
NUM_UNITS = 5  # of module 11: the root and four blocks
BLOCK_BYTES = 100e6
ROOT_BYTES = 25e6
FORWARD_S = 0.05


@dataclass(frozen=True)
class BucketStep:
    """A backward pass with an all-reduce for each of `num_buckets` buckets, until the last all-reduce is complete."""

    num_buckets: int
    backward_s: float
    transfers: list[Transfer]
    end_s: float

    @property
    def exposed_s(self) -> float:
        """The time by which communication lengthens the step."""
        return self.end_s - self.backward_s


@dataclass(frozen=True)
class Allocation:
    """The time from `start_s` to `end_s` in which the full weights of one unit are allocated."""

    unit: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class PrefetchStep:
    """Forward and backward of module 11. `computed` contains (unit, start, end) in seconds, for forward first."""

    computed: list[tuple[int, float, float]]
    transfers: list[Transfer]
    allocations: list[Allocation]
    peak_bytes: float
    compute_s: float
    end_s: float

    @property
    def exposed_s(self) -> float:
        """The time by which communication lengthens the step."""
        return self.end_s - self.compute_s


def simulate_buckets(
    link: Link,
    world_size: int,
    bucket_bytes: float,
    grad_bytes: float = GRAD_BYTES,
    backward_s: float = BACKWARD_S,
) -> BucketStep:
    """Simulate a backward pass whose equal buckets of at most `bucket_bytes` become ready at equal intervals."""
    num_buckets = math.ceil(grad_bytes / bucket_bytes)
    instructions: list[Instruction] = []
    for bucket in range(num_buckets):
        instructions.append(Compute("backward", backward_s / num_buckets, [bucket]))
        instructions.append(Launch("all_reduce", grad_bytes / num_buckets, [bucket]))
    simulation = simulate([*instructions, *map(Wait, range(num_buckets))], link, world_size)
    return BucketStep(num_buckets, backward_s, simulation.transfers, simulation.end_s)


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

    All units except the root, which is unit 0, have equal sizes; none is empty. The computation time of a unit is
    proportional to its bytes, and backward takes twice as long as forward. The weights of a unit are allocated from the
    launch of their all-gather until the unit has computed. The root's weights stay allocated until the end of backward.
    """
    unit_bytes = [root_bytes] + [block_bytes] * (num_units - 1)
    instructions: list[Instruction] = []
    gathers: dict[int, int] = {}  # unit -> number of the launch
    reductions: list[int] = []
    num_launches = 0
    for backward, pass_s in ((False, forward_s), (True, 2 * forward_s)):
        for action, unit in plan_schedule(num_units, prefetch, backward):
            if action == "compute":
                share = unit_bytes[unit] / sum(unit_bytes)
                instructions += [Wait(gathers[unit])] if unit in gathers else []  # the root may still be gathered
                instructions.append(Compute("backward" if backward else "forward", pass_s * share, [unit]))
                continue
            if action == "reduce":  # when the previous reduction is complete
                instructions += map(Wait, reductions[-1:])
                reductions.append(num_launches)
            else:
                gathers[unit] = num_launches
            op = "all_gather" if action == "gather" else "reduce_scatter"
            instructions.append(Launch(op, unit_bytes[unit], [unit]))
            num_launches += 1
    simulation = simulate([*instructions, *map(Wait, reductions[-1:])], link, world_size)
    computed = [
        (busy.instruction.param_indices[0], busy.start_s, busy.end_s)
        for busy in simulation.busy
        if isinstance(busy.instruction, Compute)
    ]
    allocations = []
    for transfer in simulation.transfers:
        if transfer.launch.op == "all_gather":
            [unit] = transfer.launch.param_indices
            ends_s = [end_s for other, start_s, end_s in computed if other == unit and start_s >= transfer.end_s]
            allocations.append(Allocation(unit, transfer.launched_s, ends_s[0] if unit else ends_s[-1]))
    peak_bytes = max(
        sum(unit_bytes[other.unit] for other in allocations if other.start_s <= one.start_s < other.end_s)
        for one in allocations
    )
    return PrefetchStep(computed, simulation.transfers, allocations, peak_bytes, 3 * forward_s, simulation.end_s)
