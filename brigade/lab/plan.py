"""`brigade plan`: predict the cost of a training step with each variant, from shapes alone.

    steps = plan(record(variants, setting), machine, link)

A rank computes for as long as its floating-point operations and its memory traffic take, and launches collectives as
the variant's own code does (`program.py`). A collective starts when all earlier ones are complete, and takes as long as
NCCL's tuner expects (`nccl.py`). `error_bars.py` says how wrong plans of published runs are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from brigade.course.table.modules import TRAINING_MODULES
from brigade.lab import nccl
from brigade.lab.error_bars import LARGE_BYTES
from brigade.lab.ladder import PLANNED_TORCH, TORCH_DDP, Variant, get_variant
from brigade.lab.nccl import AMPERE, BLACKWELL, HOPPER, PCIE3, PCIE4, Fabric
from brigade.lab.program import Machine, Network, Program, simulate
from brigade.ranks.events import count_sent_bytes

if TYPE_CHECKING:
    from rich.table import Table

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp8": "bfloat16"}  # of parameters, by that of matrix products
FABRICS: dict[str, Fabric] = {
    "nvlink3": AMPERE,
    "nvlink4": HOPPER,
    "nvlink5": BLACKWELL,
    "pcie3": PCIE3,
    "pcie4": PCIE4,
}
CARDS = {"100gbe": 100.0, "10gbe": 10.0}  # in Gbit/s, in one direction


@dataclass(frozen=True)
class PlannedStep:
    """The predicted step of one variant. `outer_bytes` are those of `sent_bytes` that go to other nodes.

    A ring over r ranks of each node sends one of r messages to another node. `exposed_s` is how much longer the step
    takes than this variant's own computation, slowed down by collectives under way. `own_s` is its computation alone.
    """

    label: str
    program: Program
    step_s: float
    exposed_s: float
    sent_bytes: float
    outer_bytes: float
    own_s: float

    @property
    def communication_share(self) -> float:
        """Which part of the step communication costs: waits, copies, and slower computation."""
        return 1 - min(self.own_s / self.step_s, 1.0)

    @property
    def memory_bytes(self) -> int:
        """The bytes that rank 0 keeps between two steps."""
        return sum(self.program.memory.values())


def make_machine(
    flops: Sequence[float],
    flops_per_s: float,
    memory_bytes_per_s: float,
    backward_s: float | None = None,
    recomputed: Sequence[float] = (),
    contention: float = 0.0,
) -> Machine:
    """Return the speed of a rank that performs `flops` during forward, and twice as many during backward.

    If backward recomputes activations, it also performs the `recomputed` ones. If `backward_s` is given, backward takes
    that long, and its parts are proportional to their operations.
    """
    backward = [2 * own + again for own, again in zip_longest(flops, recomputed, fillvalue=0.0)]
    backward_s = sum(backward) / flops_per_s if backward_s is None else backward_s
    forward_s = backward_s * sum(flops) / sum(backward)
    shares = tuple(backward_s * part / sum(backward) for part in backward)
    return Machine(forward_s, shares, memory_bytes_per_s, memory_bytes_per_s, contention)


def list_variants() -> list[Variant]:
    """Return all variants: first the course's, in the order of the modules, then torch's."""
    names = [(entry, name) for entry in TRAINING_MODULES for name in [*filter(None, [entry.alone]), ""]]
    return [*(get_variant(*name) for name in names), *PLANNED_TORCH]


def plan(programs: dict[str, Program | str], machine: Machine, network: Network) -> list[PlannedStep]:
    """Return the predicted step of each program. Leave out the variants without a program."""
    steps = []
    for label, program in programs.items():
        if isinstance(program, str):
            continue
        sent = outer = 0.0
        for launch in program.launches:
            nbytes = count_sent_bytes(launch.op, launch.nbytes, launch.num_ranks)
            num_nodes = network.count_nodes(launch.ranks)
            sent += nbytes
            outer += nbytes * num_nodes / launch.num_ranks if num_nodes > 1 else 0
        (step_s, slowed_s), (own_s, _) = (simulate(program.instructions, machine, one) for one in (network, None))
        exposed_s = max(0.0, step_s - slowed_s - own_s)  # rounding could make it negative
        steps.append(PlannedStep(label, program, step_s, exposed_s, sent, outer, own_s))
    return steps


def format_size(number: float) -> str:
    """Return a number as text with one decimal place, or with none if it is 100 or more."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def make_plan_table(
    steps: Sequence[PlannedStep], title: str, has_nodes: bool, bounds: Sequence[tuple[float, float]] = ()
) -> Table:
    """Return a table with a row for each variant, at most 80 columns wide.

    If there are nodes, it shows the bytes sent inside a node and to other nodes, instead of launches and all bytes.
    `bounds` are the ranges of the steps, in seconds.
    """
    from brigade.lab.plots import make_empty_table

    torch_s = next(step.step_s for step in steps if step.label == TORCH_DDP.label)
    time_unit, seconds = ("s", 1.0) if torch_s >= 1 else ("ms", 1e-3)
    digits = 3 if torch_s / seconds < 10 else 1 if torch_s / seconds < 1000 else 0
    size_unit, size = ("GB", 1e9) if max(step.memory_bytes for step in steps) >= 1e10 else ("MB", 1e6)
    headings = [f"step\n{time_unit}", *(["range"] if bounds else []), "ratio to\ntorch DDP", f"exposed\n{time_unit}"]
    sizes = ["inside", "between", "memory"] if has_nodes else ["sent", "memory"]
    headings += [*(["launches"] if not has_nodes else []), *(f"{what}\n{size_unit}" for what in sizes)]
    table = make_empty_table(title, "variant", headings)
    of_range = 1 if digits > 1 else 0
    for step, (low_s, high_s) in zip(steps, bounds or [(0.0, 0.0)] * len(steps), strict=True):
        sent = [step.sent_bytes - step.outer_bytes, step.outer_bytes] if has_nodes else [step.sent_bytes]
        table.add_row(
            step.label,
            f"{step.step_s / seconds:,.{digits}f}",
            *([f"{low_s / seconds:,.{of_range}f}-{high_s / seconds:,.{of_range}f}"] if bounds else []),
            f"{step.step_s / torch_s:.2f}",
            f"{step.exposed_s / seconds:,.{digits}f}",
            *([f"{len(step.program.launches):,}"] if not has_nodes else []),
            *(format_size(nbytes / size) for nbytes in (*sent, step.memory_bytes)),
        )
    return table


