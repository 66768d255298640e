"""Likely causes when a check of module 14 fails."""

import copy
from itertools import chain

from brigade.course.checks.diagnose.evidence import TOO_LARGE, Evidence, is_averaged
from brigade.ranks.events import launches
from m11_fully_sharded.expected import train_plain
from m14_hybrid_sharded.scenario import CROSSED, NESTED, REPEATED

NO_ERROR = "a grid that does not divide, or without ranks, is not refused. Raise ValueError."
SWAPPED = "the two kinds of groups are exchanged: a shard group consists of consecutive ranks."
NOT_CONSECUTIVE = "a shard group must consist of consecutive ranks, because they are in one node."
NODES = "the constructor makes these tensors equal inside each node only."
NO_BROADCAST = "a rank keeps its own weights or buffers."
WORLD = "the broadcast starts from rank 0 of the world instead of the grid's first rank."
LAST = "the broadcast starts from the last rank of a group."
NOT_CROSSED = "gradients are averaged inside each node only, not across nodes."
SUMMED = "gradients are summed over the replicas, not averaged."
DIVIDED_TWICE = "gradients are divided once too often. Module 11 has averaged over the shard group already."
BY_WORLD = "gradients are divided by a number of ranks of the world. Divide by the size of the replica group."
UNAWAITED = "a step does not wait for {} of {} all-reduces across nodes, whose results are NaN until then."
CHANGED = "shard.grad is changed, for example divided, while its all-reduce across nodes is in flight."
OTHER_GROUP = "all collectives except the all-reduce belong to the shard group, and this is another one."
NO_REPLICAS = "with one replica there is nothing to average across nodes, so launch nothing."
ON_SHARD_GROUP = "the gradient is all-reduced in the shard group. Use the replica group."
ON_DEFAULT_GROUP = "the gradient is all-reduced in the default group, with other shards. Use the replica group."
IN_FINISH = "all all-reduces are launched in the finish. Launch each in shard_reduced, when its average is there."
SYNC = "the launch blocks, because it is made without async_op=True."
AWAITED_AT_ONCE = "the all-reduce is awaited where it is launched, so nothing overlaps. Wait for it in the finish."
AWAITED_IN_UNIT = "the all-reduce of one dtype of a unit is awaited for that of another dtype. Wait in the finish."
BLOCK_IGNORED = "a backward in no_replica_sync crosses: its flag is not tested, or an inner block sets it again."
READ_IN_FORWARD = "the flag of no_replica_sync is read in forward. Read it when a reduction has ended."
ENDED_BY_FINISH = "a finish ends the block in which it is. Only the end of the block may restore the previous state."
NOT_RESTORED = "no_replica_sync restores its state only if the block ends normally. Use try ... finally."
NO_SYNC = "gradients stay whole until the finish, as no_sync does. Inside the node, reduce them during backward."
PARTLY = "the nodes have different weights, so a part of what was added up in shard.grad has not crossed."
FORGOTTEN = "a finish loses what earlier finishes of the step have added to shard.grad. All of it must stay there."
NORM = "the norm counts every replica. One replica has the whole gradient, so sum over the shard group only."


def explain_run(grids, failed):
    """Return why a run hangs, if the gradients of one of the grids cross in another group."""
    wrong = any(uses_other_group(own, rank, grids) for rank, own in enumerate(failed.events))
    return ON_DEFAULT_GROUP * wrong


def uses_other_group(events, rank, grids):
    """Return whether a rank makes an all-reduce in a step of the first call, in a group that its grid does not have."""
    grid, ends = grids[0], [place for place, event in enumerate(events) if event.get("step", 0) is None]
    groups = grid.get_groups(rank) if rank in grid.case.group else []
    launched = [x for x in launches(events[: min(ends, default=None)]) if x.op == "all_reduce" and x.step is not None]
    return bool(groups) and any(x.ranks not in groups for x in launched)


def explain_groups(got, expected):
    """Return why plan_grid returned other groups than expected, or the name of an exception."""
    if got == expected[::-1]:
        return SWAPPED
    if isinstance(got, str) or not got:
        return ""
    is_strided = all(group[1] - group[0] > 1 for group in got[0] if len(group) > 1)
    return NOT_CONSECUTIVE if is_strided and sorted(chain(*got[0])) == sorted(chain(*expected[0])) else ""


