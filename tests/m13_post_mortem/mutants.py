"""Mistakes in module 13."""

from mutants import Mutant

FIRST = "first = max(oldest.get((rank, group), 1) for rank in living)"
SILENT = "if any((rank, group) not in oldest and num_lost[rank] for rank in living):"
LIVING = "living = [rank for rank in members[group] if rank in num_lost]"
KEPT = "if kept := {number: calls for number, calls in rows.items() if number >= first}:"
OLDEST = "oldest.setdefault((trace.rank, call.group), call.number)"
DIFFERS = "not living.intersection(members) <= calls.keys() or len({contents(call) for call in calls.values()}) > 1"
ROW = "{rank: calls.get(rank) for rank in members}"
WAITS = "if call is None and second.calls.get(rank)]"
CHOICE = "return min(free or divergences, key=lambda one: (one.number, one.group), default=None)"
CONTENTS = "sizes=tuple(tuple(size) for size in sizes)"
MAJORITY = "has_majority = sets[0][1] > sets[1][1]"
OTHERS = "if has_majority and contents(call) == sets[0][0]]"
KIND = "kind = compare_tails(by_rank, place, culprits, others) or find_difference(made.values())"
DELAYS = '(("missing", 1), ("extra", -1))'
SOME = "return any(pairs) and all("
DISAGREE = "if place and len(sets) > 1:"
DEAD = "if dead := sorted(set(range(max(trace.world_size for trace in traces))) - by_rank.keys()):"
CIRCLE = "if all(map(any, links)):"
CULPRITS = "culprits = {rank for row in links for ranks in row for rank in ranks}"
CALLS = "calls = [call for one in divergences for call in one.calls.values() if call]"
ENDED = "culprits = ended or absent"
LAST = "place, made.values(), last)"
BY_KIND = 'kinds = ("different_op", "different_size", "different_dtype")'

ALIGNED = ("test_calls_are_aligned",)
LOST = ("test_overwritten_calls",)
FOUND = ("test_first_difference",)
WAITING = ("test_the_group_that_others_wait_for",)
DIFFERENT = ("test_calls_that_differ",)
SHIFTED = ("test_missing_and_extra_calls",)
STOPPED = ("test_ranks_that_stop",)
CIRCLES = ("test_circles",)

MUTANTS = [
    Mutant(
        "only numbers that every rank has called",
        KEPT,
        KEPT.replace("first}", "first and len(calls) == len(living)}"),
        ALIGNED,
        "numbers are left out that no member",
    ),
    Mutant(
        "overwritten numbers are kept",
        FIRST,
        "first = 1",
        LOST,
        "a member's first call of the group has a higher number",
    ),
    Mutant(
        "the earliest instead of the latest first call",
        FIRST,
        FIRST.replace("max(", "min("),
        LOST,
        "has a higher number",
    ),
    Mutant("a silent member has lost nothing", SILENT, "if False:", LOST, "without a call of the group has lost all"),
    Mutant(
        "a silent member has always lost everything",
        SILENT,
        SILENT.replace(" and num_lost[rank]", ""),
        ALIGNED,
        "numbers are left out",
    ),
    Mutant(
        "the last call instead of the first",
        OLDEST,
        "oldest[trace.rank, call.group] = call.number",
        ALIGNED,
        "numbers are left out",
    ),
    Mutant("num_lost counts numbers of every group", FIRST, "first = max(num_lost[rank] + 1 for rank in living)", LOST),
    Mutant("missing calls are ignored", DIFFERS, DIFFERS.split(" or ")[1], FOUND),
    Mutant("differences are ignored", DIFFERS, DIFFERS.split(" or ")[0], FOUND),
    Mutant(
        "dead members count as missing",
        DIFFERS,
        "len(calls) < len(members) or " + DIFFERS.split(" or ")[1],
        FOUND,
        "have no trace count as members",
    ),
    Mutant("only ranks with a call", ROW, "dict(calls)", FOUND),
    Mutant(
        "waiting is ignored", CHOICE, CHOICE.replace("free or ", ""), WAITING, "this divergence waits for another group"
    ),
    Mutant("None if all wait", CHOICE, CHOICE.replace("free or divergences", "free"), WAITING),
    Mutant("waiting the other way round", WAITS, "if call and second.calls.get(rank, call) is None]", WAITING),
    Mutant(
        "the group before the number", CHOICE, CHOICE.replace("one.number, one.group", "one.group, one.number"), FOUND
    ),
    Mutant("the first of two largest sets wins", MAJORITY, "has_majority = True", DIFFERENT),
    Mutant("the majority is the culprit", OTHERS, OTHERS.replace("==", "!="), DIFFERENT, "the majority is named"),
    Mutant(
        "the size before the operation",
        BY_KIND,
        'kinds = ("different_size", "different_op", "different_dtype")',
        DIFFERENT,
    ),
    Mutant("a skipped call is another size", KIND, "kind = find_difference(made.values())", SHIFTED),
    Mutant(
        "missing and extra exchanged", DELAYS, '(("extra", 1), ("missing", -1))', SHIFTED, "the roles are exchanged"
    ),
    Mutant("no later call is evidence enough", SOME, "return all(", DIFFERENT, "without a later call as evidence"),
    Mutant("one call that agrees is enough", SOME, "return any(pairs) and any(", SHIFTED),
    Mutant(
        "dead before different calls",
        DISAGREE,
        "if place and len(sets) > 1 and len(by_rank) == traces[0].world_size:",
        STOPPED,
        "come before dead ranks",
    ),
    Mutant("ranks without a trace are ignored", DEAD, "dead = []\n    if dead:", STOPPED),
    Mutant("ranks that end are only behind", ENDED, "ended, culprits = [], absent", STOPPED),
    Mutant("everybody who is absent has ended", ENDED, "culprits = absent", STOPPED, "only slow are named"),
    Mutant("no last line", LAST, "place, made.values())", STOPPED),
    Mutant("a circle is a slow rank", CIRCLE, "if False:", CIRCLES),
    Mutant(
        "everybody absent is in the circle",
        CULPRITS,
        "culprits = {rank for one in divergences for rank, call in one.calls.items() if not call}",
        CIRCLES,
    ),
    Mutant("one place of the circle", CALLS, "calls = made.values()", CIRCLES),
    Mutant(
        "an unreadable file ends with an exception",
        "except (OSError, ValueError) as error:",
        "except OSError as error:",
        ("test_program",),
    ),
    Mutant("always 1", 'return 0 if finding.kind == "healthy" else 1', "return 1", ("test_program",)),
    Mutant(
        "the first call instead of the last",
        'last = f"{trace.calls[-1].op} at {trace.calls[-1].line}"',
        'last = f"{trace.calls[0].op} at {trace.calls[0].line}"',
        ("test_program",),
    ),
]
SAMPLE = ("waiting is ignored", "the majority is the culprit")
