"""Published training runs and collectives, and what the planner predicts for them: how wrong is it?

    rows = read_rows()                                        docs/published.tsv
    errors = list_errors(rows)                                one for each row: predicted / measured - 1
    print(describe_errors(errors))                            `make validate-plan`

A training run is predicted twice: from the device's typical utilisation, and *calibrated*. Another run of the family
then tells how fast the GPUs compute this model: the smallest one with the same recomputation and micro-batch, as if
somebody had measured `--backward-ms` on fewer GPUs, or else the smallest one. Runs with other sequence lengths are also
*calibrated on two* runs, because attention has a rate of its own. Nothing else is fitted: the network is that of NCCL's
tuner (`nccl.py`), and peaks and memory bandwidths are those of datasheets.

The runs use torch's FSDP and the like. Their steps are planned with the schedule of module 11, which gathers one unit
ahead (`make_sharded_program`; `tests/toolkit/test_published.py` compares it with what module 11 really does).
"""

from __future__ import annotations

import csv
import functools
import itertools
import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from brigade.course.table.modules import ROOT
from brigade.lab.devices import CONTENTION, DEVICES, Device
from brigade.lab.nccl import ALGORITHMS, PROTOCOLS, Network
from brigade.lab.program import Machine, simulate
from brigade.lab.shapes import ATTENTION_AGAIN, MODELS, Shape

PUBLISHED = ROOT / "docs" / "published.tsv"
BYTES = {"bf16": 2, "fp32": 4}
A100_40GB_GBPS = 1555.0  # memory bandwidth of the A100 with 40 GB; that with 80 GB has 2039 GB/s
LARGE_BYTES = 256 * 2**20  # a collective on a larger buffer is limited by bandwidth rather than by latency
TRAINING, COLLECTIVE = "training", "collective"
SEQUENCES = "sequence"  # how the name of a family begins whose runs differ in sequence length


@dataclass(frozen=True)
class Row:
    """A row of docs/published.tsv. Rates of cards are in Gbit/s, and `latency_us` is that of `nccl.Network`.

    `launch_us` is the time of the host that a measured collective includes. The benchmark of stas00/ml-engineering
    (commit 744d01e) times one call on an idle GPU. Its later version (0cc3de50) says that this adds "some 20-30us".
    `settings` are variables of the environment that limit what NCCL may choose.

    Of a training run, `subject` is the model, `sequence` and `micro_batch` give the tokens of a GPU and micro-batch,
    `sharding` is "full", "keep" (units stay gathered after forward) or "hybrid" (a replica in each node), `gather` and
    `reduce` are the dtypes on the wire, and `recompute` is the part of blocks that backward computes again: as much of
    them as `Shape.recomputed_numel` says, and whole ones if `torch` is "1.13". The `torch` of llm-foundry's runs is the
    one in scripts/train/benchmarking/sweep.sh when they were added: 1.13.1 (33aeb79d) for those in bf16 PURE, and 2.1.0
    (b2a43a14) for others. Of a collective, `subject` is the operation and `sequence` the bytes of the buffer.
    `held_back` is "yes" for rows that nobody compared with the model before it was complete. `assumed` says what the
    source does not.
    """

    name: str
    kind: str
    family: str
    device: str
    gpus: int
    node_size: int
    cards: int
    card_gbit: float
    latency_us: float
    launch_us: float
    settings: str
    subject: str
    sequence: int
    micro_batch: int
    accumulation: int
    sharding: str
    gather: str
    reduce: str
    recompute: float
    torch: str
    measured: float
    unit: str
    source: str
    date: str
    held_back: str
    assumed: str

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return math.ceil(self.gpus / self.node_size)

    @property
    def measured_s(self) -> float:
        """The measured seconds: of a training step, or of a collective."""
        if self.unit == "ms":
            return self.measured / 1e3
        if self.kind == TRAINING:  # tokens/s/GPU
            return self.sequence * self.micro_batch * self.accumulation / self.measured
        factor = (2 if self.subject == "all_reduce" else 1) * (self.gpus - 1) / self.gpus
        return self.sequence * factor / (self.measured * 1e9)  # of busbw, as nccl-tests defines it

    @property
    def gpu(self) -> Device:
        """The GPU. Its memory is that of the larger variant."""
        return DEVICES[self.device.partition("-")[0]]

    @functools.cached_property
    def network(self) -> Network:
        """The network between these GPUs."""
        allowed = dict(one.split("=") for one in self.settings.split() if one != "-")
        algorithms = tuple(name.lower() for name in allowed.get("NCCL_ALGO", "").split(",") if name) or ALGORITHMS
        protocols = tuple(allowed.get("NCCL_PROTO", ",".join(PROTOCOLS)).split(","))
        card_gbps = self.card_gbit / 8 or None
        return Network(self.gpu.fabric, self.node_size, card_gbps, self.cards, self.latency_us, algorithms, protocols)


