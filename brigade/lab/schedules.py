"""The work of each variant in one training step, as a program for one rank: compute, launch, wait.

    program = make_program(variant, setting)
    program.launches            the collectives, in launch order
    simulate(program, link)     when each instruction runs, on a link

For each variant, a few lines repeat its launch rule as the instructions of one rank. All ranks are assumed to do the
same at the same time, so no collective waits for another rank to launch it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from brigade.lab.ladder import FP32_BYTES, Variant
from brigade.lab.plan_config import Buckets, Setting, load_planner
from brigade.rank.emulated_link import Link

LIVE_BUCKETS = 2  # the default of module 10's max_live_buckets


@dataclass(frozen=True)
class Compute:
    """An instruction that keeps the processor busy for some seconds.

    `kind` is "forward", "backward", "step" for the optimizer's computation, or "copy" for copies and divisions of
    gradients. `param_indices` are the parameters whose gradients or outputs are computed, if they are known.
    """

    kind: str
    seconds: float
    param_indices: Sequence[int] = ()


@dataclass(frozen=True)
class Launch:
    """An instruction that launches a collective on a buffer of `nbytes` bytes and does not wait.

    The buffer contains the parameters `param_indices`.
    """

    op: str
    nbytes: int
    param_indices: Sequence[int]


@dataclass(frozen=True)
class Wait:
    """An instruction that waits until the launch with this number is complete."""

    launch: int


class Program:
    """A rank's instructions for one step, which the rules below assemble."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.instructions: list[Compute | Launch | Wait] = []
        self.launches: list[Launch] = []

    def compute(self, kind: str, seconds: float, param_indices: Sequence[int] = ()) -> None:
        self.instructions.append(Compute(kind, seconds, param_indices))

    def move(self, nbytes: float) -> None:
        """Read and write memory. `nbytes` counts the bytes read plus the bytes written."""
        self.compute("copy", nbytes / self.setting.machine.copy_bytes_per_s)

    def launch(self, op: str, nbytes: int, param_indices: Sequence[int]) -> int:
        """Launch a collective. Return its number, for `wait`."""
        self.instructions.append(Launch(op, nbytes, param_indices))
        self.launches.append(self.instructions[-1])
        return len(self.launches) - 1

    @property
    def computation_s(self) -> float:
        """The time of the step's own computation. Copies belong to communication."""
        return sum(one.seconds for one in self.instructions if isinstance(one, Compute) and one.kind != "copy")

    def wait(self, *launched: int) -> None:
        self.instructions += map(Wait, launched)

    def add_backward(self, op: str = "", buckets: Buckets | None = None, copies: int = 0) -> list[int]:
        """Run backward. Launch each bucket when its last gradient is ready, after copying it `copies` times.

        Return the numbers of the launches; without buckets, the list is empty.
        """
        complete = {bucket[-1]: (nbytes, bucket) for bucket, nbytes in buckets or ()}
        launched = []
        for i in range(len(self.setting.parameters))[::-1]:
            self.compute("backward", self.setting.machine.backward_s[i], [i])
            if i in complete:
                self.move(2 * copies * complete[i][0])
                launched.append(self.launch(op, *complete[i]))
        return launched

    def add_step(self, part: float = 1.0, itemsize: int | None = None) -> None:
        """Run the optimizer on the fraction `part` of all elements.

        The optimizer reads gradients, and reads and writes weights and state.
        """
        touched = 2 + 1 + 2 * self.setting.optimizer.values
        nbytes = part * self.setting.numel * touched * (itemsize or self.setting.itemsize)
        self.compute("step", nbytes / self.setting.machine.step_bytes_per_s)


def run_forward(program: Program) -> None:
    program.compute("forward", program.setting.machine.forward_s)


def run_prefetched_forward(program: Program) -> None:
    """Wait for each bucket's weights just before they are used. The previous step launches the all-gathers."""
    machine = program.setting.machine
    buckets = [(param_indices[::-1], nbytes) for param_indices, nbytes in program.setting.layout_buckets][::-1]
    for number, (param_indices, _) in zip(gather_weights(program, buckets), buckets):
        share = sum(machine.backward_s[i] for i in param_indices) / sum(machine.backward_s)
        program.wait(number)
        program.compute("forward", share * machine.forward_s, param_indices)


