"""One training step as a timeline: what each rank computed, and when each of its collectives was running.

    [timeline] = trace([get_variant(get_module(3))])
    make_chrome_trace([timeline])     the step for https://ui.perfetto.dev and chrome://tracing

`timeline_plot.py` draws timelines.

The workload's link is emulated (`emulated_link.py`). Ranks compute on the CPU, because on a GPU, the events show when
work was queued, not when it ran. `gpu_timeline.py` makes timelines of GPUs from the profiler's times instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from brigade.course.checks.tiny_lm import Size
from brigade.lab.emulated_link import Link, read_link
from brigade.lab.ladder import (
    EMULATED,
    PHASES,
    Variant,
    Workload,
    find_step_number,
    judge_run,
    make_measurement,
    read_reference,
    run_variants,
)
from brigade.lab.noise import Verdict
from brigade.lab.plots import NAMES
from brigade.ranks.events import Launch, launches
from brigade.ranks.texts import Sources

# A model with few but large parameters, so that the collectives are visible.
WORKLOAD = replace(
    EMULATED,
    size=Size(d_model=192, d_ff=512, layers=2, heads=4, vocabulary=256),
    batch_size=16,
    rounds=15,
    warmup=3,
    named=True,
)
EXPOSED = ("wait", "finish")  # kinds of spans that one process would not need
GAP_S = 1e-4  # shorter waits are ignored


@dataclass(frozen=True)
class Span:
    """The activity of one rank from `start_ms` to `end_ms`, relative to the start of the step.

    `kind` is one of `ladder.PHASES`, or "wait" if the rank waited for a collective in one of them.
    """

    rank: int
    kind: str
    start_ms: float
    end_ms: float

    @property
    def title(self) -> str:
        return NAMES.get(self.kind, self.kind)


@dataclass(frozen=True, kw_only=True)
class Running(Span):
    """What a rank launched at `launched_ms`, and what then ran beside its computation, or as a part of it.

    `number` is the number of earlier launches of the same kind. What runs at the same time has different values of
    `row`, starting at 0.
    """

    launched_ms: float
    number: int
    row: int = 0

    @property
    def title(self) -> str:
        """The operation and its number, such as "all-reduce 3"."""
        return f"{self.kind.replace('_', '-')} {self.number}"


@dataclass(frozen=True, kw_only=True)
class Collective(Running):
    """One collective on one rank: its operation is `kind`, and it ran from `start_ms` to `end_ms`.

    A link carries one collective at a time, so `start_ms` is later than `launched_ms` if another rank launched later or
    if the link was busy. If the end was not recorded, `end_ms` is the end of the step. The rank waited for the
    collective until `waited_ms`; None means that it never waited. If there are nodes, each rank has two links:
    collectives on different links have different values of `row`.
    """

    launch: Launch
    waited_ms: float | None = None

    @property
    def title(self) -> str:
        """The operation and its number, such as "all-reduce 3", or the parameter's name instead of the number."""
        return f"{self.kind.replace('_', '-')} {self.launch.name or self.number}"

    def describe(self) -> dict[str, Any]:
        """Return what Perfetto shows of the collective. Times are in ms."""
        launch = self.launch
        content = {"bytes": launch.nbytes, "dtype": launch.dtype, "tensors": launch.parts}
        origin = {"phase": launch.phase, "line": launch.line}
        return content | origin | {"launched": self.launched_ms, "waited": self.waited_ms}


