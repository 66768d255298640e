"""Likely causes of failures of module 11's checks."""

import copy
import math
import re
from collections import Counter

import torch

from brigade.course.checks import edge_case_models
from brigade.course.checks.diagnose.evidence import TOO_LARGE, find_no_sync_launches, find_wrong_group, is_averaged
from brigade.course.checks.diagnose.exceptions import Symptom
from brigade.ranks.claims import show
from brigade.ranks.events import launches
from brigade.ranks.runner.ranks import PerRank
from brigade.ranks.verdict import USUAL_CAUSE, join_names
from m08_zero_optimizer.causes import scale_to
from m11_fully_sharded.expected import (
    cut_shards,
    find_units,
    join_shards,
    lay_out,
    list_units,
    train_mixed,
    train_plain,
)
from m11_fully_sharded.scenario import (
    DISCARDED,
    EVALUATION,
    LATE,
    PASSES,
    PLACES,
    UNIT_TYPES,
    UNSYNCED,
    cast_layers,
    join_words,
)

# Units
OUTERMOST = "a submodule that is inside another one of these types is no unit: only the outermost one is."
BEGINNING = "the names in a submodule begin with its name and a dot: layer1.weight0 does not belong to layer."
SUBCLASS = "a subclass of a unit type is a unit too. Use isinstance."
TIED = "a parameter with more than one name belongs to the root."
ROOT_FIRST = "the root comes first, even if it is empty."
EMPTY = "a unit without parameters is omitted."

# Schedule
ROOT_GATHERED = "backward does not gather the root: it stays until the end of backward."
FORWARD_ORDER = "backward visits the units in reverse."
TOO_FEW = "one of the units that are needed here, up to `prefetch` ahead, is gathered too late, or never."
TOO_FAR = "a unit is gathered too far ahead: at most `prefetch` units after the one that computes may be gathered."

# Flat shards
NEVER_FREED = "`reshard` never releases the memory. Resize the storage of the flat tensor to 0 bytes."
COPIED = "no two parameters share a storage: they are copies. Set each `.data` to its view of the flat tensor."
UNSHARDED = "shards() returns the model's own parameters: nothing is sharded."
WHOLE = "each rank keeps the whole flat tensor, not one of N equal parts."
FROZEN_SHARDS = "the shard of frozen parameters is trainable. It must have requires_grad=False, as they do."
OWN_WEIGHTS = "each rank keeps a part of its own weights. The constructor must first broadcast those of rank 0."
OTHER_PART = "a rank keeps a wrong part: rank r keeps part r of N equal parts."
REPLACED = "the storage is replaced, but autograd remembers the old one. Resize it, and gather the weights into it."
OTHER_LAYOUT = "the views are not at the places that `layout.param_ranges` says."
OVERWRITTEN = "the second reduction replaces shard.grad instead of adding to it."
SUMMED = "gradients are summed over the ranks but not divided by the group size."
DIVIDED_TWICE = "gradients are divided twice by the group size, for example by ReduceOp.AVG and after it."
UNAWAITED = {
    "reduce_scatter": "`finish_reduce` must wait, and `finish_grad_sync` must wait for the last reduction.",
    "all_gather": '`reach` must wait for the weights in the action "compute".',
}
NOT_CLONED = "a shard is a view of the full tensor, so `reshard` frees the shard too. Copy this rank's part."
KEPT_WHOLE = "a shard is a view of a larger tensor, which stays in memory. Copy this rank's part only."
FREED_FIRST = "the constructor reads a flat tensor that it has freed. Copy this rank's part before `reshard`."
SHARDED_FIRST = "weights are freed before they are broadcast. Broadcast first: shards are parts of rank 0's weights."
BYTES = "`resize_` of a storage counts bytes, not elements. Resize it to the tensor's nbytes."
NOT_RESIZED = "the full tensor has no memory when its all-gather is launched. `unshard` must resize its storage first."
UNWRITTEN = "the numbers come from memory that nothing has written. Start full gradients, and padding, from zeros."
NARROW_SHARDS = "shards, or their gradients, have `compute_dtype`. They must keep the parameters' dtype."
NARROW_SUMS = "averages are added to `shard.grad` in `reduce_dtype`, not in the parameters' dtype."
INTEGERS = "integer arguments are cast to `compute_dtype`. Only floating-point tensors may be cast."
KEYWORDS = "keyword arguments, of `ddp(...)` or of a unit, are not cast to `compute_dtype`. Positional ones are."
RECOMPUTED = (
    "the arguments of a unit are not cast to `compute_dtype` when its checkpoint computes it again in backward."
)
INPUTS = "a floating-point argument is not cast to `compute_dtype`. Cast all of them, of `ddp(...)` and of every unit."
REDUCED_NARROW = "gradients are reduced in `compute_dtype`. Cast them to `reduce_dtype` before the reduction."
DIVIDED_EARLY = "gradients are divided in `compute_dtype`. Cast them to `reduce_dtype` first."
NOTHING_CAST = "weights are not rounded: nothing computes in compute_dtype."
WHOLE_GRADIENTS = "start_reduce must set p.grad to None after it has copied the gradient."

