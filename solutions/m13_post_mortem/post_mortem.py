"""Module 13: find the rank that broke a job that hangs.

The rank that complains about a hang is usually a victim: it waits for a collective that another rank never launched.
torch's flight recorder keeps the last collectives of each rank. This module compares these records, one per rank, and
names the culprit:

1. `align` puts the calls with the same group and number side by side.
2. `find_divergence` finds the first place where the calls differ, in a group that waits for no other.
3. `diagnose` says which kind of mistake explains this place, and which ranks made it, or what no record shows.
4. `main` prints the finding: `python post_mortem.py dump_*.json`.

No rank runs here, and nothing communicates. The cost is one pass over the calls of all ranks. To read dumps, only
Python is needed.
"""

from __future__ import annotations

import argparse
import gc
import html as markup
import io
import json
import os
import pickle
import re
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from heapq import merge
from itertools import chain
from pathlib import Path
from typing import Any

# Operations whose ranks may pass different shapes.
SIZES_MAY_DIFFER = ("gather", "scatter", "alltoall", "all_to_all", "all_gather_v", "reduce_scatter_v")
RECORDED = ("process_group", "collective_seq_id", "p2p_seq_id", "is_p2p", "profiling_name", "input_sizes",
            "input_dtypes", "output_dtypes", "state", "retired", "time_created_ns", "line")  # fmt: skip
FOREIGN = re.compile(
    r"^<|[/\\](site|dist)-packages[/\\]|[/\\]lib[/\\]python3|[/\\]torch[/\\](distributed|nn|autograd)"
    r"|[/\\]brigade[/\\]ranks[/\\]"
)  # the standard library, torch, and what records the course's own ranks
MAX_RANKS = 1_000_000  # more are an error in a file
PATIENCE_S = 1.0  # a call that waits for a shorter time proves no hang
COLOURS = ("#b3cde3", "#fbb4ae", "#ccebc5", "#decbe4", "#fed9a6", "#ffffcc", "#e5d8bd", "#fddaec")


@dataclass(frozen=True)
class Call:
    """One collective as one rank launched it, or one message.

    `ranks` are the members of `group`, as ranks of the world. `number` counts this rank's collectives in the group,
    from 1. `sizes` contains the shape of each input tensor; it is empty for operations whose ranks may pass different
    shapes. If a rank launches several operations together, they are one call, and `op`, `sizes` and `dtype` list them
    all. `line` is the place of the call, such as "train.py:17"; it is "" if the record does not contain it.
    `description` is the group's name for people, such as "dp", or "". `has_started`: the GPU came to this call. `time`
    is when the rank launched it, in seconds since 1970, or 0 if the record does not contain it.
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    op: str
    sizes: tuple[tuple[int, ...], ...]
    dtype: str
    line: str
    is_complete: bool = True
    description: str = ""
    has_started: bool = True
    time: float = 0.0


@dataclass(frozen=True)
class Trace:
    """The calls of one rank in program order.

    `world_size` is 0 if the file does not contain it. `has_ended`: the rank left its program normally. `num_lost`: so
    many of its first calls are not in the record, because its ring buffer has overwritten them. `messages`: the sends
    and receives, in program order. They have numbers of their own and are not aligned. `job` is equal on all ranks of a
    job, or "" if the file does not contain it. `ends_with_message`: the rank launched its last message after its last
    call. `time` is when the dump was written, in seconds since 1970, or 0 if the file does not contain it.
    """

    rank: int
    world_size: int
    calls: tuple[Call, ...]
    has_ended: bool = False
    num_lost: int = 0
    messages: tuple[Call, ...] = ()
    job: str = ""
    ends_with_message: bool = False
    time: float = 0.0


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

    `group` and `number` are the place, or None without one. For "unseen", `ranks` are those without a record, and for
    "stale" those whose dump is too old. "running" names nobody.
    """

    kind: str
    ranks: list[int]
    group: str | None
    number: int | None
    text: str


# ---- given: write and read what torch's flight recorders contain


