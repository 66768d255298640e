"""The programs of published runs, how fast their GPUs compute, and what the planner predicts for them.

Most runs use torch's FSDP and the like. Their steps are planned with the schedule of module 11, which gathers one unit
ahead (`make_sharded_program`; `tests/lab/test_published.py` compares it with what module 11 really does).
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from brigade.lab.devices import CONTENTION
from brigade.lab.nccl import Network
from brigade.lab.program import Machine, simulate
from brigade.lab.shapes import ATTENTION_AGAIN, MODELS, Shape
from tools.planner.runs import COLLECTIVE, Row

BYTES = {"bf16": 2, "fp32": 4}
A100_40GB_GBPS = 1555.0  # memory bandwidth of the A100 with 40 GB; that with 80 GB has 2039 GB/s


def make_sharded_program(
    units: Sequence[int],
    root: tuple[int, int],
    world_size: int,
    *,
    node_size: int | None = None,
    gather_bytes: int = 4,
    reduce_bytes: int = 4,
    micro_batches: int = 1,
    reshard_after_forward: bool = True,
    state_values: int = 2,
) -> list[tuple[Any, ...]]:
    """Return the instructions of one step with module 11, or with module 14 in groups of `node_size` ranks.

    `units` are the numbers of elements of the units, and `root` those of the embedding and of the head. Parameter 0 is
    the embedding, parameter i the i-th unit, and the last one the head. Each micro-batch reduces its gradients, as
    torch FSDP does outside `no_sync`. Gathers take `gather_bytes` per element and reductions `reduce_bytes`.
    """
    shard_size = min(node_size or world_size, world_size)
    program: list[tuple[Any, ...]] = []
    numels = {0: sum(root)} | dict(enumerate(units, 1))  # by unit; unit 0 is the root
    numbers: dict[tuple[str, int], int] = {}  # of launches, by operation and unit
    count = itertools.count()
    last_unit, head = len(units), len(units) + 1

    def launch(op: str, unit: int) -> None:
        numbers[op, unit] = next(count)
        nbytes = numels[unit] * (gather_bytes if op == "all_gather" else reduce_bytes)
        if op == "all_reduce":
            ranks = world_size // shard_size
            program.append(("launch", numbers[op, unit], op, nbytes / shard_size, ranks, (ranks - 1) * shard_size))
        else:
            program.append(("launch", numbers[op, unit], op, nbytes, shard_size, shard_size - 1))

    def wait(op: str, unit: int) -> None:
        program.append(("wait", numbers[op, unit]))

    def copy(numel: int) -> None:  # into the buffer that is reduced
        program.append(("copy", numel * (gather_bytes + reduce_bytes)))

    def reduce(unit: int) -> None:
        launch("reduce_scatter", unit)

    def finish(unit: int) -> None:
        wait("reduce_scatter", unit)
        if world_size > shard_size:
            launch("all_reduce", unit)

    for _ in range(micro_batches):
        launch("all_gather", 0)
        if units:
            launch("all_gather", 1)
        wait("all_gather", 0)
        program.append(("forward", 0))
        for unit in range(1, last_unit + 1):
            if unit < last_unit:
                launch("all_gather", unit + 1)
            wait("all_gather", unit)
            program.append(("forward", unit))
        program.append(("forward", head))
        if reshard_after_forward:
            for unit in (last_unit, last_unit - 1)[: len(units)]:
                launch("all_gather", unit)
        program.append(("backward", head))
        for unit in range(last_unit, 0, -1):
            if reshard_after_forward:
                wait("all_gather", unit)
            program.append(("backward", unit))
            if reshard_after_forward and unit > 2:
                launch("all_gather", unit - 2)
            if unit < last_unit:
                finish(unit + 1)
            copy(numels[unit])
            reduce(unit)
        program.append(("backward", 0))
        if units:
            finish(1)
        copy(root[0])
        copy(root[1])
        reduce(0)
        finish(0)
    if world_size > shard_size:
        for unit in (*range(last_unit, 0, -1), 0):
            wait("all_reduce", unit)
    program.append(("step", (2 + 1 + 2 * state_values) * 4 * sum(numels.values()) / shard_size))
    return program


def list_owned_bytes(shape: Shape, num_owners: int, nbytes: int) -> list[float]:
    """Return the bytes of each owner's weights. Whole weights, the largest first, go to the owner with the fewest."""
    numels = sorted((math.prod(own) for _, block in shape.make_groups() for own in block), reverse=True)
    owned = [0.0] * num_owners
    for numel in numels:
        heapq.heapreplace(owned, owned[0] + numel * nbytes)
    return [own for own in owned if own]


