"""The training ladder: train the same TinyLM on the same text with every module of the course and with torch.

    ladder = run_benchmark(Workload(), add_torch_variants(get_course_variants()))
    ladder.variants[0].median_ms                the step time of the first module
    ladder.compute_ratios(ladder.variants[0])   the same in each round, as a multiple of torch DDP's
    ladder.list_wrong_losses()                  sentences about variants that do not train as one process does

All variants run in the same ranks (`timed_step.train`) and alternate. In each round, every variant takes one step on
the same batch, after a barrier, in an order that is shuffled for every round. A slow moment of the machine therefore
affects all variants, and ratios are taken within a round. Times of different runs are not comparable.

If a GPU has too little memory for all variants, they run one after the other, each beside the computation alone. The
exposed time is then still taken within a round, but ratios compare runs of different minutes (`is_interleaved`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch

from brigade.course.checks.tiny_lm import SIZES, Size
from brigade.course.table.modules import CORE_MODULES, REFERENCE, TRAINING_MODULES, Module, find_module
from brigade.course.table.submission import read
from brigade.lab.emulated_link import Link, Pace, read_link, spans_nodes
from brigade.lab.memory_accounting import Bytes
from brigade.lab.noise import Verdict, judge_machine
from brigade.lab.timed_step import STEP_BEFORE, train
from brigade.ranks.errors import UserError
from brigade.ranks.events import Event, count_sent_bytes, launches
from brigade.ranks.runner.machine import count_gpus
from brigade.ranks.runner.ranks import RankResults, run_ranks
from brigade.ranks.texts import Sources

PHASES = ("forward", "backward", "finish", "step")  # of one training step; "step" is the optimizer's
DEADLINE_S = 900.0

# Nats per token on held-out text, on any rank. SGD does not amplify rounding as Adam does. With this workload in fp32,
# we measured that correct answers differ from one process by at most 3e-7. On 64 sequences, the mutants
# that change the numbers on two ranks differ by at least 3e-3.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Workload:
    """The training run of every variant. A batch has `batch_size` sequences of `time` tokens, over all ranks.

    `bucket_mb` (MiB) is for variants that have buckets, including torch DDP. With a `link`, collectives take as long as
    on that emulated link (`emulated_link.py`); otherwise they take their real time on this machine. If `named` is set,
    each recorded launch contains the name of its parameter, if it has one; this takes a little time. A node consists of
    `node_size` consecutive ranks (None: all ranks); module 14 keeps a replica in each.
    """

    size: Size = SIZES["tiny"]
    batch_size: int = 8
    time: int = 64
    rounds: int = 30
    warmup: int = 5  # rounds that train but are not timed
    learning_rate: float = 0.05
    bucket_mb: float = 1.0
    seed: int = 0
    link: Link | Pace | None = None
    named: bool = False
    node_size: int | None = None
    optimizer: str = "SGD"  # of `torch.optim`; SGD has momentum
    limit_s: float | None = None  # after this time, no round begins, except the first one that is timed


# The workload for the emulated link. Its computation takes long enough that the real collectives take only a small
# part of the emulated time. They still take processor time from the computation.
PACE = Pace(comm_ratio=0.8, latency_ratio=0.002)
EMULATED = Workload(batch_size=24, time=128, rounds=35, link=PACE)


# The workload for GPUs: the model is large enough that they compute longer than Python needs to launch the kernels, and
# ten variants fit into 16 GB. Each rank gets 4 sequences of a batch.
ON_GPUS = Workload(
    size=Size(d_model=1024, d_ff=4096, layers=4, heads=16, vocabulary=256, context=512),
    batch_size=4,
    time=512,
    rounds=20,
    bucket_mb=25.0,
    learning_rate=0.005,
)


def fit_batch(workload: Workload, world_size: int) -> Workload:
    """Return the workload with the smallest batch that is not smaller, and that `world_size` ranks can split."""
    return replace(workload, batch_size=math.ceil(workload.batch_size / world_size) * world_size)


def scale_batch(workload: Workload, world_size: int) -> Workload:
    """Return a workload for two ranks with a batch that gives each of `world_size` ranks as much to do."""
    return replace(workload, batch_size=workload.batch_size // 2 * world_size)


@dataclass(frozen=True)
class Variant:
    """The classes that average gradients and take the step, each as (package, name). A package may be "torch".

    Without a wrapper, as for one process, no gradients are averaged. Without an optimizer, every rank uses the
    workload's. `bucket_mb` (MiB) replaces the workload's value, unless it is None. `arguments` are additional arguments
    of the wrapper. `others` is the optimizer of the parameters that are no matrices, if `optimizer` trains only
    matrices. `takes` and `overlaps_forward` are those of the module.
    """

    label: str
    wrapper: tuple[str, str] | None = None
    optimizer: tuple[str, str] | None = None
    bucket_mb: float | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"  # of the model's parameters
    others: tuple[str, str] | None = None
    takes: tuple[str, ...] = ()
    overlaps_forward: bool = False

    @property
    def is_torch(self) -> bool:
        return self.wrapper is not None and self.wrapper[0] == "torch"

    @property
    def needs_nodes(self) -> bool:
        return "replica_group" in self.takes


TORCH_DDP = Variant("torch DDP", ("torch", "DistributedDataParallel"))
TORCH_ZERO = replace(TORCH_DDP, label="torch DDP + ZeRO", optimizer=("torch", "ZeroRedundancyOptimizer"))
TORCH_FSDP = Variant("torch fully_shard", ("torch", "fully_shard"), takes=("compute_dtype",))
TORCH = (TORCH_DDP, TORCH_ZERO)
PLANNED_TORCH = (*TORCH, TORCH_FSDP)
ONE_PROCESS = Variant("one process")
COMPUTATION = Variant("computation alone")  # without communication; alternates with the others


@dataclass(frozen=True)
class Spread:
    """The median and the quartiles of a value over all rounds."""

    median: float
    lower: float
    upper: float

    @property
    def relative(self) -> float:
        """The distance between the quartiles, relative to the median."""
        return (self.upper - self.lower) / self.median


def compute_step_ms(marks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return the step time of the slowest rank, in ms, for each round of `Measurement.marks`."""
    return [max(1e3 * (times[-1] - times[0]) for times in ranks) for ranks in zip(*marks, strict=True)]


