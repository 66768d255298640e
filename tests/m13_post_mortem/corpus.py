"""How often is module 13's program right? Break healthy jobs at random, write their dumps, and count what it finds.

    python tests/m13_post_mortem/corpus.py               # 750 jobs of 4 ranks

Each job makes 40 calls, of few operations and sizes, in the world and two pairs. Then one rank drops a call, swaps two
of one group (swapped) or of two (order), changes a size or the root of a broadcast, stops, ends early or is killed, or
its file is lost, cut off, without calls or from an earlier time. "victims died": it ended early, and some other ranks
left no file. The ranks run until they hang: a call is complete if all members have launched the same as this and every
earlier call of the group, and a rank waits if 1, 4 or 11 of its calls are not complete. Each buffer has room for 12 to
60 calls. So the traces of a fault may look like another fault. A swap that holds up nobody counts as no fault.
"running" is a healthy job that wrote its dumps in between.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

GROUPS = {"0": [0, 1, 2, 3], "1": [0, 1], "2": [2, 3]}
LENGTH = 40
KINDS = {  # fault -> the kinds that are right for it
    "none": {"healthy"},
    "dropped": {"missing"},
    "swapped": {"different_op", "different_size"},
    "order": {"circular"},
    "root": {"stuck"},
    "resized": {"different_size"},
    "stopped": {"behind"},
    "ended early": {"ended"},
    "victims died": {"ended", "untraced"},
    "killed": {"dead"},
    "file lost": {"untraced"},
    "file cut off": {"refused"},
    "no calls": {"unseen"},
    "old file": {"stale"},
    "running": {"running", "healthy"},
}
BLAMELESS = {"healthy", "refused", "running", "stale", "stuck", "unseen", "untraced"}  # findings that accuse nobody
START_NS = 1_800_000_000_000_000_000


def make_programs(rng: random.Random, fault: str, rank: int) -> list[list[tuple]]:
    """Return each rank's calls, (group, op, size, line), after this rank made its mistake."""
    calls = [
        (rng.choice("0012"), rng.choice(("all_reduce", "broadcast")), rng.choice((8, 8, 64, 512)), f"train.py:{line}")
        for line in range(LENGTH)
    ]
    programs = [[call for call in calls if member in GROUPS[call[0]]] for member in range(4)]
    own = programs[rank]
    place = rng.randrange(1, len(own) - 2)
    if fault == "dropped":
        del own[place]
    elif fault in ("swapped", "order"):
        place = next(
            p
            for p in [*range(place, len(own) - 1), *range(place)]
            if own[p][:3] != own[p + 1][:3] and (own[p][0] == own[p + 1][0]) == (fault == "swapped")
        )
        own[place : place + 2] = own[place + 1], own[place]
    elif fault == "root":
        for program in programs:
            program[:] = [(*call[:1], "broadcast", *call[2:]) if call[3] == own[place][3] else call for call in program]
        own[place] = (*own[place][:3], f"{own[place][3]} (root)")
    elif fault == "resized":
        own[place] = (*own[place][:2], own[place][2] + 1, own[place][3])
    elif fault in ("stopped", "ended early", "victims died", "killed"):
        del own[place:]
    return programs


