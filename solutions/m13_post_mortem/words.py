"""Given: the text of a finding, whether the dumps are early enough to prove it, and the page with a picture."""

from __future__ import annotations

import html as markup
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .records import Call, Trace

PATIENCE_S = 1.0  # a call that waits for a shorter time proves no hang
COLOURS = ("#b3cde3", "#fbb4ae", "#ccebc5", "#decbe4", "#fed9a6", "#ffffcc", "#e5d8bd", "#fddaec")
VERBS = {
    "missing": "skipped a call",
    "extra": "made one call more than the others",
    "different_op": "launched a different operation",
    "different_size": "launched a call of a different size",
    "different_dtype": "launched a call with a different dtype",
    "dead": "left no trace: the process died, or its trace is not among these files",
    "untraced": "left no trace, which accuses nobody, because other ranks have ended",
    "stuck": "did not complete a call that all members of the group launched",
    "not_started": "launched a call that did not start on the GPU, while it waits on other ranks' GPUs",
    "stale": "wrote the dump before other ranks launched a later call",
    "unexplained": "did not complete a call or a message, and no record says why",
    "unseen": "recorded no call",
    "circular": "wait for each other in a circle and hold up calls",
    "alone": "alone stands between calls that wait for each other in a circle",
    "ended": "ended without a call that other ranks wait in",
    "behind": "{are} not there yet, and other ranks wait",
}
NEXT = {  # what to look at next
    "missing": "Look for a branch before this line that not every rank takes: an if, an exception, a shorter loop. "
    "If these ranks were to make the call later, look for another order of calls.",
    "extra": "Look for a branch before this line that not every rank takes: an if, an exception, a longer loop.",
    "different_op": "Look for a branch before these lines that depends on the rank or on its data.",
    "different_size": "Print the shape before this line on every rank: an uneven last batch, padding, another model.",
    "different_dtype": "Print the dtype before this line on every rank: autocast, a loaded checkpoint.",
    "dead": "Read the end of these ranks' logs, and the kernel's log: out of memory, a signal, a lost node. If a log "
    "says that a peer closed the connection, its rank is a victim: look for a rank that ended or died earlier.",
    "untraced": "No record shows who was first. A rank that ended too early closes the connections of the others: "
    "compare the number of batches. Or these ranks died: read the end of their logs. Or only their files are missing.",
    "stuck": "The calls agree in all that a recorder shows. It does not show the root, the reduce operation, split "
    "sizes, the network and the GPU: compare the arguments at this line on all ranks, then test network and GPUs.",
    "not_started": "Look at what these GPUs do before this line: another kernel, a copy, or a stream that waits.",
    "stale": "What these ranks lack or made instead proves nothing. Remove old dumps before a job starts, and write "
    "those of all ranks at one time. If the dumps are of one time, the clocks of the hosts differ.",
    "running": "Nobody had waited for long, so this is no hang: the calls show a moment of a job that works. Raise the "
    "timer above the slowest step (evaluation, a checkpoint), or stop the job before it writes its dumps.",
    "unexplained": "Look at what the other rank of a message does. If calls of these ranks' groups are overwritten, "
    "a larger TORCH_FR_BUFFER_SIZE keeps more of them.",
    "unseen": "Either these ranks have not come to their first call (they import, or make the model: raise the timer), "
    "or their recorder is off. Switch it on before init_process_group with TORCH_FR_BUFFER_SIZE=2000 (0 is off). Only "
    "gloo, NCCL and nccl2 record their calls.",
    "circular": "Either a rank uses the groups in another order than the others, or it skipped a call in one of them. "
    "Compare these lines with those of ranks that have the same role in other groups.",
    "ended": "Compare the number of batches on all ranks, and look for a return or a break.",
    "healthy": "If the job hangs all the same, it waits in something that is not recorded: with gloo, send, recv and "
    "monitored_barrier; with NCCL, the first call of a group, until all of its members have launched it.",
    "behind": "This alone is no mistake: a rank that is not there computes, loads data, or waits in a call that is not "
    "recorded (with gloo, send, recv and monitored_barrier). Print the stacks of these ranks (py-spy dump).",
}


@dataclass(frozen=True)
class Divergence:
    """A place where ranks of a group may wait: the first number where their calls differ, or a call of all of them.

    `calls` has the members of the group, also those without a trace: the member's call, or None if it has not come to
    this place. It does not have members that have completed a call of all of them.
    """

    group: str
    number: int
    calls: dict[int, Call | None]


@dataclass(frozen=True)
class Finding:
    """What broke the job: the kind, the culprits (sorted), the place, and the text.

    `group` and `number` are the place, or None without one. For "unseen" and "untraced", `ranks` are those without a
    record, and for "stale" those whose dump is too old. "running" names nobody.
    """

    kind: str
    ranks: list[int]
    group: str | None
    number: int | None
    text: str


