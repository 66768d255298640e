"""One training step on GPUs as a timeline: which kernels ran when, on which stream.

    [timeline] = trace_on_gpus([get_variant(get_module(3))])
    make_chrome_trace([timeline])     all kernels of the step, for https://ui.perfetto.dev and chrome://tracing

`timeline_plot.py` draws these timelines as it draws those of an emulated link. The times are those of torch's profiler,
which gets them from the GPU. `read_profile` needs no GPU.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from brigade.course.checks.tiny_lm import Size
from brigade.lab.ladder import PHASES, Variant, Workload, read_reference, scale_batch
from brigade.lab.profiled_step import MARK, PROFILED, profile_steps
from brigade.lab.timeline import Running, Span, Timeline, make_metadata, make_slice, merge_intervals
from brigade.ranks.errors import UserError
from brigade.ranks.runner.machine import count_gpus
from brigade.ranks.runner.ranks import run_ranks
from brigade.ranks.texts import Sources

if TYPE_CHECKING:
    from brigade.lab.notebook_plots import LargeFigure

# Large enough that a GPU computes longer than Python needs to launch the kernels.
WORKLOAD = Workload(
    size=Size(d_model=1024, d_ff=4096, layers=2, heads=16, vocabulary=256, context=512),
    batch_size=8,
    time=512,
    rounds=3 + PROFILED,
    bucket_mb=25.0,
)
DEADLINE_S = 300.0
ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of events that ran on the GPU
LAUNCHES = ("cuda_runtime", "cuda_driver")  # categories of the calls that queued them
GAP_S = 2e-5  # shorter gaps between kernels are ignored
SHOWN_RANKS = 2  # in a notebook: eight do not fit on a screen
OPERATIONS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce", "send_recv")
SHARED = "Several ranks share a GPU: these times say nothing about speed."


@dataclass(frozen=True, kw_only=True)
class Kernel(Running):
    """A kernel, a copy or a memset on a GPU, from `start_ms` to `end_ms`.

    `kind` is the operation of one of NCCL's kernels, and the phase in which other kernels were launched: one of
    `ladder.PHASES`. A kernel of NCCL begins when its own rank can run it, so its time includes waiting for its peers.
    """

    name: str
    stream: int
    is_nccl: bool

    @property
    def title(self) -> str:
        return super().title if self.is_nccl else self.name

    def shift(self, by_ms: float) -> Kernel:
        """Return the kernel, `by_ms` later."""
        times = {name: getattr(self, name) + by_ms for name in ("start_ms", "end_ms", "launched_ms")}
        return replace(self, **times)


@dataclass(frozen=True)
class GpuTimeline(Timeline):
    """One step of one variant on GPUs. `launched` has NCCL's kernels, and `kernels` has all.

    `spans` are the computation's kernels: those of one phase that follow each other without a gap are one span. A span
    of the kind "wait" is time in which a GPU ran one of NCCL's kernels and none of the rank's others.
    """

    kernels: list[Kernel] = field(default_factory=list)

    @property
    def count(self) -> str:
        """The number of NCCL's kernels on rank 0 in words, such as "1 NCCL kernel"."""
        count = len(self.get_collectives(0))
        return f"{count} NCCL kernel" + ("" if count == 1 else "s")


def trace_on_gpus(
    variants: Sequence[Variant], sources: Sources | None = None, *, world_size: int = 2, **options: Any
) -> list[GpuTimeline]:
    """Run the variants alternately on GPUs, in one run of ranks, and return a timeline of each one's last step.

    The arguments and the errors are those of `record_profiles` and `make_timelines`.
    """
    return make_timelines(record_profiles(variants, sources, world_size=world_size, **options))