def dump_trace(path: str | Path, has_ended: bool = False) -> None:
    """Write this rank's flight recorders to `path` as JSON. Call it before a collective's time-out, from any thread.

    torch has one recorder for gloo and another for NCCL. Its own JSON has neither source lines nor, with gloo, the
    members of a group. So this function merges the recorders, keeps one line for each call, and adds the members.
    """
    import torch.distributed as dist  # here, so that reading dumps needs no torch

    world = dist.distributed_c10d._world
    processes = {name: group for group, name in world.pg_names.items()}
    groups: dict[str, list[int]] = {}
    time_ns = time.time_ns()  # before the records are read: to make the texts of their frames may take seconds
    records = list(_read_recorders())
    for entry in (entry for record in records for entry in record.get("entries", [])):
        name, description = entry["process_group"]
        backends = set(re.findall(r":(\w+)", world.pg_backend_config.get(processes[name], "")))
        # If a group has two backends, each of them counts its own calls.
        key = f"{name} {entry['profiling_name'].split(':')[0]}" if len(backends) > 1 else name
        groups[key] = dist.get_process_group_ranks(processes[name])
        entry |= {"process_group": (key, description), "line": _find_line(entry.get("frames", []))}
    entries = merge(*(record.get("entries", []) for record in records), key=lambda entry: entry["time_created_ns"])
    dump = {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "has_ended": has_ended,
        "num_lost": sum(map(_count_lost, records)),
        "job": _identify_job(),
        "time_ns": time_ns,
        "groups": groups,
        "entries": [{name: entry[name] for name in RECORDED} for entry in entries],
    }
    Path(path).write_text(json.dumps(dump))


def _read_recorders() -> Iterator[dict]:
    """Yield the record of each recorder that this torch has: gloo's, NCCL's, and that of the newer NCCL backend."""
    from torch._C import _distributed_c10d as c10d

    for name, options in (("_dump_fr_trace", {}), ("_dump_nccl_trace", {}), ("_dump_fr_trace", {"backend": "nccl2"})):
        try:
            dump = getattr(c10d, name)(True, True, False, **options)
        except (AttributeError, TypeError, ValueError, RuntimeError):
            continue  # this torch lacks the recorder
        yield pickle.loads(dump)  # torch has just made it in this process


def _identify_job() -> str:
    """Return the names that torchrun and Slurm give to this job. They are equal on all of its ranks."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT", "SLURM_JOB_ID", "SLURM_STEP_ID")
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _find_line(frames: Sequence[dict]) -> str:
    """Return the innermost line of the user's own code, such as "train.py:17"."""
    own = (frame for frame in frames if not FOREIGN.search(frame["filename"]))
    frame = next(own, frames[0] if frames else None)
    return f"{Path(frame['filename']).name}:{frame['line']}" if frame else ""


def _count_lost(record: Mapping[str, Any]) -> int:
    """Return how many calls a recorder no longer has. If it has none, torch's counters say how many it made."""
    if entries := record.get("entries"):
        return int(entries[0]["record_id"])
    counts = (int(status["last_enqueued_collective"]) for status in record.get("pg_status", {}).values())
    return sum(max(count, 0) for count in counts)


class _Unpickler(pickle.Unpickler):
    """Reads lists, dictionaries, numbers and texts. It loads no class and no function, so nothing is executed."""

    def find_class(self, module: str, name: str) -> Any:
        raise TypeError(f"it contains {module}.{name}")


def load_trace(path: str | Path) -> Trace:
    """Read a file of `dump_trace`, or torch's own dump of gloo, NCCL or nccl2: a pickle or JSON.

    At a time-out, torch writes its dump to TORCH_FR_DUMP_TEMP_FILE plus the rank. The dump does not contain the rank,
    so the file's name must end in it: nccl_trace_rank_3. Raise OSError, or ValueError with a hint if it is not such a
    file. Nothing in it is executed.
    """
    data = Path(path).read_bytes()
    if not data.strip():
        raise ValueError("the file is empty: the process ended before it wrote its record")
    try:
        record = _Unpickler(io.BytesIO(data)).load() if data.startswith(b"\x80") else json.loads(data)
    except TypeError as error:
        raise ValueError(f"the file is a pickle of something else: {error}") from None
    except (pickle.PickleError, EOFError, ValueError, LookupError, AttributeError, OverflowError, RecursionError):
        ends = {b"\x80": b".", b"{": b"}"}
        end = ends.get(data[:1])
        if end and not data.rstrip().endswith(end):
            raise ValueError("the file is truncated: the process ended while it wrote its record") from None
        raise ValueError("the file is not a trace: it is neither JSON nor a pickle of torch's recorder") from None
    if not isinstance(record, dict) or not record.keys() & {"groups", "pg_config"}:
        raise ValueError("the file is a trace of something else: a flight recorder's contains groups and their calls")
    try:
        return _make_trace(record, Path(path).name)
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"the file is not a flight recorder's ({type(error).__name__}: {error})") from None


