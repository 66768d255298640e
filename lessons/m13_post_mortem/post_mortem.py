"""Module 13: find the rank that broke a job that hangs.

The rank that complains about a hang is usually a victim: it waits for a collective that another rank never launched.
torch's flight recorder keeps the last collectives of each rank. This module compares these records, one per rank, and
names the culprit:

1. `align` puts the calls with the same group and number side by side.
2. `find_divergence` finds the first place where the calls differ, in the group for which nothing else is waiting.
3. `diagnose` says which kind of mistake explains this place, and which ranks made it.
4. `main` prints the finding: `python post_mortem.py dump_*.json`.

No rank runs here, and nothing communicates. The cost is one pass over the calls of all ranks.
"""

from __future__ import annotations

import json
import pickle
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

SIZES_MAY_DIFFER = ("gather", "scatter", "alltoall", "all_to_all")  # operations whose ranks may pass different shapes


@dataclass(frozen=True)
class Call:
    """One collective as one rank launched it.

    `ranks` are the members of `group`, as ranks of the world. `number` counts this rank's collectives in the group,
    from 1. `sizes` contains the shape of each input tensor; it is empty for operations whose ranks may pass different
    shapes. `line` is the place of the call, such as "train.py:17".
    """

    group: str
    ranks: tuple[int, ...]
    number: int
    op: str
    sizes: tuple[tuple[int, ...], ...]
    dtype: str
    line: str


@dataclass(frozen=True)
class Trace:
    """The calls of one rank in program order.

    `has_ended`: the rank left its program normally. `num_lost`: so many of its first calls were overwritten in the
    recorder's ring buffer.
    """

    rank: int
    world_size: int
    calls: tuple[Call, ...]
    has_ended: bool = False
    num_lost: int = 0


@dataclass(frozen=True)
class Divergence:
    """The first place in a group where the calls of its members with a trace differ.

    `calls` has every member of the group, also those without a trace: the member's call, or None.
    """

    group: str
    number: int
    calls: dict[int, Call | None]


@dataclass(frozen=True)
class Finding:
    """What broke the job: the kind, the culprits (sorted), the place (None for "dead" and "healthy"), one sentence."""

    kind: str
    ranks: list[int]
    group: str | None
    number: int | None
    text: str


def dump_trace(path: str | Path, has_ended: bool = False) -> None:
    """Write this rank's flight recorder to `path` as JSON. Call it before a collective's time-out, from any thread.

    torch's own JSON has neither source lines nor, with gloo, the members of a group. So this function reads the pickle
    that torch has just made in this process, keeps the first frame outside installed packages, and adds the members.
    """
    import torch  # here, so that reading dumps needs no torch
    import torch.distributed as dist

    record = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(True, True, False))
    packages = str(Path(torch.__file__).parents[1])

    def find_line(frames: list[dict]) -> str:
        own = (frame for frame in frames if not frame["filename"].startswith((packages, "<")))
        return next((f"{Path(frame['filename']).name}:{frame['line']}" for frame in own), "")

    for entry in record.get("entries", []):
        entry["line"] = find_line(entry.pop("frames", []))
    names = dist.distributed_c10d._world.pg_names
    record["groups"] = {name: dist.get_process_group_ranks(group) for group, name in names.items()}
    record |= {"rank": dist.get_rank(), "world_size": dist.get_world_size(), "has_ended": has_ended}
    Path(path).write_text(json.dumps(record))