def read_rows() -> list[Row]:
    """Return the rows of docs/published.tsv."""
    numbers: dict[str, Any] = {"recompute": float, "measured": float, "card_gbit": float}
    numbers |= dict.fromkeys(("latency_us", "launch_us"), float)
    numbers |= dict.fromkeys(("gpus", "node_size", "cards", "sequence", "micro_batch", "accumulation"), int)
    with PUBLISHED.open(newline="") as file:
        lines = [*csv.DictReader(file, delimiter="\t")]
    return [
        Row(
            **{
                name: numbers.get(name, str)("0" if value == "-" and name in numbers else value)
                for name, value in line.items()
            }
        )
        for line in lines
    ]


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
    """Return the instructions of one step with module 11, or with module 14 in nodes of `node_size` ranks.

    `units` are the numbers of elements of the units, and `root` those of the embedding and of the head. Parameter 0 is
    the embedding, parameter i the i-th unit, and the last one the head. Each micro-batch reduces its gradients, as
    torch FSDP does outside `no_sync`. Gathers take `gather_bytes` per element and reductions `reduce_bytes`.
    """
    shard_size = node_size or world_size
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


def predict(row: Row, rates: Rates | None = None) -> float:
    """Return the predicted seconds of a row. A run computes with `rates` (default: its device's typical ones)."""
    if row.kind == COLLECTIVE:
        return row.launch_us * 1e-6 + row.network.seconds(row.subject, row.sequence, row.gpus, row.num_nodes)
    return Run(row).predict(rates or Rates(*[1 / (row.gpu.utilisation.typical * row.gpu.tflops["bf16"] * 1e12)] * 2))


class Run:
    """The programs of a training run: with one micro-batch, and with two if there are several."""

    def __init__(self, row: Row):
        self.row = row
        units, root, self.flops = make_parts(MODELS[row.subject], row.sequence, row.sequence * row.micro_batch)
        self.programs = [
            make_sharded_program(
                units,
                root,
                row.gpus,
                node_size=row.node_size if row.sharding == "hybrid" else None,
                gather_bytes=BYTES[row.gather],
                reduce_bytes=BYTES[row.reduce],
                micro_batches=micro_batches,
                reshard_after_forward=row.sharding != "keep",
            )
            for micro_batches in range(1, min(row.accumulation, 2) + 1)
        ]

    def predict(self, rates: Rates) -> float:
        """Return the seconds of a step. Every micro-batch after the first one takes as long as the second."""
        machine = make_machine(self.row, self.flops, rates)
        one, *two = (simulate(program, machine, self.row.network).step_s for program in self.programs)
        return one + (self.row.accumulation - 1) * (two[0] - one) if two else one

    def calibrate(self) -> Rates:
        """Return the rates, equal ones, with which the predicted step takes as long as the measured one."""
        rate = 1 / (self.row.gpu.tflops["bf16"] * 1e12)
        for _ in range(8):  # computation is nearly all of a step, so this converges quickly
            rate *= self.row.measured_s / self.predict(Rates(rate, rate))
        return Rates(rate, rate)

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


class Error(NamedTuple):
    """The error of a prediction, relative to what was measured: 0.1 means 10 % too long.

    `calibrated` and `calibrator`, the run that calibrates it, are None for collectives and for a family's smallest run.
    `paired` is the error of a run that is calibrated on two sequence lengths, or None.
    """

    row: Row
    raw: float
    calibrated: float | None
    calibrator: Row | None
    paired: float | None


def list_errors(rows: Iterable[Row]) -> list[Error]:
    """Return the errors of all rows, in their order."""
    families: dict[str, list[Row]] = defaultdict(list)
    rows = [*rows]
    for row in rows:
        if row.kind == TRAINING:
            families[row.family].append(row)
    calibrate = functools.cache(lambda row: Run(row).calibrate())
    calibrate_pair = functools.cache(lambda short, long: calibrate_two(Run(short), Run(long)) or calibrate(short))
    errors = []
    for row in rows:
        raw, calibrated, paired = predict(row) / row.measured_s - 1, None, None
        if calibrator := find_calibrator(row, families[row.family]):
            calibrated = predict(row, calibrate(calibrator)) / row.measured_s - 1
        if (pair := find_pair(families[row.family])) and row not in pair:
            paired = predict(row, calibrate_pair(*pair)) / row.measured_s - 1
        errors.append(Error(row, raw, calibrated, calibrator, paired))
    return errors


