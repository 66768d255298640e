"""One training step as a timeline: what each rank computed, and when each of its collectives was running.

    [timeline] = trace([get_variant(get_module(3))])
    make_chrome_trace([timeline])     the step for https://ui.perfetto.dev and chrome://tracing

`timeline_plot.py` draws timelines.

`timeline_view.py` writes an interactive page.

The workload's link is emulated (`emulated_link.py`). With `link=None`, collectives take their real time on this
machine. Ranks compute on the CPU, because on a GPU, the events show when work was queued, not when it ran.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brigade.checks.tiny_lm import Size
from brigade.course.submission import Sources
from brigade.events import Launch, launches
from brigade.lab import program
from brigade.lab.ladder import (
    EMULATED,
    PHASES,
    Variant,
    Workload,
    compute_spread,
    find_step_number,
    make_measurement,
    read_reference,
    run_variants,
)
from brigade.lab.plan import make_model, make_setting
from brigade.lab.plots import NAMES
from brigade.lab.program import Machine, record
from brigade.rank.emulated_link import Link, read_link

# A model with few but large parameters, so that the collectives are visible.
WORKLOAD = replace(
    EMULATED,
    size=Size(d_model=192, d_ff=512, layers=2, heads=4, vocabulary=256),
    batch_size=16,
    rounds=15,
    warmup=3,
    named=True,
)
EXPOSED = ("wait", "finish", "copy")  # kinds of spans that one process would not need
GAP_S = 1e-4  # shorter waits are ignored
MAX_SPREAD = 0.25  # of the step time, between its quartiles, relative to the median
MAX_LATE = 0.1  # of the step time, by which a recorded end may be later than the link's


@dataclass(frozen=True)
class Span:
    """The activity of one rank from `start_ms` to `end_ms`, relative to the start of the step.

    `kind` is one of `ladder.PHASES`, or "wait" if the rank waited for a collective in one of them. In a schematic, it
    may also be "copy". `label` is the text of the span in the picture.
    """

    rank: int
    kind: str
    start_ms: float
    end_ms: float
    label: str = ""


@dataclass(frozen=True)
class Collective:
    """One collective on one rank. It was launched at `launched_ms`, and ran from `start_ms` to `end_ms`.

    An emulated link carries one collective at a time, so `start_ms` is later than the launch if another rank launched
    later or if the link was busy. (If there are nodes, each rank has two links.) If the end was not recorded,
    `end_ms` is the end of the step. The rank waited for the collective until `waited_ms`; None means that it never
    waited. `number` is the one that `number_launches` gives, and `parts` counts the tensors in a coalesced launch.
    `name` is the parameter's name, if the launch is on a single parameter. Collectives that overlap have different
    values of `row`, starting at 0. `line` is the line of the wrapper that launched the collective, if it is known.
    `label` is the text of the collective in the picture, in which the first `latency_ms` are dark.
    """

    rank: int
    ranks: Sequence[int]  # of the group
    op: str
    number: int
    name: str | None
    dtype: str
    nbytes: int
    parts: int
    phase: str
    launched_ms: float
    start_ms: float
    end_ms: float
    waited_ms: float | None
    row: int
    line: str | None
    label: str
    latency_ms: float = 0.0

    @property
    def title(self) -> str:
        """The operation and its number, such as "all-reduce 3", or the parameter's name instead of the number."""
        return f"{self.op.replace('_', '-')} {self.name or self.number}"

    @property
    def labels(self) -> list[str]:
        """The possible labels of the collective in `timeline_view.py`, the longest first."""
        number, size = str(self.number), f"{self.nbytes / 1e6:.2g} MB"
        short = (self.name or "").removesuffix(".weight")
        return [*([f"{short}, {size}", short] if short else []), f"{number}: {size}", number]


