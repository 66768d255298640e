"""The training ladder: train the same TinyLM on the same text with every module of the course and with torch.

    ladder = run_ladder()
    ladder.variants[0].median_ms               the step time of the first module
    ladder.compute_ratio(ladder.variants[0])   the same, as a multiple of torch DDP's
    ladder.list_wrong_losses()                 sentences about variants that do not train as one process does

All variants run in the same ranks and alternate. In each round, every variant takes one step on the same batch, after a
barrier, in an order that is shuffled for every round. A slow moment of the machine therefore affects all variants, and
ratios are taken within a round. Times of different runs are not comparable.

Ranks import this file, so it needs only torch; `plots.py` makes the table and the picture.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from brigade.checks.tiny_lm import SIZES, Block, Size, TinyLM, language_loss
from brigade.course.modules import CORE_MODULES, REFERENCE, TRAINING_MODULES, CourseError, Module
from brigade.course.submission import Sources, read
from brigade.events import Event, launches
from brigade.lab import corpus
from brigade.lab.memory_accounting import Bytes, PeakMemory, count_bytes_by_kind, count_torch_bucket_bytes
from brigade.rank import emulated_link, recording
from brigade.rank.api import device, student
from brigade.rank.emulated_link import Link, Pace, count_sent_bytes
from brigade.runner.ranks import RankResults, run_ranks

OVERLAPPING = ("PrefetchedDDP",)  # see `TrainingSetup.overlaps`
STEP_BEFORE = "the step before"  # the phase of launches that replace those of the previous step
PHASES = ("forward", "backward", "finish", "step")  # of one training step; "step" is the optimizer's
FP32_BYTES = 4
DEADLINE_S = 900.0
CALIBRATION = 9  # the median backward of this many rounds sets the link, because a busy machine's speed changes

HELD_OUT = 16  # sequences on which the final loss is computed

# Nats per token on held-out text, on any rank. SGD does not amplify rounding as Adam does. With this workload in fp32,
# we measured that correct answers differ from one process by at most 3e-7. On 64 sequences, the mutants
# that change the numbers on two ranks differ by at least 3e-3.
LOSS_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Workload:
    """The training run of every variant. A batch has `batch_size` sequences of `time` tokens, over all ranks.

    `bucket_mb` (MiB) is for variants that have buckets, including torch DDP. With a `link`, collectives take as long as
    on that emulated link (`emulated_link.py`); otherwise they take their real time on this machine. If `named` is set,
    each recorded launch contains the name of its parameter, if it has one; this takes a little time.
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


# The workload for the emulated link. Its computation takes long enough that the real collectives take only a small
# part of the emulated time. They still take processor time, and more in modules 6 to 8 than in 4 and 5: gloo's
# reduce-scatter does the work of an all-reduce, and an all-gather follows.
EMULATED = Workload(batch_size=24, time=128, rounds=35, link=Pace(comm_ratio=0.8, latency_ratio=0.002))


@dataclass(frozen=True)
class Variant:
    """The classes that average gradients and take the step, each as (package, name). A package may be "torch".

    Without a wrapper, as for one process, no gradients are averaged. Without an optimizer, every rank uses plain SGD.
    `bucket_mb` (MiB) replaces the workload's value, unless it is None. `arguments` are additional arguments of the
    wrapper.
    """

    label: str
    wrapper: tuple[str, str] | None = None
    optimizer: tuple[str, str] | None = None
    bucket_mb: float | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


TORCH_DDP = Variant("torch DDP", ("torch", "DistributedDataParallel"))
TORCH_ZERO = Variant("torch DDP + ZeRO", TORCH_DDP.wrapper, ("torch", "ZeroRedundancyOptimizer"))
TORCH_FSDP = Variant("torch fully_shard", ("torch", "fully_shard"))
TORCH = (TORCH_DDP, TORCH_ZERO)
ONE_PROCESS = Variant("one process")
COMPUTATION = Variant("computation alone")  # without communication; alternates with the others