def make_zero1_program(
    shape: Shape,
    world_size: int,
    shard_size: int,
    *,
    gather_bytes: int = 2,
    reduce_bytes: int = 2,
    micro_batches: int = 1,
    bucket_numel: int = 512 * 2**20,
) -> list[tuple[Any, ...]]:
    """Return the instructions of one step with whole weights, whose optimizer's state `shard_size` ranks share.

    The last micro-batch all-reduces gradients in buckets during backward. After the step, each owner broadcasts its
    weights to its group. InternEvo does so (internlm/solver/optimizer/hybrid_zero_optim.py of InternLM 01e7fd61, whose
    configurations have this bucket). Parameter 0 is the embedding, i the i-th block, and the last one the head.
    """
    vocabulary = shape.vocabulary * shape.d_model
    numels = [vocabulary, *[shape.block_numel] * shape.layers, vocabulary]
    program: list[tuple[Any, ...]] = []
    count, reductions, bucket = itertools.count(), [], 0
    for index in range(micro_batches):
        program += [("forward", parameter) for parameter in range(len(numels))]
        for parameter in reversed(range(len(numels))):
            program.append(("backward", parameter))
            bucket += numels[parameter] if index == micro_batches - 1 else 0
            if bucket and (bucket >= bucket_numel or not parameter):
                reductions.append(next(count))
                program.append(("copy", 2 * reduce_bytes * bucket))
                program.append(
                    ("launch", reductions[-1], "all_reduce", bucket * reduce_bytes, world_size, world_size - 1)
                )
                bucket = 0
    program += [("wait", number) for number in reductions]
    program.append(("step", 7 * 4 * sum(numels) / shard_size))
    broadcasts = list(enumerate(list_owned_bytes(shape, shard_size, gather_bytes), next(count)))
    program += [("launch", number, "broadcast", own, shard_size, shard_size - 1) for number, own in broadcasts]
    return [*program, *(("wait", number) for number, _ in broadcasts)]


class Rates(NamedTuple):
    """How many seconds a GPU needs for an operation of a matrix product, and of attention."""

    matrices: float
    attention: float


def make_parts(shape: Shape, sequence: int, tokens: int) -> tuple[list[int], tuple[int, int], list[Rates]]:
    """Return a model's units and root for `make_sharded_program`, and the operations of forward for each parameter.

    The first and the last parameter, embedding and head, are in no block.
    """
    attention = 4 * shape.heads * shape.d_head * sequence  # all pairs of positions, as in `Shape.count_forward_flops`
    vocabulary = shape.vocabulary * shape.d_model
    block = Rates(2.0 * shape.block_numel * tokens, float(attention * tokens))
    root = (0 if shape.is_tied else vocabulary, vocabulary)
    return (
        [shape.block_numel] * shape.layers,
        root,
        [Rates(0, 0), *[block] * shape.layers, Rates(2.0 * vocabulary * tokens, 0)],
    )


def count_backward(row: Row, forward: Sequence[Rates]) -> list[Rates]:
    """Return the operations of backward for each parameter. Recomputation repeats blocks, but not the head."""
    shape = MODELS[row.subject]
    matrices = 1.0 if row.torch == "1.13" else shape.recomputed_numel / shape.block_numel
    again = Rates(row.recompute * matrices, row.recompute * ATTENTION_AGAIN)
    blocks = [Rates(*((2 + more) * own for own, more in zip(one, again, strict=True))) for one in forward[1:-1]]
    return [Rates(*(2 * own for own in forward[0])), *blocks, Rates(*(2 * own for own in forward[-1]))]