def load_trace(path: str | Path) -> Trace:
    """Read a file of `dump_trace`. Raise OSError, or ValueError if it is not such a file. Nothing in it is executed."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        entries = record.get("entries", [])  # absent if the recorder is off
        groups = {name: tuple(ranks) for name, ranks in record["groups"].items()}
        return Trace(
            rank=int(record["rank"]),
            world_size=int(record["world_size"]),
            calls=tuple(_read_call(entry, groups) for entry in entries if not entry["is_p2p"]),
            has_ended=bool(record["has_ended"]),
            num_lost=int(entries[0]["record_id"]) if entries else 0,
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise ValueError(f"not a file of dump_trace ({type(error).__name__}: {error})") from None


def _read_call(entry: dict, groups: dict[str, tuple[int, ...]]) -> Call:
    op = entry["profiling_name"].split(":")[-1]
    sizes = () if op.startswith(SIZES_MAY_DIFFER) else entry["input_sizes"]
    return Call(
        group=entry["process_group"][0],
        ranks=groups[entry["process_group"][0]],
        number=int(entry["collective_seq_id"]),
        op=op,
        sizes=tuple(tuple(size) for size in sizes),
        dtype=",".join(sorted(set(entry["input_dtypes"]))),
        line=str(entry["line"]),
    )


# ---- given: the sentence of a finding

VERBS = {
    "missing": "skipped a call",
    "extra": "made one call more than the others",
    "different_op": "launched a different operation",
    "different_size": "launched a call of a different size",
    "different_dtype": "launched a call with a different dtype",
    "dead": "left no trace: the process died, or its trace is not among these files",
    "circular": "wait for each other in a circle and hold up calls",
    "ended": "ended without a call that other ranks wait in",
    "behind": "did not launch a call that other ranks wait in",
}


def conclude(
    kind: str,
    ranks: list[int],
    place: Divergence | None = None,
    calls: Iterable[Call] = (),
    last_lines: Sequence[str] = (),
) -> Finding:
    """Return the finding, with a sentence that names the culprits, the place, the different `calls` and last lines."""
    if kind == "healthy":
        return Finding(kind, ranks, None, None, "No call is missing or different.")
    text = f"{'Rank' if len(ranks) == 1 else 'Ranks'} {', '.join(map(str, ranks))} {VERBS[kind]}"
    if place:
        different = {(*contents(call), call.line): call for call in calls}.values()
        listed = [f"{call.op} {list(map(list, call.sizes))} {call.dtype} at {call.line}" for call in different]
        text += f": call {place.number} of group {place.group}, {' / '.join(listed)}"
    if last_lines:
        text += f"; the last call before was at {', '.join(dict.fromkeys(last_lines))}"
    return Finding(kind, ranks, place and place.group, place and place.number, text + ".")


def contents(call: Call) -> tuple[str, tuple[tuple[int, ...], ...], str]:
    """Return what must be equal on all ranks. Calls with equal contents agree."""
    return call.op, call.sizes, call.dtype


# ---- what you write


def align(traces: Sequence[Trace]) -> dict[str, dict[int, dict[int, Call]]]:
    """Return group -> number -> rank -> call, for the numbers that a rank has called and that no rank has lost.

    A member of a group has lost the numbers below its first call of the group. A member without a call of the group has
    lost all of them if `num_lost` is above 0, and none otherwise. Groups without numbers are left out. Ranks without a
    trace are ignored.
    """
    # Collect the calls first. Then find, for each group, the first number that every member with a trace still has.
    # TODO: part (a)
    raise NotImplementedError("module 13, part (a)")


def list_divergences(traces: Sequence[Trace]) -> list[Divergence]:
    """Return the divergence of each group that has one.

    A group diverges at its first aligned number where the calls of its members with a trace do not agree, or where one
    of these members has no call. Calls agree if op, sizes and dtype are equal.
    """
    # Numbers may be missing from `align`'s result only before its first one.
    # TODO: part (b)
    raise NotImplementedError("module 13, part (b)")


def list_waiting_members(first: Divergence, second: Divergence) -> list[int]:
    """Return the members that have not made the call of `first` but that of `second`: `first` waits for `second`."""
    # A rank that is in `second` has not come as far as `first` yet.
    # TODO: part (c)
    raise NotImplementedError("module 13, part (c)")


def find_divergence(traces: Sequence[Trace]) -> Divergence | None:
    """Return the divergence with the smallest (number, group) of those that wait for no other; None without any.

    If every divergence waits for another, return the smallest of all.
    """
    # Numbers of different groups say nothing about time. What a rank waits in does.
    # TODO: part (d)
    raise NotImplementedError("module 13, part (d)")


def compare_tails(by_rank: dict[int, Trace], place: Divergence, culprits: Sequence[int], others: Sequence[int]) -> str:
    """Return "missing" if the culprits skipped the call at `place`, "extra" if they made one more; otherwise "".

    After a skipped call, each culprit's calls from this number on agree with the others' calls from the next number on,
    as far as both go, and there is at least one such pair. After an additional call, the roles are exchanged.
    """
    # Without a majority (`others` is empty), a skipped call and an additional one look the same.
    # TODO: part (e)
    raise NotImplementedError("module 13, part (e)")


def find_difference(calls: Iterable[Call]) -> str:
    """Return what differs between calls that do not agree: "different_op", "different_size" or "different_dtype"."""
    # TODO: part (f)
    raise NotImplementedError("module 13, part (f)")


def diagnose(traces: Sequence[Trace]) -> Finding:
    """Return what broke the job. The place is that of `find_divergence`, or None for "dead" and "healthy".

    The first kind that applies:

    - The calls at this place do not agree. The culprits are the ranks with a call outside the largest set of agreeing
      calls; if two sets are largest, all ranks with a call. With one largest set, the kind is "missing" or "extra" if
      `compare_tails` says so. Otherwise it is "different_op", "different_size" or "different_dtype", the first that
      differs.
    - "dead": some ranks of the world have no trace. They are the culprits.
    - "healthy": nothing diverges.
    - "circular": every divergence waits for another. The culprits are the members through which they wait.
    - "ended": members without the call have ended. They are the culprits.
    - "behind": the culprits are the members without the call.

    The text is one sentence. It contains the culprits, the number, and op and line of each different call (for
    "circular", those of all divergences); for "ended" and "behind" also the line of a culprit's last call.
    """
    # `traces` may come in any order. In a circle, name the ranks that are absent from one call because of another one.
    # TODO: part (g)
    raise NotImplementedError("module 13, part (g)")


def main(paths: Sequence[str]) -> int:
    """Print the finding for these dumps and, for each trace, the rank with op and line of its last call.

    Return 0 if nothing diverges, 1 for any other finding, and 2 after one sentence with the file's name if a dump
    cannot be read, or if it is from another job: a dump before it has the same rank, or another world size.
    """
    # `load_trace` raises OSError or ValueError.
    # TODO: part (h)
    raise NotImplementedError("module 13, part (h)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) if len(sys.argv) > 1 else "usage: post_mortem.py dump_0.json dump_1.json ...")