@dataclass(frozen=True)
class Timeline:
    """One step of one variant: the step that has the median length of all timed steps.

    `link` is the emulated link, and `backward_ms` is the time of backward alone. `verdict` says whether the machine was
    quiet during the run; None means that nothing was measured. `note` is a sentence that the picture has to show.
    """

    label: str
    world_size: int
    spans: list[Span]
    launched: Sequence[Running]
    link: Link | None = None
    backward_ms: float | None = None
    verdict: Verdict | None = None
    note: str = ""

    @property
    def end_ms(self) -> float:
        return max(span.end_ms for span in self.spans)

    @property
    def count(self) -> str:
        """The number of collectives in words, such as "1 collective"."""
        count = len(self.get_collectives(0))
        return f"{count} collective" + ("" if count == 1 else "s")

    @property
    def lengths(self) -> str:
        """The length of the step, and the exposed time of its ranks, as text, such as: 131 ms, 41 to 44 ms exposed"""
        exposed = sorted({round(self.compute_exposed_ms(rank)) for rank in range(self.world_size)})
        return f"{self.end_ms:.0f} ms, {' to '.join(map(str, exposed[:1] + exposed[1:][-1:]))} ms exposed"

    def get_span(self, rank: int, kind: str) -> Span:
        """Return the span of a rank in one of `ladder.PHASES`."""
        return next(span for span in self.spans if span.rank == rank and span.kind == kind)

    def compute_exposed_ms(self, rank: int) -> float:
        """Return how long a rank was in spans of the kinds `EXPOSED` in this step, in ms.

        Unlike `Ladder.compute_exposed`, this needs no step without communication, because it sees each wait, or, for
        torch's wrappers, where they begin to wait (`find_edges`).
        """
        spans = [span for span in self.spans if span.rank == rank and span.kind in EXPOSED]
        merged = merge_intervals([(1e-3 * span.start_ms, 1e-3 * span.end_ms) for span in spans])
        return 1e3 * sum(end - start for start, end in merged)

    def get_collectives(self, rank: int) -> list[Running]:
        """Return the collectives of a rank, in launch order."""
        return [collective for collective in self.launched if collective.rank == rank]