def make_machine(row: Row, forward: Sequence[Rates], rates: Rates) -> Machine:
    """Return the speed of one GPU of a run, for one micro-batch. `forward` are operations."""
    gbps = A100_40GB_GBPS if row.device == "a100-40" else row.gpu.memory_gbps
    seconds, backward = (
        [sum(map(operator.mul, flops, rates)) for flops in parts] for parts in (forward, count_backward(row, forward))
    )
    return Machine(sum(seconds), tuple(backward), gbps * 1e9, gbps * 1e9, CONTENTION)


def make_rates(row: Row, utilisation: float) -> Rates:
    """Return the rates of a GPU that reaches this fraction of its peak. Attention is computed in bf16."""
    peaks = row.gpu.tflops[row.precision], row.gpu.tflops["bf16"]
    return Rates(*(1 / (utilisation * peak * 1e12) for peak in peaks))


def predict(row: Row, rates: Rates | None = None) -> float:
    """Return the predicted seconds of a row. A run computes with `rates` (default: its device's typical ones)."""
    if row.kind == COLLECTIVE:
        return row.launch_us * 1e-6 + row.network.seconds(row.subject, row.sequence, row.gpus, row.num_nodes)
    return Run(row).predict(rates or make_rates(row, row.gpu.get_utilisation(row.precision).typical))


class Run:
    """The programs of a training run: with one micro-batch, and with two if there are several."""

    def __init__(self, row: Row):
        self.row = row
        shape = MODELS[row.subject]
        units, root, self.flops = make_parts(shape, row.sequence, row.sequence * row.micro_batch)
        options: dict[str, Any] = {"gather_bytes": BYTES[row.gather], "reduce_bytes": BYTES[row.reduce]}
        counts = range(1, min(row.accumulation, 2) + 1)
        if row.sharding == "zero1":
            make = functools.partial(make_zero1_program, shape, row.gpus, row.shard or row.gpus, **options)
        else:
            options |= {"node_size": row.shard or None, "reshard_after_forward": row.sharding != "keep"}
            make = functools.partial(make_sharded_program, units, root, row.gpus, **options)
        self.programs = [make(micro_batches=count) for count in counts]

    def predict(self, rates: Rates, network: Network | None = None) -> float:
        """Return the seconds of a step. Every micro-batch after the first one takes as long as the second."""
        machine = make_machine(self.row, self.flops, rates)
        one, *two = (simulate(program, machine, network or self.row.network).step_s for program in self.programs)
        return one + (self.row.accumulation - 1) * (two[0] - one) if two else one

    def measure_share(self, rates: Rates) -> float:
        """Return which part of the predicted step communication costs: waits, copies, and slower computation."""
        machine = make_machine(self.row, self.flops, rates)
        one, *two = (simulate(program, machine, None).step_s for program in self.programs)
        own = one + (self.row.accumulation - 1) * (two[0] - one) if two else one
        return 1 - own / self.predict(rates)

    def calibrate(self) -> Rates:
        """Return the rates, equal parts of the peaks, with which the predicted step takes as long as measured."""
        utilisation = 1.0
        for _ in range(8):  # computation is nearly all of a step, so this converges quickly
            utilisation *= self.predict(make_rates(self.row, utilisation)) / self.row.measured_s
        return make_rates(self.row, utilisation)

    @functools.cached_property
    def operations(self) -> Rates:
        """The operations of a step: of matrix products and of attention."""
        parts = [*self.flops, *count_backward(self.row, self.flops)]
        return Rates(*(self.row.accumulation * sum(kind) for kind in zip(*parts, strict=True)))


def calibrate_two(short: Run, long: Run) -> Rates | None:
    """Return the rates with which both steps take as long as measured, or None if these are not positive."""
    rates = short.calibrate()
    (a, b), (c, d) = short.operations, long.operations
    for _ in range(8):
        e, f = (run.row.measured_s - run.predict(rates) for run in (short, long))
        change = Rates((d * e - b * f) / (a * d - b * c), (a * f - c * e) / (a * d - b * c))
        rates = Rates(*map(operator.add, rates, change))
        if min(rates) <= 0:
            return None
    return rates
