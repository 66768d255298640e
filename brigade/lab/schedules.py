"""What each variant does in one training step, as a program of one rank: compute, launch, wait.

    program = program_of(variant, setting)
    program.launches            the collectives, in the order in which they are launched
    simulate(program, link)     seconds until the end, on a link

Each variant's launch rule is repeated here as the instructions of one rank, in a few lines. All ranks are assumed to do
the same at the same time, so a collective starts when this rank launches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from brigade.lab.ladder import FP32_BYTES, Variant
from brigade.lab.plan_config import Buckets, Setting
from brigade.rank.emulated_link import Link


@dataclass(frozen=True)
class Compute:
    """The processor is busy for so many seconds."""

    seconds: float


@dataclass(frozen=True)
class Launch:
    """A collective on a buffer of `nbytes` is put on the link; the rank goes on."""

    op: str
    nbytes: int


@dataclass(frozen=True)
class Wait:
    """The rank goes on when that launch, the number of which is given, is complete."""

    launch: int


class Program:
    """A rank's instructions for one step, which the rules below put together."""

    def __init__(self, setting: Setting):
        self.setting = setting
        self.instructions: list[Compute | Launch | Wait] = []
        self.launches: list[Launch] = []
        self.compute(setting.machine.forward_s)

    def compute(self, seconds: float) -> None:
        self.instructions.append(Compute(seconds))

    def move(self, nbytes: float) -> None:
        """Reads and writes so many bytes of memory, both counted."""
        self.compute(nbytes / self.setting.machine.copy_bytes_per_s)

    def launch(self, op: str, nbytes: int) -> int:
        """Puts a collective on the link; returns its number, to wait for."""
        self.instructions.append(Launch(op, nbytes))
        self.launches.append(self.instructions[-1])
        return len(self.launches) - 1

    def wait(self, *launched: int) -> None:
        self.instructions += map(Wait, launched)

    def backward(self, op: str = "", buckets: Buckets | None = None, copies: int = 0) -> list[int]:
        """Launches each bucket when its last gradient is ready, and before that copies it so many times.

        Returns the numbers of the launches. Without buckets there are none.
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

    def step(self, part: float = 1.0, itemsize: int | None = None) -> None:
        """The optimizer, on a part of all elements: it reads and writes them and their state, and reads gradients."""
        touched = 2 + 1 + 2 * self.setting.optimizer.values
        nbytes = part * self.setting.numel * touched * (itemsize or self.setting.itemsize)
        self.compute(nbytes / self.setting.machine.step_bytes_per_s)


def schedule_naive(program: Program) -> None:
    program.backward()
    for nbytes in program.setting.nbytes:
        program.wait(program.launch("all_reduce", nbytes))
        program.move(2 * nbytes)  # divides
    program.step()


def schedule_flat(program: Program) -> None:
    nbytes = sum(program.setting.nbytes)
    program.backward()
    program.move(2 * nbytes)  # into the flat tensor
    program.wait(program.launch("all_reduce", nbytes))
    program.move(4 * nbytes)  # divides, and copies back
    program.step()


def schedule_overlapped(program: Program) -> None:
    nbytes = program.setting.nbytes
    backwards = range(len(nbytes))[::-1]
    launched = program.backward("all_reduce", Buckets([[i] for i in backwards], [nbytes[i] for i in backwards]))
    for number, i in zip(launched, backwards):
        program.wait(number)
        program.move(2 * nbytes[i])
    program.step()


def schedule_bucketed(program: Program) -> None:
    average_copies(program, program.setting.capped_buckets, 4)  # divides, and copies back
    program.step()


def average_copies(program: Program, buckets: Buckets, moves: int) -> None:
    """Copy and reduce the buckets in backward. Wait for each, and read or write its bytes so many times."""
    for number, nbytes in zip(program.backward("all_reduce", buckets, copies=1), buckets.nbytes):
        program.wait(number)
        program.move(moves * nbytes)


def schedule_buffered(program: Program) -> None:
    program.wait(*program.backward("all_reduce", program.setting.layout_buckets))
    program.step()


def schedule_coalesced(program: Program) -> None:
    """One bucket in each group. A group is gathered when half of the gradients of the next one are ready."""
    buckets = program.setting.layout_buckets
    reduced: list[int] = []
    gathered: list[int] = []

    def gather() -> None:
        place = len(gathered)
        program.wait(reduced[place])
        gathered.append(program.launch("all_gather", buckets.nbytes[place]))

    for param_indices, nbytes in zip(buckets.param_indices, buckets.nbytes):
        for ready, i in enumerate(param_indices, 1):
            program.compute(program.setting.machine.backward_s[i])
            if 2 * ready >= len(param_indices) and len(gathered) < len(reduced):
                gather()
        reduced.append(program.launch("reduce_scatter", nbytes))
    gather()
    program.wait(*gathered)
    program.step()


def schedule_zero(program: Program) -> None:
    buckets = program.setting.layout_buckets
    program.wait(*program.backward("reduce_scatter", buckets))
    program.step(1 / program.setting.world_size, FP32_BYTES)
    weights = [nbytes * program.setting.itemsize // FP32_BYTES for nbytes in buckets.nbytes]
    program.wait(*[program.launch("all_gather", nbytes) for nbytes in weights])


def schedule_sharded(program: Program) -> None:
    """Module 8's other optimizer, on a plain model."""
    program.backward()
    program.wait(*[program.launch("reduce", nbytes) for nbytes in sorted(program.setting.nbytes, reverse=True)])
    step_on_owners(program)


