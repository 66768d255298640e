"""Likely causes when a check of module 13 fails."""

from itertools import permutations, product

from m13_post_mortem import expected as jobs

UNREADABLE = "main does not catch both OSError and ValueError, or it returns another number."
OTHER_JOB = "main compares dumps of different jobs."
NO_LAST = "the line of what a culprit launched last is not passed to conclude."
FIRST_WAIT = "a rank waits in its first unfinished call, in the order of its program, not of numbers or groups."
NO_WAIT = "the first unfinished call or message of the culprits is not passed to conclude."
MISSING_IGNORED = "the calls here agree, but a member with a trace has none, so the group diverges here."
DIFFERENCE_IGNORED = "the calls of the members do not agree here, so the group diverges here."
AGREE = "the calls here agree: their op, sizes and dtype are equal, and nothing else counts."
EVIDENCE = (
    "without a later call as evidence, without a majority, or if a later call does not agree, a call was not skipped "
    "but differs."
)
PROVEN = "the culprits' later calls are those of the others, one call ahead or behind: see compare_tails."
FIRST = "the kind is the first of op, size and dtype that differs."
NO_TRACE = "a rank of the world, or a member of a group, has no trace, and the calls agree: this case comes first."
TAKEN = "a member without the call has ended: ranks without a trace may be its victims."
VICTIM = "calls that do not agree come before dead ranks: the dead rank may be a victim."
ACCUSED = "a rank that has recorded nothing is accused, although nobody knows what it did."
UNSEEN = "a rank that has recorded nothing was not seen, so nobody knows whether it broke the job."
TIMES = "the finding of check_times, which says that the dumps are too early, is not returned."
RUNS = "the finding of check_runs, which says that a dump may be of another run, is not returned."
AT_A_CALL = "a member that has launched this call has come to it, whatever it launched later, so it is the place."
NO_PLACE = "a call that a member has not launched is a divergence, and no place of list_unfinished."
DIFFERENT = [*jobs.DIFFERENCES.values()]
LATER = ["healthy", "stuck", "not_started", "unseen", "ended", "behind", "circular"]  # than ranks without a trace


def explain_alignment(traces, got, expected):
    """Explain which numbers align should have left out or kept."""
    rows, right = {tuple(row[:2]) for row in got}, {tuple(row[:2]) for row in expected}
    if rows > right:
        members = {call["group"]: call["ranks"] for trace in traces for call in trace["calls"]}
        groups = {trace["rank"]: {call["group"] for call in trace["calls"]} for trace in traces if trace["num_lost"]}
        silent = {group for group, ranks in members.items() if any(group not in groups.get(r, {group}) for r in ranks)}
        if all(group in silent for group, _ in rows - right):
            return "a member with num_lost > 0 and without a call of the group has lost all its numbers."
        return "a number is kept although a member's first call of the group has a higher number."
    if rows - {(call["group"], call["number"]) for trace in traces for call in trace["calls"]}:
        return "the numbers are not those of the calls: call.number counts the calls of the call's own group."
    if rows < right:
        return "numbers are left out that no member with a trace has lost."
    if rows == right and [[r for r, _ in row[2]] for row in got] != [[r for r, _ in row[2]] for row in expected]:
        return "ranks without a call, or ranks without a trace, must not be in the innermost dictionary."
    return ""


def explain_place(traces, got, expected):
    """Explain why find_divergence returned another place."""
    found = jobs.find_divergences(traces)
    places = [(group, *place) for group, place in found.items()]
    is_real = bool(got) and found.get(got[0], (None,))[0] == got[1]
    absent = {rank for rank, call in got[2] if call is None} if got and not is_real else set()
    if absent and absent.isdisjoint(trace["rank"] for trace in traces):
        return "the ranks that have no trace count as members without a call. Compare living members only."
    if got and expected and got[:2] == expected[:2]:
        lacking = {rank for rank, _ in expected[2]} - {rank for rank, _ in got[2]}
        return "calls has every member of the group. It is None for one without a trace." if lacking else ""
    if expected and is_real:
        waiting = {one[0] for one in places if any(jobs.list_absent(one, other) for other in places)}
        if expected[0] in waiting:
            return "this divergence waits for another group, as all do, and is not the smallest (number, group)."
        if got[0] in waiting:
            return "this divergence waits for another group: a member without its call is in the other group's call."
        return "this divergence is not the smallest (number, group) of those that wait for no other."
    if expected and not got and all(any(jobs.list_absent(one, other) for other in places) for one in places):
        return "every place waits for another here, so the smallest of all is the answer."
    is_later = got and expected and got[0] == expected[0] and got[1] > expected[1]
    if expected and (is_later or not got):
        calls = [call for call in found[expected[0]][1].values() if call]
        return MISSING_IGNORED if jobs.agree(calls) else DIFFERENCE_IGNORED
    row = jobs.align(traces).get(tuple(got[:2]), {}) if got and not expected else {}
    return AGREE if jobs.agree(row.values()) else ""