def compute_spread(values: Sequence[float]) -> Spread:
    """Return the median and the quartiles of `values`, which contain one value per round."""
    quantiles = torch.tensor([0.5, 0.25, 0.75], dtype=torch.float64)
    return Spread(*torch.tensor(values, dtype=torch.float64).quantile(quantiles).tolist())


@dataclass(frozen=True)
class Measurement:
    """The measurements of one variant in a finished ladder. Everything except the losses excludes the warm-up.

    `collectives`, `sent_bytes` and `outer_bytes` are means over ranks, per step. `kept_bytes` and `peak_bytes` are the
    bytes between steps and at the peak of a step, by kind and on the fullest rank (see `memory_accounting.py`).
    `copied_bytes`, `allocated_bytes` and `new_views` are what the submission's own lines do in one step on rank 0.
    `computation_marks` are the marks of the computation alone, if it was measured beside this variant only.
    """

    label: str
    marks: list[list[list[float]]]  # [rank][round]: the start of the step and the ends of its `PHASES`, in seconds
    collectives: float
    sent_bytes: float  # with ring algorithms
    outer_bytes: float  # of `sent_bytes`, in groups that span nodes
    losses: list[float]  # per rank, in nats per token
    kept_bytes: Bytes
    peak_bytes: Bytes
    copied_bytes: int = 0
    allocated_bytes: int = 0
    new_views: int = 0
    bucket_mb: float | None = None
    computation_marks: list[list[list[float]]] | None = None

    @property
    def step_ms(self) -> list[float]:
        """The step time of the slowest rank, for each round."""
        return compute_step_ms(self.marks)

    @property
    def median_ms(self) -> float:
        return median(self.step_ms)