def trace(
    variants: Sequence[Variant],
    sources: Sources | None = None,
    *,
    workload: Workload | None = None,
    world_size: int = 2,
    **options: Any,
) -> list[Timeline]:
    """Run the variants alternately, in one run of ranks, and return a timeline of each.

    `ladder.TORCH_DDP` may be one of the variants. `sources` defaults to the solutions. `options` are passed to
    `ladder.run_variants`. Raise the errors of that function.
    """
    workload = workload or WORKLOAD
    sources = read_reference() if sources is None else sources
    results = run_variants(workload, variants, sources, world_size=world_size, **options)
    link = read_link(results[0]["link"])
    assert link  # the workload has one
    measurements = [make_measurement(workload, variants, variant, results) for variant in variants]
    cpu_shares = [result["cpu_shares"] for result in results]
    num_nodes = link.count_nodes(range(world_size))
    link_s = link.seconds("all_reduce", results[0]["model_bytes"], world_size, num_nodes)
    verdict = judge_run([one.step_ms for one in measurements], cpu_shares, results[0]["real_s"] / link_s)
    timelines = []
    for variant, measurement in zip(variants, measurements, strict=True):
        lengths = measurement.step_ms
        round_index = sorted(range(len(lengths)), key=lengths.__getitem__)[(len(lengths) - 1) // 2]
        marks = [rounds[round_index] for rounds in measurement.marks]
        zero = min(times[0] for times in marks)
        spans, launched = [], []
        for rank, times in enumerate(marks):
            events = results.events[rank]
            rank_launches = launches(events, find_step_number(variants, variant, workload.warmup + round_index))
            edges = [1e3 * (time - zero) for time in find_edges(variant, times, rank_launches)]
            spans += [Span(rank, kind, *ends) for kind, ends in zip(PHASES, pairwise(edges), strict=True)]
            for launch in rank_launches:
                launch.end = launch.end or times[-1]  # torch gave no future, or the run ended first
            waits = [  # except those of module 9 in the next step
                (launch.wait_start, launch.wait_end)
                for launch in rank_launches
                if launch.wait_start and launch.wait_end and launch.wait_start < times[-1]
            ]
            spans += [Span(rank, "wait", 1e3 * (a - zero), 1e3 * (b - zero)) for a, b in merge_intervals(waits)]
            launched += make_collectives(rank, rank_launches, zero, link)
        backward_ms = 1e3 * results[0]["backward_s"]
        timelines.append(Timeline(variant.label, world_size, spans, launched, link, backward_ms, verdict))
    return timelines


def find_edges(variant: Variant, times: Sequence[float], launched: Sequence[Launch]) -> list[float]:
    """Return the start of a rank's step and the ends of its `PHASES`, in seconds. `times` are those of the loop.

    Torch's wrappers wait before backward returns, and DDP does so in C++, where no wait is recorded. Their last launch
    follows the last gradient, so backward ends there. The rest is the phase "finish", as in the course's wrappers.
    """
    edges = [*times]
    if variant.is_torch:
        _, begin, end, *_ = times
        edges[2] = max([launch.start for launch in launched if begin <= launch.start < end], default=end)
    return edges


def merge_intervals(
    intervals: list[tuple[float, float]], gap_s: float = GAP_S, shortest_s: float = GAP_S
) -> list[tuple[float, float]]:
    """Return the sorted intervals. Merge those at most `gap_s` apart; drop those not longer than `shortest_s`."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap_s:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return [(start, end) for start, end in merged if end - start > shortest_s]


def make_collectives(rank: int, launched: Sequence[Launch], zero: float, network: Link) -> list[Collective]:
    """Return the collectives of one rank's step. Times in seconds become milliseconds since `zero`."""
    free: dict[bool, float] = {}  # when the last collective inside a node, or between nodes, ended, maybe late
    counts: Counter[str] = Counter()
    collectives = []
    for launch in launched:
        link = network.count_nodes(launch.ranks) > 1
        start = max(launch.began or launch.start, free.get(link, 0.0))
        free[link] = max(start, launch.end or start)
        collectives.append(
            Collective(
                rank,
                launch.op,
                1e3 * (start - zero),
                1e3 * (free[link] - zero),
                launch=launch,
                number=counts[launch.op],
                launched_ms=1e3 * (launch.start - zero),
                waited_ms=None if launch.wait_end is None else 1e3 * (launch.wait_end - zero),
                row=[*free].index(link),
            )
        )
        counts[launch.op] += 1
    return collectives


def make_chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the timelines in Chrome's Trace Event Format, with one process per rank and timeline.

    Times are in microseconds. An arrow leads from a launch to its collective if the collective did not start
    immediately. Collectives of different links have separate threads. "otherData" has the verdict on the machine.
    """
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for process, (timeline, rank) in enumerate((line, rank) for line in timelines for rank in range(line.world_size)):
        collectives: list[Any] = timeline.get_collectives(rank)  # not kernels
        threads = {0: "computation", 1: "communication"}
        threads |= {one.row + 1: f"communication {one.row + 1}" for one in collectives if one.row}
        metadata += make_metadata(process, f"{timeline.label}, rank {rank}", threads)
        events += [make_slice(span, process, 0) for span in timeline.spans if span.rank == rank]
        for one in collectives:
            events.append(make_slice(one, process, one.row + 1) | {"args": one.describe()})
            if one.launched_ms < one.start_ms:
                arrow = {"name": "launch", "cat": one.kind, "id": len(events), "pid": process}
                events.append(arrow | {"ph": "s", "tid": 0, "ts": convert_to_us(one.launched_ms)})
                events.append(arrow | {"ph": "f", "bp": "e", "tid": one.row + 1, "ts": convert_to_us(one.start_ms)})
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))  # an enclosing slice comes first
    quiet = {"quiet": timelines[0].verdict.describe()} if timelines[0].verdict else {}
    return {"traceEvents": metadata + events, "displayTimeUnit": "ms", "otherData": quiet}


def make_metadata(process: int, name: str, threads: dict[int, str]) -> list[dict[str, Any]]:
    """Return the events of Chrome's format that name a process and its threads."""
    names = [("process_name", 0, name), *(("thread_name", thread, text) for thread, text in threads.items())]
    return [{"name": key, "ph": "M", "pid": process, "tid": tid, "args": {"name": text}} for key, tid, text in names]


def make_slice(span: Span, process: int, thread: int) -> dict[str, Any]:
    """Return a "complete" event of Chrome's format. Times in ms become microseconds."""
    start, end = convert_to_us(span.start_ms), convert_to_us(span.end_ms)
    place = {"pid": process, "tid": thread, "ts": start, "dur": end - start}
    return {"name": span.title, "cat": span.kind, "ph": "X", **place}


def convert_to_us(ms: float) -> int:
    """Return whole microseconds, so that start plus length is never rounded beyond the next start."""
    return round(1e3 * ms)