@dataclass(frozen=True)
class Measurement:
    """The measurements of one variant in a finished ladder. Everything except the losses excludes the warm-up.

    `marks[rank][round]` are seconds: the start of the step, and the end of each of its `PHASES`. `cpu_s[rank][round]`
    is the processor time of the step, for all threads of the rank together. `collectives` and `sent_bytes` are means
    over ranks, per step; `sent_bytes` counts the bytes that a rank sends with ring algorithms. `losses` are per rank,
    in nats per token. `kept_bytes` and `peak_bytes` are the bytes between steps and at the peak of a step, by kind and
    on the fullest rank (see `memory_accounting.py`); `peak_bytes` is empty if no peak was measured.
    """

    label: str
    marks: list[list[list[float]]]
    cpu_s: list[list[float]]
    collectives: float
    sent_bytes: float
    losses: list[float]
    kept_bytes: Bytes
    peak_bytes: Bytes

    @property
    def step_ms(self) -> list[float]:
        """The step time of the slowest rank, for each round."""
        return [max(1e3 * (marks[-1] - marks[0]) for marks in ranks) for ranks in zip(*self.marks)]

    @property
    def median_ms(self) -> float:
        return median(self.step_ms)

    @property
    def quartiles_ms(self) -> tuple[float, float]:
        return compute_quartiles(self.step_ms)

    def compute_phase_parts_ms(self) -> dict[str, float]:
        """Return how many ms each of `PHASES` takes in the median step.

        The share of a phase in the step is its mean over rounds, measured on the slowest rank of each round.
        """
        slowest = [max(ranks, key=lambda marks: marks[-1] - marks[0]) for ranks in zip(*self.marks)]
        parts = [[(end - start) / (marks[-1] - marks[0]) for start, end in zip(marks, marks[1:])] for marks in slowest]
        return {phase: self.median_ms * fmean(shares) for phase, shares in zip(PHASES, zip(*parts))}

    def compute_phase_ms(self, phase: str) -> float:
        """Return the median time of one of `PHASES` in ms, over rounds and ranks."""
        end = PHASES.index(phase) + 1
        return median(1e3 * (marks[end] - marks[end - 1]) for rounds in self.marks for marks in rounds)

    @property
    def cpu_ms(self) -> list[float]:
        """The processor time of the step on all ranks together, for each round."""
        return [1e3 * sum(ranks) for ranks in zip(*self.cpu_s)]

    def compute_exposed_ms(self, alone: Measurement) -> list[float]:
        """Return, for each round, how much longer the step took than `alone`, the step without communication."""
        return [
            with_communication - computation for with_communication, computation in zip(self.step_ms, alone.step_ms)
        ]

    @property
    def loss(self) -> float:
        return fmean(self.losses)


