"""How often is module 13's program right? Break healthy jobs at random, write their dumps, and count what it finds.

    python tests/m13_post_mortem/corpus.py               # 500 jobs of 4 ranks: 2000 dumps

Each job makes 40 calls, of few operations and sizes, in the world and two pairs. Then one rank drops a call, swaps two,
changes a size, stops or ends early, or its file is lost, cut off or without calls. The ranks run until they hang: a
call is complete if all members have launched the same as this and every earlier call of the group, and a rank waits if
1, 4 or 11 of its calls are not complete. Each buffer has room for 12 to 60 calls. So the traces of a fault may look
like another fault. A swap that holds up nobody counts as no fault.
"""

from __future__ import annotations

import contextlib
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
    "resized": {"different_size"},
    "stopped": {"behind"},
    "ended early": {"ended"},
    "file lost": {"dead"},
    "file cut off": {"refused"},
    "no calls": {"unseen"},
}


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
    elif fault == "swapped":
        place = next(p for p in [*range(place, len(own) - 1), *range(place)] if own[p][:3] != own[p + 1][:3])
        own[place : place + 2] = own[place + 1], own[place]
    elif fault == "resized":
        own[place] = (*own[place][:2], own[place][2] + 1, own[place][3])
    elif fault in ("stopped", "ended early"):
        del own[place:]
    return programs


def run(rng: random.Random, programs: list[list[tuple]]) -> tuple[list[list[dict]], list[bool]]:
    """Return the recorder's entries of each rank, and whether it left its program, when no rank can go on."""
    ahead = rng.choice((1, 4, 11))
    entries: list[list[dict]] = [[] for _ in programs]
    launched: dict[tuple[str, int], dict[int, dict]] = {}
    complete = dict.fromkeys(GROUPS, 0)  # so many calls of each group
    moves = True
    while moves:
        moves = False
        for rank, program in enumerate(programs):
            waiting = sum(not entry["retired"] for entry in entries[rank])
            if len(entries[rank]) == len(program) or waiting >= ahead:
                continue
            group, op, size, line = program[len(entries[rank])]
            number = 1 + sum(entry["process_group"][0] == group for entry in entries[rank])
            entry = {
                "record_id": len(entries[rank]),
                "process_group": [group, "undefined"],
                "profiling_name": f"gloo:{op}",
            }
            entry |= {"collective_seq_id": number, "p2p_seq_id": 0, "is_p2p": False, "line": line}
            entry |= {"input_sizes": [[size]], "input_dtypes": ["Float"], "state": "scheduled", "retired": False}
            entries[rank].append(entry)
            launched.setdefault((group, number), {})[rank] = entry
            while agree(row := launched.get((group, complete[group] + 1), {}), GROUPS[group]):
                complete[group] += 1
                for one in row.values():
                    one["retired"] = True
            moves = True
    return entries, [
        len(own) == len(program) and all(entry["retired"] for entry in own)
        for own, program in zip(entries, programs, strict=True)
    ]


def agree(row: dict[int, dict], members: list[int]) -> bool:
    """Return whether all members have launched the same."""
    return (
        len(row) == len(members) and len({(one["profiling_name"], *one["input_sizes"][0]) for one in row.values()}) == 1
    )


def make_job(rng: random.Random, fault: str, folder: Path) -> set[int]:
    """Write the dumps of a job with this fault. Return the rank that holds up the others, if one does."""
    rank = rng.randrange(4)
    entries, ended = run(rng, make_programs(rng, fault, rank))
    if fault == "stopped":
        ended[rank] = False
    for member, own in enumerate(entries):
        kept = [] if fault == "no calls" and member == rank else own[-rng.randint(12, 60) :]
        record = {"rank": member, "world_size": 4, "has_ended": ended[member], "groups": GROUPS, "entries": kept}
        record |= {"num_lost": kept[0]["record_id"] if kept else 0, "job": "a job"}
        text = json.dumps(record)
        if fault == "file cut off" and member == rank:
            text = text[: rng.randrange(len(text))]
        if fault != "file lost" or member != rank:
            (folder / f"dump_{member}.json").write_text(text)
    return set() if fault == "none" or (fault == "swapped" and all(ended)) else {rank}


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
        yield fault if guilty else "none", guilty, kind, named


def print_table(results: list[tuple[str, set[int], str, set[int]]]) -> None:
    """Print recall by fault and precision by finding."""
    print("| fault | jobs | names the rank | and no other | and the fault |\n|---|---|---|---|---|")
    for fault, kinds in KINDS.items():
        own = [(guilty, kind, named) for one, guilty, kind, named in results if one == fault]
        counts = (
            sum(guilty <= named for guilty, _, named in own),
            sum(guilty == named for guilty, _, named in own),
            sum(guilty == named and kind in kinds for guilty, kind, named in own),
        )
        print(f"| {fault} | {len(own)} | {' | '.join(f'{count / len(own):.0%}' for count in counts)} |")
    print("\n| finding | jobs | names the guilty rank | names only innocent ranks |\n|---|---|---|---|")
    for kind in sorted({kind for _, _, kind, _ in results} - {"healthy"}):
        own_ranks = [(guilty, named) for _, guilty, one, named in results if one == kind]
        right = sum(bool(guilty) and guilty <= named for guilty, named in own_ranks)
        wrong = sum(not guilty & named for guilty, named in own_ranks)
        print(f"| {kind} | {len(own_ranks)} | {right / len(own_ranks):.0%} | {wrong / len(own_ranks):.0%} |")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "solutions/m13_post_mortem"))
    import post_mortem

    print_table(list(examine(post_mortem, 500)))
