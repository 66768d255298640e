"""Likely causes of failures of module 7's checks."""

import re
from collections import Counter

from brigade.course.checks.diagnose.evidence import find_leftover
from brigade.ranks.verdict import join_names
from m06_coalesced.causes import UNEQUAL_SHARDS

WRONG_VIEW = (
    "a cached view does not refer to the right bucket or shard. It belongs to another buffer, bucket or rank, or its "
    "start or length is wrong."
)
OLD_VIEWS = "the cache keeps views of the old tensor in addition to views of the new one."
OTHER_SHARD = (
    "a rank uses the shard of another rank. Shard r of a bucket belongs to rank r, in grad_data and in param_data."
)
COPIES = (
    "each rank still has its own gradient. Either its bucket is not reduced, for example because a cached view belongs "
    "to another bucket, or the result goes to a copy instead of a view."
)


def find_wrong_view(failed):
    """Blame a view where no other cause is known, because module 6 gives the right numbers."""
    verdict = failed.verdict
    is_unequal = any(word in verdict.message for word in ("hape", "size"))  # in the words of torch
    general = ("ranks_disagree", "misplaced_entries", "unequal shards")
    is_general = not verdict.likely_cause or verdict.hypothesis in general
    if is_general and not verdict.part and (is_unequal or not verdict.error):
        return explain_unequal_shards(verdict.message, len(failed.events)) or WRONG_VIEW
    return ""


def suspect_copies(case):
    """Return the hypothesis that no rank replaces its own gradients: {likely cause: each rank's gradients}."""
    return {COPIES: [case.gradients([rank]) for rank in case.group]} if len(case.group) > 1 else {}


def explain_unequal_shards(message, world_size):
    """Return why the output of a reduce-scatter, times the ranks of the group, is not as long as its input."""
    if not (match := re.search(UNEQUAL_SHARDS, message)):
        return ""
    total, given = map(int, match.groups())
    if not total:
        return "the cached shard is empty, as for a rank outside the group. Use dist.get_rank(process_group)."
    if given and total % given == 0 and total > given:
        return (
            "a shard is as long as its whole bucket. Either both use the same cached view, because its key does not "
            "contain the rank, or the shard is not sliced from the bucket."
        )
    if total < given and world_size * total % given == 0:
        return (
            "the cached shard is too short: the bucket is divided by a number larger than the group size. Use "
            "dist.get_world_size(process_group)."
        )
    return ""


def describe_stale(flat):
    """Describe the effect of cached views of these flat tensors after a move."""
    return (
        f"the values were correct before reallocate() was called. Since then, cached views of {flat} point to the "
        "wrong memory: to the old tensor, or to the tensor of another cache."
    )


def find_stale_views(num_moves, gather_grads, events, failed):
    """Blame views of the old memory for values that are correct until the buffers move, and wrong afterwards."""
    if cause := next(filter(None, map(find_leftover, events)), ""):
        return cause
    if num_moves:
        return describe_stale("grad_data" if gather_grads else "grad_data or param_data")
    is_general = not failed.verdict.likely_cause or failed.verdict.hypothesis == "ranks_disagree"
    return OTHER_SHARD if is_general and not gather_grads else ""


def explain_views(views, num_views, step, package, gather_grads, is_moved, numels):
    """Return why a step makes `views`; `num_views` has their number in each step, and `is_moved` if buffers moved.

    `numels` are the elements of each bucket.
    """
    first = num_views[0]
    earlier = sorted({view["file"] for view in views if not view["module"].startswith(package)})
    own = [view for view in views if view["module"].startswith(package)]
    phases = {view["phase"] for view in own}
    if not own:
        return (
            f"the code of an earlier module ({join_names(earlier)}) still creates views. Cache them there, or "
            "override the method that creates them."
        )
    if is_moved and not all(num_views[:step]):
        return (
            "before reallocate(), a step created no views. Since then, every step empties the cache. Empty it only "
            "when the tensor has changed, and remember the new tensor."
        )
    if not gather_grads and phases >= {"backward", "start_param_sync"}:
        return (
            "grad_data and param_data share a cache, which is emptied whenever the tensor changes. Use one cache for "
            "each, or make the tensor part of the key."
        )
    if all("param" in phase for phase in phases):
        return "the views of grad_data are cached, but the views of param_data are not."
    count = sum(view["count"] for view in views)
    if count == first and gather_grads and count == 2 * len(numels):  # a shard and a bucket for two collectives
        return "views are cached only within a step: the cache is emptied or created again before the next step."
    if count == first:
        again = ", because a later step creates as many views as the first step"
        if gather_grads and count == 4 * len(numels):
            again = ": already in the first step, before any move, every view is created twice"
        return (
            f"no view is cached{again}. Either the code does not look in the cache before it creates a view, or it "
            "empties the cache every time, for example because it does not remember which tensor the cache belongs to."
        )
    return (
        f"only some views are cached. The first step created {first} views, and every later step creates "
        f"{describe_kind(views, numels)} again."
    )


def describe_kind(views, numels):
    """Return what these views contain: whole buckets, which have `numels` elements, or shards."""
    sizes = {numel for view in views for numel in view["numels"]}
    if sizes == set(numels):
        return f"the views of whole buckets, of {join_names(sorted(sizes))} elements,"
    if sizes and {numel * max(numels) // max(sizes) for numel in sizes} == set(numels):
        return f"the views of shards, of {join_names(sorted(sizes))} elements,"
    return "the views listed above"


def explain_launches(numels, gather_grads, launched):
    """Return why a step does not have one launch of each kind per group; `numels` are the elements of the groups."""
    if cause := find_leftover(launched.step.events, launched.step.number):
        return cause
    if not gather_grads and any(x.op == "all_gather" and x.phase != "start_param_sync" for x in launched):
        return "gradients are gathered, although gather_grads is False. In this case, gather only parameters."
    total, counts = sum(launch.numel for launch in launched), Counter(launch.op for launch in launched)
    many = [op for op in ("reduce_scatter", "all_gather") if counts[op] > len(numels)]
    if total > 2 * sum(numels):
        gathered = Counter(launch.numel for launch in launched if launch.op == "all_gather")
        if not gather_grads and gathered == Counter(numels * 2):
            return "start_param_sync gathers the parameters of each group twice."
        twice = join_names([f"{op}s" for op in many]) or "elements"
        return f"some buckets are launched twice: there are too many {twice}."
    if len(launched) > 2 * len(numels):
        if len(many) == 1:
            return f"the {many[0]}s of a group are launched one by one. Call them in one coalesce block."
        return (
            "every bucket is launched by itself. Either each group has one bucket, for example because a constructor "
            "does not pass on buckets_per_group, or the calls are not inside a coalesce block."
        )
    if len(launched) < 2 * len(numels) and total == 2 * sum(numels):
        return "a launch contains more than buckets_per_group buckets."
    if total < 2 * sum(numels):
        return "some elements of the buffer are in no launch. The last group may have fewer buckets than the others."
    return ""


def explain_late_launches(scatters):
    """Return why a group is launched only when the next one is complete."""
    if any(launch.phase == "backward" for launch in scatters):
        return "a group is launched too late, when a gradient of a later group becomes ready."
    return "groups are launched only after backward."


def explain_blocking(blocking):
    """Return why these launches are awaited too early."""
    if any(launch.sync for launch in blocking):
        return "the launch is synchronous. Keep an asynchronous handle for finish_grad_sync or finish_param_sync."
    return "wait() is called too early. Keep the handle for finish_grad_sync or finish_param_sync."