def gather_weights(program: Program, buckets: Iterable[tuple[list[int], int]]) -> list[int]:
    """Launch the all-gathers of weights. Return the numbers of the launches.

    `buckets` contains the parameters of each bucket, by index, and its bytes in fp32.
    """
    itemsize = program.setting.itemsize
    return [program.launch("all_gather", n * itemsize // FP32_BYTES, indices) for indices, n in buckets]


def schedule_naive(program: Program) -> None:
    program.add_backward()
    for i, nbytes in enumerate(program.setting.nbytes):
        program.wait(program.launch("all_reduce", nbytes, [i]))
        program.move(2 * nbytes)  # to divide
    program.add_step()


def schedule_flat(program: Program) -> None:
    nbytes = sum(program.setting.nbytes)
    program.add_backward()
    program.move(2 * nbytes)  # into the flat tensor
    program.wait(program.launch("all_reduce", nbytes, range(len(program.setting.parameters))))
    program.move(4 * nbytes)  # to divide and to copy back
    program.add_step()


def schedule_overlapped(program: Program) -> None:
    nbytes = program.setting.nbytes
    backwards = range(len(nbytes))[::-1]
    launched = program.add_backward("all_reduce", Buckets([[i] for i in backwards], [nbytes[i] for i in backwards]))
    for number, i in zip(launched, backwards):
        program.wait(number)
        program.move(2 * nbytes[i])
    program.add_step()


def schedule_bucketed(program: Program) -> None:
    average_copies(program, program.setting.capped_buckets, 4)  # to divide and to copy back
    program.add_step()


def average_copies(program: Program, buckets: Buckets, moves: int) -> None:
    """Copy and all-reduce the buckets during backward.

    Afterwards, wait for each bucket and read or write its bytes `moves` times.
    """
    for number, (_, nbytes) in zip(program.add_backward("all_reduce", buckets, copies=1), buckets):
        program.wait(number)
        program.move(moves * nbytes)


def schedule_buffered(program: Program) -> None:
    program.wait(*program.add_backward("all_reduce", program.setting.layout_buckets))
    program.add_step()


def schedule_coalesced(program: Program) -> None:
    """Schedule modules 6 and 7 with one bucket per group.

    A group is gathered when half of the gradients of the next group are ready.
    """
    buckets = [*program.setting.layout_buckets]
    reduced: list[int] = []
    gathered: list[int] = []

    def gather() -> None:
        index = len(gathered)
        program.wait(reduced[index])
        param_indices, nbytes = buckets[index]
        gathered.append(program.launch("all_gather", nbytes, param_indices))

    for param_indices, nbytes in buckets:
        for ready, i in enumerate(param_indices, 1):
            program.compute("backward", program.setting.machine.backward_s[i], [i])
            if 2 * ready >= len(param_indices) and len(gathered) < len(reduced):
                gather()
        reduced.append(program.launch("reduce_scatter", nbytes, param_indices))
    gather()
    program.wait(*gathered)
    program.add_step()


def schedule_zero(program: Program) -> None:
    buckets = program.setting.layout_buckets
    program.wait(*program.add_backward("reduce_scatter", buckets))
    program.add_step(1 / program.setting.world_size, FP32_BYTES)
    program.wait(*gather_weights(program, buckets))


def schedule_prefetched(program: Program) -> None:
    """Schedule backward and the optimizer step of module 9. Its next forward waits for the all-gathers."""
    program.wait(*program.add_backward("reduce_scatter", program.setting.layout_buckets))
    program.add_step(1 / program.setting.world_size, FP32_BYTES)


def schedule_grad_shards(program: Program) -> None:
    """Schedule module 10. Before the rank launches bucket i, it waits for bucket i - LIVE_BUCKETS."""
    buckets = program.setting.layout_buckets
    reduced: list[int] = []
    for param_indices, nbytes in buckets:
        for i in param_indices:
            program.compute("backward", program.setting.machine.backward_s[i], [i])
        program.move(2 * nbytes)  # into the bucket
        program.wait(*reduced[-LIVE_BUCKETS : len(reduced) - LIVE_BUCKETS + 1])
        reduced.append(program.launch("reduce_scatter", nbytes, param_indices))
    program.wait(*reduced[-LIVE_BUCKETS:])
    program.add_step(1 / program.setting.world_size, FP32_BYTES)
    program.wait(*gather_weights(program, buckets))


def schedule_sharded(program: Program) -> None:
    """Schedule module 8's `ShardedOptimizer` on a plain model."""
    program.add_backward()
    launch_largest_first(program, "reduce")
    step_on_owners(program)


def step_on_owners(program: Program) -> None:
    """Step on the parameters that the fullest rank owns, and broadcast each parameter."""
    program.add_step(max(program.setting.owned_bytes) / sum(program.setting.nbytes))
    launch_largest_first(program, "broadcast")


def launch_largest_first(program: Program, op: str) -> None:
    """Launch a collective for each parameter, the largest first. Wait for all of them."""
    largest_first = sorted(enumerate(program.setting.nbytes), key=lambda item: -item[1])
    program.wait(*[program.launch(op, nbytes, [i]) for i, nbytes in largest_first])


def schedule_torch_ddp(program: Program) -> None:
    average_copies(program, program.setting.torch_buckets, 2)  # torch divides while it copies
    program.add_step()


def schedule_torch_zero(program: Program) -> None:
    average_copies(program, program.setting.torch_buckets, 2)
    step_on_owners(program)


def schedule_computation(program: Program) -> None:
    program.add_backward()
    program.add_step()


def run_sharded_forward(program: Program) -> None:
    run_units(program, backward=False)


def schedule_fully_sharded(program: Program) -> None:
    program.wait(*run_units(program, backward=True))
    program.add_step(1 / program.setting.world_size)


def run_units(program: Program, backward: bool) -> list[int]:
    """Run a pass of module 11 with `prefetch=1` and its own `plan_schedule`. Return the numbers of the reductions."""
    setting, machine = program.setting, program.setting.machine
    with load_planner("plan_schedule") as plan_schedule:
        actions = plan_schedule(len(setting.units), 1, backward)
    total_s = sum(machine.backward_s) if backward else machine.forward_s
    shares = [sum(machine.backward_s[i] for i in unit) / sum(machine.backward_s) for unit in setting.units]
    kind = "backward" if backward else "forward"
    computations = [Compute(kind, share * total_s, unit) for share, unit in zip(shares, setting.units)]
    return perform_actions(program, actions, setting.unit_bytes, computations)


def perform_actions(
    program: Program, actions: Iterable[tuple[str, int]], unit_bytes: Sequence[float], computations: Sequence[Compute]
) -> list[int]:
    """Perform the actions of a pass of module 11. Return the numbers of the reductions.

    `unit_bytes` are the bytes of each unit's weights, and `computations` what each unit computes in this pass. Before a
    reduction is launched, the previous one must be complete.
    """
    gathers, reductions = {}, []
    for action, unit in actions:
        if action != "compute" and not unit_bytes[unit]:
            continue  # an empty root
        if action == "gather":
            gathers[unit] = program.launch("all_gather", unit_bytes[unit], computations[unit].param_indices)
        elif action == "reduce":
            program.wait(*reductions[-1:])
            program.move(2 * unit_bytes[unit])  # into the flat tensor
            reductions.append(program.launch("reduce_scatter", unit_bytes[unit], computations[unit].param_indices))
        else:
            if unit in gathers:  # during backward, the root is still gathered
                program.wait(gathers[unit])
            program.instructions.append(computations[unit])
    return reductions


@dataclass(frozen=True)
class Rule:
    """The launch rule of a variant, and where the variant keeps gradients, parameters and optimizer state.

    `grads_in_buffer` and `params_in_buffer` refer to padded buffers. `state` is "everywhere" if every rank has all of
    the state, "parameters" if each rank has the state of some whole parameters, "shards" if it has the state of its
    shard of each bucket, and "units" if parameters and gradients are sharded too. `forward` runs before `run`.
    """

    run: Callable[[Program], None]
    forward: Callable[[Program], None] = run_forward
    grads_in_buffer: bool = False
    params_in_buffer: bool = False
    state: str = "everywhere"
    grads_in_shards: bool = False
    grad_copies: int = 1  # torch DDP keeps its buckets in addition to the gradients


RULES = {
    ("NaiveDDP", None): Rule(schedule_naive),
    ("FlatDDP", None): Rule(schedule_flat),
    ("OverlappedDDP", None): Rule(schedule_overlapped),
    ("BucketedDDP", None): Rule(schedule_bucketed),
    ("BufferedDDP", None): Rule(schedule_buffered, grads_in_buffer=True),
    ("CoalescedDDP", None): Rule(schedule_coalesced, grads_in_buffer=True, params_in_buffer=True),
    ("CachedDDP", None): Rule(schedule_coalesced, grads_in_buffer=True, params_in_buffer=True),
    (None, "ShardedOptimizer"): Rule(schedule_sharded, state="parameters"),
    ("CachedDDP", "ZeroOptimizer"): Rule(schedule_zero, grads_in_buffer=True, params_in_buffer=True, state="shards"),
    ("PrefetchedDDP", "PrefetchedZeroOptimizer"): Rule(
        schedule_prefetched, run_prefetched_forward, grads_in_buffer=True, params_in_buffer=True, state="shards"
    ),
    ("GradShardedDDP", "Zero2Optimizer"): Rule(
        schedule_grad_shards, grads_in_buffer=True, grads_in_shards=True, params_in_buffer=True, state="shards"
    ),
    ("FullyShardedDDP", None): Rule(schedule_fully_sharded, run_sharded_forward, state="units"),
    ("DistributedDataParallel", None): Rule(schedule_torch_ddp, grad_copies=2),
    ("DistributedDataParallel", "ZeroRedundancyOptimizer"): Rule(
        schedule_torch_zero, state="parameters", grad_copies=2
    ),
    (None, None): Rule(schedule_computation),
}


def get_class_names(variant: Variant) -> tuple[str | None, str | None]:
    """Return the names under which `RULES` lists a variant."""
    return variant.wrapper and variant.wrapper[1], variant.optimizer and variant.optimizer[1]


def get_rule(variant: Variant) -> Rule:
    """Return the rule for a variant's classes. Raise KeyError if there is none."""
    return RULES[get_class_names(variant)]


def select_with_rule(variants: Iterable[Variant]) -> list[Variant]:
    """Return the variants that have a rule; others are not planned."""
    return [variant for variant in variants if get_class_names(variant) in RULES]


def make_program(variant: Variant, setting: Setting) -> Program:
    """Return the program of a variant's step."""
    program = Program(setting)
    rule = get_rule(variant)
    rule.forward(program)
    rule.run(program)
    return program


class Busy(NamedTuple):
    """A period in which the rank computes or waits, in seconds. A wait for a complete collective takes no time."""

    instruction: Compute | Wait
    start_s: float
    end_s: float


class Transfer(NamedTuple):
    """A collective that was launched at `launched_s` and occupied the link from `start_s` to `end_s`."""

    launch: Launch
    launched_s: float
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Simulation:
    """The result of `simulate`: when the rank computes and waits, and when the link carries each collective.

    Times are in seconds since the start.
    """

    busy: list[Busy]
    transfers: list[Transfer]
    end_s: float


def simulate(program: Program, link: Link) -> Simulation:
    """Return when each instruction of the program runs.

    As in `emulated_link.py`, a collective starts when all ranks have launched it (here, at the same time) and the link
    is free. It occupies the link for its latency plus its bytes divided by the bandwidth.
    """
    machine, world_size = program.setting.machine, program.setting.world_size
    now, link_free = 0.0, 0.0
    busy: list[Busy] = []
    transfers: list[Transfer] = []
    for instruction in program.instructions:
        start = now
        if isinstance(instruction, Launch):
            now += machine.launch_s + instruction.nbytes * machine.launch_s_per_byte
            begin = max(now, link_free)
            link_free = begin + link.seconds(instruction.op, instruction.nbytes, world_size)
            transfers.append(Transfer(instruction, now, begin, link_free))
            continue
        if isinstance(instruction, Compute):
            now += instruction.seconds
        elif now < transfers[instruction.launch].end_s:
            now = transfers[instruction.launch].end_s + machine.wake_s
        busy.append(Busy(instruction, start, now))
    return Simulation(busy, transfers, now)