@dataclass(frozen=True)
class Ladder:
    """The results of `run_benchmark`.

    `expected_loss` is the loss of one process, in nats per token, or NaN if none has run. `computation` is the
    measurement of the same steps without communication. `link` is the emulated link, made for `backward_s`, the time of
    backward alone. `real_s` is the time of a real all-reduce of all gradients, which have `model_bytes` bytes together.
    `device` is what rank 0 computes on, such as "the CPU".
    `dtype` is that of the parameters of the computation alone. `cpu_shares[rank]`
    contains, for each timed round on CPUs, the part of a backward in which the rank had a processor core.
    """

    workload: Workload
    world_size: int
    backend: str
    expected_loss: float
    variants: list[Measurement]
    computation: Measurement
    link: Link | None
    backward_s: float
    real_s: float
    model_bytes: int
    cpu_shares: Sequence[Sequence[float]] = ()
    dtype: str = "float32"
    device: str = "the CPU"

    @property
    def is_interleaved(self) -> bool:
        """Whether the variants alternated. If not, the rounds of two variants have nothing in common but the batch."""
        return all(one.computation_marks is None for one in self.variants)

    def get_computation_ms(self, variant: Measurement) -> list[float]:
        """Return, for each round, the step time of the computation alone that ran beside this variant, in ms."""
        marks = variant.computation_marks
        return self.computation.step_ms if marks is None else compute_step_ms(marks)

    @property
    def verdict(self) -> Verdict:
        """Whether the machine was quiet during the timed rounds."""
        measured = [one.step_ms for one in (*self.variants, self.computation)]
        real_share = self.real_s / self.link_s if self.link else None
        return judge_run(measured, self.cpu_shares, real_share)

    def compute_exposed(self, variant: Measurement) -> Spread:
        """Return the exposed communication time of a variant in ms: the extra time of its step over computation alone.

        This is the median, with the quartiles, of the differences within each round. The two steps of a round follow
        each other closely, so a slow moment of the machine changes both, and hardly their difference. The difference of
        two medians would compare steps of different rounds. An exposed time can be negative after a noisy run.
        """
        pairs = zip(variant.step_ms, self.get_computation_ms(variant), strict=True)
        return compute_spread([whole - computation for whole, computation in pairs])

    @property
    def link_s(self) -> float:
        """The time of an all-reduce of all gradients on the emulated link, which there must be."""
        assert self.link
        num_nodes = self.link.count_nodes(range(self.world_size))
        return self.link.seconds("all_reduce", self.model_bytes, self.world_size, num_nodes)

    def get_measurement(self, label: str) -> Measurement:
        """Return the measurement of the variant with this label."""
        return next(variant for variant in self.variants if variant.label == label)

    def compute_ratios(self, variant: Measurement, base: str = "") -> list[float]:
        """Return, for each round, the ratio of the step time to that of the variant labelled `base`.

        By default, this is torch DDP with the same buckets.
        """
        base = base or set_bucket_size(TORCH_DDP, variant.bucket_mb).label
        return [time / other for time, other in zip(variant.step_ms, self.get_measurement(base).step_ms, strict=True)]

    def list_wrong_losses(self) -> list[str]:
        """Return a sentence for every rank of a variant whose loss differs from that of one process, if one has run."""
        if math.isnan(self.expected_loss):
            return []
        return [
            f"{variant.label} does not train as one process does: rank {rank} has a loss of {loss:.6f}, one process "
            f"has {self.expected_loss:.6f}; the allowed difference is {LOSS_TOLERANCE:g}"
            for variant in self.variants
            for rank, loss in enumerate(variant.losses)
            if not abs(loss - self.expected_loss) <= LOSS_TOLERANCE
        ]