def conclude(
    kind: str,
    ranks: list[int],
    place: Divergence | None = None,
    calls: Iterable[Call] = (),
    last_lines: Sequence[str] = (),
    waits: Mapping[int, Call | None] = {},
) -> Finding:
    """Return the finding. Its text names the culprits, the place, the different `calls`, and what to look at next.

    `last_lines` are those of what the culprits launched last. `waits` contains the call in which a culprit waits.
    """
    group, number = (place.group, place.number) if place else (None, None)
    if kind == "healthy":
        text = f"No call is missing or different, and none is unfinished.\n{NEXT[kind]}"
        return Finding(kind, ranks, group, number, text)
    advice = "unexplained" if kind == "stuck" and (waits or not place) else kind
    is_one = len(ranks) == 1
    verb = VERBS["alone" if kind == "circular" and is_one else advice].format(are="is" if is_one else "are")
    text = f"{'Rank' if is_one else 'Ranks'} {shorten(ranks)} {verb}"
    if place:
        named = {(call.group, *contents(call), call.line): call for call in calls}.values()
        groups = {call.group: call for call in named}
        labels = {group: label_group(call, groups.values()) for group, call in groups.items()}
        if len(groups) == 1:
            text += f": call {number} of group {labels[place.group]}, {' / '.join(map(describe, named))}"
        else:
            each = (f"call {call.number} of group {labels[call.group]}, {describe(call)}" for call in named)
            text += f": {' / '.join(each)}"
    if last_lines := [line for line in dict.fromkeys(last_lines) if line]:
        text += f"; the last call before was at {shorten(last_lines)}"
    where: dict[str, list[int]] = {}
    for rank, call in waits.items():
        if call:
            where.setdefault(f"{call.op}{f' at {call.line}' * bool(call.line)}", []).append(rank)
    for op, waiting in where.items():
        is_one = len(waiting) == 1
        text += f"; {'rank' if is_one else 'ranks'} {shorten(waiting)} {'waits' if is_one else 'wait'} in {op}"
    return Finding(kind, ranks, group, number, f"{text}.\n{NEXT[advice]}")


def contents(call: Call) -> tuple[str, tuple[tuple[int, ...], ...], str]:
    """Return what must be equal on all ranks. Calls with equal contents agree."""
    return call.op, call.sizes, call.dtype


def shorten(values: Sequence[Any]) -> str:
    """Return values as text, at most 20 of them."""
    return ", ".join(map(str, values[:20])) + f" and {len(values) - 20} more" * (len(values) > 20)


def describe(call: Call) -> str:
    """Return a call as text, such as "all_reduce [[2]] Float at train.py:17"."""
    ops, sizes = call.op.split(","), [str(list(size)) for size in call.sizes]
    text = f"{shorten(ops)} [{shorten(sizes)}] {call.dtype}".rstrip()
    return text + f" at {call.line}" * bool(call.line)


def label_group(call: Call, others: Iterable[Call]) -> str:
    """Return the name of a call's group for people. It differs from those of the other calls' groups."""
    is_unique = all(other.group == call.group or other.description != call.description for other in others)
    return call.description if call.description and is_unique else f"{call.description} {call.group}".strip()


def find_wait(trace: Trace) -> Call | None:
    """Return the first unfinished message of a rank, or else its first unfinished call, or None."""
    return next((call for call in (*trace.messages, *trace.calls) if not call.is_complete), None)


def find_last(trace: Trace) -> Call | None:
    """Return what a rank launched last: a call or a message, or None."""
    last = trace.messages[-1:] if trace.ends_with_message else trace.calls[-1:]
    return last[0] if last else None


def check_runs(traces: Sequence[Trace], place: Divergence) -> Finding | None:
    """Return the finding "stale" if a dump was written before another rank made the first call of its record.

    Such a file may be of another run, so it is no proof of anything. If its rank has ended, the other record must be
    whole: a rank may end long before the oldest call that others remember. Times that are unknown (0) prove nothing.
    """
    begins = [(trace.calls[0].time - PATIENCE_S, trace.num_lost) for trace in traces if trace.calls]
    whole, latest = (max((time for time, lost in begins if lost <= most), default=0.0) for most in (0, math.inf))
    old = sorted(trace.rank for trace in traces if 0 < trace.time < (whole if trace.has_ended else latest))
    return conclude("stale", old, place, filter(None, place.calls.values())) if old else None


