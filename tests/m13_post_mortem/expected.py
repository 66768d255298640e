"""Module 13: traces of jobs with one known fault, and what the functions must return for them.

A job is a tuple of its fault, its culprits and its traces, which are dictionaries. Nothing here knows the submission or
the reference.
"""

from collections import Counter
from itertools import permutations

OPS = ("all_reduce", "broadcast", "all_gather", "barrier")
DTYPES = ("Float", "BFloat16", "Double")
CONTENTS = ("op", "sizes", "dtype")
START_S = 1_800_000_000.0
DIFFERENCES = dict(zip(CONTENTS, ("different_op", "different_size", "different_dtype"), strict=True))


# ---- jobs without a fault


def make_program(rng, world_size, num_groups=1, length=12):
    """Return groups {name: ranks} and a program: the calls that all members of each group make, in one order.

    Every call of a job has another size and another line, so that no two calls agree by chance. Groups with an odd
    number have a description.
    """
    groups = {"0": tuple(range(world_size))}
    for index in range(1, num_groups):
        size = rng.randint(min(2, world_size), max(2, world_size - 1)) if world_size > 1 else 1
        groups[str(index)] = tuple(sorted(rng.sample(range(world_size), size)))
    sizes = rng.sample(range(1, 10_000), length)
    program = [
        {
            "group": rng.choice(list(groups)),
            "op": rng.choice(OPS[:3]),
            "sizes": ((size,),),
            "dtype": rng.choice(DTYPES),
            "line": f"train.py:{place + 10}",
        }
        for place, size in enumerate(sizes)
    ]
    return groups, program


def make_traces(groups, programs):
    """Return a trace for each rank of `programs`, {rank: its calls}. Calls of other ranks' groups are left out.

    A call is complete if all members have made it. A rank makes a call each 10 ms, and writes its dump half a minute
    after the start.
    """
    world_size = len(groups["0"])
    traces = []
    for rank, program in programs.items():
        numbers = dict.fromkeys(groups, 0)
        calls = []
        for call in program:
            group = call["group"]
            if rank in groups[group]:
                numbers[group] += 1
                description = f"mesh_{group}" if int(group) % 2 else ""
                calls.append(dict(call, ranks=groups[group], number=numbers[group], description=description))
                calls[-1] |= {"time": START_S + 0.01 * len(calls), "has_started": True}
        traces.append({"rank": rank, "world_size": world_size, "calls": calls, "has_ended": False, "num_lost": 0})
        traces[-1] |= {"messages": [], "job": "a job", "time": START_S + 30}
    made = Counter((call["group"], call["number"]) for trace in traces for call in trace["calls"])
    for call in (call for trace in traces for call in trace["calls"]):
        call["is_complete"] = made[call["group"], call["number"]] == len(call["ranks"])
    return traces


def add_message(trace, op, line, is_complete):
    """Add a message to a trace, in the group of the whole world."""
    message = {"group": "0", "ranks": tuple(range(trace["world_size"])), "number": len(trace["messages"]) + 1, "op": op}
    message |= {"sizes": ((4,),), "dtype": "Float", "line": line, "is_complete": is_complete, "description": ""}
    trace["messages"] = [*trace["messages"], message]


def run_blocking(groups, programs):
    """Return the part of each rank's program that it reaches if every call waits for all members of its group."""
    at = dict.fromkeys(programs, 0)
    own = {rank: [call for call in program if rank in groups[call["group"]]] for rank, program in programs.items()}
    while True:
        waiting = {rank: own[rank][place]["group"] for rank, place in at.items() if place < len(own[rank])}
        ready = [group for group, ranks in groups.items() if all(waiting.get(rank) == group for rank in ranks)]
        if not ready:
            return {rank: own[rank][: place + 1] for rank, place in at.items()}
        for rank in groups[ready[0]]:
            at[rank] += 1


def lose_calls(trace, count):
    """Overwrite the first calls of a trace, as a full ring buffer does."""
    return dict(trace, calls=trace["calls"][count:], num_lost=trace["num_lost"] + count)


# ---- the right answers, from the definitions