@dataclass(frozen=True)
class Assumption:
    """An assumption of a plan, what replaces it to see how much depends on it, and the machine and network with it."""

    text: str
    machine: Machine
    network: Network


@dataclass(frozen=True)
class SlowSmallCollectives:
    """A network on which collectives on buffers of less than 256 MiB take twice as long as on another one."""

    network: nccl.Network

    def count_nodes(self, ranks: Collection[int]) -> int:
        """Return the number of nodes of these ranks."""
        return self.network.count_nodes(ranks)

    def seconds(self, op: str, nbytes: float, num_ranks: int, num_nodes: int) -> float:
        """Return how many seconds a collective takes."""
        return self.network.seconds(op, nbytes, num_ranks, num_nodes) * (2 if nbytes < LARGE_BYTES else 1)


def list_assumptions(
    machine: Machine, network: nccl.Network, utilisations: tuple[float, float] | None
) -> list[Assumption]:
    """Return changes of a plan's assumptions. `utilisations` are those of the plan, and the lowest published."""
    slow_memory = replace(
        machine, step_bytes_per_s=machine.step_bytes_per_s / 2, copy_bytes_per_s=machine.copy_bytes_per_s / 2
    )
    changes = [
        Assumption("no slower computation during communication", replace(machine, contention=0.0), network),
        Assumption("half the memory bandwidth", slow_memory, network),
        Assumption("collectives of less than 256 MiB twice as long", machine, SlowSmallCollectives(network)),
    ]
    if utilisations:
        typical, low = utilisations
        seconds = tuple(one * typical / low for one in machine.backward_s)
        slow = replace(machine, forward_s=machine.forward_s * typical / low, backward_s=seconds)
        changes.append(Assumption(f"a utilisation of {low:.0%} instead of {typical:.0%}", slow, network))
    if network.card_gbps:
        half = replace(network, card_gbps=network.card_gbps / 2)
        changes.append(Assumption("half the rate of the network cards", machine, half))
    if network.ranks_per_node > 1:
        half = replace(network, fabric=replace(network.fabric, gbps=network.fabric.gbps / 2))
        changes.append(Assumption("half the rate inside nodes", machine, half))
    return changes


def rank_assumptions(step: PlannedStep, assumptions: Sequence[Assumption]) -> list[tuple[float, str]]:
    """Return how much each change changes a step, relative to its time, and its text. The largest comes first."""
    changes = [
        (simulate(step.program.instructions, one.machine, one.network).step_s / step.step_s - 1, one.text)
        for one in assumptions
    ]
    return sorted(changes, key=lambda change: -abs(change[0]))
