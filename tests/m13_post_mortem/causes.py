"""Likely causes when a check of module 13 fails."""

from m13_post_mortem import expected as jobs

UNREADABLE = "main does not catch both OSError and ValueError, or it returns another number."
OTHER_JOB = "main compares dumps of different jobs."
NO_WAIT = "the first unfinished call or message of the culprits is not passed to conclude."


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
    if rows < right:
        return "numbers are left out that no member with a trace has lost."
    if rows == right and [[r for r, _ in row[2]] for row in got] != [[r for r, _ in row[2]] for row in expected]:
        return "ranks without a call, or ranks without a trace, must not be in the innermost dictionary."
    return ""


def explain_place(traces, got, expected):
    """Explain why find_divergence returned another place."""
    found = jobs.find_divergences(traces)
    is_real = bool(got) and found.get(got[0], (None,))[0] == got[1]
    absent = {rank for rank, call in got[2] if call is None} if got and not is_real else set()
    if absent and absent.isdisjoint(trace["rank"] for trace in traces):
        return "the ranks that have no trace count as members without a call. Compare living members only."
    if got and expected and got[:2] == expected[:2]:
        lacking = {rank for rank, _ in expected[2]} - {rank for rank, _ in got[2]}
        return "calls has every member of the group. It is None for one without a trace." if lacking else ""
    if expected and is_real:
        smallest = min(found, key=lambda group: (found[group][0], group))
        if len(found) > 1 and got[0] == smallest:
            return "this divergence waits for another group: a member without its call is in the other group's call."
        return "this divergence is not the smallest (number, group) of those that wait for no other."
    return ""


def explain_finding(traces, kind, culprits, got_kind, ranks):
    """Explain why diagnose found another fault."""
    silent = [t["rank"] for t in traces if not t["calls"]]
    if got_kind == "healthy" and kind == "stuck":
        return "calls agree on all ranks, but ranks still wait in one: is_complete is not looked at."
    if got_kind == "stuck" and kind == "healthy" and all(t["has_ended"] for t in traces):
        return "all ranks have ended, so nobody waits."
    if got_kind == "stuck" and kind == "circular":
        return "this unfinished call waits for another: one of its members launched an unfinished call before it."
    if got_kind == "circular" and kind == "stuck":
        return "a member that has completed a call, or waits in it, has come to it, whatever it launched later."
    if kind == got_kind and kind == "stuck" and set(culprits) < set(ranks):
        return "members that have completed the call are named together with those that wait."
    if kind == "unseen" and set(ranks) & set(silent):
        return "a rank that has recorded nothing is accused, although nobody knows what it did."
    if kind == "unseen" and got_kind in ("healthy", "stuck"):
        return "a rank that has recorded nothing was not seen, so nobody knows whether it broke the job."
    if got_kind == "dead" and kind.startswith("different"):
        return "calls that do not agree come before dead ranks: the dead rank may be a victim."
    if kind == got_kind and kind == "ended" and set(culprits) < set(ranks):
        return "members that are only slow are named together with those that have ended."
    if kind == got_kind and kind == "circular" and set(culprits) < set(ranks):
        return "ranks that only wait for the circle are named."
    if kind == got_kind and kind.startswith("different") and set(ranks) < set(culprits):
        return "a rank outside the largest set of agreeing calls is not named."
    is_exchanged = {kind, got_kind} == {"missing", "extra"}
    if (kind == got_kind or is_exchanged) and set(ranks) == {t["rank"] for t in traces} - set(culprits):
        return "the majority is named instead of the minority."
    if is_exchanged and ranks == culprits:
        return "the roles are exchanged: after a skipped call, the culprits are ahead of the others."
    if got_kind in ("missing", "extra") and jobs.is_swapped(traces, culprits):
        return "the culprits' first two calls are those of the others, exchanged."
    if got_kind in ("missing", "extra") and kind.startswith("different"):
        return "without a later call as evidence, or without a majority, a call was not skipped but differs."
    return ""