# Wrapper
ROOT_STAYS = "at the end of backward they are not freed. In backward, `leave` must free every unit, also the root."
ONE_RANK_STAYS = "a wrapper with one rank must free full weights, too."
NOT_FREED = "a unit that has computed is not freed."
IN_THE_ROOT = "units are not freed after they have computed, or are gathered too far ahead."
OTHER_PREFETCH = "plan_schedule follows its rule, but `{}` does not give it the wrapper's `prefetch`."
WRONG_PLAN = "{} does not follow its rule, and the wrapper performs what it plans. See the checks of parts (a) and (b)."
COPIES = "there are copies of full weights besides the parameters, or full gradients before any backward."
KEPT_SHARDS = "after the finish, as much memory as all shards take is used for more than shards() and their gradients."
LATE_RELEASE = "full gradients are kept too long. Release them when their reduction ends, before the next one starts."
LATE_GATHER = "the gather is launched too late: the schedule has it `prefetch` units ahead."
EARLY_WAIT = "a gather is awaited where it is launched. Wait for it only before its unit computes."
EARLY_REDUCE_WAIT = "a reduction is awaited where it is launched. Let it run until the next unit has computed."
GATHERED_AGAIN = "without reshard_after_forward, backward finds the weights in memory and must not gather them again."
READ_EARLY = "the wrapper reads the flag of no_sync during forward. `begin_backward` must read it."
REDUCED_EARLY = "a backward in no_sync launches reduce-scatters. `begin_backward` must leave its reduce actions out."
NOT_KEPT = "a backward in no_sync reduces nothing, but it does not leave the full gradients in p.grad."
OWN_NORM = "it is the norm of this rank's own shards. Sum the squares over all ranks."
SUM_OF_NORMS = "the norms of the shards are added without squaring them. Take the root of the sum of all squares."
NO_ZEROS = "`finish_reduce` (part (k)) must set shard.grad after each reduction, even if the average is zero."
OTHER_GROUP = "the norm includes the ranks of another group. Pass self.process_group to the all-reduce."
NOT_SCALED = "the gradients of all shards must be scaled by max_norm / norm, but at most 1."
SCALED_UP = "gradients whose norm is below max_norm are scaled up. They must not change."
ROUNDED_LOAD = "load_full_state_dict rounds the weights to `compute_dtype`. Shards keep the parameters' dtype."
REDUCED_TWICE = "a step reduces its units again, because an evaluation changes what the wrapper knows about the step."
SKIPPED_STAY = "a unit that this rank skips keeps its full weights. `reach` must free it, as if it had computed."
NOT_OWN_PART = "load_full_state_dict must load into each shard this rank's own part of the flat tensor."
CONVERTED = "full_state_dict converts the weights to another dtype. Return them in the dtype of the shards."
FROZEN_REDUCED = "frozen parameters have no gradients. `start_reduce` must not reduce their flat tensor."
NEVER_REDUCED = "a unit is not reduced. A backward outside no_sync must reduce all trainable flat tensors of all units."
SKIPPED = "`reach` must perform every action of a unit that this rank skips, also its reduction, with zeros."
UNFINISHED = "a backward in no_sync left out actions of skipped units. The end of the backward must perform them."
NO_REPORT = "`finish_reduce` must call `shard_reduced` for each shard whose reduction it has awaited."
FROZEN_REPORT = "`shard_reduced` is called for shards that are not reduced. Call it only where a reduction has ended."
EARLY_REPORTS = (
    "`shard_reduced` is called before the average is in shard.grad. Call it after the average has been added."
)
LATE_REPORTS = "`shard_reduced` is called for all shards at the end. Call it right after each reduction has ended."
ROOT_FREED = "the root is freed before forward has ended. `leave` must not free the root in forward."
NOT_REFUSED = "a step with {} uses freed weights. Gather them again or raise RuntimeError: see `pre_backward`."
LOST_HANDLE = "a forward between backward and finish makes the wrapper lose the handle of a reduction in flight."
LOST_AT_FINISH = "a finish after backwards in no_sync must reduce the gradients that were accumulated in p.grad."
LOST_BETWEEN = LOST_AT_FINISH[:-1] + ", even if a forward comes in between."
STALE = "the step changes the weights that a discarded forward gathers. The next forward must gather every unit again."
KEPT_IN_NO_SYNC = "a backward in no_sync does not free the units. `leave` must free them in every backward."
ROOT_BETWEEN = "as long as a backward is due, an evaluation must not free the root, which this backward needs."
FORGOTTEN_BACKWARD = "an evaluation may come between a forward and its backward, and then the backward is still due."
UNITS_BETWEEN = "without reshard_after_forward, an evaluation must not free any unit as long as a backward is due."
AFTER_OTHER = "the forward after {}, or its backward, uses freed weights. Each forward must gather all units again."
KEPT_AFTER_EVALUATION = "an evaluation has no backward that frees weights. If none is due, its end must free them all."
FREED_IN_FLIGHT = 'a unit is freed while its all-gather is in flight. "compute" must wait, also for a skipped unit.'
FREED_AGAIN = "a unit that is computed again in backward is freed by this forward. Free it when its backward has ended."
EMPTIED = "parameter.data is now an empty tensor, so the parameter lost its shape. `reshard` must resize the storage."
CRASHED = "a freed weight is used: on the CPU this crashes the process. Its unit is freed too early or not gathered."
FREED = (
    "a freed weight is used. Its unit is freed too early or not gathered, or the weight is not a view of the memory "
    "that is gathered, for example because its storage was replaced."
)
SYMPTOMS = [
    Symptom("freed", "RuntimeError", "out of bounds for storage of size 0", FREED),
    Symptom("freed", "RuntimeError", "whose memory is released", FREED),
]


