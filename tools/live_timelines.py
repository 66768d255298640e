"""The recorded steps of a chapter's live figure, and how long they would take on a link of another speed.

    runs = record_runs(get_module(4))       a few steps, as `brigade trace` measures them
    replay(runs[0], speed=0.5)              the first one, if each collective took twice as long
    python -m tools.live_timelines          give the notebooks the figures with the scripts and runs of today

A step is stored as what each rank did, without its waits, so that the waits can be computed for any speed of the link.
`site/_static/timeline_model.js` contains the same `replay`. All times are whole microseconds, or follow from these.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import nbformat

from brigade.course.table.modules import CORE_MODULES, Module
from brigade.lab.ladder import Variant, get_variant, scale_batch, set_bucket_size
from brigade.lab.noise import Verdict
from brigade.lab.notebook import LiveStep
from brigade.lab.timeline import WORKLOAD, Collective, Timeline, convert_to_us, trace
from tools.notebook_files import list_notebooks

Run = dict[str, Any]
BUCKETS_MIB = (0.25, 1.0, 4.0)
MORE_RANKS = 3, 4
LIVE_STEP = re.compile(r"^LiveStep\((\d+)\)$", re.MULTILINE)  # in the cell of a notebook


def list_recorded(entry: Module) -> list[tuple[str, Variant, int]]:
    """Return the runs of a module's live figure: a name, the variant, and the number of ranks."""
    own, name = get_variant(entry), f"module {entry.number}"
    before = [module for module in CORE_MODULES if module.number < entry.number][-1:]
    runs = [(f"module {module.number}", get_variant(module), 2) for module in before]
    if "FullyShardedDDP" in entry.public:
        variants = [replace(own, label=f"{name}, prefetch {n}", arguments={"prefetch": n}) for n in (0, 1, 2)]
        return [*runs, *((variant.label, variant, 2) for variant in variants)]
    if [module.number for module in CORE_MODULES].index((before or [entry])[0].number) < 2:  # no buckets yet
        runs.append((name, own, 2))
        counts = MORE_RANKS[1:] if before else MORE_RANKS
        return [*runs, *((f"{run}, {n} ranks", variant, n) for n in counts for run, variant, _ in runs)]
    return [*runs, *((f"{name}, {mib:g} MiB", set_bucket_size(own, mib), 2) for mib in BUCKETS_MIB)]


def record_runs(entry: Module) -> tuple[list[Run], Verdict]:
    """Measure the runs of a module's live figure. Return them for JSON, and whether the machine was quiet.

    The verdict is that of the first runs: more ranks than cores always share them.
    """
    runs: list[Run] = []
    verdicts = []
    for world_size, group in groupby(list_recorded(entry), key=lambda run: run[2]):
        rows = list(group)
        workload = scale_batch(WORKLOAD, world_size)
        lines = trace([variant for _, variant, _ in rows], workload=workload, world_size=world_size)
        verdicts.append(lines[0].verdict)
        runs += [{"name": name, **store(line)} for (name, _, _), line in zip(rows, lines, strict=True)]
    return runs, verdicts[0]


def store(timeline: Timeline) -> Run:
    """Return what the ranks of a timeline did.

    "starts" has the start of each rank's step. "ranks" has what a rank did then: [us, "phase"], [us, "launch", number],
    or [us, "wait", number, more_us], in which it computed for `us` microseconds before. A wait ends `more_us` after its
    collective. "collectives" has for each number: its operation, its bytes, how long after its last launch it could
    begin on a free link, and how long it took.
    """
    by_rank: list[list[Any]] = [timeline.get_collectives(rank) for rank in range(timeline.world_size)]
    collectives: list[list[Any]] = []
    ends: list[int] = []
    for same in zip(*by_rank, strict=True):
        ready = max([*(convert_to_us(one.launched_ms) for one in same), *ends[-1:]])
        start = max(ready, min(convert_to_us(one.start_ms) for one in same))
        ends.append(max(start, min(convert_to_us(one.end_ms) for one in same)))
        collectives.append([same[0].kind, same[0].launch.nbytes, start - ready, ends[-1] - start])
    starts, ranks = [], []
    for rank, own in enumerate(by_rank):
        spans = [span for span in timeline.spans if span.rank == rank and span.kind != "wait"]
        starts.append(convert_to_us(spans[0].start_ms))
        events = [(convert_to_us(span.end_ms), 2, ["phase"]) for span in spans]
        events += [(convert_to_us(one.launched_ms), 0, ["launch", i]) for i, one in enumerate(own)]
        events += [(began, 1, ["wait", i, over]) for i, one in enumerate(own) for began, over in list_waits(one, spans)]
        ranks.append(remove_waits(starts[-1], sorted(events, key=lambda event: event[:2]), ends))
    return {"starts": starts, "ranks": ranks, "collectives": collectives}