def get_variant(entry: Module, name: str = "") -> Variant:
    """Return the variant that trains with a module, or with the optimizer of this name that needs no wrapper.

    Raise UserError for a module that trains nothing.
    """
    if not entry.wrapper and not entry.alone:
        raise UserError(f"module {entry.number} trains no model: choose another engine")
    own = [one for one in entry.public if one in (entry.wrapper, entry.optimizer, entry.alone)] or entry.public
    label = f"{entry.number} {name or own[-1]}"
    if not entry.wrapper or (name and name == entry.alone):
        return Variant(label, None, find_class(entry.alone), others=find_class(entry.others))
    classes = find_class(entry.wrapper), find_class(entry.optimizer)
    return Variant(label, *classes, takes=entry.takes, overlaps_forward=entry.overlaps_forward)


def find_class(name: str) -> tuple[str, str] | None:
    """Return the package that has this public name, and the name, or None without a name."""
    return (find_module(name).package, name) if name else None


def set_bucket_size(variant: Variant, bucket_mb: float | None) -> Variant:
    """Return the variant with buckets of `bucket_mb` MiB, if this is not None, and with this size in its label."""
    label = f"{variant.label}, {bucket_mb:g} MiB" if bucket_mb else variant.label
    return replace(variant, label=label, bucket_mb=bucket_mb)