# ---- units and schedules


def explain_units(model, unit_types, answer, expected):
    """Return why plan_units returned `answer`."""
    names = [name for unit in answer for name in unit]
    known = [name for unit in expected for name in unit]
    if sorted(names) != sorted(known):
        wrong = sorted({name for name in {*names, *known} if names.count(name) != known.count(name)})
        return f"each name of named_parameters() must be in one unit, but {join_names(wrong, 4)} is not."
    everywhere = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tied = {n for n in known if sum(model.get_parameter(other) is model.get_parameter(n) for other in everywhere) > 1}
    got, wanted = [sorted(unit) for unit in answer], [sorted(unit) for unit in expected]
    if sorted(filter(None, got)) == sorted(filter(None, wanted)):
        if got[:1] != wanted[:1]:
            return ROOT_FIRST if got[:1] != [[]] else TIED * tied.issuperset(wanted[0])
        return EMPTY if [] in got[1:] else "units are in registration order."
    if any(name in tied for unit in got[1:] for name in unit):
        return TIED
    lost = [name.split(".") for name in got[0] if name not in wanted[0]]
    owners = {type(model.get_submodule(".".join(parts[:end]))) for parts in lost for end in range(1, len(parts))}
    if any(issubclass(owner, unit_types) and owner not in unit_types for owner in owners):
        return SUBCLASS
    if any(set(unit) < set(other) for unit in got[1:] for other in wanted[1:]):
        return OUTERMOST
    return BEGINNING if any(set(unit) > set(other) for unit in got[1:] for other in wanted[1:]) else ""


def explain_order(action, got, expected, is_backward):
    """Return why the units of an action are wrong."""
    if action == "gather" and is_backward and 0 in got:
        return ROOT_GATHERED
    if is_backward and got == sorted(got) and len(got) > 1:
        return FORWARD_ORDER
    return TOO_FEW if action == "gather" and len(got) < len(expected) else ""


