"""What each variant does in one training step, as a program of one rank: compute, launch, wait.

    program = make_program(variant, setting)
    program.launches            the collectives, in launch order
    simulate(program, link)     seconds until the end, on a link

Each variant's launch rule is repeated here as the instructions of one rank, in a few lines. All ranks are assumed to do
the same at the same time, so a collective starts when this rank launches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from brigade.lab.ladder import FP32_BYTES, Variant
from brigade.lab.plan_config import Buckets, Setting, load_planner
from brigade.rank.emulated_link import Link

LIVE_BUCKETS = 2  # the default of module 10's max_live_buckets


@dataclass(frozen=True)
class Compute:
    """Keep the processor busy for some seconds."""

    seconds: float


@dataclass(frozen=True)
class Launch:
    """Launch a collective on a buffer of `nbytes`, and continue."""

    op: str
    nbytes: int


@dataclass(frozen=True)
class Wait:
    """Wait until the launch with this number is complete."""

    launch: int


class Program:
    """A rank's instructions for one step, which the rules below assemble."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.instructions: list[Compute | Launch | Wait] = []
        self.launches: list[Launch] = []

    def compute(self, seconds: float) -> None:
        self.instructions.append(Compute(seconds))

    def move(self, nbytes: float) -> None:
        """Read and write memory: `nbytes` counts both."""
        self.compute(nbytes / self.setting.machine.copy_bytes_per_s)

    def launch(self, op: str, nbytes: int) -> int:
        """Launch a collective. Return its number, for `wait`."""
        self.instructions.append(Launch(op, nbytes))
        self.launches.append(self.instructions[-1])
        return len(self.launches) - 1

    def wait(self, *launched: int) -> None:
        self.instructions += map(Wait, launched)

    def add_backward(self, op: str = "", buckets: Buckets | None = None, copies: int = 0) -> list[int]:
        """Run backward; launch each bucket when its last gradient is ready, after copying it `copies` times.

        Return the numbers of the launches. Without buckets there are none.
        """
        complete = (
            {bucket[-1]: nbytes for bucket, nbytes in zip(buckets.param_indices, buckets.nbytes)} if buckets else {}
        )
        launched = []
        for i in range(len(self.setting.parameters))[::-1]:
            self.compute(self.setting.machine.backward_s[i])
            if i in complete:
                self.move(2 * copies * complete[i])
                launched.append(self.launch(op, complete[i]))
        return launched

    def add_step(self, part: float = 1.0, itemsize: int | None = None) -> None:
        """Run the optimizer on a part of all elements: it reads gradients, and reads and writes weights and state."""
        touched = 2 + 1 + 2 * self.setting.optimizer.values
        nbytes = part * self.setting.numel * touched * (itemsize or self.setting.itemsize)
        self.compute(nbytes / self.setting.machine.step_bytes_per_s)


def run_forward(program: Program) -> None:
    program.compute(program.setting.machine.forward_s)


def run_prefetched_forward(program: Program) -> None:
    """Wait for each bucket's weights just before they are used. The step before has launched the all-gathers."""
    buckets, machine = program.setting.layout_buckets, program.setting.machine
    gathered = gather_weights(program, buckets.nbytes[::-1])
    for number, param_indices in zip(gathered, buckets.param_indices[::-1]):
        share = sum(machine.backward_s[i] for i in param_indices) / sum(machine.backward_s)
        program.wait(number)
        program.compute(share * machine.forward_s)


