"""Likely causes of failures of module 11's checks."""

import contextlib

import torch

from brigade.checks.diagnose.evidence import join_names
from brigade.checks.verdict import CheckFailed
from expected.m11_fully_sharded import build, cut_shards, find_units, join_shards
from scenarios.m11_fully_sharded import UNIT_TYPES

# Units
OUTERMOST = "a submodule that is inside another one of these types is no unit: only the outermost one is."
BEGINNING = "the names in a submodule begin with its name and a dot: layer10 is not inside layer1."
SUBCLASS = "a subclass of a unit type is a unit too. Use isinstance."
TIED = "a parameter with more than one name belongs to the root."
ROOT_FIRST = "The root comes first, even if it is empty."
EMPTY = "a unit without parameters is omitted."

# Schedule
ROOT_GATHERED = "backward does not gather the root: it stays until the end of backward."
FORWARD_ORDER = "backward visits the units in reverse."
TOO_FEW = "a unit is gathered too late, or never: gather as far ahead as `prefetch` allows."
TOO_FAR = "a unit is gathered too far ahead: at most `prefetch` units after the one that computes may be gathered."

# Flat shards
NEVER_FREED = "`free` never releases the memory. Resize the storage of the flat tensor to 0 bytes."
WHOLE = "each rank keeps the whole flat tensor, not one of N equal parts."
FROZEN_SHARDS = "the shard of frozen parameters is trainable. It must have requires_grad=False, as they do."
OWN_WEIGHTS = "each rank keeps a part of its own weights. The constructor must first broadcast those of rank 0."
OTHER_PART = "a rank keeps a wrong part: rank r keeps part r of N equal parts."
REPLACED = "the storage is replaced, but autograd remembers the old one. Resize it, and gather the weights into it."
OTHER_LAYOUT = "the views are not at the places that `layout.param_ranges` says."
OVERWRITTEN = "the second reduction replaces shard.grad instead of adding to it."
SUMMED = "gradients are summed over the ranks but not divided by the group size."
WHOLE_GRADIENTS = "start_reduce must set p.grad to None after it has copied the gradient."

# Wrapper
ROOT_STAYS = "they are not freed at the end of backward. The root is freed there too."
NOT_FREED = "a unit that has computed is not freed."
IN_THE_ROOT = "units are not freed after they have computed, or are gathered too far ahead."
COPIES = {
    "forward": "there are copies of whole weights besides the parameters.",
    "backward": (
        "whole gradients are kept too long. Wait for the reduction of a unit before the next one starts, and then "
        "release its whole gradients."
    ),
}
SYNC = "the launch blocks. Use async_op=True."
LATE_GATHER = "the gather is launched too late: the schedule has it `prefetch` units ahead."
EARLY_WAIT = "a gather is awaited where it is launched. Wait for it only before its unit computes."
EARLY_REDUCE_WAIT = "a reduction is awaited where it is launched. Let it run until the next unit has computed."
ON_ITS_WAY = "a skipped unit is freed while its gather is on its way. Wait for the gather first."
GATHERED_AGAIN = "without reshard_after_forward the weights are still there in backward: leave its gathers out."
REDUCED_AGAIN = "a backward in no_sync reduces. Leave its reduce actions out."
REDUCED_EARLY = "a backward in no_sync does not leave the whole gradients in p.grad."
OWN_NORM = "it is the norm of this rank's own shards. Sum the squares over all ranks."
NOT_SCALED = "the gradients of all shards must be scaled by max_norm / norm, but at most 1."
NOT_OWN_PART = "a rank does not load its own part of the flat tensors."
FROZEN_REDUCED = "frozen parameters have no gradients: their flat tensor is never reduced."
CRASHED = "a freed weight is used: on the CPU this crashes the process. Its unit is freed too early or not gathered."


# ---- units and schedules