def explain_reduce(actions, places):
    """Return why the reduce actions of a unit, at these places of a schedule, are wrong."""
    for place, (action, unit) in enumerate(actions):
        if action == "reduce" and ("compute", unit) in actions[place:]:
            return f"unit {unit} is reduced before it has computed. Reduce the unit that has just computed."
    if len(places) == 1:
        return "this unit is reduced too late: the reduction must run while the next unit computes."
    return "this unit is reduced more than once." if places else "this unit is never reduced."


# ---- flat shards


def explain_sizes(got, expected, case, cast):
    """Return why shards have other sizes than expected. For `cast` see `lay_out`."""
    world, model = len(case.group), case.build()
    if got == [(world * numel, dtype) for numel, dtype in expected]:
        return WHOLE
    cast_layers({} if cast is None else {"cast": cast}, model)
    if got == [(p.numel(), p.dtype) for p in model.parameters() if p.requires_grad]:
        return UNSHARDED
    frozen = lay_out(case, cast, trainable=False)
    sizes = [(layout["numel"] // world, dtype) for unit in frozen for dtype, (layout, _) in unit.items()]
    return FROZEN_SHARDS if sizes and Counter(got) == Counter(expected + sizes) else ""


def explain_unawaited(records):
    """Return which launches of a step no rank waits for, if they are all of one kind."""
    launched = [x for events in records for x in launches(events) if x.step is not None]
    forgotten = Counter(x.op for x in launched if not x.waits)
    if len(forgotten) != 1 or not forgotten.keys() <= UNAWAITED.keys():
        return ""
    [(op, count)] = forgotten.items()
    total = sum(x.op == op for x in launched)
    return f"no rank waits for {count} of {total} launches of {op}, whose results are NaN until then. {UNAWAITED[op]}"


def is_all_awaited(records):
    """Return whether the ranks have waited for all their launches."""
    return bool(records) and all(x.waits for events in records for x in launches(events))


def suspect_parts(case, units):
    """Return the values that the shards would have after some mistakes."""
    world = len(case.group)
    own = [cut_shards(case.states[rank], units, world)[number] for number, rank in enumerate(case.group)]
    parts = cut_shards(case.start(), units, world)
    hypotheses = {OWN_WEIGHTS: own} | {OTHER_PART: parts[-1:] + parts[:-1]}
    return {cause: [join_shards(shards, units, case)] for cause, shards in hypotheses.items()}


def suspect_gradients(case, events):
    """Return the gradients that the shards would have after some mistakes. `events` is the record of a rank."""
    has_average = is_averaged([x for x in launches(events) if x.op == "reduce_scatter"])
    too_large = TOO_LARGE.format("gradients are", len(case.group)) if has_average else SUMMED
    summed = {name: None if g is None else g * len(case.group) for name, g in case.gradients().items()}
    divided = {name: None if g is None else g / len(case.group) for name, g in case.gradients().items()}
    return {too_large: [summed], DIVIDED_TWICE: [divided], OVERWRITTEN: [case.gradients(micro=slice(-1, None))]}


def suspect_casts(case, compute_dtype, reduce_dtype, is_loaded, which):
    """Return the weights (`which` is 0) or the first gradients (1) that mixed precision has after some mistakes.

    `is_loaded` says whether training begins with a state dict.
    """
    if compute_dtype != torch.bfloat16:
        return {}
    mistakes = {NARROW_SHARDS: {"kept": torch.bfloat16}, DIVIDED_EARLY: {"is_divided_early": True}, NOTHING_CAST: {}}
    mistakes |= {ROUNDED_LOAD: {"is_start_rounded": True}} if is_loaded else {}
    return {
        cause: [
            train_mixed(case, torch.float32 if cause == NOTHING_CAST else compute_dtype, reduce_dtype, **how)[which]
        ]
        * len(case.group)
        for cause, how in mistakes.items()
    }


def explain_stays(alive, case):
    """Return why these parameters of a model still have memory after a finish."""
    is_root = set(alive) <= set(list_units(case)[0])
    return ROOT_STAYS if is_root or len(case.group) > 1 else ONE_RANK_STAYS


def explain_narrow(results, case, *dtypes):
    """Return why all gradients are values of a narrow dtype: there was no addition, or it was in this dtype."""
    last = copy.copy(case)
    last.batches = [[step[-1:] for step in steps] for steps in case.batches]
    only = train_mixed(last, *dtypes)[1]
    got = join_shards([result["gradients"] for result in results], lay_out(case), case)
    is_last = all((got[name] - value).abs().max() <= 2**-5 * value.abs().max() for name, value in only.items())
    return OVERWRITTEN if is_last else NARROW_SUMS


def suspect_copies(result, places):
    """Return why a rank of `measure` has too much memory besides full weights, in forward and in backward.

    `places` are the boundaries.
    """
    [(direction, name, _), *_] = places
    first = result["boundaries"][join_words(direction, name, PASSES[1])]  # after the finish
    kept, sharded = first["bytes"]["other"] - result["bare"][join_words(direction, name)], result["sharded"]
    if sharded <= kept < 1.25 * sharded:
        return {"forward": KEPT_SHARDS, "backward": KEPT_SHARDS}
    return {"forward": COPIES, "backward": WHOLE_GRADIENTS if result["whole"] else LATE_RELEASE}


def explain_whole(whole, case):
    """Return why these parameters of a model still have gradients."""
    for number, names in enumerate(list_units(case)):
        if whole == names:
            name = f"unit {number}" if number else "the root"
            return f"{name} is never reduced: its action is not in the schedule, or it is not performed."
    return WHOLE_GRADIENTS


# ---- the wrapper


def explain_failure(submission, scenario, jobs_per_call, failed):
    """Return a more specific cause than that of a failure of the scenario, or ""."""
    verdict, first = failed.verdict, jobs_per_call[0][0]

    def succeeds(change):
        """Return whether all calls succeed after each job is updated with change(job, job of rank 0)."""
        changed = [PerRank(job | change(job, jobs[0]) for job in jobs) for jobs in jobs_per_call]
        return all(submission.try_run(scenario, jobs, world_size=len(jobs)) is not None for jobs in changed)

    for group in (group for jobs in jobs_per_call for group in jobs[0].get("groups", [])):
        if cause := find_wrong_group(failed.events, group, ("all_gather", "reduce_scatter")):
            return cause
    if verdict.error == "FreedShardError":
        return NOT_CLONED if "full weights" in verdict.message else ""
    if sizes := re.search(r"all_gather needs (\d+) bytes.* has (\d+) bytes", verdict.message):
        itemsize = (first.get("dtype") or torch.float32).itemsize
        return {int(sizes[1]) // itemsize: BYTES, 0: NOT_RESIZED}.get(int(sizes[2]), "")
    if verdict.error == "FreedTensorError":
        return SHARDED_FIRST if verdict.message.startswith("broadcast") else explain_in_flight(failed)
    if "shape '[0]' is invalid" in verdict.message:
        return EMPTIED
    is_checkpointed = any("checkpointed" in jobs[0].get("forward", "") for jobs in jobs_per_call)
    if any("scaled" in jobs[0].get("forward", "") for jobs in jobs_per_call):
        if "used as indices" in verdict.message:
            return INTEGERS
        if "dtype" in verdict.message and is_checkpointed and succeeds(lambda *_: {"forward": "scaled"}):
            return RECOMPUTED
        uncast = "got:? Float and BFloat16|float != c10::BFloat16|dtypes of a block's arguments"
        if "dtype" in verdict.message and succeeds(lambda *_: {"forward": "scaled, by position"}):
            return KEYWORDS
        return INPUTS if re.search(uncast, verdict.message) else ""
    if verdict.ending == "died" or verdict.hypothesis == "freed":
        if "order" in first:
            return explain_unusual(failed, jobs_per_call)
        if is_checkpointed and succeeds(lambda *_: {"forward": ""}):
            return FREED_AGAIN
        return CRASHED if verdict.ending == "died" else explain_freed(failed, jobs_per_call)
    if verdict.hypothesis == USUAL_CAUSE and verdict.ending in ("mismatch", "deadlock"):
        return explain_skips(succeeds, jobs_per_call)
    return ""


def explain_freed(failed, jobs_per_call):
    """Return why a rank used a freed weight, if the constructor did so or if the weight is the root's."""
    rank, shape = failed.verdict.rank, re.search(r"(?:sizes|shape) \[([\d, ]+)\]", failed.verdict.message)
    phase = failed.events[rank][-1]["phase"]
    if phase == "construct":
        return SHARDED_FIRST if "whose memory is released" in failed.verdict.message else FREED_FIRST
    if failed.verdict.message.startswith("a new data "):
        return REPLACED
    gathers = [x for events in failed.events for x in launches(events) if x.op == "all_gather"]
    if gathers and not any(x.waits for x in gathers):
        return f"no rank waits for an all_gather. {UNAWAITED['all_gather']}"
    return ROOT_FREED if phase == "forward" and shape and is_late_root(shape[1], jobs_per_call, rank) else ""


def is_late_root(shape, jobs_per_call, rank):
    """Return whether only parameters of the root have this shape, or its transpose, and none in its first submodule.

    The forward that uses such a parameter has already used the root.
    """
    shape = [int(size) for size in shape.split(",")]
    found = []
    for job in (jobs[rank] for jobs in jobs_per_call):
        model = edge_case_models.build(job["model"], job["sizes"], job["state"], job["dtype"])
        root = find_units(model, UNIT_TYPES[job["unit_type"]])[0]
        owner = root[0].rpartition(".")[0] if root else ""
        names = [name for name, p in model.named_parameters() if list(p.shape) in (shape, shape[::-1])]
        found += [name in root and name.rpartition(".")[0] != owner for name in names]
    return bool(found) and all(found)


def explain_unusual(failed, jobs_per_call):
    """Return why a step of `train_unusually` used a freed weight, if its order of calls alone is enough for it."""
    events = failed.events[failed.verdict.rank]
    job = jobs_per_call[[event["number"] for event in events if event["kind"] == "order"][-1]][0]
    order = job["order"]
    if order == (EVALUATION, PLACES[1]):
        if not job["arguments"]["reshard_after_forward"]:
            return UNITS_BETWEEN
        step = max(event["step"] for event in events if event["kind"] == "step")
        gathers = [x for x in launches(events, step) if x.op == "all_gather"]
        forwards = 2 * len(find_units(edge_case_models.MODELS[job["model"]](job["sizes"]), UNIT_TYPES["Block"]))
        return ROOT_BETWEEN if len(gathers) > forwards else FORGOTTEN_BACKWARD
    return AFTER_OTHER.format(order[0]) if isinstance(order, tuple) else NOT_REFUSED.format(order)


def explain_order_of_calls(order, records, num_units):
    """Return why weights are wrong after steps with this order of calls."""
    if cause := explain_unawaited(records):
        return LOST_HANDLE if order in [(EVALUATION, PLACES[2]), (DISCARDED, PLACES[2])] else cause
    if order == UNSYNCED[0]:
        return LOST_AT_FINISH
    if order in LATE:
        return LOST_BETWEEN
    gathers = [x for x in launches(records[0], 1) if x.op == "all_gather"]
    return STALE if order == (DISCARDED, PLACES[3]) and len(gathers) < 3 * num_units - 1 else ""


def explain_garbage(records, failed):
    """Return why tensors contain NaN, if they do, judging by the launches that nobody waits for."""
    cause = explain_unawaited(records) or UNWRITTEN * is_all_awaited(records)
    return cause if failed.verdict.hypothesis == "early_read" else ""


def explain_dtype(compute_dtype, launched):
    """Return why reductions have another dtype than `reduce_dtype`."""
    return REDUCED_NARROW if launched[0].dtype == show(compute_dtype) else ""


def explain_forgotten(launched):
    """Return why a rank that skips units does not wait for these launches, if it forgets only gathers."""
    return FREED_IN_FLIGHT if {launch.op for launch in launched} == {"all_gather"} else ""


def explain_in_flight(failed):
    """Return why a tensor was freed while a launch was in flight, if this launch was an all-gather."""
    waits = [event["index"] for event in failed.events[failed.verdict.rank] if event["kind"] == "wait"]
    launched = {launch.index: launch.op for launch in launches(failed.events[failed.verdict.rank])}
    return FREED_IN_FLIGHT if waits and launched.get(waits[-1]) == "all_gather" else ""


def explain_skips(succeeds, jobs_per_call):
    """Return why ranks launch different collectives, if they do not do so when they skip the same units."""
    branches = [  # branches[rank][step] is the list of the branches of the micro-batches
        [[micro["branch"] for micro in step] for job in jobs_of_rank for step in job["batches"]]
        for jobs_of_rank in zip(*jobs_per_call, strict=True)
    ]
    if all(steps == branches[0] for steps in branches):
        return ""
    if not succeeds(lambda _, first: {"batches": first["batches"]}):
        return ""
    has_no_sync = any(len(step) > 1 for step in branches[0])
    is_unfinished = has_no_sync and succeeds(lambda job, _: {"batches": [step[-1:] for step in job["batches"]]})
    return UNFINISHED if is_unfinished else SKIPPED


def explain_alive(alive, unit, direction, prefetch, skipped):
    """Return why other units than allowed have memory at a boundary. Forward does not use the units `skipped`."""
    if not unit:
        return OTHER_PREFETCH.format("forward") if direction == "forward" else IN_THE_ROOT
    distances = [other - unit if direction == "forward" else unit - other for other in alive]
    if max(distances) > prefetch:
        return TOO_FAR
    return SKIPPED_STAY if skipped and skipped.issuperset(late for late in alive if late < unit) else NOT_FREED


def explain_volume(expected, launched):
    """Return why a step launches other collectives than expected. expected[op] are their numbers of elements."""
    if Counter(x.numel for x in launched if x.op == "reduce_scatter") < Counter(expected["reduce_scatter"]):
        return NEVER_REDUCED
    return GATHERED_AGAIN if sum(x.op == "all_gather" for x in launched) > len(expected["all_gather"]) else ""


def suspect_clipping(case, max_norm):
    """Return mistakes of clip_grad_norm_, with the weights that each of them gives."""
    mistakes = {NOT_SCALED: {"max_norm": math.inf}, SCALED_UP: {"max_norm": max_norm, "clip": scale_to}}
    return {cause: [train_plain(case, **how)[0]] * len(case.group) for cause, how in mistakes.items()}


def explain_norm(case, groups, got, records):
    """Return why the norm over the case's group, the first of all groups, is wrong."""
    norms, *others = (list_norms(case, group) for group in groups)
    total = float(torch.cat(norms).sum())
    if math.isnan(got) and is_all_awaited(records):
        return UNWRITTEN
    for cause, values in (
        (OTHER_GROUP, [torch.cat(sum(others, norms)).norm()] if others else []),
        (OWN_NORM, [own.norm() for own in norms]),
        (SUM_OF_NORMS, [total, total**0.5]),
    ):
        if any(abs(got - float(value)) <= 1e-5 * float(value) for value in values):
            return cause
    return ""


def list_norms(case, group):
    """Return the norms of the gradients of the shards of each rank of a group that trains with the case's batches."""
    own = copy.copy(case)
    own.group = group
    shards = cut_shards(own.gradients(), lay_out(own), len(group))
    return [torch.stack([torch.linalg.vector_norm(shard.double()) for shard in part]) for part in shards]


def explain_accumulated(step, crossed):
    """Return why full gradients are not in p.grad after a backward in no_sync.

    In step `crossed`, forward was outside no_sync. In earlier steps, it was inside, and full gradients were in p.grad.
    """
    if any(launch.op == "reduce_scatter" for launch in find_no_sync_launches(step.events, step.number)):
        return READ_EARLY if step.number == crossed else REDUCED_EARLY
    return NOT_KEPT


def explain_missing(launched, expected):
    """Return why shards have no gradient after a step with these launches, of which `expected` should be reductions."""
    reduced = [launch for launch in launched if launch.op == "reduce_scatter"]
    if not all(launch.waits for launch in reduced):
        return UNAWAITED["reduce_scatter"]
    return NO_ZEROS if len(reduced) >= expected else NEVER_REDUCED


def explain_reduced(reduced, case):
    """Return why a step reduces flat tensors with these numbers of elements."""
    trainable, frozen = (
        Counter(layout["numel"] for unit in lay_out(case, trainable=kind) for layout, _ in unit.values())
        for kind in (True, False)
    )
    surplus, missing = Counter(reduced) - trainable, trainable - Counter(reduced)
    if surplus and not missing and surplus <= frozen:
        return FROZEN_REDUCED
    return NEVER_REDUCED if missing and not surplus else ""