OTHER_KIND = {  # the right kind and the returned one
    ("stuck", "healthy"): "ranks that have not ended wait in a call that is not complete, so the job is not healthy.",
    ("circular", "stuck"): "this unfinished call waits for another: one of its members launched an unfinished call "
    "before it.",
    ("stuck", "circular"): "a member that has completed a call, or waits in it, has come to it, whatever it launched "
    "later.",
    ("circular", "behind"): "every place waits for another here. The kind is circular, and nobody is only behind.",
    ("ended", "behind"): "some of the members without the call have ended. The kind is ended.",
    **dict.fromkeys(product(["unseen"], ["behind", "ended"]), ACCUSED),
    **dict.fromkeys(product(["unseen"], ["healthy", "stuck"]), UNSEEN),
    **dict.fromkeys(product(["dead", "untraced"], LATER), NO_TRACE),
    **dict.fromkeys(product(["ended"], ["dead", "untraced"]), TAKEN),
    ("untraced", "dead"): "a rank has ended, and the others may be its victims: nothing shows who was first.",
    ("untraced", "ended"): "no member has ended without the call, or it has recorded nothing, so no rank is accused.",
    ("dead", "untraced"): "no rank has ended, so those without a trace are what the others wait for: they are dead.",
    **dict.fromkeys(product(["running", "stale"], ["circular", "stuck", "not_started", "behind", "healthy"]), TIMES),
    **dict.fromkeys(product(["stale"], [*DIFFERENT, "missing", "extra"]), RUNS),
    **dict.fromkeys(product(["stuck"], ["behind", "ended"]), AT_A_CALL),
    **dict.fromkeys(product(["behind", "ended"], ["stuck", "not_started"]), NO_PLACE),
    ("not_started", "stuck"): "the call has started on some members only.",
    ("stuck", "not_started"): "the call has started on all members that wait in it, or on none of them.",
    **dict.fromkeys(product(DIFFERENT, ["dead"]), VICTIM),
    **dict.fromkeys(product(["missing", "extra"], DIFFERENT), PROVEN),
    **dict.fromkeys(product(DIFFERENT, ["missing", "extra"]), EVIDENCE),
    **dict.fromkeys(permutations(DIFFERENT, 2), FIRST),
}
OTHER_RANKS = (  # for one kind, why other ranks are named: kinds, whether too many are, and the sentence
    (("stuck",), True, "members that have completed the call are named together with those that wait."),
    (("ended",), True, "members that are only slow are named together with those that have ended."),
    (("circular",), True, "only the smallest set of members through whom a place of the circle waits is named."),
    (("unseen",), True, "a rank that has recorded a call, or a message, is named."),
    (("unseen",), False, "a rank that has recorded neither a call nor a message is not named."),
    (DIFFERENT, False, "a rank outside the largest set of agreeing calls is not named."),
)


def explain_finding(traces, kind, culprits, got_kind, ranks):
    """Explain why diagnose found another fault."""
    have, named, everybody = set(culprits), set(ranks), {trace["rank"] for trace in traces}
    if got_kind == "stuck" and kind == "healthy" and all(t["has_ended"] for t in traces):
        return "all ranks have ended, so nobody waits."
    is_exchanged = {kind, got_kind} == {"missing", "extra"}
    if kind in (*DIFFERENT, "missing", "extra") and (kind == got_kind or is_exchanged) and named == everybody - have:
        return "the majority is named instead of the minority."
    if is_exchanged and ranks == culprits:
        return "the roles are exchanged: after a skipped call, the culprits are ahead of the others."
    if kind == got_kind and kind in DIFFERENT and named < have == everybody:
        return "two sets of agreeing calls are largest, so all ranks with a call are named."
    if got_kind in ("missing", "extra") and jobs.is_swapped(traces, culprits):
        return "the culprits' first two calls are those of the others, exchanged."
    if kind != got_kind:
        return OTHER_KIND.get((kind, got_kind), "")
    for kinds, has_more, why in OTHER_RANKS:
        if kind in kinds and (have < named if has_more else named < have):
            return why
    return ""