def list_waits(one: Collective, spans: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the start and the end of a rank's wait for a collective in its step, or nothing if it did not wait."""
    if one.waited_ms is None or one.launch.wait_start is None:
        return []
    shift_ms = one.launched_ms - 1e3 * one.launch.start
    began = convert_to_us(1e3 * one.launch.wait_start + shift_ms)
    return [(began, convert_to_us(one.waited_ms))] if began < convert_to_us(spans[-1].end_ms) else []


def remove_waits(start: int, events: Sequence[tuple[int, int, list[Any]]], ends: Sequence[int]) -> list[list[Any]]:
    """Return a rank's events with the time that it computed before each, and with what a wait adds to its end."""
    actions, now = [], start
    for time, _, [kind, *values] in events:
        computed = max(0, time - now)
        now = max(now, time)
        if kind == "wait":
            number, over = values
            more = max(0, over - max(now, ends[number]))
            actions.append([computed, kind, number, more])
            now = max(now, ends[number]) + more
        else:
            actions.append([computed, kind, *values])
    return actions


def replay(run: Run, speed: float) -> dict[str, Any]:
    """Return the step on a link that is `speed` times as fast as when it was recorded. Times are in microseconds.

    A collective begins when every rank has launched it and the link is free. "phases" has the ends of a rank's phases,
    "waits" its waits as (start, end, number), "launched" its launches, and "exposed" how long it waited or finished.
    """
    num_ranks = len(run["ranks"])
    now, place = [float(start) for start in run["starts"]], [0] * num_ranks
    phases: list[list[float]] = [[] for _ in range(num_ranks)]
    waits: list[list[list[float]]] = [[] for _ in range(num_ranks)]
    launched: list[list[float]] = [[] for _ in range(num_ranks)]
    transfers: list[list[float]] = []

    def start_transfers() -> None:
        while len(transfers) < min(map(len, launched)):
            _, _, lag, took = run["collectives"][len(transfers)]
            ready = max(times[len(transfers)] for times in launched)
            start = max(ready, transfers[-1][1] if transfers else 0.0) + lag
            transfers.append([start, start + took / speed])

    def advance(rank: int) -> bool:
        """Let a rank take its next action. Return False if it has none, or must wait for another rank's launch."""
        if place[rank] == len(run["ranks"][rank]):
            return False
        computed, kind, *values = run["ranks"][rank][place[rank]]
        if kind == "wait" and values[0] >= len(transfers):
            return False
        now[rank] += computed
        place[rank] += 1
        if kind == "phase":
            phases[rank].append(now[rank])
        elif kind == "launch":
            launched[rank].append(now[rank])
            start_transfers()
        else:
            start, end = now[rank], max(now[rank], transfers[values[0]][1]) + values[1]
            waits[rank].append([start, end, values[0]])
            now[rank] = end
        return True

    while any(advance(rank) for rank in range(num_ranks)):
        pass
    exposed = []
    for ends, own in zip(phases, waits, strict=True):
        outside = [end - start for start, end, _ in own if not ends[1] <= start < ends[2]]
        exposed.append(ends[2] - ends[1] + sum(outside))
    end = max(now)
    return {
        "phases": phases,
        "waits": waits,
        "launched": launched,
        "transfers": transfers,
        "exposed": exposed,
        "end": end,
    }


def store_live_steps(notebook: Path) -> None:
    """Store the outputs of `LiveStep` in a notebook again. They need no other cell."""
    content = nbformat.read(notebook, as_version=4)
    for cell in content.cells:
        if found := LIVE_STEP.search(cell.source):
            cell.outputs[0].data["text/html"] = LiveStep(int(found[1]))._repr_html_()
    nbformat.write(content, notebook)


if __name__ == "__main__":
    for path in list_notebooks():
        store_live_steps(path)