def compute_quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the lower and the upper quartile."""
    lower, _, upper = quantiles(values, n=4, method="inclusive")
    return lower, upper


@dataclass(frozen=True)
class Ladder:
    """The results of `run_ladder`. The last of `variants` belong to torch.

    `expected_loss` is the loss of one process, in nats per token. `computation` is the measurement of the same steps
    without any communication. `link` is the emulated link, and `backward_s` is the time of backward alone for which the
    link was made. `real_s` is the time of a real all-reduce of all gradients, which have `model_bytes` bytes together.
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

    @property
    def link_s(self) -> float | None:
        """The time of an all-reduce of all gradients on the emulated link, or None without a link."""
        return self.link.seconds("all_reduce", self.model_bytes, self.world_size) if self.link else None

    def get_measurement(self, label: str) -> Measurement:
        """Return the measurement of the variant with this label."""
        return next(variant for variant in self.variants if variant.label == label)

    def compute_ratio(self, variant: Measurement) -> float:
        """Return the median, over rounds, of the step time as a multiple of torch DDP's in the same round."""
        return median(self.compute_ratios(variant))

    def compute_ratios(self, variant: Measurement, base: str = TORCH_DDP.label) -> list[float]:
        """Return, for each round, the ratio of the step time to that of the variant with the label `base`."""
        return [
            numerator / denominator
            for numerator, denominator in zip(variant.step_ms, self.get_measurement(base).step_ms)
        ]

    def compute_exposed_ms(self, variant: Measurement) -> list[float]:
        """Return, for each round, the time by which communication lengthened the step."""
        return variant.compute_exposed_ms(self.computation)

    def compute_cpu_ratios(self, variant: Measurement, base: str = TORCH_DDP.label) -> list[float]:
        """Return, for each round, the ratio of the processor time to that of the variant with the label `base`."""
        return [
            numerator / denominator for numerator, denominator in zip(variant.cpu_ms, self.get_measurement(base).cpu_ms)
        ]

    def list_wrong_losses(self) -> list[str]:
        """Return a sentence for every rank of a variant whose loss differs from that of one process."""
        return [
            f"{variant.label} does not train as one process does: rank {rank} has a loss of {loss:.6f}, one process "
            f"has {self.expected_loss:.6f}; the allowed difference is {LOSS_TOLERANCE:g}"
            for variant in self.variants
            for rank, loss in enumerate(variant.losses)
            if not abs(loss - self.expected_loss) <= LOSS_TOLERANCE
        ]


def get_variant(entry: Module) -> Variant:
    """Return the variant of a module, which uses the last of the module's public names.

    If this name is an optimizer, it is combined with the module's own wrapper, or else with the last wrapper before it.
    """
    wrappers = [
        (one.package, name)
        for one in TRAINING_MODULES
        if one.number <= entry.number
        for name in one.public
        if is_wrapper(name)
    ]
    optimizer = None if is_wrapper(entry.public[-1]) else (entry.package, entry.public[-1])
    return Variant(f"{entry.number} {entry.public[-1]}", wrappers[-1], optimizer)


def is_wrapper(name: str) -> bool:
    """Return whether a public name is the name of a wrapper."""
    return name.endswith("DDP")