def check_times(traces: Sequence[Trace], place: Divergence) -> Finding | None:
    """Return the finding "stale" or "running" if the dumps are too early to prove that somebody waits at `place`.

    "stale": a member wrote its dump before another one launched a later call of the group, so the files are not of one
    time. If nobody waits at the place any more, a later call of any group shows this. "running": the call had waited
    for less than PATIENCE_S when a member that has not completed it wrote its dump. It waits from its first launch if a
    member has not launched it, and from its last launch otherwise. A rank that has ended comes no more. Times that are
    unknown (0) prove nothing. Dumps of two runs (`check_runs`) come first.
    """
    if old := check_runs(traces, place):
        return old
    row, latest, lack = {}, 0.0, False
    is_waiting = any(call and not call.is_complete for call in place.calls.values())
    members = next(call.ranks for call in place.calls.values() if call)
    for trace in traces:
        calls = [call for call in trace.calls if call.group == place.group]
        later = calls if is_waiting or trace.rank not in members else trace.calls
        latest = max(latest, *(call.time for call in later), 0)
        row |= {call.time: call for call in calls if call.number == place.number}
        lack |= trace.rank in members and all(call.number != place.number for call in calls)
    dumps = {trace.rank: trace.time for trace in traces if trace.rank in members and not trace.has_ended}
    if stale := sorted(rank for rank, dump in dumps.items() if 0 < dump < latest - PATIENCE_S):
        return conclude("stale", stale, place, row.values())
    since = min(row) if lack else max(row)
    waited = (dump - since for rank, dump in dumps.items() if rank in place.calls and dump and since)
    wait_s = min(waited, default=PATIENCE_S)
    if wait_s >= PATIENCE_S:
        return None
    call = next(iter(row.values()))
    what = f"call {place.number} of group {label_group(call, [call])}, {describe(call)},"
    text = f"The job was running: {what} had waited for {max(wait_s, 0) * 1000:.0f} ms when a rank wrote its dump."
    return Finding("running", [], place.group, place.number, f"{text}\n{NEXT['running']}")


def write_page(path: str | Path, finding: Finding, traces: Sequence[Trace]) -> None:
    """Write a page with the finding and a picture: the last ten calls of each rank in the finding's group.

    Equal calls of a column have equal colours, and unfinished calls have a dashed border. At most 40 ranks are drawn,
    the culprits first.
    """
    by_rank = {trace.rank: trace for trace in traces}
    everybody = sorted(by_rank, key=lambda rank: (rank not in finding.ranks, rank))
    shown = sorted(everybody[:40])
    group = finding.group or next((call.group for rank in shown for call in by_rank[rank].calls), None)
    rows = {rank: [call for call in by_rank[rank].calls if call.group == group][-10:] for rank in shown}
    columns = sorted({call.number for row in rows.values() for call in row})
    kinds: dict[int, list] = {number: [] for number in columns}
    width, height = 150, 46
    parts = []
    for y, (rank, row) in enumerate(rows.items()):
        weight = "bold" if rank in finding.ranks else "normal"
        parts.append(f'<text x="4" y="{y * height + 52}" font-weight="{weight}">rank {rank}</text>')
        for call in row:
            if contents(call) not in kinds[call.number]:
                kinds[call.number].append(contents(call))
            colour = COLOURS[kinds[call.number].index(contents(call)) % len(COLOURS)]
            x = 90 + columns.index(call.number) * width
            dash = "" if call.is_complete else ' stroke-dasharray="5 3"'
            parts.append(
                f'<g><title>{markup.escape(describe(call))}</title><rect x="{x}" y="{y * height + 26}" '
                f'width="{width - 8}" height="{height - 8}" fill="{colour}" stroke="#444"{dash}/>'
                f'<text x="{x + 6}" y="{y * height + 42}">'
                f'{markup.escape(call.op[:20])}</text><text x="{x + 6}" y="{y * height + 57}">'
                f"{markup.escape(call.line[-20:])}</text></g>"
            )
    for x, number in enumerate(columns):
        weight = "bold" if number == finding.number else "normal"
        parts.append(f'<text x="{90 + x * width}" y="16" font-weight="{weight}">call {number}</text>')
    size = f'width="{100 + len(columns) * width}" height="{30 + len(rows) * height}"'
    caption = f"The last calls of each rank in group {group}. Calls with a dashed border are unfinished."
    if hidden := len(by_rank) - len(shown):
        caption += f" {hidden} more ranks are not drawn."
    Path(path).write_text(
        '<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>Post-mortem</title>'
        "<style>body { font: 16px sans-serif; margin: 2em } svg { font-size: 12px }</style>"
        f"<h1>{finding.kind.replace('_', ' ')}</h1>"
        + "".join(f"<p>{markup.escape(line)}</p>" for line in (*finding.text.splitlines(), caption))
        + f"<svg {size}>{''.join(parts)}</svg></html>\n",
        encoding="utf-8",
    )