def run(rng: random.Random, programs: list[list[tuple]], fault: str, rank: int) -> list[dict]:
    """Return what dump_trace writes on each rank when no rank can go on, or earlier for some faults.

    The ranks launch a call each millisecond. A rank whose file is old wrote it in a pause of 40 s, and "running" jobs
    write their dumps one after the other while they run.
    """
    ahead = rng.choice((1, 4, 11))
    entries: list[list[dict]] = [[] for _ in programs]
    launched: dict[tuple[str, int], dict[int, dict]] = {}
    complete = dict.fromkeys(GROUPS, 0)  # so many calls of each group
    early = rng.randrange(30, 90)  # so many launches are before the first dump that is early
    dumps: dict[int, dict] = {}
    now, moves = START_NS, True

    def dump(member: int, after_s: float) -> None:
        program, own = programs[member], entries[member]
        ended = (
            len(own) == len(program) and all(entry["retired"] for entry in own) and (fault, member) != ("stopped", rank)
        )
        text = {"rank": member, "world_size": 4, "has_ended": ended, "groups": GROUPS, "job": "a job"}
        dumps.setdefault(member, copy.deepcopy(text | {"entries": own, "time_ns": now + int(after_s * 1e9)}))

    while moves:
        moves = False
        for member, program in enumerate(programs):
            waiting = sum(not entry["retired"] for entry in entries[member])
            if len(entries[member]) == len(program) or waiting >= ahead:
                continue
            group, op, size, line = program[len(entries[member])]
            number = 1 + sum(entry["process_group"][0] == group for entry in entries[member])
            entry = {
                "record_id": len(entries[member]),
                "process_group": [group, "undefined"],
                "profiling_name": f"gloo:{op}",
                "time_created_ns": now,
            }
            entry |= {"collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "line": line}
            entry |= {"input_sizes": [[size]], "input_dtypes": ["Float"], "state": "scheduled", "retired": False}
            entry["retired"] = (fault, member) == ("root", rank) and line.endswith("(root)")
            entries[member].append(entry)
            launched.setdefault((group, number), {})[member] = entry
            while agree(row := launched.get((group, complete[group] + 1), {}), GROUPS[group]):
                complete[group] += 1
                for one in row.values():
                    one["retired"] = True
            moves, now = True, now + 1_000_000
            made = sum(map(len, entries))
            if fault == "running" and made >= early:
                dump((made - early) % 4, 0)
            elif fault == "old file" and made == early:
                dump(rank, 30)
                now += 40_000_000_000
    for member in range(4):
        dump(member, 30)
    return [dumps[member] for member in range(4)]


def agree(row: dict[int, dict], members: list[int]) -> bool:
    """Return whether all members have launched the same, with one root."""
    contents = {(one["profiling_name"], *one["input_sizes"][0], one["retired"]) for one in row.values()}
    return len(row) == len(members) and len(contents) == 1


def make_job(rng: random.Random, fault: str, folder: Path) -> set[int]:
    """Write the dumps of a job with this fault. Return the rank that holds up the others, if one does."""
    rank = rng.randrange(4)
    records = run(rng, make_programs(rng, fault, rank), fault, rank)
    victims = rng.sample([member for member in range(4) if member != rank], rng.randint(1, 3))
    lost = {"victims died": victims, "killed": [rank], "file lost": [rank]}.get(fault, [])
    for member, record in enumerate(records):
        kept = [] if fault == "no calls" and member == rank else record["entries"][-rng.randint(12, 60) :]
        record |= {"entries": kept, "num_lost": kept[0]["record_id"] if kept else 0}
        text = json.dumps(record)
        if fault == "file cut off" and member == rank:
            text = text[: rng.randrange(len(text))]
        if member not in lost:
            (folder / f"dump_{member}.json").write_text(text)
    is_harmless = fault in ("swapped", "order") and all(record["has_ended"] for record in records)
    return set() if fault in ("none", "running") or is_harmless else {rank}


def examine(program: ModuleType, num_jobs: int, seed: int = 0) -> Iterator[tuple[str, set[int], str, set[int]]]:
    """Yield (fault, guilty ranks, kind, named ranks) of each job. The faults are equally frequent."""
    rng = random.Random(seed)
    faults = list(KINDS)
    for index in range(num_jobs):
        fault = faults[index % len(faults)]
        with tempfile.TemporaryDirectory() as name:
            guilty = make_job(rng, fault, Path(name))
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                status = program.main([name])
            if status == 2:
                kind, named = "refused", {rank for rank in range(4) if f"dump_{rank}.json" in printed.getvalue()}
            else:
                finding = program.diagnose([program.load_trace(path) for path in program.list_files([name])])
                kind, named = finding.kind, set(finding.ranks)
        yield fault if guilty or fault == "running" else "none", guilty, kind, named


def accuses_innocent_ranks(guilty: set[int], kind: str, named: set[int]) -> bool:
    """Return whether a finding that accuses ranks names only such that did nothing wrong."""
    return kind not in BLAMELESS and not guilty & named


def print_table(results: list[tuple[str, set[int], str, set[int]]]) -> None:
    """Print how often each fault is found, and how often only innocent ranks are accused."""
    print("| fault | jobs | names the rank | and no other | names the fault | accuses only innocent ranks |")
    print("|---|---|---|---|---|---|")
    for fault, kinds in KINDS.items():
        own = [(guilty, kind, named) for one, guilty, kind, named in results if one == fault]
        counts = (
            sum(guilty <= named for guilty, _, named in own),
            sum(guilty == named for guilty, _, named in own),
            sum(kind in kinds for _, kind, _ in own),
            sum(accuses_innocent_ranks(*one) for one in own),
        )
        print(f"| {fault} | {len(own)} | {' | '.join(f'{count / len(own):.0%}' for count in counts)} |")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "solutions"))
    from m13_post_mortem import post_mortem

    print_table(list(examine(post_mortem, 750)))