def align(traces):
    """Return {(group, number): {rank: call}}."""
    by_rank = {trace["rank"]: trace for trace in traces}
    calls = {}
    for rank, trace in by_rank.items():
        for call in trace["calls"]:
            calls.setdefault((call["group"], call["number"]), {})[rank] = call

    def has_lost(rank, group, number):
        own = [call["number"] for call in by_rank[rank]["calls"] if call["group"] == group]
        return number < own[0] if own else by_rank[rank]["num_lost"] > 0

    def is_kept(group, number, ranks):
        return not any(has_lost(rank, group, number) for rank in ranks if rank in by_rank)

    return {key: row for key, row in calls.items() if is_kept(*key, next(iter(row.values()))["ranks"])}


def agree(calls):
    """Return whether calls are equal in all that counts."""
    return len({tuple(call[key] for key in CONTENTS) for call in calls}) == 1


def find_divergences(traces):
    """Return {group: (number, {member: call or None})}."""
    living = {trace["rank"] for trace in traces}
    found = {}
    for (group, number), row in sorted(align(traces).items()):
        members = next(iter(row.values()))["ranks"]
        if group not in found and (
            not agree(row.values()) or any(rank in living and rank not in row for rank in members)
        ):
            found[group] = (number, {rank: row.get(rank) for rank in members})
    return found


def list_unfinished(traces):
    """Return (group, number, {member: call, or None if it waits elsewhere}) of each call that a rank waits in.

    Calls from their group's divergence on are left out, and members that have completed a call.
    """
    table, waits, ends = align(traces), {}, find_divergences(traces)
    for trace in traces:
        for call in trace["calls"]:
            if not call["is_complete"] and (call["group"], call["number"]) in table:
                waits.setdefault(trace["rank"], (call["group"], call["number"]))

    def keep(key):
        row = {rank: call for rank, call in table[key].items() if not call["is_complete"]}
        return {rank: call if waits[rank] == key else None for rank, call in row.items()}

    return [(*key, keep(key)) for key in sorted(set(waits.values())) if key[1] < ends.get(key[0], (key[1] + 1,))[0]]


def list_absent(first, second):
    """Return the members that are not at the first place, but at the second."""
    return {rank for rank, call in first[2].items() if call is None and second[2].get(rank)}


def list_free(places):
    """Return the places that wait for no other."""
    return [one for one in places if not any(list_absent(one, other) for other in places)]


def choose(places):
    """Return the place (group, number, {member: call or None}) that waits for no other, or None without any."""
    return min(list_free(places) or places, key=lambda place: (place[1], place[0]), default=None)


def list_places(traces):
    """Return the divergences and the calls that ranks wait in, or only one of them, from the definition."""
    divergences = [(group, *found) for group, found in find_divergences(traces).items()]
    calls = [call for call in (choose(divergences) or (0, 0, {}))[2].values() if call]
    if len({tuple(call[key] for key in CONTENTS) for call in calls}) > 1:
        return divergences
    unfinished = [] if all(trace["has_ended"] for trace in traces) else list_unfinished(traces)
    both = divergences + unfinished
    return both if list_free(both) else divergences or unfinished


def find_circle(places):
    """Return the shortest circle of places that wait for each other, and of several the smallest."""
    ordered = sorted(places, key=lambda place: (place[1], place[0]))
    for length in range(2, len(ordered) + 1):
        for circle in permutations(ordered, length):
            if all(list_absent(one, other) for one, other in zip(circle, (*circle[1:], circle[0]), strict=True)):
                return circle
    return ()


def choose_divergence(traces):
    """Return (group, number, {member: call or None}) of the divergence that waits for no other, or None."""
    return choose([(group, *found) for group, found in find_divergences(traces).items()])


def is_swapped(traces, culprits):
    """Return whether the next two calls of the culprits are those of the other ranks, exchanged."""
    group, number, _ = choose_divergence(traces)
    pairs = {True: set(), False: set()}  # by whether the rank is a culprit
    for trace in traces:
        calls = {call["number"]: call["sizes"] for call in trace["calls"] if call["group"] == group}
        pair = (calls.get(number), calls.get(number + 1))
        pairs[trace["rank"] in culprits].add(pair if trace["rank"] in culprits else pair[::-1])
    return len(pairs[True]) == 1 and pairs[True] == pairs[False]


# ---- jobs with one fault: (kind, culprits, traces); the place follows from the definitions