def gather_weights(program: Program, buckets: Iterable[int]) -> list[int]:
    """Launch the all-gathers of weights for buckets of so many bytes of fp32. Return the numbers of the launches."""
    return [program.launch("all_gather", n * program.setting.itemsize // FP32_BYTES) for n in buckets]


def schedule_naive(program: Program) -> None:
    program.add_backward()
    for nbytes in program.setting.nbytes:
        program.wait(program.launch("all_reduce", nbytes))
        program.move(2 * nbytes)  # to divide
    program.add_step()


def schedule_flat(program: Program) -> None:
    nbytes = sum(program.setting.nbytes)
    program.add_backward()
    program.move(2 * nbytes)  # into the flat tensor
    program.wait(program.launch("all_reduce", nbytes))
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
    """Copy and reduce the buckets in backward. Wait for each, then read or write its bytes `moves` times."""
    for number, nbytes in zip(program.add_backward("all_reduce", buckets, copies=1), buckets.nbytes):
        program.wait(number)
        program.move(moves * nbytes)


def schedule_buffered(program: Program) -> None:
    program.wait(*program.add_backward("all_reduce", program.setting.layout_buckets))
    program.add_step()


def schedule_coalesced(program: Program) -> None:
    """Use one bucket per group. A group is gathered when half of the gradients of the next one are ready."""
    buckets = program.setting.layout_buckets
    reduced: list[int] = []
    gathered: list[int] = []

    def gather() -> None:
        index = len(gathered)
        program.wait(reduced[index])
        gathered.append(program.launch("all_gather", buckets.nbytes[index]))

    for param_indices, nbytes in zip(buckets.param_indices, buckets.nbytes):
        for ready, i in enumerate(param_indices, 1):
            program.compute(program.setting.machine.backward_s[i])
            if 2 * ready >= len(param_indices) and len(gathered) < len(reduced):
                gather()
        reduced.append(program.launch("reduce_scatter", nbytes))
    gather()
    program.wait(*gathered)
    program.add_step()


def schedule_zero(program: Program) -> None:
    buckets = program.setting.layout_buckets
    program.wait(*program.add_backward("reduce_scatter", buckets))
    program.add_step(1 / program.setting.world_size, FP32_BYTES)
    program.wait(*gather_weights(program, buckets.nbytes))


def schedule_prefetched(program: Program) -> None:
    """Schedule module 9 after its forward, which waits for the weights that the step before has launched."""
    program.wait(*program.add_backward("reduce_scatter", program.setting.layout_buckets))
    program.add_step(1 / program.setting.world_size, FP32_BYTES)


def schedule_grad_shards(program: Program) -> None:
    """Schedule module 10: before a bucket is launched, wait for the one that is LIVE_BUCKETS before it."""
    buckets = program.setting.layout_buckets
    reduced: list[int] = []
    for param_indices, nbytes in zip(buckets.param_indices, buckets.nbytes):
        program.compute(sum(program.setting.machine.backward_s[i] for i in param_indices))
        program.move(2 * nbytes)  # into the bucket
        program.wait(*reduced[-LIVE_BUCKETS : len(reduced) - LIVE_BUCKETS + 1])
        reduced.append(program.launch("reduce_scatter", nbytes))
    program.wait(*reduced[-LIVE_BUCKETS:])
    program.add_step(1 / program.setting.world_size, FP32_BYTES)
    program.wait(*gather_weights(program, buckets.nbytes))


def schedule_sharded(program: Program) -> None:
    """Schedule module 8's other optimizer, on a plain model."""
    program.add_backward()
    program.wait(*[program.launch("reduce", nbytes) for nbytes in sorted(program.setting.nbytes, reverse=True)])
    step_on_owners(program)


def step_on_owners(program: Program) -> None:
    """Step on the parameters that the fullest rank owns, and broadcast each parameter."""
    program.add_step(max(program.setting.owned_bytes) / sum(program.setting.nbytes))
    program.wait(*[program.launch("broadcast", nbytes) for nbytes in sorted(program.setting.nbytes, reverse=True)])


def schedule_torch_ddp(program: Program) -> None:
    average_copies(program, program.setting.torch_buckets, 2)  # torch divides as it copies
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
    """Run a pass of module 11 with `prefetch=1`, by its own `plan_schedule`. Return the numbers of the reductions."""
    setting, machine = program.setting, program.setting.machine
    with load_planner("plan_schedule") as plan_schedule:
        actions = plan_schedule(len(setting.units), 1, backward)
    total_s = sum(machine.backward_s) if backward else machine.forward_s
    gathers, reductions = {}, []
    for action, unit in actions:
        if action != "compute" and not setting.unit_bytes[unit]:
            continue  # an empty root
        if action == "gather":
            gathers[unit] = program.launch("all_gather", setting.unit_bytes[unit])
        elif action == "reduce":
            program.move(2 * setting.unit_bytes[unit])  # into the flat tensor
            reductions.append(program.launch("reduce_scatter", setting.unit_bytes[unit]))
        else:
            if unit in gathers:  # backward has the root from forward
                program.wait(gathers[unit])
            share = sum(machine.backward_s[i] for i in setting.units[unit]) / sum(machine.backward_s)
            program.compute(share * total_s)
    return reductions


@dataclass(frozen=True)
class Rule:
    """How a variant launches, whether its gradients and its parameters are in padded buffers, and where the state is.

    `state` is "everywhere" (on every rank), or divided by "parameters" or by "shards" of buckets; "units" divides
    parameters and gradients too. `forward` comes before `run`.
    """

    run: Callable[[Program], None]
    forward: Callable[[Program], None] = run_forward
    grads_in_buffer: bool = False
    params_in_buffer: bool = False
    state: str = "everywhere"
    grads_in_shards: bool = False
    grad_copies: int = 1  # torch DDP keeps its buckets beside the gradients


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


def simulate(program: Program, link: Link) -> float:
    """Return the seconds until the end of the program.

    The rule is that of `emulated_link.py`: a collective starts when all ranks, here at once, have launched it and the
    link is free, and occupies the link for its latency and its bytes / bandwidth.
    """
    machine, world_size = program.setting.machine, program.setting.world_size
    now, ends = 0.0, [0.0]  # the rank's time; the end of each launch, after a dummy entry
    for instruction in program.instructions:
        if isinstance(instruction, Compute):
            now += instruction.seconds
        elif isinstance(instruction, Launch):
            now += machine.launch_s + instruction.nbytes * machine.launch_s_per_byte
            ends.append(max(now, ends[-1]) + link.seconds(instruction.op, instruction.nbytes, world_size))
        elif now < ends[instruction.launch + 1]:
            now = ends[instruction.launch + 1] + machine.wake_s
    return now
