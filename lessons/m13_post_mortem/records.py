"""Given: write what torch's flight recorders contain to files, and read such files, which needs only Python."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import time
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

    `world_size` is 0 if the file does not contain it. `has_ended`: the rank left its program normally, so it waits
    in nothing. `num_lost`: so many of its first calls are not in the record, because its ring buffer has overwritten
    them. `messages`: the sends and receives, in program order. They have numbers of their own and are not aligned.
    `job` is equal on all ranks of a job, or "" if the file does not contain it. `ends_with_message`: the rank launched
    its last message after its last call. `time` is when the dump was written, in seconds since 1970, or 0 if the file
    does not contain it.
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
    has_ended = bool(record.get("has_ended", False))
    if has_ended:  # gloo marks a call as complete a moment after it returned, so the last one may not be marked yet
        entries = [entry | {"state": "completed"} for entry in entries]
    num_lost = int(record["num_lost"] if "num_lost" in record else _count_lost(record))
    calls, messages, ends_with_message = _read_entries(entries, groups, world_size, num_lost > 0)
    first = _find_unbroken(calls)
    kept = tuple(call for call in calls if call.number >= first[call.group])
    return Trace(
        rank=rank,
        world_size=world_size,
        calls=kept,
        has_ended=has_ended,
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