def _make_trace(record: dict, name: str) -> Trace:
    """Return the trace in a record of `dump_trace` or torch. `name` is the file's name."""
    if "groups" in record:
        groups = {key: tuple(map(int, ranks)) for key, ranks in record["groups"].items()}
        rank, world_size = int(record["rank"]), int(record["world_size"])
    else:
        number = re.search(r"(\d+)(\.\w+)?$", name)
        if not number:
            raise ValueError("torch's dumps do not contain the rank, so the name must end in it: nccl_trace_rank_3")
        # gloo's record has one entry, without a name. Its members are those of the world, or unknown.
        config = {key or "0": info for key, info in record["pg_config"].items()}
        groups = {key: tuple(map(int, json.loads(info["ranks"]))) for key, info in config.items()}
        is_world = [key for key, info in config.items() if info["desc"] in ("default_pg", "")]
        rank, world_size = int(number[1]), max((len(groups[key]) for key in is_world), default=0)
    highest = max(rank, *map(max, filter(None, groups.values())), -1)
    if not 0 <= rank <= highest < (world_size or MAX_RANKS) <= MAX_RANKS:
        raise ValueError(f"the file is not a flight recorder's: it has a rank {highest} of {world_size}")
    entries = record.get("entries", [])  # absent from torch's JSON if the recorder is off
    unknown = {entry["process_group"][0] for entry in entries} - {key for key, ranks in groups.items() if ranks}
    if unknown:
        raise ValueError(
            f"the file does not contain the members of group {', '.join(sorted(unknown))}: torch's own dump of gloo "
            "lacks them if there are several groups, so use dump_trace"
        )
    num_lost = int(record["num_lost"] if "num_lost" in record else _count_lost(record))
    calls, messages, ends_with_message = _read_entries(entries, groups, world_size, num_lost > 0)
    first = _find_unbroken(calls)
    kept = tuple(call for call in calls if call.number >= first[call.group])
    return Trace(
        rank=rank,
        world_size=world_size,
        calls=kept,
        has_ended=bool(record.get("has_ended", False)),
        num_lost=max(num_lost, *(number - 1 for number in first.values()), 0),
        messages=tuple(messages),
        job=str(record.get("job", "")),
        ends_with_message=ends_with_message,
        time=int(record.get("time_ns", 0)) / 1e9,
    )


def _read_entries(
    entries: Sequence[dict], groups: Mapping[str, tuple[int, ...]], world_size: int, has_lost: bool
) -> tuple[list[Call], list[Call], bool]:
    """Return the calls, the messages, and whether the last one is a message.

    Entries of one group that share a number are one call.
    """
    blocks: dict[tuple[str, bool, int], list[dict]] = {}  # what was launched together, by group, kind and number
    latest: dict[str, tuple[str, bool, int]] = {}  # each group's latest block
    is_complete: dict[tuple[str, bool, int], bool] = {}  # for the blocks that end with an entry for all of the block
    for entry in entries:
        group, is_message = entry["process_group"][0], bool(entry["is_p2p"])
        if entry["profiling_name"].endswith(":coalesced"):  # this entry's own number and kind may be those of others
            if group in latest:
                is_complete[latest[group]] = _is_complete(entry)
            continue
        latest[group] = (group, is_message, int(entry["p2p_seq_id" if is_message else "collective_seq_id"]))
        blocks.setdefault(latest[group], []).append(entry)
    oldest = next(iter(blocks), None)
    if oldest and has_lost and (len(blocks[oldest]) > 1 or oldest in is_complete):
        del blocks[oldest]  # the entries before it may be overwritten
    names = {key: _name_group(key, ranks, world_size) for key, ranks in groups.items()}
    calls: list[Call] = []
    messages: list[Call] = []
    for key, block in blocks.items():
        group, is_message, number = key
        completed = is_complete[key] if key in is_complete else all(map(_is_complete, block))
        if is_message:
            messages += [_make_call([one], names[group], groups[group], number, completed) for one in block]
        else:
            calls.append(_make_call(block, names[group], groups[group], number, completed))
    return calls, messages, bool(blocks) and next(reversed(blocks))[1]


def _is_complete(entry: Mapping[str, Any]) -> bool:
    """Return whether a call is complete. gloo retires its calls; NCCL retires a started call also at a time-out."""
    return entry["state"] == "completed" or (bool(entry["retired"]) and entry["state"] != "started")


def _name_group(key: str, ranks: Sequence[int], world_size: int) -> str:
    """Return a name that no other group has. torch gives one name to groups that one call has split off."""
    listed = [*ranks[:4], "...", ranks[-1]] if len(ranks) > 6 else ranks
    return key if len(ranks) == world_size else f"{key} [{', '.join(map(str, listed))}]"