def show_on_gpus(variants: Sequence[Variant], **changes: Any) -> LargeFigure | None:
    """Draw a step of each variant in a notebook, with one rank per GPU, or two that share the only one.

    `changes` replace fields of `WORKLOAD`. If there is no GPU, or if the profiler records no kernels, print one
    sentence and return None.
    """
    from brigade.lab.notebook_plots import draw_timelines  # imported here, because the rest needs only torch

    gpus = count_gpus()
    if not gpus:
        print("This machine has no GPU that ranks can use. On GPUs, this cell draws the kernels of a step.")
        return None
    world_size = max(2, gpus)
    workload = replace(scale_batch(WORKLOAD, world_size), **changes)
    try:
        timelines = trace_on_gpus(variants, workload=workload, world_size=world_size, share_gpu=gpus < world_size)
    except UserError as error:
        print(error)
        return None
    return draw_timelines(timelines, [f"{timeline.label}, {timeline.count}" for timeline in timelines], SHOWN_RANKS)


def record_profiles(
    variants: Sequence[Variant],
    sources: Sources | None = None,
    *,
    workload: Workload | None = None,
    world_size: int = 2,
    **options: Any,
) -> dict[str, list[bytes]]:
    """Return the profile of each rank's last step, as `profile_steps` does, by the variants' labels.

    `sources` defaults to the solutions. `options` are passed to `run_ranks`, whose errors are raised. Also raise
    UserError if the ranks cannot share a batch.
    """
    workload = workload or scale_batch(WORKLOAD, world_size)
    if workload.batch_size % world_size:
        raise UserError(f"{world_size} ranks cannot split a batch of {workload.batch_size} sequences equally")
    results = run_ranks(
        profile_steps,
        asdict(workload),
        [asdict(variant) for variant in variants],
        world_size=world_size,
        packages={"submission": read_reference() if sources is None else sources},
        seed=workload.seed,
        **{"backend": "nccl", "deadline": DEADLINE_S, "stream": False} | options,
    )
    return {variant.label: [result[variant.label] for result in results] for variant in variants}


def make_timelines(profiles: Mapping[str, Sequence[bytes]]) -> list[GpuTimeline]:
    """Return a timeline for each label in `profiles`, which has a profile for each rank that ran on this machine.

    Raise UserError if one contains no kernels of backward.
    """
    timelines = []
    for label, of_ranks in profiles.items():
        steps = [read_profile(rank, json.loads(profile)) for rank, profile in enumerate(of_ranks)]
        zero_us = min(start_us for start_us, *_ in steps)
        kernels, spans = [], []
        for rank, (start_us, end_us, found) in enumerate(steps):
            own = [kernel.shift(1e-3 * (start_us - zero_us)) for kernel in found]
            kernels += own
            spans += make_spans(rank, own, 1e-3 * (end_us - zero_us))
        launched = [kernel for kernel in kernels if kernel.is_nccl]
        note = SHARED if count_gpus() < len(steps) else ""
        timelines.append(GpuTimeline(label, len(steps), spans, launched, note=note, kernels=kernels))
    return timelines


def read_profile(rank: int, profile: dict[str, Any]) -> tuple[float, float, list[Kernel]]:
    """Return when a rank's step started and ended in µs, and what it ran on the GPU, in the order of launches.

    `profile` is a file of `export_chrome_trace`. Times of kernels are in ms since the start of the step. Only what was
    launched between the first and the last `MARK` is returned. torch also writes annotations for NCCL's kernels, which
    have another category and are not counted. Raise UserError if the profile contains no kernels of backward.
    """
    events = [event for event in profile["traceEvents"] if event.get("ph") == "X"]
    marks = [event for event in events if event["name"] == MARK and event.get("cat") == "user_annotation"]
    edges = sorted(mark["ts"] + mark["dur"] for mark in marks)
    queued = {event["args"]["correlation"]: event["ts"] for event in events if event.get("cat") in LAUNCHES}
    before, start, *_, end = edges
    ran = [
        (queued.get(event["args"].get("correlation"), event["ts"]), event)
        for event in events
        if event.get("cat") in ON_GPU
    ]
    kernels: list[Kernel] = []
    counts: Counter[str] = Counter()
    rows: dict[int, int] = {}
    for launched, event in sorted(ran, key=lambda pair: (pair[0], pair[1]["ts"])):
        if not before <= launched <= end:
            continue
        stream, name = event["args"]["stream"], event["name"]
        is_nccl = event["cat"] == "kernel" and "nccl" in name.lower()
        kind = find_operation(name) if is_nccl else PHASES[sum(launched > edge for edge in edges[2:-1])]
        kernels.append(
            Kernel(
                rank,
                kind,
                1e-3 * (event["ts"] - start),
                1e-3 * (event["ts"] + event["dur"] - start),
                launched_ms=1e-3 * (launched - start),
                number=counts[kind],
                row=rows.setdefault(stream, len(rows)) if is_nccl else 0,
                name=name,
                stream=stream,
                is_nccl=is_nccl,
            )
        )
        counts[kind] += 1
    if not any(kernel.kind == "backward" for kernel in kernels):
        raise UserError(
            f"torch's profiler recorded no kernels of backward on rank {rank}, so there is no timeline to draw; "
            "docs/gpus.md says what the profiler needs"
        )
    base_us = 1e-3 * profile.get("baseTimeNanoseconds", 0)
    return base_us + start, base_us + end, kernels