def step_on_owners(program: Program) -> None:
    """A step on the parameters that the fullest rank owns, and a broadcast of each parameter."""
    program.step(max(program.setting.owned_bytes) / sum(program.setting.nbytes))
    program.wait(*[program.launch("broadcast", nbytes) for nbytes in sorted(program.setting.nbytes, reverse=True)])


def schedule_torch_ddp(program: Program) -> None:
    average_copies(program, program.setting.torch_buckets, 2)  # torch divides as it copies
    program.step()


def schedule_torch_zero(program: Program) -> None:
    average_copies(program, program.setting.torch_buckets, 2)
    step_on_owners(program)


def schedule_computation(program: Program) -> None:
    program.backward()
    program.step()


@dataclass(frozen=True)
class Rule:
    """How a variant launches; whether its gradients, and its parameters, lie in padded buffers, and who has what state.

    `state` is on every rank, divided by "parameters", or divided into "shards" of buckets.
    """

    run: Callable[[Program], None]
    grads_in_buffer: bool = False
    params_in_buffer: bool = False
    state: str = "everywhere"
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
    ("DistributedDataParallel", None): Rule(schedule_torch_ddp, grad_copies=2),
    ("DistributedDataParallel", "ZeroRedundancyOptimizer"): Rule(
        schedule_torch_zero, state="parameters", grad_copies=2
    ),
    (None, None): Rule(schedule_computation),
}


def get_class_names(variant: Variant) -> tuple[str | None, str | None]:
    """The names by which `RULES` knows a variant."""
    return variant.wrapper and variant.wrapper[1], variant.optimizer and variant.optimizer[1]


def get_rule(variant: Variant) -> Rule:
    """The rule of a variant's classes. Raises KeyError for classes without one."""
    return RULES[get_class_names(variant)]


def select_with_rule(variants: Iterable[Variant]) -> list[Variant]:
    """Those that have a rule: a module without one is not planned."""
    return [variant for variant in variants if get_class_names(variant) in RULES]


def make_program(variant: Variant, setting: Setting) -> Program:
    program = Program(setting)
    get_rule(variant).run(program)
    return program


def simulate(program: Program, link: Link) -> float:
    """Return the seconds until the end of the program.

    The rule is that of `emulated_link.py`: a collective starts when all ranks, here at once, have launched it and the
    link is free, and occupies the link for its latency and its bytes / bandwidth.
    """
    machine, world_size = program.setting.machine, program.setting.world_size
    now, ends = 0.0, [0.0]  # when the rank is there; when each launch is complete, after a first that never was
    for one in program.instructions:
        if isinstance(one, Compute):
            now += one.seconds
        elif isinstance(one, Launch):
            now += machine.launch_s + one.nbytes * machine.launch_s_per_byte
            ends.append(max(now, ends[-1]) + link.seconds(one.op, one.nbytes, world_size))
        elif now < ends[one.launch + 1]:
            now = ends[one.launch + 1] + machine.wake_s
    return now