def _make_call(entries: Sequence[dict], group: str, ranks: tuple[int, ...], number: int, is_complete: bool) -> Call:
    """Return the call that consists of these entries."""
    op, sizes, dtype = _read_contents(entries[0])
    if len(entries) > 1:
        parts = [_read_contents(entry) for entry in entries]
        op, sizes = ",".join(part[0] for part in parts), tuple(size for part in parts for size in part[1])
        dtype = dtype if all(part[2] == dtype for part in parts) else ",".join(part[2] for part in parts)
    line = entries[0].get("line")
    description = entries[0]["process_group"][1]
    return Call(
        group,
        ranks,
        number,
        op,
        sizes,
        dtype,
        _find_line(entries[0].get("frames", [])) if line is None else str(line),
        is_complete,
        "" if description == "undefined" else str(description),
        has_started=is_complete or any(entry["state"] == "started" for entry in entries),
        time=int(entries[0].get("time_created_ns", 0)) / 1e9,
    )


def _read_contents(entry: Mapping[str, Any]) -> tuple[str, tuple[tuple[int, ...], ...], str]:
    """Return op, sizes and dtype of an entry."""
    op, is_uneven = _read_name(entry["profiling_name"])
    if is_uneven:  # only the root of a gather or scatter has all tensors, but every rank has an input or an output
        return op, (), ",".join(sorted({*entry["input_dtypes"], *entry["output_dtypes"]}))
    dtypes = entry["input_dtypes"]
    dtype = dtypes[0] if len(dtypes) == 1 else ",".join(sorted(set(dtypes)))
    return op, tuple([tuple(map(int, size)) for size in entry["input_sizes"]]), dtype


@cache
def _read_name(name: str) -> tuple[str, bool]:
    """Return the operation in a name such as "nccl:send 0->1", and whether its ranks may pass different shapes."""
    op = name.split(":")[-1].split(" ")[0]
    return op, op.startswith(SIZES_MAY_DIFFER)


def _find_unbroken(calls: Iterable[Call]) -> dict[str, int]:
    """Return from which number on a record has every call of a group. torch does not record every kind of call."""
    numbers: dict[str, set[int]] = {}
    for call in calls:
        numbers.setdefault(call.group, set()).add(call.number)
    first = {group: max(known) for group, known in numbers.items()}
    for group, known in numbers.items():
        while first[group] - 1 in known:
            first[group] -= 1
    return first


def list_files(paths: Iterable[str | Path]) -> list[Path]:
    """Return these files, and instead of a folder its dumps by rank.

    The names of a job's dumps differ only in the rank at the end, as dump_0.json and dump_1.json. At least one of them
    begins like a dump, so log_0.txt and log_1.txt are left out. Raise ValueError if a folder contains no dump, and
    OSError if one of these files cannot be read.
    """
    files = []
    for path in map(Path, paths):
        if not path.is_dir():
            files.append(path)
            continue
        named: dict[tuple[str, str | None], list[tuple[int, Path]]] = {}  # by the name without the rank
        for file in path.iterdir():
            if (number := re.search(r"(\d+)(\.\w+)?$", file.name)) and file.is_file():
                named.setdefault((file.name[: number.start()], number[2]), []).append((int(number[1]), file))
        found = [own for own in named.values() if any(_begins_like_a_dump(file) for _, file in own)]
        if not found:
            raise ValueError(
                f"the folder {path} contains no dump: a pickle or JSON whose name ends in its rank, as dump_0.json. If "
                "the job ended before its timer or its time-out, it did not hang: it crashed. Find the first error in "
                "the logs of all ranks, and its text in docs/errors.md: with gloo, calls that differ end a job so."
            )
        files += [file for _, file in sorted(chain(*found))]
    return files


def _begins_like_a_dump(path: Path) -> bool:
    """Return whether the first byte of a file is that of a pickle or of JSON."""
    with path.open("rb") as file:
        return file.read(1) in (b"\x80", b"{")


# ---- given: the text of a finding, and the page