def skip_or_add(rng, kind, world_size=None):
    """Return a job in which a minority skips an asynchronous call, or makes one more than the others."""
    world_size = world_size or rng.randint(3, 6)
    groups, program = make_program(rng, world_size, length=14)
    culprits = sorted(rng.sample(range(world_size), rng.randint(1, (world_size - 1) // 2)))
    place = rng.randint(1, 8)
    changed = program[:place] + program[place + 1 :]
    programs = {rank: (changed if (rank in culprits) == (kind == "missing") else program) for rank in range(world_size)}
    stops = {rank: rng.randint(place + 5, 13) for rank in range(world_size)}
    return kind, culprits, make_traces(groups, {rank: calls[: stops[rank]] for rank, calls in programs.items()})


def swap(rng):
    """Return a job in which a minority swaps two asynchronous calls. Some ranks come no further than these two."""
    world_size = rng.randint(3, 6)
    groups, program = make_program(rng, world_size)
    culprits = sorted(rng.sample(range(world_size), rng.randint(1, (world_size - 1) // 2)))
    place = rng.randint(1, 8)
    first, second = program[place : place + 2]
    swapped = [*program[:place], second, first, *program[place + 2 :]]
    programs = {rank: swapped if rank in culprits else program for rank in range(world_size)}
    stops = {rank: place + 2 + rng.choice((0, 0, 1, 2)) for rank in range(world_size)}
    traces = make_traces(groups, {rank: calls[: stops[rank]] for rank, calls in programs.items()})
    return DIFFERENCES[next(key for key in CONTENTS if first[key] != second[key])], culprits, traces


def change(rng, field, world_size=None, has_majority=True):
    """Return a job in which some ranks make one call with another op, size or dtype."""
    world_size = world_size or (rng.randint(3, 6) if has_majority else rng.choice((2, 4)))
    groups, program = make_program(rng, world_size, num_groups=rng.choice((1, 2)))
    place = rng.choice([place for place, call in enumerate(program) if call["group"] == "0"] or [0])
    program[place]["group"] = "0"
    count = rng.randint(1, (world_size - 1) // 2) if has_majority else world_size // 2
    changed_ranks = sorted(rng.sample(range(world_size), count))
    old = program[place]
    new = {
        "op": next(op for op in OPS if op != old["op"]),
        "sizes": ((old["sizes"][0][0] + 10_000,),),
        "dtype": next(dtype for dtype in DTYPES if dtype != old["dtype"]),
    }
    later = CONTENTS[CONTENTS.index(field) :]
    other = dict(old, line="model.py:7", **{key: new[key] for key in later if key == field or rng.random() < 0.5})
    programs = {
        rank: [*program[:place], other if rank in changed_ranks else old, *program[place + 1 :]]
        for rank in range(world_size)
    }
    is_blocked = rng.random() < 0.5  # nobody comes further
    if is_blocked:
        programs = {rank: calls[: place + 1] for rank, calls in programs.items()}
    culprits = changed_ranks if has_majority else list(range(world_size))
    traces = make_traces(groups, programs)
    for trace in traces:
        trace["calls"][-1]["is_complete"] = not is_blocked
    return DIFFERENCES[field], culprits, traces


def die(rng):
    """Return a job some of whose ranks left no trace; the others wait. They may know the groups, but no world size."""
    world_size = rng.randint(2, 6)
    groups, program = make_program(rng, world_size, num_groups=rng.choice((1, 2, 3)))
    program[0]["group"] = "0"
    dead = sorted(rng.sample(range(world_size), rng.randint(1, world_size - 1)))
    stop = rng.randint(1, len(program) - 1)
    programs = {rank: program[: stop + rng.randint(0, 1)] for rank in range(world_size) if rank not in dead}
    size = rng.choice((0, world_size))
    return "dead", dead, [dict(trace, world_size=size) for trace in make_traces(groups, programs)]


def leave_early(rng):
    """Return a job in which ranks ended, maybe too early, and others left no trace. The rest waits, or is late."""
    world_size = rng.randint(3, 6)
    groups, program = make_program(rng, world_size)
    ranks, ends = rng.sample(range(world_size), world_size), sorted(rng.sample(range(1, world_size + 1), 2))
    ended, lost, others = ranks[: ends[0]], ranks[ends[0] : ends[1]], ranks[ends[1] :]
    waiting, is_silent = others[: rng.randint(1, 3)], rng.random() < 0.3  # silent: the ended ranks recorded nothing
    groups["1"], program[-1]["group"] = tuple(sorted(lost + others)), rng.choice("001")
    programs = {rank: program[: None if rank in waiting else -1] for rank in range(world_size)}
    traces = [trace for trace in make_traces(groups, programs) if trace["rank"] not in lost]
    for trace in traces:
        trace["has_ended"] = trace["rank"] in ended
        trace["calls"] = [] if is_silent and trace["has_ended"] else trace["calls"]
    is_proof = waiting and program[-1]["group"] == "0" and not is_silent
    return ("ended", sorted(ended), traces) if is_proof else ("untraced", sorted(lost), traces)


def stop_early(rng, kind):
    """Return a job in which some ranks stop before a call that blocks the others; "ended": they left their program."""
    world_size = rng.randint(2, 6)
    groups, program = make_program(rng, world_size, num_groups=rng.choice((1, 2, 3)))
    stopped = sorted(rng.sample(range(world_size), rng.randint(1, world_size - 1)))
    stop = rng.randint(1, len(program) - 1)
    program[stop]["group"] = program[0]["group"] = "0"  # every rank has a call
    reached = run_blocking(groups, {rank: program[: stop if rank in stopped else None] for rank in range(world_size)})
    traces = make_traces(groups, reached)
    ended = stopped if kind == "ended" else []
    if kind == "ended" and len(stopped) > 1 and rng.random() < 0.5:
        ended = stopped[: rng.randint(1, len(stopped) - 1)]  # the others are only slow
    for trace in traces:
        trace["has_ended"] = trace["rank"] in ended
    return kind, ended or stopped, traces


def fall_behind(rng):
    """Return a job with asynchronous calls in which a slow rank is missing in several groups at once."""
    world_size = rng.randint(2, 6)
    groups, program = make_program(rng, world_size, num_groups=3)
    slow = rng.randrange(world_size)
    groups["1"] = groups["2"] = groups["0"]
    stop = rng.randint(1, len(program) - 2)
    traces = make_traces(groups, {rank: program[: stop if rank == slow else None] for rank in range(world_size)})
    return "behind", [slow], traces


def stop_inside(rng):
    """Return a job in which ranks wait in the whole world for one that waits in a small group for the culprit."""
    world_size = rng.randint(3, 6)
    culprit, victim = rng.sample(range(world_size), 2)
    groups, program = make_program(rng, world_size, length=10)
    groups["1"] = tuple(sorted((culprit, victim)))
    for call in rng.sample(program[:9], 4):
        call["group"] = "1"
    stop = next(place for place, call in enumerate(program) if call["group"] == "1" and place)
    program[-1]["group"] = "0"
    reached = run_blocking(groups, {rank: program[: stop if rank == culprit else None] for rank in range(world_size)})
    return "behind", [culprit], make_traces(groups, reached)


def make_circle(rng, length):
    """Return the groups of a job, its program, and the programs of all ranks. One rank of a pair swaps calls 6 and 7.

    The two calls are in two groups of this pair. All ranks have the same calls otherwise, which are the same dicts.
    """
    world_size = rng.randint(2, 5)
    first, second = rng.sample(range(world_size), 2)
    groups, program = make_program(rng, world_size, length=length)
    pair = tuple(sorted((first, second)))
    groups |= {"1": pair, "2": pair}
    others = [rank for rank in range(world_size) if rank not in pair]
    for call in rng.sample(program[:6], 3):
        call["group"] = rng.choice("12")
    program[6]["group"], program[7]["group"], program[8]["group"] = "1", "2", "0"
    program[0]["group"] = "0"  # every rank has a call
    if others and rng.random() < 0.5:  # another rank waits for the pair in a group of its own
        groups["3"], program[8]["group"], program[9]["group"] = tuple(sorted((first, others[-1]))), "3", "0"
    swapped = [*program[:6], program[7], program[6], *program[8:]]
    programs = {rank: swapped if rank == second else program for rank in range(world_size)}
    return groups, program, programs


def wait_in_a_circle(rng):
    """Return a job in which two ranks use two groups in opposite orders; other ranks of the world only wait."""
    groups, program, programs = make_circle(rng, length=10)
    if bystanders := programs.keys() - groups["1"]:
        programs[min(bystanders)] = program[: rng.choice((6, 9))]  # this rank may be slow, too
    reached = run_blocking(groups, programs)
    return "circular", [*groups["1"]], make_traces(groups, reached)


def queue_in_a_circle(rng):
    """Return a job like that of `wait_in_a_circle` on GPUs: all ranks have launched all calls, which wait in queues."""
    groups, program, programs = make_circle(rng, length=12)
    for call in program[10:]:
        call["group"] = rng.choice("012")
    reached = run_blocking(groups, programs)
    traces = make_traces(groups, programs)
    for trace in traces:
        for call in trace["calls"][len(reached[trace["rank"]]) - 1 :]:
            call["is_complete"] = False
    return "circular", [*groups["1"]], traces


def stand_between(rng):
    """Return a job in which one rank alone uses a group and the world in another order than all others."""
    world_size = rng.randint(3, 6)
    groups, program = make_program(rng, world_size, length=12)
    groups["1"] = tuple(sorted(rng.sample(range(world_size), rng.randint(3, world_size))))
    odd = rng.choice(groups["1"])
    for call in rng.sample(program[1:6], 2):
        call["group"] = "1"
    program[6]["group"], program[7]["group"] = "1", "0"
    swapped = [*program[:6], program[7], program[6], *program[8:]]
    programs = {rank: swapped if rank == odd else program for rank in range(world_size)}
    reached = run_blocking(groups, programs)
    if rng.random() < 0.5:
        return "circular", [odd], make_traces(groups, reached)
    traces = make_traces(groups, programs)  # on GPUs: launches return at once
    for trace in traces:
        for call in trace["calls"][len(reached[trace["rank"]]) - 1 :]:
            call["is_complete"] = False
    return "circular", [odd], traces


def leave_a_stuck_call(rng):
    """Return a job with two roots: all have launched a call, one rank left it early, and waits in the next one."""
    world_size = rng.randint(2, 6)
    groups, program = make_program(rng, world_size)
    leaver, stop = rng.randrange(world_size), rng.randint(2, len(program) - 2)
    traces = make_traces(groups, {r: program[: stop + (r == leaver)] for r in range(world_size)})
    for trace in traces:
        trace["calls"][-1]["is_complete"] = False
    return "stuck", [rank for rank in range(world_size) if rank != leaver], traces


def wait_for_a_gpu(rng):
    """Return a job on GPUs in which all ranks have launched a call that has not started on some of them."""
    _, _, traces = run_ahead(rng)
    ranks = sorted(trace["rank"] for trace in traces)
    late = sorted(rng.sample(ranks, rng.randint(1, len(ranks) - 1)))
    for trace in traces:
        waiting = [call for call in trace["calls"] if not call["is_complete"]]
        for call in waiting[trace["rank"] not in late :]:
            call["has_started"] = False
    return "not_started", late, traces


def wait_in_a_message(rng):
    """Return a job whose calls are all complete, but in which some ranks wait in a message, and some have ended."""
    _, _, traces = stay_healthy(rng)
    waiting = sorted(rng.sample(range(len(traces)), rng.randint(1, len(traces))))
    for trace in traces:
        trace["calls"][-1]["is_complete"] = True
        trace["has_ended"] = trace["rank"] not in waiting and rng.random() < 0.5
        if trace["rank"] in waiting:
            add_message(trace, "recv", "pipe.py:8", False)
    return "stuck", waiting, traces


def keep_running(rng):
    """Return a job that works, but whose ranks wrote their dumps some milliseconds after one launched a call."""
    kind = rng.choice((leave_a_stuck_call, fall_behind, wait_in_a_circle, stand_between))
    _, _, traces = kind(rng)
    last = max(call["time"] for trace in traces for call in trace["calls"])
    for trace in traces:
        trace["time"] = last + rng.uniform(0.1, 0.4)
    return "running", [], traces


def keep_an_old_dump(rng):
    """Return a job with a dump from an earlier time: its rank had completed its calls, or waited in the last one."""
    world_size = rng.randint(2, 6)
    groups, program = make_program(rng, world_size)
    old, stop = rng.randrange(world_size), rng.randint(1, len(program) - 1)
    traces = make_traces(groups, {rank: program[: stop if rank == old else None] for rank in range(world_size)})
    for trace in traces:
        for call in trace["calls"][stop:]:
            call["time"] += 600
        trace["time"] += 0 if trace["rank"] == old else 600
        if trace["rank"] == old:
            trace["calls"][-1]["is_complete"] = rng.random() < 0.5
    return "stale", [old], traces


def keep_another_run(rng):
    """Return a job with a dump of an earlier run, in which its rank made other calls."""
    world_size = rng.randint(2, 6)
    (groups, program), (_, earlier) = (make_program(rng, world_size) for _ in range(2))
    old = rng.randrange(world_size)
    traces = make_traces(groups, {rank: earlier if rank == old else program for rank in range(world_size)})
    for made in (traces[old], *traces[old]["calls"]):
        made["time"] -= 600
    return "stale", [old], traces


def stay_healthy(rng):
    """Return a job without a fault. In some, all ranks have ended, although calls were not complete at that time.

    One rank makes a call at another line than the others.
    """
    world_size = rng.randint(1, 6)
    groups, program = make_program(rng, world_size, num_groups=rng.choice((1, 2, 3)))
    program[-1]["group"] = "0"  # so that every rank has a call
    traces = make_traces(groups, dict.fromkeys(range(world_size), program))
    rng.choice(rng.choice(traces)["calls"])["line"] = "first_rank.py:5"
    if rng.random() < 0.5:
        for trace in traces:
            trace["has_ended"] = True
            trace["calls"][-1]["is_complete"] = rng.random() < 0.5
    return "healthy", [], traces


def get_stuck(rng):
    """Return a job in which all members of a group have made the same calls, but some of them wait in one."""
    world_size = rng.randint(2, 6)
    groups, program = make_program(rng, world_size, num_groups=rng.choice((1, 2, 3)))
    program[-2]["group"] = "0"  # so that every rank has a call
    group = program[-1]["group"]
    traces = make_traces(groups, dict.fromkeys(range(world_size), program))
    last = sum(call["group"] == group for call in program)
    waiting = rng.sample(groups[group], rng.randint(1, len(groups[group])))
    waits = {rank: max(1, last - rng.choice((0, 0, 2))) for rank in waiting}  # rank -> number
    has_started = rng.random() < 0.5  # on all ranks, or on none: gloo does not record it
    for trace in traces:
        if trace["rank"] in waits:
            for call in trace["calls"]:
                if call["group"] == group and call["number"] >= waits[trace["rank"]]:
                    call |= {"is_complete": False, "has_started": has_started}
        elif rng.random() < 0.3:
            trace["has_ended"] = True
    return "stuck", sorted(rank for rank, number in waits.items() if number == min(waits.values())), traces


def run_ahead(rng):
    """Return a job on GPUs in which a call of the world is stuck. All ranks have launched later calls, which queue."""
    world_size = rng.randint(2, 6)
    groups, program = make_program(rng, world_size, num_groups=rng.choice((2, 3)))
    stop = rng.randint(1, len(program) - 3)
    program[0]["group"] = program[stop]["group"] = "0"
    program[stop + 1]["group"] = "1"
    traces = make_traces(groups, dict.fromkeys(range(world_size), program))
    for trace in traces:
        place = next(place for place, call in enumerate(trace["calls"]) if call["line"] == program[stop]["line"])
        for call in trace["calls"][place:]:
            call["is_complete"] = False
    return "stuck", list(range(world_size)), traces


def record_nothing(rng):
    """Return a job in which no rank, or not every rank, has recorded a call."""
    world_size = rng.randint(2, 6)
    groups, program = make_program(rng, world_size, num_groups=rng.choice((1, 2)))
    if rng.random() < 0.5 and len(groups) > 1:  # nobody waits for the silent rank
        silent = [rng.randrange(world_size)]
        groups["0"] = tuple(range(world_size))
        groups["1"] = tuple(rank for rank in range(world_size) if rank not in silent)
        for call in program:
            call["group"] = "1"
    else:
        silent = sorted(rng.sample(range(world_size), rng.choice((1, 1, world_size))))
    traces = make_traces(groups, {rank: [] if rank in silent else program for rank in range(world_size)})
    for trace in traces:
        if trace["rank"] in silent:
            trace["has_ended"] = rng.random() < 0.3
            trace["num_lost"] = rng.choice((0, 0, 7))
    return "unseen", silent, traces


def wait_elsewhere(rng):
    """Return a job in which a rank waits in a message (behind), or in a call that the others completed (stuck)."""
    world_size = rng.randint(2, 6)
    groups, program = make_program(rng, world_size)
    culprit, stop = rng.randrange(world_size), rng.randint(2, len(program) - 1)
    ends = {rank: stop + rng.randint(1, len(program) - stop) for rank in range(world_size)} | {culprit: stop}
    traces = make_traces(groups, {rank: program[:end] for rank, end in ends.items()})
    for trace in traces:
        if trace["rank"] != culprit:
            add_message(trace, rng.choice(("send", "recv")), "pipe.py:5", True)
        elif rng.random() < 0.5:
            add_message(trace, "recv", "pipe.py:8", True)
            add_message(trace, "send", "pipe.py:9", False)
        else:
            trace["calls"][-1]["is_complete"] = False
            return "stuck", [culprit], traces
    return "behind", [culprit], traces


def lose_some(rng, job):
    """Return the job after some ring buffers have overwritten calls that all ranks completed, in another order."""
    kind, culprits, traces = job
    places = list_places(traces)
    first = {group: min(number for other, number, _ in places if other == group) for group, *_ in places}
    for index, trace in enumerate(traces):
        calls = trace["calls"]
        agreed = [call["number"] < first.get(call["group"], call["number"] + 1) for call in calls]
        count = rng.randint(0, max(0, [*agreed, False].index(False) - 1))
        needed = {group for group, _, row in places if trace["rank"] in row} | {c["group"] for c in calls}
        if {call["group"] for call in calls[count:]} == needed:
            traces[index] = lose_calls(trace, count)
    rng.shuffle(traces)
    return kind, culprits, traces


def lose_anything(rng, job):
    """Return the job after ring buffers have overwritten any number of calls, in another order."""
    kind, culprits, traces = job
    return shuffle_traces(rng, (kind, culprits, [lose_calls(one, rng.randint(0, len(one["calls"]))) for one in traces]))


def shuffle_traces(rng, job):
    """Return the job with its traces in another order."""
    rng.shuffle(job[2])
    return job


def change_twice(rng):
    """Return a job in which two ranks make a call with another size than the majority, and than each other."""
    world_size = rng.randint(5, 6)
    groups, program = make_program(rng, world_size)
    place, culprits = rng.randrange(len(program)), sorted(rng.sample(range(world_size), 2))
    programs = {rank: [*program] for rank in range(world_size)}
    for number, rank in enumerate(culprits, 1):
        programs[rank][place] = dict(program[place], sizes=((program[place]["sizes"][0][0] + 10_000 * number,),))
    return "different_size", culprits, make_traces(groups, programs)


def skip_then_differ(rng):
    """Return a job that looks like a skipped call at first, but a culprit's next call differs from the others'."""
    _, culprits, traces = skip_or_add(rng, "missing", world_size=rng.randint(5, 6))
    place, odd = choose_divergence(traces), culprits[: rng.randint(1, len(culprits))]
    for trace in traces:
        if trace["rank"] in odd:
            for call in trace["calls"]:
                if call["number"] == place[1] + 1:
                    call["sizes"] = ((call["sizes"][0][0] + 10_000,),)
    calls = [call for call in choose_divergence(traces)[2].values() if call]
    differing = (key for key in CONTENTS if len({call[key] for call in calls}) > 1)
    return DIFFERENCES[next(differing)], culprits, traces


def die_after_a_difference(rng):
    """Return a job in which a rank launched another size and another rank, its victim, died of it."""
    kind, culprits, traces = change(rng, "sizes", world_size=rng.randint(4, 6))
    victims = [trace for trace in traces if trace["rank"] not in culprits]
    traces.remove(rng.choice(victims))
    if len(culprits) * 2 >= len(traces):
        return die_after_a_difference(rng)
    return kind, culprits, traces


def describe(traces):
    """Return the traces as text, short enough for a message."""

    def describe_calls(trace):
        calls = [f"{c['group']}/{c['number']} {c['op']} {c['sizes'][0][0]} {c['dtype']}" for c in trace["calls"]]
        shown = calls if len(calls) <= 3 else [calls[0], "...", calls[-1]]
        more = f", {trace['num_lost']} lost" * bool(trace["num_lost"]) + ", ended" * trace["has_ended"]
        return f"rank {trace['rank']} ({', '.join(shown) or 'no calls'}{more})"

    return "; ".join(describe_calls(trace) for trace in traces) + f" of {traces[0]['world_size']} ranks"