def explain_units(model, unit_types, answer, expected):
    """Return why plan_units returned `answer`."""
    names = [name for unit in answer for name in unit]
    known = [name for unit in expected for name in unit]
    if sorted(names) != sorted(known):
        wrong = sorted({name for name in {*names, *known} if names.count(name) != known.count(name)})
        return f"each name of named_parameters() must be in one unit, but {join_names(wrong, 4)} is not."
    got, wanted = [sorted(unit) for unit in answer], [sorted(unit) for unit in expected]
    if sorted(filter(None, got)) == sorted(filter(None, wanted)):
        if got[:1] != wanted[:1]:
            return ROOT_FIRST
        return EMPTY if [] in got[1:] else "units are in registration order."
    everywhere = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    tied = {n for n in known if sum(model.get_parameter(other) is model.get_parameter(n) for other in everywhere) > 1}
    if any(name in tied for unit in got[1:] for name in unit):
        return TIED
    lost = [name.split(".") for name in got[0] if name not in wanted[0]]
    owners = {type(model.get_submodule(".".join(parts[:end]))) for parts in lost for end in range(1, len(parts))}
    if any(issubclass(owner, unit_types) and owner not in unit_types for owner in owners):
        return SUBCLASS
    if any(set(unit) < set(other) for unit in got[1:] for other in wanted[1:]):
        return OUTERMOST
    return BEGINNING if any(set(unit) > set(other) for unit in got[1:] for other in wanted[1:]) else ""


def explain_order(action, got, expected, case):
    """Return why the units of an action are wrong."""
    if action == "gather" and case[2] and 0 in got:
        return ROOT_GATHERED
    if case[2] and got == sorted(got) and len(got) > 1:
        return FORWARD_ORDER
    return TOO_FEW if action == "gather" and len(got) < len(expected) else ""


def explain_prefetch(before, allowed, unit):
    """Return why other units than allowed are gathered when a unit computes."""
    return TOO_FAR if len(before) > len(allowed) else TOO_FEW


def explain_reduce(places, done):
    """Return why the reduce actions of a unit, at these places of the schedule, are wrong. It computes at `done`."""
    if not places:
        return "this unit is never reduced."
    if len(places) > 1:
        return "this unit is reduced more than once."
    if places[0] < done:
        return "this unit is reduced before it has computed."
    return "this unit is reduced too late: the reduction must run while the next unit computes."


# ---- flat shards


def explain_sizes(got, expected, world):
    """Return why shards have other sizes than expected."""
    if got == [(world * numel, dtype) for numel, dtype in expected]:
        return WHOLE
    return FROZEN_SHARDS if len(got) > len(expected) else ""


def suspect_parts(case, units):
    """Return the values that the shards would have after some mistakes."""
    world = len(case.group)
    own = [cut_shards(case.states[rank], units, world)[number] for number, rank in enumerate(case.group)]
    parts = cut_shards(case.start(), units, world)
    hypotheses = {OWN_WEIGHTS: own} | {OTHER_PART: parts[-1:] + parts[:-1]}
    return {cause: [join_shards(shards, units, case)] for cause, shards in hypotheses.items()}


def suspect_gradients(case):
    """Return the gradients that the shards would have after some mistakes."""
    summed = {name: None if g is None else g * len(case.group) for name, g in case.gradients().items()}
    return {SUMMED: [summed], OVERWRITTEN: [case.gradients(micro=slice(-1, None))]}


def explain_whole(whole, case, unit_type):
    """Return why these parameters of a model still have gradients."""
    units = find_units(build(case), UNIT_TYPES[unit_type])
    for number, names in enumerate(units):
        if whole == names:
            return f"{'the root' if number == 0 else f'unit {number}'} is never reduced."
    return WHOLE_GRADIENTS


# ---- the wrapper


@contextlib.contextmanager
def explain_run():
    """Explain a rank that crashes."""
    try:
        yield
    except CheckFailed as failed:
        raise (failed.with_cause(CRASHED) if failed.verdict.ending == "died" else failed) from None


def explain_alive(alive, unit, direction, prefetch):
    """Return why other units than allowed have memory at a boundary."""
    if not unit:
        return IN_THE_ROOT
    distances = [other - unit if direction == "forward" else unit - other for other in alive]
    return TOO_FAR if max(distances) > prefetch else NOT_FREED


def explain_volume(got, expected):
    """Return why a step launches other collectives than expected."""
    counts = {op: len(got.get(op, [])) - len(numels) for op, numels in expected.items()}
    if counts["reduce_scatter"] > 0:
        return REDUCED_AGAIN
    return GATHERED_AGAIN if counts["all_gather"] > 0 else ""


def explain_norm(gradients, got, expected):
    """Return why a norm is wrong. gradients[rank] are the gradients of a rank's shards."""
    for shards in gradients:
        own = float(torch.stack([torch.linalg.vector_norm(grad) for grad in shards]).square().sum().sqrt())
        if abs(own - got) <= 1e-5 * own:
            return OWN_NORM
    return ""