def explain_traffic(got, expected, arguments):
    """Return why plan_traffic returned `got` instead of `expected`, or ""."""
    numel, replicas, shards, micro_batches, itemsize = arguments
    inner, outer = (g / e if e else 0 for g, e in zip(got, expected, strict=True))

    def fits(value, right):
        return abs(value - right) < 1e-6

    for is_it, cause in (
        (fits(inner, 2 / 3), "a step also reduces gradients inside the node: weights are gathered twice and reduced."),
        (micro_batches > 1 and fits(inner, 1 / micro_batches), "each micro-batch gathers and reduces inside the node."),
        (micro_batches > 1 and fits(outer, micro_batches), "only the last micro-batch crosses: see no_replica_sync."),
        (shards > 1 and fits(outer, shards), "whole gradients would cross. A rank sends its shard only."),
        (replicas > 1 and fits(outer, 0.5), "an all-reduce sends 2 (R - 1) / R of its bytes."),
    ):
        if is_it:
            return cause
    return ""


def suspect_start(case, shards):
    """Return what ranks start with after some mistakes."""
    group = case.group
    nodes = [case.states[group[place - place % shards]] for place in range(len(group))]
    return {
        NODES: nodes,
        NO_BROADCAST: [case.states[rank] for rank in group],
        WORLD: [case.states[0]] * len(group),
        LAST: [case.states[group[-1]]] * len(group),
    }


def suspect_gradients(case, shards, events):
    """Return the gradients that the nodes have after some mistakes. `events` is the record of a rank."""
    nodes = [case.group[start : start + shards] for start in range(0, len(case.group), shards)]
    replicas, average = len(nodes), case.gradients()
    hypotheses = {NOT_CROSSED: [case.gradients(node) for node in nodes]} if replicas > 1 else {}
    by_world = len(case.group) / case.world_size
    has_average = is_averaged([x for x in launches(events) if x.op == "all_reduce" and x.step is not None])
    too_large = TOO_LARGE.format("gradients are", replicas) if has_average else SUMMED
    for cause, factor in ((too_large, replicas), (DIVIDED_TWICE, 1 / shards), (BY_WORLD, by_world)):
        if replicas > 1 and factor != 1:
            hypotheses[cause] = [{name: None if g is None else g * factor for name, g in average.items()}] * replicas
    return hypotheses


def find_mistake(events, grid):
    """Return the evidence that all-reduces are in a wrong group, or that a step does not wait for them."""
    for rank in grid.case.group:
        launched = [x for x in launches(events[rank]) if x.op == "all_reduce" and x.step is not None]
        shard_ranks, replica_ranks = grid.get_groups(rank)
        groups = [x.ranks for x in launched]
        if len(replica_ranks) > 1 and replica_ranks not in groups:
            mistake = ON_SHARD_GROUP if shard_ranks in groups else ON_DEFAULT_GROUP if groups else ""
            return Evidence(mistake=mistake)
        crossing = [x for x in launched if x.ranks == replica_ranks]
        unawaited = [x for x in crossing if not x.sync and x.step not in x.wait_steps]
        if unawaited:
            return Evidence(mistake=UNAWAITED.format(len(unawaited), len(crossing)))
        if any(x.raced for x in crossing):
            return Evidence(mistake=CHANGED)
    return Evidence()


def explain_crossing(events, grid, crossing):
    """Return why a rank's launches in the replica group, `crossing`, are not one all-reduce per shard."""
    if len(grid.get_groups(crossing.step.rank)[1]) == 1:
        return NO_REPLICAS
    return find_mistake(events, grid).mistake or ("" if crossing else NOT_CROSSED)


def explain_accumulation(order, passes, is_late, crossing):
    """Return why not all gradients cross in the last of three backward passes, which begin at these places.

    `is_late` says that reductions inside the node wait for a finish. The orders before CROSSED, in which one block
    lasts from the first backward to the last forward, were right.
    """
    since = [sum(one.place > place for one in crossing) for place in passes]
    first, second, last = since[0] - since[1], since[1] - since[2], since[2]
    if order == CROSSED:
        return READ_IN_FORWARD if first and not last else ENDED_BY_FINISH if second and not first else ""
    if len(crossing) > last:
        return NO_SYNC if is_late else BLOCK_IGNORED
    return NOT_RESTORED * (order == NESTED)


def suspect_forgotten(case, orders):
    """Return the weights if a finish in REPEATED loses the gradients of the step's earlier finishes."""
    last = copy.copy(case)
    last.batches = [
        [step[-1:] if order == REPEATED else step for step, order in zip(steps, orders, strict=True)]
        for steps in case.batches
    ]
    return {FORGOTTEN: [train_plain(last)[0]] * len(case.group)}


def explain_nodes(results, grid):
    """Return the evidence that weights are equal inside each node only, although each step has its all-reduces."""
    weights = [results[rank]["weights"] for rank in grid.case.group]

    def are_equal(ranks):
        first, *others = (weights[grid.case.group.index(rank)] for rank in ranks)
        return all(first[name].equal(other[name]) for other in others for name in first)

    differ = all(map(are_equal, grid.nodes)) and not are_equal([node[0] for node in grid.nodes])
    return Evidence(mistake=PARTLY if differ else "")