def add_torch_variants(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants, then torch's: DDP and ZeRO, and `fully_shard` if a fully sharded variant is compared."""
    fully_sharded = any(variant.wrapper and variant.wrapper[1] == "FullyShardedDDP" for variant in variants)
    return [*variants, *TORCH, *([TORCH_FSDP] if fully_sharded else [])]


def get_course_variants() -> list[Variant]:
    """Return the variants of all core modules."""
    return [get_variant(entry) for entry in CORE_MODULES]


def read_reference() -> Sources:
    """Return the text of all solutions, or of all of the student's modules in the student edition."""
    return read(REFERENCE, TRAINING_MODULES[-1].number).sources


def count_steps(workload: Workload, variants: Sequence[Variant]) -> int:
    """Return how often `run_benchmark` calls `on_step`, including the steps of one process and of computation alone."""
    return workload.rounds * (len(variants) + 2)


def run_ladder(
    workload: Workload | None = None,
    variants: Sequence[Variant] | None = None,
    sources: Sources | None = None,
    **how: Any,
) -> Ladder:
    """Call `run_benchmark` with the variants (default: the course's), followed by torch's."""
    variants = get_course_variants() if variants is None else variants
    return run_benchmark(workload or Workload(), add_torch_variants(variants), sources, **how)


def run_benchmark(
    workload: Workload,
    variants: Sequence[Variant],
    sources: Sources | None = None,
    *,
    world_size: int = 2,
    backend: str = "gloo",
    share_gpu: bool = False,
    deadline: float = DEADLINE_S,
    on_step: Callable[[], None] | None = None,
    run: Callable[..., RankResults] = run_ranks,
    with_peaks: bool = True,
) -> Ladder:
    """Train all variants alternately on `world_size` ranks, then train one process. Return the measurements.

    `sources` are the submission's modules (default: the solutions). `on_step` is called when a step begins. `run`
    replaces `run_ranks`. Without `with_peaks`, no memory peaks are measured. Raise ValueError if a batch cannot be
    split equally among the ranks, CourseError if an emulated link is requested on NCCL, and RankFailure or CourseError
    as `run_ranks` does.
    """
    sources = read_reference() if sources is None else sources
    how = {"backend": backend, "share_gpu": share_gpu, "deadline": deadline, "on_step": on_step}
    together = [*variants, COMPUTATION]
    results = run_variants(workload, together, sources, world_size=world_size, run=run, with_peaks=with_peaks, **how)
    [single_result] = run_variants(replace(workload, link=None), [ONE_PROCESS], sources, world_size=1, **how)
    *measurements, computation = [make_measurement(workload, together, variant, results) for variant in together]
    return Ladder(
        workload=workload,
        world_size=world_size,
        backend=backend,
        expected_loss=single_result["losses"][ONE_PROCESS.label],
        variants=measurements,
        computation=computation,
        link=Link(*results[0]["link"]) if results[0]["link"] else None,
        backward_s=results[0]["backward_s"],
        real_s=results[0]["real_s"],
        model_bytes=results[0]["model_bytes"],
    )


def dry_run(workload: Workload, variants: Sequence[Variant], sources: Sources, **how: Any) -> None:
    """Take two steps of every variant with streamed events, so that RankFailure is raised early if a variant hangs."""
    run_variants(replace(workload, rounds=2, warmup=0, link=None), variants, sources, stream=True, **how)


def run_variants(
    workload: Workload,
    variants: Sequence[Variant],
    sources: Sources,
    *,
    world_size: int,
    backend: str = "gloo",
    share_gpu: bool = False,
    deadline: float = DEADLINE_S,
    on_step: Callable[[], None] | None = None,
    run: Callable[..., RankResults] = run_ranks,
    stream: bool = False,
    with_peaks: bool = False,
) -> RankResults:
    """Run `train` on the ranks; return its results and the events. Raise the errors of `run_benchmark`.

    `stream` is passed to `run_ranks`, and `with_peaks` to `train`.
    """
    if workload.batch_size % world_size:
        raise ValueError(f"{world_size} ranks cannot split a batch of {workload.batch_size} sequences equally")
    if workload.link and backend != "gloo":
        raise CourseError(f"an emulated link needs the backend gloo: {backend} does not wait on the CPU")

    def follow(rank: int, event: Event) -> None:
        if on_step and rank == 0 and event.get("kind") == "step" and event["step"] is not None:
            on_step()

    return run(
        train,
        asdict(workload),
        [asdict(variant) for variant in variants],
        with_peaks,
        world_size=world_size,
        backend=backend,
        share_gpu=share_gpu,
        mode="emulate" if workload.link else "record",
        packages={"submission": sources},
        seed=workload.seed,
        deadline=deadline,
        stream=stream,
        on_event=follow,
    )


def find_step_number(variants: Sequence[Variant], variant: Variant, turn: int) -> int:
    """Return the step number that marks the events of a variant's step in round `turn`."""
    return turn * len(variants) + list(variants).index(variant)


def make_measurement(
    workload: Workload, variants: Sequence[Variant], variant: Variant, results: RankResults
) -> Measurement:
    """Return the measurement of one variant from the results and the events of the ranks."""
    timed = {find_step_number(variants, variant, turn) for turn in range(workload.warmup, workload.rounds)}
    timed_launches = [
        launch
        for events in results.events
        for launch in launches(events)
        if launch.step in timed and launch.phase != STEP_BEFORE
    ]
    return Measurement(
        label=variant.label,
        marks=[result["marks"][variant.label][workload.warmup :] for result in results],
        cpu_s=[result["cpu_s"][variant.label][workload.warmup :] for result in results],
        collectives=len(timed_launches) / len(results) / len(timed),
        sent_bytes=sum(count_sent_bytes(launch.op, launch.nbytes, len(results)) for launch in timed_launches)
        / len(results)
        / len(timed),
        losses=[result["losses"][variant.label] for result in results],
        kept_bytes=find_fullest([result["kept"][variant.label] for result in results]),
        peak_bytes=find_fullest([result["peaks"].get(variant.label, {}) for result in results]),
    )


def find_fullest(ranks: Sequence[Bytes]) -> Bytes:
    """Return the bytes by kind of the rank that has the most bytes."""
    return max(ranks, key=lambda nbytes: sum(nbytes.values()))


# The code below runs in the ranks.


@dataclass
class TrainingSetup:
    """One variant in a rank: the model, its wrapper, its optimizer, and the marks of its steps."""

    label: str
    model: nn.Module
    wrapper: nn.Module
    optimizer: torch.optim.Optimizer
    marks: list[list[float]]
    cpu_s: list[float]

    @property
    def overlaps(self) -> bool:
        """Whether the all-gathers of weights run during the next step's forward."""
        return type(self.wrapper).__name__ in OVERLAPPING


def build_setup(variant: dict, model: nn.Module, workload: dict) -> TrainingSetup:
    """Construct the variant's wrapper and optimizer. Only this function knows how variants are constructed.

    `workload["optimizer"]` is the optimizer's class, if it is not SGD with momentum.
    """
    wrapper = model
    if variant["wrapper"]:
        wrapper_class = load_class(*variant["wrapper"])
        bucket_mb = workload["bucket_mb"] if variant["bucket_mb"] is None else variant["bucket_mb"]
        sizes = {
            "bucket_cap_mb": bucket_mb,
            "bucket_numel": max(1, int(bucket_mb * 2**20 / FP32_BYTES)),
            "unit_types": (Block,),
            "grad_dtype": torch.float32,  # for models in 16 bits
        }
        accepted = inspect.signature(wrapper_class).parameters
        sizes = {name: size for name, size in sizes.items() if name in accepted}
        wrapper = wrapper_class(model, **sizes, **variant["arguments"])
    base = workload.get("optimizer", torch.optim.SGD)
    options = {"lr": workload["learning_rate"]} | ({"momentum": 0.9} if issubclass(base, torch.optim.SGD) else {})
    if not variant["optimizer"]:
        shards = wrapper.shards() if hasattr(wrapper, "shards") else model.parameters()
        optimizer = base(shards, **options)
    else:
        shards_buckets = variant["wrapper"] and variant["optimizer"][0] != "torch"
        stepped = wrapper if shards_buckets else model.parameters()
        optimizer = load_class(*variant["optimizer"])(stepped, base, **options)
    return TrainingSetup(variant["label"], model, wrapper, optimizer, [], [])


def load_class(package: str, name: str) -> type:
    """Return a class of a submission's module, or of torch."""
    if package != "torch":
        return student(package, name)
    if name == "DistributedDataParallel":
        return DistributedDataParallel
    if name == "fully_shard":
        return shard_fully
    from torch.distributed.optim import ZeroRedundancyOptimizer  # imported late because the import prints a warning

    return ZeroRedundancyOptimizer


def shard_fully(model: nn.Module) -> nn.Module:
    """Apply torch's fully_shard to each block of the model and to the rest. Return the model, with rank 0's weights."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    for tensor in model.state_dict().values():
        dist.broadcast(tensor, 0)
    mesh = DeviceMesh.from_group(dist.group.WORLD, device().type)
    blocks = [fully_shard(block, mesh=mesh) for block in model.blocks]
    for block, following in zip(blocks, blocks[1:]):  # torch prefetches one unit in backward, but none in forward
        block.set_modules_to_forward_prefetch([following])
    model = fully_shard(model, mesh=mesh)
    model.set_modules_to_forward_prefetch(blocks[:1])
    return model


def train(workload: dict, variants: list[dict], with_peaks: bool) -> dict:
    """Take all steps of all variants. If `with_peaks`, take one more step of each variant, which is not timed.

    Return, by label, "marks" and "cpu_s" (see `Measurement`), "losses" (on held-out text), "kept" and "peaks" (bytes by
    kind). Also return "link" (the two numbers of a `Link`, or None), "backward_s", "real_s" and "model_bytes" (see
    `Ladder`).
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size == 1:
        torch.set_num_threads(1)  # this run is not timed, and a second thread slows it down on a busy machine
    # Seeds differ between ranks, so only a wrapper that broadcasts starts from rank 0's weights, as one process does.
    start = TinyLM(Size(**workload["size"])).to(device())
    with recording.phase("construct"):
        setups = [build_setup(variant, copy.deepcopy(start), workload) for variant in variants]
    text = broadcast_text(corpus.read_text())
    generator = torch.Generator().manual_seed(workload["seed"])

    def draw_next_batch() -> list[Tensor]:
        whole = corpus.draw_batch(text, workload["batch_size"], workload["time"], generator)
        return [tensor.chunk(world_size)[rank].to(device()) for tensor in whole]

    calibration = Calibration(start, workload["link"])
    for turn in range(workload["rounds"]):
        batch = draw_next_batch()
        for _ in range(CALIBRATION if turn == 0 else 1):
            calibration.measure(*batch)
        for index in random.Random(turn).sample(range(len(setups)), len(setups)):
            setup = setups[index]
            dist.barrier()
            recording.note("step", step=turn * len(variants) + index, variant=variants[index]["label"])
            if setup.overlaps:  # as the previous step would have done if no other variant had run since
                with recording.phase(STEP_BEFORE):
                    setup.wrapper.start_param_sync()
            if workload["named"]:
                recording.name_parameters(setup.model)
            cpu = time.process_time()
            setup.marks.append(take_step(setup, *batch))
            setup.cpu_s.append(time.process_time() - cpu)
            if setup.overlaps:
                setup.wrapper.finish_param_sync()
    recording.note("step", step=None)  # the evaluation may communicate
    kept = {c.label: count_kept_bytes(c) for c in setups}  # before a forward gathers weights again
    tokens, targets = (tensor.to(device()) for tensor in corpus.draw_batch(text, HELD_OUT, workload["time"], generator))
    with torch.no_grad():
        losses = {c.label: language_loss(c.wrapper(tokens), targets).item() for c in setups}
    emulated_link.use(None)
    peaks = {c.label: measure_peak(c, tokens[:1, :1], targets[:1, :1]) for c in setups if with_peaks}
    return {
        "marks": {c.label: c.marks for c in setups},
        "cpu_s": {c.label: c.cpu_s for c in setups},
        "losses": losses,
        "kept": kept,
        "peaks": peaks,
        **calibration.get_results(),
    }


def count_kept_bytes(setup: TrainingSetup) -> dict[str, int]:
    """Return the bytes that the variant keeps on this rank, by kind. Gradients include torch DDP's flat tensors."""
    nbytes = count_bytes_by_kind(setup.model, setup.wrapper, setup.optimizer)
    nbytes["gradients"] += count_torch_bucket_bytes(setup.wrapper)
    return nbytes


def measure_peak(setup: TrainingSetup, tokens: Tensor, targets: Tensor) -> Bytes:
    """Return the bytes by kind at the peak of a step on these tokens. The step also trains the variant."""
    with PeakMemory(setup.model, setup.wrapper, setup.optimizer) as memory:
        take_step(setup, tokens, targets)
    if setup.overlaps:
        setup.wrapper.finish_param_sync()
    return memory.at_peak


def broadcast_text(text: bytes) -> bytes:
    """Return rank 0's text on every rank, because another machine may have a different Python."""
    length = torch.tensor([len(text)], device=device())
    dist.broadcast(length, 0)
    whole = bytearray(text[: length.item()].ljust(length.item()))
    shared = torch.frombuffer(whole, dtype=torch.uint8).to(device())
    dist.broadcast(shared, 0)
    shared = shared.cpu()
    return ctypes.string_at(shared.data_ptr(), len(shared))


class Calibration:
    """The measurement of backward alone in every round, which determines the emulated link.

    `wanted` is a workload's `link`, as a dict. The link is in use from the first `measure` on.
    """

    def __init__(self, model: nn.Module, wanted: dict | None):
        self.model = model
        self.wanted = wanted
        self.model_bytes = sum(parameter.nbytes for parameter in model.parameters())
        self.backward_s: list[float] = []
        self.real_s: list[float] = []

    def measure(self, tokens: Tensor, targets: Tensor) -> None:
        """Time backward alone and one real all-reduce of all gradients; append the means over the ranks."""
        if dist.get_world_size() == 1:
            return
        emulated_link.use(None)
        recording.note("step", step=None)  # the following events belong to no step
        loss = language_loss(self.model(tokens), targets)
        synchronize()
        dist.barrier()
        marks = [time.perf_counter()]
        loss.backward()
        synchronize()
        marks.append(time.perf_counter())
        flat = torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])
        self.model.zero_grad()
        dist.barrier()
        marks.append(time.perf_counter())
        dist.all_reduce(flat)
        synchronize()
        marks.append(time.perf_counter())
        times = torch.tensor([marks[1] - marks[0], marks[3] - marks[2]], dtype=torch.float64).to(device())
        dist.all_reduce(times)
        backward_s, real_s = (times / dist.get_world_size()).tolist()
        self.backward_s.append(backward_s)
        self.real_s.append(real_s)
        emulated_link.use(self.make_link(self.backward_s[-CALIBRATION:]))

    def make_link(self, backward_s: list[float]) -> Link | None:
        """Return the requested link for a backward that takes the median of `backward_s`.

        Return None if no link is wanted or nothing has been measured.
        """
        if not self.wanted or not backward_s:
            return None
        if "comm_ratio" in self.wanted:
            return Pace(**self.wanted).link(median(backward_s), self.model_bytes, dist.get_world_size())
        return Link(**self.wanted)

    def get_results(self) -> dict[str, Any]:
        """Return fields of `Ladder`: the medians "backward_s" and "real_s", the resulting "link", and "model_bytes"."""
        link = self.make_link(self.backward_s)
        return {
            "link": [link.latency_s, link.bytes_per_s] if link else None,
            "backward_s": median(self.backward_s or [0.0]),
            "real_s": median(self.real_s or [0.0]),
            "model_bytes": self.model_bytes,
        }


def synchronize() -> None:
    """Wait until the GPU, if there is one, has finished all queued work."""
    if device().type == "cuda":
        torch.cuda.synchronize()


def take_step(setup: TrainingSetup, tokens: Tensor, targets: Tensor) -> list[float]:
    """Take one training step, in the loop that all variants share. Return its marks, in seconds."""
    marks = [time.perf_counter()]
    with recording.phase("forward"):
        setup.optimizer.zero_grad()
        loss = language_loss(setup.wrapper(tokens), targets)
    marks.append(time.perf_counter())
    with recording.phase("backward"):
        loss.backward()
    marks.append(time.perf_counter())
    with recording.phase("finish"):
        if hasattr(setup.wrapper, "finish_grad_sync"):  # torch DDP has finished when backward returns
            setup.wrapper.finish_grad_sync()
    marks.append(time.perf_counter())
    with recording.phase("step"):
        setup.optimizer.step()
        synchronize()
    marks.append(time.perf_counter())
    return marks
