"""Module 13 in another style: named tuples, one table with (group, number) as key, and sets of ranks."""

import json
from collections import namedtuple
from itertools import groupby
from pathlib import Path

FIELDS = "group ranks number op sizes dtype line is_complete description has_started time"
Call = namedtuple("Call", FIELDS, defaults=(True, "", True, 0))
Trace = namedtuple(
    "Trace", "rank world_size calls has_ended num_lost messages job time", defaults=(False, 0, (), "", 0)
)
Divergence = namedtuple("Divergence", "group number calls")
Finding = namedtuple("Finding", "kind ranks group number text")


def load_trace(path):
    try:
        record = json.loads(Path(path).read_bytes())
        calls = []
        for entry in record.get("entries", ()):
            name = entry["process_group"][0]
            sizes = tuple(map(tuple, entry["input_sizes"]))
            op, dtype = entry["profiling_name"].partition(":")[2], " ".join(entry["input_dtypes"])
            number, done = entry["collective_seq_id"], entry["retired"]
            members = tuple(record["groups"][name])
            calls.append(Call(name, members, number, op, sizes, dtype, entry["line"], done))
        lost = record["num_lost"] if "num_lost" in record else record["entries"][0]["record_id"] if calls else 0
        job = record.get("job", "")
        return Trace(record["rank"], record["world_size"], tuple(calls), record["has_ended"], lost, (), job)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(repr(error)) from error


def align(traces):
    table = {}
    for trace in traces:
        for call in trace.calls:
            table.setdefault((call.group, call.number), {})[trace.rank] = call
    start = {}
    for (group, _), row in table.items():
        for trace in traces:
            if trace.rank in next(iter(row.values())).ranks:
                own = [call.number for call in trace.calls if call.group == group]
                begins = own[0] if own else float("inf") if trace.num_lost else 0
                start[group] = max(start.get(group, 0), begins)
    kept = sorted(key for key in table if key[1] >= start[key[0]])
    by_group = groupby(kept, key=lambda key: key[0])
    return {group: {number: table[group, number] for _, number in keys} for group, keys in by_group}


def all_divergences(traces):
    alive = {trace.rank for trace in traces}
    for group, rows in align(traces).items():
        for number in sorted(rows):
            row = rows[number]
            members = set(next(iter(row.values())).ranks)
            if len({call[3:6] for call in row.values()}) != 1 or (members & alive) - row.keys():
                yield Divergence(group, number, {rank: row.get(rank) for rank in members})
                break


def absentees(divergence):
    return {rank for rank, call in divergence.calls.items() if call is None}


def callers(divergence):
    return divergence.calls.keys() - absentees(divergence)


def find_divergence(traces):
    return first_cause(list(all_divergences(traces)))


def first_cause(places):
    """The place that waits for no other, or else the first of all."""
    places.sort(key=lambda one: (one.number, one.group))
    for one in places:
        if not any(absentees(one) & callers(other) for other in places if other is not one):
            return one
    return places[0] if places else None


def all_waits(traces):
    """What each rank waits in, by (group, number): all of its unfinished calls queue behind the first."""
    table = align(traces)
    heads = {}
    for trace in traces:
        queue = [c for c in trace.calls if not c.is_complete and c.number in table.get(c.group, ())]
        for call in queue[:1]:
            heads.setdefault((call.group, call.number), set()).add(trace.rank)
    broken = {
        (one.group, number) for one in all_divergences(traces) for number in table[one.group] if number >= one.number
    }
    for group, number in heads.keys() - broken:
        pending = {rank: call for rank, call in table[group][number].items() if not call.is_complete}
        row = {rank: call if rank in heads[group, number] else None for rank, call in pending.items()}
        yield Divergence(group, number, row)


def rings(places):
    """All circles of places as lists that begin with their first place, the shortest first."""
    places.sort(key=lambda one: (one.number, one.group))
    after = {i: [j for j, b in enumerate(places) if absentees(a) & callers(b)] for i, a in enumerate(places)}
    chains = [[i] for i in after]
    while chains:
        yield from ([places[i] for i in chain] for chain in chains if chain[0] in after[chain[-1]])
        chains = [[*chain, j] for chain in chains for j in after[chain[-1]] if j > chain[0] and j not in chain]


def is_differing(place):
    return place and len({call[3:6] for call in place.calls.values() if call}) > 1


def too_early(traces, place):
    """stale or running, if the dumps were written too early. Records without times say nothing."""
    if not all(trace.time for trace in traces):
        return None
    own = {trace.rank: [call for call in trace.calls if call.group == place.group] for trace in traces}
    members = {rank for calls in own.values() for call in calls for rank in call.ranks}
    row = [
        next((call.time for call in own[rank] if call.number == place.number), None) for rank in own if rank in members
    ]
    start = min(time for time in row if time) if None in row else max(row)
    dumps = {trace.rank: trace.time for trace in traces if trace.rank in place.calls and not trace.has_ended}
    newest = max(call.time for calls in own.values() for call in calls)
    old = sorted(rank for rank, time in dumps.items() if time + 1 < newest)
    if old:
        return finish("stale", old, place, [place])
    if any(time - start < 1 for time in dumps.values()):
        return finish("running", [], place, [place])
    return None