def find_operation(name: str) -> str:
    """Return the collective of a kernel such as `ncclDevKernel_AllReduce_Sum_f32_RING_LL(...)`: "all_reduce"."""
    text = name.lower()
    return next((one for one in OPERATIONS if one.replace("_", "") in text), "other")


def make_spans(rank: int, kernels: Sequence[Kernel], end_ms: float) -> list[Span]:
    """Return the `spans` of `GpuTimeline` of one rank, whose step ends at `end_ms`, from its kernels.

    The step does not wait for collectives that run longer.
    """
    computing = [kernel for kernel in kernels if not kernel.is_nccl]
    communicating = merge_kernels([kernel for kernel in kernels if kernel.is_nccl])
    waits = subtract(communicating, [*merge_kernels(computing), (1e-3 * end_ms, math.inf)])
    of_phases = {kind: merge_kernels([kernel for kernel in computing if kernel.kind == kind]) for kind in PHASES}
    return [
        Span(rank, kind, 1e3 * start, 1e3 * end)
        for kind, intervals in {**of_phases, "wait": waits}.items()
        for start, end in intervals
    ]


def merge_kernels(kernels: Sequence[Kernel]) -> list[tuple[float, float]]:
    """Return the times in seconds during which one of the kernels ran. Gaps up to `GAP_S` count as such times."""
    return merge_intervals([(1e-3 * one.start_ms, 1e-3 * one.end_ms) for one in kernels], gap_s=GAP_S, shortest_s=0.0)


def subtract(
    intervals: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """Return the parts of the intervals that are longer than `GAP_S` and in none of the others. Both are sorted."""
    rest = []
    for start, end in intervals:
        for other_start, other_end in others:
            if start < other_end and other_start < end:
                rest.append((start, other_start))
                start = max(start, other_end)
        rest.append((start, end))
    return [(start, end) for start, end in rest if end - start > GAP_S]


def make_chrome_trace(timelines: Sequence[GpuTimeline]) -> dict[str, Any]:
    """Return all kernels in Chrome's Trace Event Format: a process per rank and timeline, a thread per stream."""
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for process, (timeline, rank) in enumerate((line, rank) for line in timelines for rank in range(line.world_size)):
        own = [kernel for kernel in timeline.kernels if kernel.rank == rank]
        with_nccl = {kernel.stream for kernel in own if kernel.is_nccl}
        streams = {
            stream: f"stream {stream}" + ", NCCL" * (stream in with_nccl)
            for stream in sorted({kernel.stream for kernel in own})
        }
        metadata += make_metadata(process, f"{timeline.label}, rank {rank}", streams)
        for kernel in own:
            details = {"kernel": kernel.name, "phase or operation": kernel.kind, "launched": kernel.launched_ms}
            events.append(make_slice(kernel, process, kernel.stream) | {"args": details})
    events.sort(key=lambda event: event["ts"])
    return {"traceEvents": metadata + events, "displayTimeUnit": "ms", "otherData": {"note": timelines[0].note}}