def find_pair(family: Sequence[Row]) -> tuple[Row, Row] | None:
    """Return the runs that tell how fast GPUs compute matrix products and attention, or None if the family has none.

    They are the run with the shortest sequences, and the one with the shortest of those that are at least four times as
    long: with a smaller difference, an error of 1 % in both throughputs would be a large one of attention's rate.
    """
    if not family or not family[0].family.startswith(SEQUENCES):
        return None
    short = min(family, key=lambda one: one.sequence)
    long = min(
        (one for one in family if one.sequence >= 4 * short.sequence), key=lambda one: one.sequence, default=None
    )
    return (short, long) if long else None


def find_calibrator(row: Row, family: Sequence[Row]) -> Row | None:
    """Return the run that tells how fast the GPUs of another run compute: the smallest with the same micro-batch.

    If there is none, return the smallest of the family, or None for this one. Runs that recompute as much come first.
    """
    alike: Sequence[Row] = [one for one in family if one.recompute == row.recompute]
    if min(alike, key=lambda one: one.gpus, default=row) is row:
        alike = family
    smallest = min(alike, key=lambda one: one.gpus, default=row)
    if row is smallest:
        return None
    same = [one for one in alike if one.gpus < row.gpus and one.micro_batch == row.micro_batch]
    return min(same, key=lambda one: one.gpus, default=smallest)


@dataclass(frozen=True)
class ErrorBar:
    """How wrong predictions of one kind are: the number of rows, and the median and 90th percentile of their errors."""

    count: int
    median: float
    most: float  # nine of ten rows have at most this error


# The kinds of predictions. "guessed" means: with the device's typical utilisation; "calibrated": with one measured run.
OTHER, SEQUENCE = "calibrated, another micro-batch", "calibrated, another sequence length"
PAIR = "calibrated on two sequence lengths"
LARGE, SMALL = "collectives of 256 MiB or more", "smaller collectives"
NODES = {4: "1 to 4 nodes", 16: "5 to 16 nodes", 64: "17 to 64 nodes"}

# What `make validate-plan` prints, for plans to show. `tests/toolkit/test_published.py` fails if a median moves.
ERROR_BARS = {
    PAIR: ErrorBar(94, 0.027, 0.166),
    OTHER: ErrorBar(19, 0.052, 0.190),
    SEQUENCE: ErrorBar(117, 0.039, 0.174),
    "calibrated, 1 to 4 nodes": ErrorBar(13, 0.023, 0.080),
    "calibrated, 17 to 64 nodes": ErrorBar(12, 0.025, 0.061),
    "calibrated, 5 to 16 nodes": ErrorBar(26, 0.022, 0.082),
    LARGE: ErrorBar(42, 0.030, 0.155),
    "guessed, 1 to 4 nodes": ErrorBar(184, 0.121, 0.301),
    "guessed, 17 to 64 nodes": ErrorBar(12, 0.218, 0.299),
    "guessed, 5 to 16 nodes": ErrorBar(40, 0.242, 0.336),
    SMALL: ErrorBar(31, 0.272, 0.647),
}


def name_nodes(num_nodes: int) -> str:
    """Return the kind of error bar for a number of nodes. Beyond the published ones, the last one is the best guess."""
    return next((name for most, name in NODES.items() if num_nodes <= most), NODES[max(NODES)])


def name_kinds(error: Error) -> dict[str, float]:
    """Return the errors of a row by the kind of prediction."""
    row = error.row
    if row.kind == COLLECTIVE:
        return {LARGE if row.sequence >= LARGE_BYTES else SMALL: error.raw}
    nodes = name_nodes(row.num_nodes)
    kinds = {f"guessed, {nodes}": error.raw}
    if error.calibrated is not None and error.calibrator is not None:
        is_same = error.calibrator.micro_batch == row.micro_batch
        calibrated = f"calibrated, {nodes}" if is_same else OTHER
        kinds[SEQUENCE if row.family.startswith(SEQUENCES) else calibrated] = error.calibrated
    if error.paired is not None:
        kinds[PAIR] = error.paired
    return kinds


def measure_error_bars(errors: Iterable[Error]) -> dict[str, ErrorBar]:
    """Return the error bar of each kind of prediction, sorted by kind."""
    sizes: dict[str, list[float]] = defaultdict(list)
    for error in errors:
        for kind, value in name_kinds(error).items():
            sizes[kind].append(abs(value))
    return {
        kind: ErrorBar(len(values), median(values), sorted(values)[math.ceil(0.9 * len(values)) - 1])
        for kind, values in sorted(sizes.items())
    }