def diagnose(traces):
    alive = {trace.rank: trace for trace in traces}
    found = list(all_divergences(traces))
    place = first_cause(found)
    if not is_differing(place):
        waits = [] if all(trace.has_ended for trace in traces) else list(all_waits(traces))
        everything = found + waits
        is_circle = everything and all(any(absentees(a) & callers(b) for b in everything) for a in everything)
        found = (found or waits) if is_circle else everything
        place = first_cause(found)
    if is_differing(place):
        by_contents = {}
        for rank in sorted(callers(place)):
            by_contents.setdefault(place.calls[rank][3:6], []).append(rank)
        ordered = sorted(by_contents.values(), key=len)
        most = ordered.pop() if len(ordered[-1]) > len(ordered[-2]) else []
        guilty = sorted(rank for ranks in ordered for rank in ranks)
        begins = max(trace.calls[0].time for trace in traces if trace.calls)
        if old := sorted(t.rank for t in traces if t.time and t.time + 1 < begins and not t.has_ended):
            return finish("stale", old, place, [place])
        kind = kind_of(alive, place, most, guilty)
        return finish(kind, guilty, place, [place], list_waits(alive, guilty if kind == "missing" else []))
    known = {rank for trace in traces for call in trace.calls for rank in call.ranks}
    silent = sorted(known.union(range(traces[0].world_size)) - set(alive))
    missing = sorted(absentees(place) & alive.keys()) if place else []
    gone = [rank for rank in missing if alive[rank].has_ended]
    lines = {rank: f"rank {rank} last called at {alive[rank].calls[-1].line}" for rank in alive if alive[rank].calls}
    if silent:
        if known := [rank for rank in gone if rank in lines]:
            return finish("ended", known, place, [place], [lines[rank] for rank in known])
        kind = "untraced" if any(trace.has_ended for trace in traces) else "dead"
        return Finding(kind, silent, None, None, f"No trace of {silent}.")
    if found and all(any(absentees(one) & callers(other) for other in found) for one in found):
        ring = next(rings(found))
        through = sorted((absentees(a) & callers(b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)), key=len)
        few = set().union(*(ranks for ranks in through if len(ranks) == len(through[0])))
        return too_early(traces, ring[0]) or finish("circular", sorted(few), ring[0], ring)
    if place and not absentees(place):
        begun = {call.has_started for call in place.calls.values()}
        kind = "not_started" if len(begun) > 1 else "stuck"
        slow = sorted(rank for rank, call in place.calls.items() if len(begun) == 1 or not call.has_started)
        return too_early(traces, place) or finish(kind, slow, place, [place])
    blank = sorted(rank for rank, trace in alive.items() if not trace.calls + trace.messages)
    if blank:
        return Finding("unseen", blank, None, None, f"TORCH_FR_BUFFER_SIZE must be above 0 on ranks {blank}.")
    if place is None:
        pending = {r: t for r, t in sorted(alive.items()) if not all(c.is_complete for c in t.messages + t.calls)}
        if pending and not all(trace.has_ended for trace in traces):
            return Finding("stuck", list(pending), None, None, f"Ranks {list(pending)} wait, and no record says why.")
        return Finding("healthy", [], None, None, "Nothing is wrong.")
    guilty = gone or missing
    last = [lines[rank] for rank in guilty if rank in lines]
    if gone:
        return finish("ended", gone, place, [place], last)
    return too_early(traces, place) or finish("behind", guilty, place, [place], last + list_waits(alive, guilty))


def kind_of(alive, place, most, guilty):
    def tail(rank, skip):
        calls = [call for call in alive[rank].calls if call.group == place.group and call.number >= place.number + skip]
        return [call[3:6] for call in calls]

    def fits(first, second):
        return first[: len(second)] == second[: len(first)]

    def exchanged(rank):
        mine = tail(rank, 1)[:1] + tail(rank, 0)[:1] + tail(rank, 2)
        theirs = [tail(other, 0) for other in most]
        return len(mine) > 1 < max(map(len, theirs), default=0) and all(fits(mine, other) for other in theirs)

    if all(map(exchanged, guilty)):
        most = []
    for kind, mine, theirs in (("missing", 0, 1), ("extra", 1, 0)):
        evidence = [[(tail(rank, mine), tail(other, theirs)) for other in most] for rank in guilty]
        if most and all(
            all(fits(*pair) for pair in row) and any(all(map(len, pair)) for pair in row) for row in evidence
        ):
            return kind
    calls = [call for call in place.calls.values() if call]
    for kind, index in (("different_op", 3), ("different_size", 4), ("different_dtype", 5)):
        if len({call[index] for call in calls}) > 1:
            return kind


def list_waits(alive, ranks):
    pending = {rank: [c for c in alive[rank].messages + alive[rank].calls if not c.is_complete] for rank in ranks}
    return [f"rank {rank} waits in {calls[0].op} ({calls[0].line})" for rank, calls in pending.items() if calls]


def finish(kind, guilty, place, places, more=()):
    calls = {f"{call.op} ({call.line})" for one in places for call in one.calls.values() if call}
    names = {call.description or call.group for one in places for call in one.calls.values() if call}
    words = [f"groups {sorted(names)}", kind.replace("_", " "), f"ranks {guilty}", f"number {place.number}"]
    return Finding(kind, guilty, place.group, place.number, ", ".join([*words, *sorted(calls), *more]))


def main(paths, html=None):
    files = [file for path in paths for file in (sorted(Path(path).iterdir()) if Path(path).is_dir() else [path])]
    traces = {}
    for path in files:
        try:
            trace = load_trace(path)
        except (OSError, ValueError):
            print("cannot read", path)
            return 2
        is_new = traces.setdefault(trace.rank, trace) is trace
        if not is_new or len({(one.world_size, one.job) for one in traces.values()}) > 1:
            print("another job:", path)
            return 2
    finding = diagnose(list(traces.values()))
    rows = [(rank, *(trace.calls[-1][3:7:3] if trace.calls else ["-"])) for rank, trace in sorted(traces.items())]
    print(finding.text)
    for row in rows:
        print(*row)
    if html:
        Path(html).write_text(f"<html><p>{finding.text}<pre>{rows}</pre></html>")
    return int(finding.kind != "healthy")