def add_torch_variants(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants, then torch's: DDP and ZeRO, and `fully_shard` if the row of one of the modules names it."""
    labels = {variant.label for variant in variants}
    bases = {entry.compare_with for entry in TRAINING_MODULES if get_variant(entry).label in labels}
    return [*variants, *TORCH, *[TORCH_FSDP] * (TORCH_FSDP.label in bases)]


def get_course_variants() -> list[Variant]:
    """Return the variants of all core modules."""
    return [get_variant(entry) for entry in CORE_MODULES]


def read_reference() -> Sources:
    """Return the text of all solutions, or of all of the student's modules in the student edition."""
    return read(REFERENCE, TRAINING_MODULES[-1].number)


def count_steps(workload: Workload, variants: Sequence[Variant]) -> int:
    """Return how often `run_benchmark` calls `on_step`, including the steps of one process and of computation alone."""
    return workload.rounds * (len(variants) + 2)


def run_benchmark(
    workload: Workload,
    variants: Sequence[Variant],
    sources: Sources | None = None,
    *,
    checks_losses: bool = True,
    **how: Any,
) -> Ladder:
    """Train all variants alternately, then train one process if `checks_losses`. Return the measurements.

    The computation alone has the first variant's dtype.
    The other arguments are those of `run_variants`, which says what is raised.
    """
    together = [*variants, replace(COMPUTATION, dtype=variants[0].dtype)]
    results = run_variants(workload, together, sources, **how)
    *measurements, computation = [make_measurement(workload, together, variant, results) for variant in together]
    expected_loss = math.nan
    if checks_losses:
        alone = how | {"world_size": 1, "run": run_ranks}
        [single_result] = run_variants(replace(workload, link=None), [ONE_PROCESS], sources, **alone)
        expected_loss = single_result["variants"][ONE_PROCESS.label]["loss"]
    return Ladder(
        workload=workload,
        world_size=len(results),
        backend=how.get("backend", "gloo"),
        expected_loss=expected_loss,
        variants=measurements,
        computation=computation,
        link=read_link(results[0]["link"]),
        backward_s=results[0]["backward_s"],
        real_s=results[0]["real_s"],
        model_bytes=results[0]["model_bytes"],
        cpu_shares=[result["cpu_shares"] for result in results],
        dtype=together[-1].dtype,
        device=results[0]["device"],
    )


def run_here(emulated: Workload, variants: Sequence[Variant]) -> Ladder:
    """Run a benchmark in a notebook: `ON_GPUS` with NCCL and a rank on each GPU, if there are at least two GPUs.

    Otherwise, run `emulated` on two ranks on the CPU.
    """
    gpus = count_gpus()
    if gpus < 2:
        return run_benchmark(emulated, variants)
    workload = replace(ON_GPUS, batch_size=ON_GPUS.batch_size * gpus)
    return run_benchmark(workload, variants, world_size=gpus, backend="nccl")


def judge_run(
    step_ms: Sequence[Sequence[float]], cpu_shares: Sequence[Sequence[float]], real_share: float | None
) -> Verdict:
    """Return the verdict on a run from the step times of each variant, in ms, and from fields of `Ladder`."""
    spreads = [compute_spread(times).relative for times in step_ms]
    return judge_machine(spreads, len(step_ms[0]), cpu_shares, real_share)


def dry_run(workload: Workload, variants: Sequence[Variant], sources: Sources, **how: Any) -> None:
    """Take two steps of every variant with streamed events, so that RankFailure is raised early if a variant hangs."""
    run_variants(replace(workload, rounds=2, warmup=0, link=None), variants, sources, stream=True, **how)


def run_variants(
    workload: Workload,
    variants: Sequence[Variant],
    sources: Sources | None = None,
    *,
    world_size: int = 2,
    backend: str = "gloo",
    on_step: Callable[[], None] | None = None,
    run: Callable[..., RankResults] = run_ranks,
    **options: Any,
) -> RankResults:
    """Run `train` on the ranks; return its results and the events.

    `sources` are the submission's modules (default: the solutions). `on_step` is called when a step begins. `run`
    replaces `run_ranks`, and `options` are some of its options. Raise UserError if the ranks cannot share a batch or
    emulate the link, and RankFailure or UserError as `run_ranks` does.
    """
    if workload.batch_size % world_size:
        raise UserError(f"{world_size} ranks cannot split a batch of {workload.batch_size} sequences equally")
    if workload.link and backend != "gloo":
        raise UserError(f"an emulated link needs the backend gloo: {backend} does not wait on the CPU")

    followed = {None}  # steps of the computation alone can come several times

    def follow(rank: int, event: Event) -> None:
        if on_step and rank == 0 and event.get("kind") == "step" and event["step"] not in followed:
            followed.add(event["step"])
            on_step()

    return run(
        train,
        asdict(workload),
        [asdict(variant) for variant in variants],
        world_size=world_size,
        backend=backend,
        mode="emulate" if workload.link else "record",
        packages={"submission": read_reference() if sources is None else sources},
        seed=workload.seed,
        on_event=follow,
        **{"deadline": DEADLINE_S, "stream": False} | options,
    )


def find_step_number(variants: Sequence[Variant], variant: Variant, turn: int) -> int:
    """Return the step number that marks the events of a variant's step in round `turn`."""
    return turn * len(variants) + list(variants).index(variant)


def make_measurement(
    workload: Workload, variants: Sequence[Variant], variant: Variant, results: RankResults
) -> Measurement:
    """Return the measurement of one variant from the results and the events of the ranks."""
    ranks = [result["variants"][variant.label] for result in results]
    rounds = len(ranks[0]["marks"])  # fewer than wanted if the time was up
    timed = {find_step_number(variants, variant, turn) for turn in range(workload.warmup, rounds)}
    node_size = workload.node_size or len(results)
    sent = [
        (count_sent_bytes(launch.op, launch.nbytes, len(launch.ranks)), spans_nodes(launch.ranks, node_size))
        for events in results.events
        for launch in launches(events)
        if launch.step in timed and launch.phase != STEP_BEFORE
    ]
    num_steps = len(results) * len(timed)
    marks: dict[str, Any] = {
        name: [rank[name][workload.warmup :] for rank in ranks] if ranks[0].get(name) else None
        for name in ("marks", "computation_marks")
    }
    fullest: dict[str, Any] = {
        name: max((rank[name] for rank in ranks), key=lambda nbytes: sum(nbytes.values()))
        for name in ("kept_bytes", "peak_bytes")
    }
    return Measurement(
        label=variant.label,
        collectives=len(sent) / num_steps,
        sent_bytes=sum(nbytes for nbytes, _ in sent) / num_steps,
        outer_bytes=sum(nbytes for nbytes, is_outer in sent if is_outer) / num_steps,
        losses=[rank["loss"] for rank in ranks],
        bucket_mb=variant.bucket_mb,
        **marks,
        **fullest,
        **ranks[0]["operations"],
    )
