"""Module 13: find the rank that broke a job that hangs.

The rank that complains about a hang is usually a victim: it waits for a collective that another rank never launched.
torch's flight recorder keeps the last collectives of each rank. This module compares these records, one per rank, and
names the culprit:

1. `align` puts the calls with the same group and number side by side.
2. `find_divergence` finds the first place where the calls differ, in a group that waits for no other.
3. `diagnose` says which kind of mistake explains this place, and which ranks made it, or what no record shows.
4. `main` prints the finding: `brigade post-mortem dump_*.json`.

No rank runs here, and nothing communicates. The cost is one pass over the calls of all ranks. `records.py` (given)
writes and reads the records, and `words.py` (given) writes the text of a finding. To read dumps, only Python is needed.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from .records import Call, Trace, list_files, load_trace
from .records import dump_trace as dump_trace  # with which a job writes its dumps
from .words import Divergence, Finding, check_runs, check_times, conclude, contents, find_last, find_wait, write_page


def align(traces: Sequence[Trace]) -> dict[str, dict[int, dict[int, Call]]]:
    """Return group -> number -> rank -> call, for the numbers that a rank has called and that no rank has lost.

    A member of a group has lost the numbers below its first call of the group. A member without a call of the group has
    lost all of them if `num_lost` is above 0, and none otherwise. Groups without numbers are left out. Ranks without a
    trace are ignored.
    """
    # TODO: part (a)
    raise NotImplementedError("module 13, part (a)")


def list_divergences(traces: Sequence[Trace]) -> list[Divergence]:
    """Return the divergence of each group that has one.

    A group diverges at its first aligned number where the calls of its members with a trace do not agree, or where one
    of these members has no call. Calls agree if op, sizes and dtype are equal.
    """
    # From its first number on, a group of `align`'s result has no gaps.
    # TODO: part (b)
    raise NotImplementedError("module 13, part (b)")


def list_waiting_members(first: Divergence, second: Divergence) -> list[int]:
    """Return the members that have come to `second` but not to `first`. Because of them, `first` waits for `second`."""
    # `calls` has None for a rank that has not come to a place.
    # TODO: part (c)
    raise NotImplementedError("module 13, part (c)")


def choose_place(places: Sequence[Divergence]) -> Divergence | None:
    """Return the place with the smallest (number, group) of those that wait for no other; None without any.

    If every place waits for another, return the smallest of all.
    """
    # Numbers of different groups say nothing about time. What a rank waits in does.
    # TODO: part (d)
    raise NotImplementedError("module 13, part (d)")


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
    # TODO: part (e)
    raise NotImplementedError("module 13, part (e)")


def find_difference(calls: Iterable[Call]) -> str:
    """Return what differs between calls that do not agree: "different_op", "different_size" or "different_dtype"."""
    # TODO: part (f)
    raise NotImplementedError("module 13, part (f)")


def list_unfinished(traces: Sequence[Trace]) -> list[Divergence]:
    """Return the calls that ranks wait in although all members with a trace launched them, and agree.

    A rank waits in its first call, in program order, that is aligned and not complete. If this call is before the
    divergence of its group, or if its group has none, it is one place. `calls` has the members with a trace that have
    not completed it: the call of a member that waits there, and None for one that waits elsewhere.
    """
    # A member may have launched a call, and yet not have come to it: it waits in an earlier call, of any group.
    # TODO: part (g)
    raise NotImplementedError("module 13, part (g)")


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


def diagnose(traces: Sequence[Trace]) -> Finding:
    """Return what broke the job, or "healthy" if nothing is missing, different or unfinished.

    The place is the one that `choose_place` chooses among those of `list_places`. "untraced", "dead", "unseen" and
    "healthy" have none. The first kind that applies:

    - The calls at the place do not agree. Return the finding of `check_runs`, if there is one. Otherwise, the culprits
      are the ranks with a call outside the largest set of agreeing calls; if two sets are largest, all ranks with a
      call. With one largest set, the kind is "missing" or "extra" if `compare_tails` says so. Otherwise it is
      "different_op", "different_size" or "different_dtype", the first that differs.
    - Some ranks of the world, or members of a group, have no trace. A rank that ended without a call may have closed
      their connections. So the kind is "ended" if members without the call have ended and have recorded something
      (`find_last`): they are the culprits. Otherwise, the ranks without a trace are named. The kind is "untraced" if a
      rank has ended, because no record shows who was first, and "dead" if none has.
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
    of `check_times` instead, if there is one. "ended" holds only if `check_runs` finds nothing.

    The text contains the culprits and, with a place, its number, its group's description (or its name without one), and
    op and line of each different call; for "circular", those of all places of the circle. It also contains the line of
    what a culprit launched last (`find_last`; "ended", "behind"), and where a culprit waits itself ("behind",
    "missing"; "stuck" and "not_started" only in a message).
    """
    # `traces` may come in any order. Absence is weak evidence: the member may have come after its dump was written.
    # TODO: part (h)
    raise NotImplementedError("module 13, part (h)")


def main(paths: Sequence[str], html: str | None = None) -> int:
    """Print the text of the finding for these dumps and, for each trace, the rank with op and line of `find_last`.

    A path may be a folder with dumps (`list_files`). With `html`, also write the page with the finding (`write_page`).
    Return 0 if the finding is "healthy" and 1 for any other. Return 2 after one sentence with the file's name if a dump
    cannot be read, if the page cannot be written, or if a dump is from another job than those before it: the same rank,
    another world size, or another `job`. A world size of 0 and the job "" fit every other.
    """
    # `list_files` raises ValueError. `load_trace` and `write_page` raise OSError, and `load_trace` also ValueError.
    # TODO: part (i)
    raise NotImplementedError("module 13, part (i)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Name the rank that broke a job, from the dumps of all ranks.")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a dump, or a folder with dumps")
    parser.add_argument("--html", metavar="FILE", help="also write a page with a picture of the calls")
    options = parser.parse_args()
    gc.disable()  # there may be millions of calls, and no cycles
    sys.exit(main(options.paths, options.html))