@dataclass(frozen=True)
class Timeline:
    """One step of one variant: the step that has the median length of all timed steps.

    `link` is the emulated link, and `backward_ms` is the time of backward alone. `doubt` says why the picture may be
    wrong, or is empty. A schematic (`schematic.py`) has one rank, which stands for all. Its `memory` contains a span
    for each period in which the memory that its label names is allocated.
    """

    label: str
    world_size: int
    spans: list[Span]
    launched: list[Collective]
    link: Link | None
    backward_ms: float
    memory: Sequence[Span] = ()
    doubt: str = ""

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
        warning = " (unreliable: the machine was busy)" if self.doubt else ""
        return f"{self.end_ms:.0f} ms, {' to '.join(map(str, exposed[:1] + exposed[1:][-1:]))} ms exposed{warning}"

    @property
    def memory_lanes(self) -> list[str]:
        """The labels of `memory`, each once."""
        return list(dict.fromkeys(span.label for span in self.memory))

    @property
    def link_text(self) -> str:
        """A sentence about the link that carried the gradients."""
        if self.link is None:
            return "No link is emulated: the ranks share this machine's cores and communicate through its memory."
        return f"The link is emulated, {self.link.description}; backward alone takes {self.backward_ms:.0f} ms."

    def get_span(self, rank: int, kind: str) -> Span:
        """Return the span of a rank in one of `ladder.PHASES`."""
        return next(span for span in self.spans if span.rank == rank and span.kind == kind)

    def compute_exposed_ms(self, rank: int) -> float:
        """Return how long a rank was in spans of the kinds `EXPOSED` in this step, in ms."""
        spans = [span for span in self.spans if span.rank == rank and span.kind in EXPOSED]
        merged = merge_intervals([(1e-3 * span.start_ms, 1e-3 * span.end_ms) for span in spans])
        return 1e3 * sum(end - start for start, end in merged)

    def find_backward_end_ms(self, rank: int) -> float:
        """Return when a rank's backward ended, in ms since the start of the step."""
        return max(span.end_ms for span in self.spans if span.rank == rank and span.kind == "backward")

    def get_collectives(self, rank: int) -> list[Collective]:
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
    timelines = []
    for variant in variants:
        planned = plan_launches(variant, workload, world_size, sources)
        measurement = make_measurement(workload, variants, variant, results)
        lengths = measurement.step_ms
        round_index = sorted(range(len(lengths)), key=lengths.__getitem__)[(len(lengths) - 1) // 2]
        marks = [rounds[round_index] for rounds in measurement.marks]
        zero = min(times[0] for times in marks)
        spans, launched = [], []
        for rank, times in enumerate(marks):
            edges = [1e3 * (time - zero) for time in times]
            spans += [Span(rank, kind, start, end) for kind, start, end in zip(PHASES, edges, edges[1:])]
            events = results.events[rank]
            rank_launches = launches(events, find_step_number(variants, variant, workload.warmup + round_index))
            for launch in rank_launches:
                launch.end = launch.end or times[-1]  # torch gave no future, or the run ended first
            waits = [
                (launch.wait_start, launch.wait_end)
                for launch in rank_launches
                if launch.wait_end is not None and launch.wait_start < times[-1]  # module 9 waits in the next step
            ]
            spans += [Span(rank, "wait", 1e3 * (a - zero), 1e3 * (b - zero)) for a, b in merge_intervals(waits)]
            numbers = number_launches(rank_launches, *planned)
            launched += make_collectives(rank, rank_launches, numbers, zero, link)
        line = Timeline(variant.label, world_size, spans, launched, link, 1e3 * results[0]["backward_s"])
        timelines.append(replace(line, doubt=find_doubt(line, lengths)))
    return timelines


def find_doubt(timeline: Timeline, lengths_ms: Sequence[float]) -> str:
    """Return why a timeline may contradict what it should show, or "". `lengths_ms` are the lengths of all steps.

    On a busy machine, ranks get the processor late: the lengths of the steps vary, and a rank notices the end of a
    collective long after it left the emulated link.
    """
    spread = compute_spread(lengths_ms)
    if spread.upper - spread.lower > MAX_SPREAD * spread.median:
        return f"the quartiles of the step time are {spread.lower:.0f} and {spread.upper:.0f} ms"
    late_ms = compute_latest_end_ms(timeline)
    if late_ms > MAX_LATE * timeline.end_ms:
        return f"a collective ended {late_ms:.0f} ms later than on the emulated link"
    return ""


def compute_latest_end_ms(timeline: Timeline) -> float:
    """Return by how much any recorded end of a collective is later than its end on the emulated link.

    A link carries one collective at a time, and starts it when the last rank has launched it.
    """
    late_ms = 0.0
    free_ms: dict[Link, float] = defaultdict(float)
    for same in zip(*map(timeline.get_collectives, range(timeline.world_size))) if timeline.link else ():
        link = timeline.link.between(same[0].ranks)
        free_ms[link] = max(free_ms[link], *(one.launched_ms for one in same))
        free_ms[link] += 1e3 * link.seconds(same[0].op, same[0].nbytes, len(same[0].ranks))
        late_ms = max(late_ms, *(one.end_ms - free_ms[link] for one in same))
    return late_ms


def number_launches(launched: Sequence[Launch], planned: Sequence[program.Launch], by_unit: bool) -> list[int]:
    """Return the number of what each launch carries, so that a bucket has the same number in all its collectives.

    If every launch carries one parameter, this is the parameter's index, as in the schematics. Otherwise, buckets are
    numbered in the order of backward, and units in the order of forward, from 0 for the root. If the launches are not
    the planned ones, return how many earlier launches have the same operation.
    """
    counters = defaultdict(itertools.count)
    counts = [next(counters[one.op]) for one in launched]
    plans = {op: [one for one in planned if one.op == op] for op in counters}
    matches = [plans[one.op][count % len(plans[one.op])] for one, count in zip(launched, counts) if plans[one.op]]
    if [one.nbytes for one in launched] != [one.nbytes for one in matches] or len(matches) < len(planned):
        return counts
    carried = [tuple(sorted(one.param_indices)) for one in matches]
    different = set(carried)
    if len(set().union(*different)) < sum(map(len, different)):  # buckets in one collective, parameters in another
        return counts
    has_buckets = any(len(one) > 1 for one in different) and not by_unit
    order = sorted(different, reverse=has_buckets)
    return [order.index(one) for one in carried]


def plan_launches(
    variant: Variant, workload: Workload, world_size: int, sources: Sources | None = None
) -> tuple[list[program.Launch], bool]:
    """Return the launches that a variant's own code makes without peers, and whether they carry units.

    The list is empty if the code does not run without peers.
    """
    model = make_model(workload.size)
    machine = Machine(1.0, (1.0,) * len([*model.parameters()]), math.inf, math.inf)  # only the launches count
    bucket_mb = workload.bucket_mb if variant.bucket_mb is None else variant.bucket_mb
    setting = make_setting(model, world_size, bucket_mb, machine, "sgd", workload.node_size)
    recorded = record([variant], setting, sources)[variant.label]
    launched = [] if isinstance(recorded, str) else recorded.launches
    return launched, any(launch.phase == "forward" for launch in launched)


def merge_intervals(intervals: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the sorted intervals. Merge those at most `GAP_S` apart; drop those that are not longer than `GAP_S`."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + GAP_S:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return [(start, end) for start, end in merged if end - start > GAP_S]


def make_collectives(
    rank: int, launched: Sequence[Launch], numbers: Sequence[int], zero: float, network: Link | None
) -> list[Collective]:
    """Return the collectives of one rank's step. Times in seconds become milliseconds since `zero`.

    Those on an emulated link share a row.
    """
    rows: list[float] = []  # when the last collective of each row ended
    links: list[Link] = []  # of each row
    collectives = []
    for launch, number in zip(launched, numbers):
        start, row = launch.began or launch.start, 0
        if network:  # the previous collective may have ended late
            link = network.between(launch.ranks)
            links += [link] * (link not in links)
            row = links.index(link)
            start = max([start, *rows[row : row + 1]])
        else:
            row = next((i for i, end in enumerate(rows) if end <= start), len(rows))
        end = max(start, launch.end)
        rows[row : row + 1] = [end]
        collectives.append(
            Collective(
                rank,
                launch.ranks,
                launch.op,
                number,
                launch.name,
                launch.dtype,
                launch.nbytes,
                launch.parts,
                launch.phase,
                launched_ms=1e3 * (launch.start - zero),
                start_ms=1e3 * (start - zero),
                end_ms=1e3 * (end - zero),
                waited_ms=None if launch.wait_end is None else 1e3 * (launch.wait_end - zero),
                row=row,
                line=launch.line,
                label=str(number),
            )
        )
    return collectives


def make_chrome_trace(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the timelines in Chrome's Trace Event Format, with one process per rank and timeline.

    Times are in microseconds. An arrow leads from a launch to its collective if the collective did not start
    immediately. Collectives that overlap have separate threads, because slices of one thread must not overlap.
    """
    metadata: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for index, timeline in enumerate(timelines):
        for rank in range(timeline.world_size):
            process = index * timeline.world_size + rank
            collectives = timeline.get_collectives(rank)
            threads = {0: "computation", 1: "communication"}
            threads |= {row + 1: f"communication {row + 1}" for row in {c.row for c in collectives} if row}
            names = [("process_name", 0, {"name": f"{timeline.label}, rank {rank}"})]
            names += [("process_sort_index", 0, {"sort_index": process})]
            names += [("thread_name", thread, {"name": name}) for thread, name in threads.items()]
            metadata += [{"name": n, "ph": "M", "pid": process, "tid": tid, "args": args} for n, tid, args in names]
            for span in timeline.spans:
                if span.rank == rank:
                    name = NAMES.get(span.kind, span.kind)
                    events.append(make_slice(name, "computation", process, 0, span.start_ms, span.end_ms))
            for collective in collectives:
                lane = process, collective.row + 1
                args = {
                    "bytes": collective.nbytes,
                    "dtype": collective.dtype,
                    "tensors": collective.parts,
                    "launched in": collective.phase,
                    "launched at (ms)": round(collective.launched_ms, 3),
                    "waited for until (ms)": None if collective.waited_ms is None else round(collective.waited_ms, 3),
                }
                events.append(
                    make_slice(collective.title, collective.op, *lane, collective.start_ms, collective.end_ms, args)
                )
                if collective.launched_ms < collective.start_ms:
                    arrow = {"name": "launch", "cat": collective.op, "id": len(events), "pid": process}
                    events.append(arrow | {"ph": "s", "tid": 0, "ts": convert_to_us(collective.launched_ms)})
                    events.append(
                        arrow | {"ph": "f", "bp": "e", "tid": lane[1], "ts": convert_to_us(collective.start_ms)}
                    )
    events.sort(key=lambda event: (event["ts"], -event.get("dur", 0)))  # an enclosing slice comes first
    return {"traceEvents": metadata + events, "displayTimeUnit": "ms"}


def save_chrome(timelines: Sequence[Timeline], path: Path) -> None:
    """Write `make_chrome_trace(timelines)` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(make_chrome_trace(timelines)))


def make_slice(
    name: str, category: str, process: int, thread: int, start_ms: float, end_ms: float, args: dict | None = None
) -> dict[str, Any]:
    """Return a "complete" event of Chrome's format. Times in ms become microseconds."""
    start, end = convert_to_us(start_ms), convert_to_us(end_ms)
    length = {"ts": start, "dur": end - start}
    return {"name": name, "cat": category, "ph": "X", "pid": process, "tid": thread, **length, "args": args or {}}


def convert_to_us(ms: float) -> int:
    """Return whole microseconds, so that start plus length is never rounded beyond the next start."""
    return round(1e3 * ms)