VERBS = {
    "missing": "skipped a call",
    "extra": "made one call more than the others",
    "different_op": "launched a different operation",
    "different_size": "launched a call of a different size",
    "different_dtype": "launched a call with a different dtype",
    "dead": "left no trace: the process died, or its trace is not among these files",
    "stuck": "did not complete a call that all members of the group launched",
    "not_started": "launched a call that did not start on the GPU, while it waits on other ranks' GPUs",
    "stale": "wrote the dump before other ranks launched a later call of the group",
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
    "dead": "Read the end of these ranks' logs, and the kernel's log: out of memory, a signal, a lost node.",
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

    Such a file may be of another run, so it is no proof that its calls differ. Ranks that have ended, and times that
    are unknown (0), prove nothing.
    """
    latest = max((trace.calls[0].time for trace in traces if trace.calls), default=0.0) - PATIENCE_S
    old = sorted(trace.rank for trace in traces if 0 < trace.time < latest and not trace.has_ended)
    return conclude("stale", old, place, filter(None, place.calls.values())) if old else None


def check_times(traces: Sequence[Trace], place: Divergence) -> Finding | None:
    """Return the finding "stale" or "running" if the dumps are too early to prove that somebody waits at `place`.

    "stale": a member wrote its dump before another one launched a later call of the group, so the files are not of one
    time. "running": the call had waited for less than PATIENCE_S when a member that has not completed it wrote its
    dump. It waits from its first launch if a member has not launched it, and from its last launch otherwise. A rank
    that has ended comes no more. Times that are unknown (0) prove nothing.
    """
    row, latest, lack = {}, 0.0, False
    members = next(call.ranks for call in place.calls.values() if call)
    for trace in traces:
        calls = [call for call in trace.calls if call.group == place.group]
        latest = max(latest, *(call.time for call in calls), 0)
        row |= {call.time: call for call in calls if call.number == place.number}
        lack |= trace.rank in members and all(call.number != place.number for call in calls)
    dumps = {trace.rank: trace.time for trace in traces if trace.rank in place.calls and not trace.has_ended}
    if stale := sorted(rank for rank, dump in dumps.items() if 0 < dump < latest - PATIENCE_S):
        return conclude("stale", stale, place, row.values())
    since = min(row) if lack else max(row)
    wait_s = min((dump - since for dump in dumps.values() if dump and since), default=PATIENCE_S)
    if wait_s >= PATIENCE_S:
        return None
    call = next(iter(row.values()))
    what = f"call {place.number} of group {label_group(call, [call])}, {describe(call)},"
    text = f"The job was running: {what} had waited for {max(wait_s, 0) * 1000:.0f} ms when a rank wrote its dump."
    return Finding("running", [], place.group, place.number, f"{text}\n{NEXT['running']}")


def list_places(traces: Sequence[Trace]) -> list[Divergence]:
    """Return the places at which the cause may be: divergences, and calls that ranks wait in (`list_unfinished`).

    If the calls of the chosen divergence do not agree, these are all divergences: a difference is a proof. Otherwise
    they are both, because an absent rank may wait in a call that all members have launched. But if then every place
    waits for another, they are the divergences alone, or those of `list_unfinished` if there are none. If all ranks
    have ended, nobody waits.
    """
    divergences = list_divergences(traces)
    chosen = choose_place(divergences)
    if chosen and len({contents(call) for call in chosen.calls.values() if call}) > 1:
        return divergences
    unfinished = [] if all(trace.has_ended for trace in traces) else list_unfinished(traces)
    both = [*divergences, *unfinished]
    chosen = choose_place(both)
    is_free = chosen and not any(list_waiting_members(chosen, other) for other in both)
    return both if is_free else divergences or unfinished


def find_circle(places: Sequence[Divergence]) -> list[Divergence]:
    """Return the shortest circle: each place waits for the next one, and the last one for the first.

    The first place has the smallest (number, group) of the circle. Of several shortest circles, return the one whose
    first place is smallest. Return [] if there is no circle.
    """
    ordered = sorted(places, key=lambda one: (one.number, one.group))
    arrows = [[j for j, other in enumerate(ordered) if list_waiting_members(one, other)] for one in ordered]
    shortest: list[int] = []
    for start in range(len(ordered)):
        paths, seen = deque([[start]]), {start}
        while paths:
            path = paths.popleft()
            if start in arrows[path[-1]]:
                shortest = path if not shortest or len(path) < len(shortest) else shortest
                break
            later = [place for place in arrows[path[-1]] if place > start and place not in seen]
            seen.update(later)
            paths.extend([*path, place] for place in later)
    return [ordered[place] for place in shortest]


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


# ---- what you write


def align(traces: Sequence[Trace]) -> dict[str, dict[int, dict[int, Call]]]:
    """Return group -> number -> rank -> call, for the numbers that a rank has called and that no rank has lost.

    A member of a group has lost the numbers below its first call of the group. A member without a call of the group has
    lost all of them if `num_lost` is above 0, and none otherwise. Groups without numbers are left out. Ranks without a
    trace are ignored.
    """
    # Collect the calls first. Then find, for each group, the first number that every member with a trace still has.
    ### BEGIN SOLUTION part (a)
    table: dict[str, dict[int, dict[int, Call]]] = {}
    members: dict[str, tuple[int, ...]] = {}
    oldest: dict[tuple[int, str], int] = {}  # (rank, group) -> the number of its first call
    for trace in traces:
        for call in trace.calls:
            table.setdefault(call.group, {}).setdefault(call.number, {})[trace.rank] = call
            members[call.group] = call.ranks
            oldest.setdefault((trace.rank, call.group), call.number)
    num_lost = {trace.rank: trace.num_lost for trace in traces}
    aligned = {}
    for group, rows in table.items():
        living = [rank for rank in members[group] if rank in num_lost]
        if any((rank, group) not in oldest and num_lost[rank] for rank in living):
            continue
        first = max(oldest.get((rank, group), 1) for rank in living)
        if kept := {number: calls for number, calls in rows.items() if number >= first}:
            aligned[group] = kept
    return aligned
    ### END SOLUTION


def list_divergences(traces: Sequence[Trace]) -> list[Divergence]:
    """Return the divergence of each group that has one.

    A group diverges at its first aligned number where the calls of its members with a trace do not agree, or where one
    of these members has no call. Calls agree if op, sizes and dtype are equal.
    """
    # From its first number on, a group of `align`'s result has no gaps.
    ### BEGIN SOLUTION part (b)
    living = {trace.rank for trace in traces}
    divergences = []
    for group, rows in align(traces).items():
        for number, calls in sorted(rows.items()):
            members = next(iter(calls.values())).ranks
            if not living.intersection(members) <= calls.keys() or len({contents(call) for call in calls.values()}) > 1:
                divergences.append(Divergence(group, number, {rank: calls.get(rank) for rank in members}))
                break
    return divergences
    ### END SOLUTION


def list_waiting_members(first: Divergence, second: Divergence) -> list[int]:
    """Return the members that have come to `second` but not to `first`. Because of them, `first` waits for `second`."""
    # `calls` has None for a rank that has not come to a place.
    ### BEGIN SOLUTION part (c)
    return [rank for rank, call in first.calls.items() if call is None and second.calls.get(rank)]
    ### END SOLUTION


def choose_place(places: Sequence[Divergence]) -> Divergence | None:
    """Return the place with the smallest (number, group) of those that wait for no other; None without any.

    If every place waits for another, return the smallest of all.
    """
    # Numbers of different groups say nothing about time. What a rank waits in does.
    ### BEGIN SOLUTION part (d)
    free = [one for one in places if not any(list_waiting_members(one, other) for other in places)]
    return min(free or places, key=lambda one: (one.number, one.group), default=None)
    ### END SOLUTION


def find_divergence(traces: Sequence[Trace]) -> Divergence | None:
    """Return the divergence that `choose_place` chooses."""
    return choose_place(list_divergences(traces))


def compare_tails(by_rank: dict[int, Trace], place: Divergence, culprits: Sequence[int], others: Sequence[int]) -> str:
    """Return "missing" if the culprits skipped the call at `place`, "extra" if they made one more; otherwise "".

    In the place's group, compare each culprit's calls from this number on with those of each of the `others`, as far as
    both go. The first case that holds for all culprits decides:

    - Their calls were swapped, so return "", if they agree once the culprit's first two calls are exchanged. At least
      one of the others must have two calls to compare.
    - A call was skipped if they agree with the others' calls from the next number on. At least one of the others must
      have a call there.
    - A call was added if the culprit's calls from the next number on agree with the others' calls, with the same
      minimum.
    """

    # Without a majority (`others` is empty), a skipped call and an additional one look the same.
    ### BEGIN SOLUTION part (e)
    def list_tail(rank: int) -> list[tuple]:
        calls = by_rank[rank].calls
        return [contents(call) for call in calls if call.group == place.group and call.number >= place.number]

    def agree(first: list, others: list[list], least: int = 1) -> bool:
        pairs = [list(zip(first, other)) for other in others]
        return max(map(len, pairs), default=0) >= least and all(one == other for row in pairs for one, other in row)

    own, theirs = [list_tail(rank) for rank in culprits], [list_tail(rank) for rank in others]
    if all(agree(tail[1::-1] + tail[2:], theirs, least=2) for tail in own):
        return ""
    if all(agree(tail, [other[1:] for other in theirs]) for tail in own):
        return "missing"
    if all(agree(tail[1:], theirs) for tail in own):
        return "extra"
    return ""
    ### END SOLUTION


def find_difference(calls: Iterable[Call]) -> str:
    """Return what differs between calls that do not agree: "different_op", "different_size" or "different_dtype"."""
    ### BEGIN SOLUTION part (f)
    values = zip(*map(contents, calls))
    kinds = ("different_op", "different_size", "different_dtype")
    return next(kind for kind, found in zip(kinds, values) if len(set(found)) > 1)
    ### END SOLUTION


def list_unfinished(traces: Sequence[Trace]) -> list[Divergence]:
    """Return the calls that ranks wait in although all members with a trace launched them, and agree.

    A rank waits in its first call, in program order, that is aligned and not complete. If this call is before the
    divergence of its group, or if its group has none, it is one place. `calls` has the members with a trace that have
    not completed it: the call of a member that waits there, and None for one that waits elsewhere.
    """
    # A member may have launched a call, and yet not have come to it: it waits in an earlier call, of any group.
    ### BEGIN SOLUTION part (g)
    table = align(traces)
    ends = {divergence.group: divergence.number for divergence in list_divergences(traces)}
    waits: dict[int, tuple[str, int]] = {}  # rank -> where it waits
    for trace in traces:
        for call in trace.calls:
            if not call.is_complete and call.number in table.get(call.group, {}):
                waits[trace.rank] = (call.group, call.number)
                break
    places = []
    for group, number in sorted(set(waits.values())):
        if number < ends.get(group, number + 1):
            row = [(rank, call) for rank, call in table[group][number].items() if not call.is_complete]
            calls = {rank: call if waits[rank] == (group, number) else None for rank, call in row}
            places.append(Divergence(group, number, calls))
    return places
    ### END SOLUTION


def diagnose(traces: Sequence[Trace]) -> Finding:
    """Return what broke the job, or "healthy" if nothing is missing, different or unfinished.

    The place is the one that `choose_place` chooses among those of `list_places`. "dead", "unseen" and "healthy" have
    none. The first kind that applies:

    - The calls at the place do not agree. Return the finding of `check_runs`, if there is one. Otherwise, the culprits
      are the ranks with a call outside the largest set of agreeing calls; if two sets are largest, all ranks with a
      call. With one largest set, the kind is "missing" or "extra" if `compare_tails` says so. Otherwise it is
      "different_op", "different_size" or "different_dtype", the first that differs.
    - "dead": some ranks of the world, or members of a group, have no trace. They are the culprits.
    - "circular": every place waits for another. The place is the first of `find_circle`. In the circle, each place
      waits for the next one because of some members. The culprits are those of the smallest set: if rank 1 alone holds
      up one place, and seven ranks hold up the other, rank 1. If several sets are smallest, all of their ranks.
    - "stuck": no member is absent, so the place is one of `list_unfinished`. The culprits are the members that wait
      there. But if the call has started on some of them, and not on others, the kind is "not_started", and the culprits
      are the others.
    - "unseen": some ranks with a trace have recorded neither a call nor a message. They are named.
    - "healthy": nothing diverges. But if a call or a message is unfinished (`find_wait`) and some rank has not ended,
      the kind is "stuck", without a place, and these ranks are named.
    - "ended": members without the call have ended. They are the culprits.
    - "behind": the culprits are the members without the call.

    "circular", "stuck", "not_started" and "behind" hold only if the dumps were written late enough: return the finding
    of `check_times` instead, if there is one.

    The text contains the culprits and, with a place, its number, its group's description (or its name without one), and
    op and line of each different call; for "circular", those of all places of the circle. It also contains the line of
    what a culprit launched last (`find_last`; "ended", "behind"), and where a culprit waits itself ("behind",
    "missing"; "stuck" and "not_started" only in a message).
    """
    # `traces` may come in any order. Absence is weak evidence: the member may have come after its dump was written.
    ### BEGIN SOLUTION part (h)
    by_rank = {trace.rank: trace for trace in traces}
    places = list_places(traces)
    place = choose_place(places)
    made = {rank: call for rank, call in place.calls.items() if call} if place else {}
    sets = Counter(map(contents, made.values())).most_common()
    waits = {rank: call for rank, trace in sorted(by_rank.items()) if (call := find_wait(trace))}
    if place and len(sets) > 1:
        has_majority = sets[0][1] > sets[1][1]
        others = [rank for rank, call in made.items() if has_majority and contents(call) == sets[0][0]]
        culprits = sorted(made.keys() - others)
        kind = compare_tails(by_rank, place, culprits, others) or find_difference(made.values())
        own_waits = {rank: waits[rank] for rank in culprits if rank in waits and kind == "missing"}
        return check_runs(traces, place) or conclude(kind, culprits, place, made.values(), waits=own_waits)
    groups = {call.group: call.ranks for trace in traces for call in trace.calls}
    everybody = set(range(max(trace.world_size for trace in traces))).union(*groups.values())
    if dead := sorted(everybody - by_rank.keys()):
        return conclude("dead", dead)
    if place and any(list_waiting_members(place, other) for other in places):  # no place is free
        circle = find_circle(places)
        arrows = [list_waiting_members(one, other) for one, other in zip(circle, [*circle[1:], circle[0]])]
        fewest = min(map(len, arrows))
        culprits = sorted({rank for ranks in arrows if len(ranks) == fewest for rank in ranks})
        calls = [call for one in circle for call in one.calls.values() if call]
        return check_times(traces, circle[0]) or conclude("circular", culprits, circle[0], calls)
    absent = sorted(place.calls.keys() - made.keys()) if place else []
    if place and not absent:
        late = sorted(rank for rank, call in made.items() if not call.has_started)
        kind, culprits = ("not_started", late) if 0 < len(late) < len(made) else ("stuck", sorted(made))
        messages = {rank: call for rank, call in waits.items() if rank in culprits and call in by_rank[rank].messages}
        return check_times(traces, place) or conclude(kind, culprits, place, made.values(), waits=messages)
    if unseen := sorted(rank for rank, trace in by_rank.items() if not trace.calls and not trace.messages):
        return conclude("unseen", unseen)
    if not place:
        is_over = all(trace.has_ended for trace in traces)
        return conclude("stuck", list(waits), waits=waits) if waits and not is_over else conclude("healthy", [])
    ended = [rank for rank in absent if by_rank[rank].has_ended]
    culprits = ended or absent
    last = [call.line for rank in culprits if (call := find_last(by_rank[rank]))]
    if ended:
        return conclude("ended", culprits, place, made.values(), last)
    own_waits = {rank: waits[rank] for rank in culprits if rank in waits}
    return check_times(traces, place) or conclude("behind", culprits, place, made.values(), last, own_waits)
    ### END SOLUTION


def main(paths: Sequence[str], html: str | None = None) -> int:
    """Print the text of the finding for these dumps and, for each trace, the rank with op and line of `find_last`.

    A path may be a folder with dumps (`list_files`). With `html`, also write the page with the finding (`write_page`).
    Return 0 if the finding is "healthy" and 1 for any other. Return 2 after one sentence with the file's name if a dump
    cannot be read, if the page cannot be written, or if a dump is from another job than those before it: the same rank,
    another world size, or another `job`. A world size of 0 and the job "" fit every other.
    """
    # `list_files` raises ValueError. `load_trace` and `write_page` raise OSError, and `load_trace` also ValueError.
    ### BEGIN SOLUTION part (i)
    traces: list[Trace] = []
    try:
        files = list_files(paths)
    except (OSError, ValueError) as error:
        print(error)
        return 2
    for path in files:
        try:
            trace = load_trace(path)
        except (OSError, ValueError) as error:
            print(f"{path} cannot be read: {error}")
            return 2
        for other in traces:
            sizes, jobs = {trace.world_size, other.world_size} - {0}, {trace.job, other.job} - {""}
            if trace.rank == other.rank or len(sizes) > 1 or len(jobs) > 1:
                print(f"{path} is a dump of another job than the files before it")
                return 2
        traces.append(trace)
    finding = diagnose(traces)
    print(finding.text)
    for trace in sorted(traces, key=lambda trace: trace.rank):
        last = find_last(trace)
        print(f"rank {trace.rank}: {f'{last.op} at {last.line}' if last else 'no call'}{' (ended)' * trace.has_ended}")
    if html:
        try:
            write_page(html, finding, traces)
        except OSError as error:
            print(f"{html} cannot be written: {error}")
            return 2
    return 0 if finding.kind == "healthy" else 1
    ### END SOLUTION


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Name the rank that broke a job, from the dumps of all ranks.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a dump, or a folder with dumps")
    parser.add_argument("--html", metavar="FILE", help="also write a page with a picture of the calls")
    options = parser.parse_args()
    gc.disable()  # there may be millions of calls, and no cycles
    sys.exit(main(options.paths, options.html))
