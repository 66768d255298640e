"""Likely causes of failures of module 7's checks."""

import contextlib
import re
from collections import Counter

from brigade.checks.diagnose.evidence import find_leftover, join_names
from brigade.checks.diagnose.exceptions import UNEQUAL_SHARDS
from brigade.checks.diagnose.tensors import GENERAL
from brigade.checks.verdict import CheckFailed

WRONG_VIEW = (
    "a kept view is not the right bucket or shard: it belongs to another buffer, bucket or rank, does not begin at its "
    "bucket's start, or divides the bucket by another number than the size of the group."
)
OLD_VIEWS = "views of the old tensor are kept in addition to those of the new one."
OTHER_SHARD = "a rank uses the shard of another rank. Shard r of a bucket belongs to rank r, in both flat tensors."
COPIES = (
    "each rank still has its own gradient: the kept tensors are copies (clone, for example) instead of views, or "
    "nothing is reduced."
)
NOT_AWAITED = "wait() is not called on every handle in the step that launched it."
RACED = "the buffer is written to while a collective is in progress."


@contextlib.contextmanager
def suspect_views(world_size):
    """Blame a view where no other cause is known, because module 6 gives the right numbers."""
    try:
        yield
    except CheckFailed as failed:
        verdict = failed.verdict
        is_unequal = any(word in verdict.message for word in ("hape", "size"))  # in the words of torch
        is_general = not verdict.likely_cause or verdict.hypothesis in ("ranks_disagree", "unequal shards")
        if is_general and not verdict.part and (is_unequal or not verdict.error):
            failed = failed.with_cause(explain_unequal_shards(verdict.message, world_size) or WRONG_VIEW)
        elif verdict.likely_cause.startswith("each rank still has its own gradient"):
            failed = failed.with_cause(COPIES)
        raise failed from None


def explain_unequal_shards(message, world_size):
    """Return why the output of a reduce-scatter, times the ranks of the group, is not as long as its input."""
    if not (match := re.search(UNEQUAL_SHARDS, message)):
        return ""
    total, given = map(int, match.groups())
    if not total:
        return "the kept shard is empty, as if there were no such rank. Use dist.get_rank(process_group)."
    if given and total % given == 0 and total > given:
        return (
            "a shard is as long as its whole bucket. Either both are the same kept view, because its key does not "
            "contain the rank, or the shard is not cut out of the bucket."
        )
    if total < given and world_size * total % given == 0:
        return (
            "the kept shard is too short: the bucket is divided by a larger number than the size of the group. Use "
            "dist.get_world_size(process_group)."
        )
    return ""


@contextlib.contextmanager
def suspect_move():
    """Blame views of the old memory for wrong weights after a step before which the buffers moved."""
    try:
        yield
    except CheckFailed as failed:
        verdict = failed.verdict
        if verdict.likely_cause and verdict.hypothesis not in GENERAL:
            raise
        raise failed.with_cause(describe_stale("grad_data")) from None


def describe_stale(flat):
    """Return what kept views of these flat tensors do after a move."""
    return (
        f"the numbers were right until reallocate(). Since then, kept views of {flat} show other memory: that of the "
        "old tensor, or that of another cache."
    )


@contextlib.contextmanager
def suspect_stale_views(num_moves, gather_grads, events):
    """Blame views of the old memory for what is right until the buffers move, and wrong afterwards."""
    flat = "grad_data" if gather_grads else "grad_data, or only those of param_data,"
    try:
        yield
    except CheckFailed as failed:
        if cause := next(filter(None, map(find_leftover, events)), ""):
            raise failed.with_cause(cause) from None
        if num_moves:
            raise failed.with_cause(describe_stale(flat)) from None
        if not gather_grads and (not failed.verdict.likely_cause or failed.verdict.hypothesis == "ranks_disagree"):
            raise failed.with_cause(OTHER_SHARD) from None
        raise


def explain_views(steps, step, package, gather_grads, is_moved, num_buckets):
    """Return why a step makes views; `steps` has those of each step, and `is_moved` if the buffers moved before it.

    The buffers have `num_buckets` buckets.
    """
    views, first = steps[step], sum(view["count"] for view in steps[0])
    earlier = sorted({view["file"] for view in views if not view["module"].startswith(package)})
    own = [view for view in views if view["module"].startswith(package)]
    phases = {view["phase"] for view in own}
    if not own:
        return (
            f"these lines of {join_names(earlier)}, an earlier module, still run. Keep the view there, or override the "
            "method that makes it."
        )
    if is_moved and not all(steps[:step]):
        return (
            "before reallocate() a step made no view. Since then, every step empties the cache. Empty it only when the "
            "tensor is another one, and remember that tensor."
        )
    if not gather_grads and phases >= {"backward", "start_param_sync"}:
        return (
            "grad_data and param_data share a cache, which is emptied whenever the tensor changes. Use one cache for "
            "each, or make the tensor part of the key."
        )
    if all("param" in phase for phase in phases):
        return "the views of grad_data are kept, but those of param_data are not."
    count = sum(view["count"] for view in views)
    if count == first and gather_grads and count == 2 * num_buckets:  # a shard and a bucket for two collectives
        return (
            "views are kept within a step, but not until the next one: the cache is emptied, or made again, in between."
        )
    if count == first:
        return (
            "no view is kept: the step makes as many as the first one. Either the cache is not searched before a view "
            "is made, or it is emptied every time, for example because it does not remember its tensor."
        )
    return f"some views are kept (the first step made {first}), but every step makes these views again."


def explain_launches(launched, numels, gather_grads, events):
    """Return why a step has not one reduce_scatter and one all_gather per group; `numels` are the groups' elements."""
    if cause := find_leftover(events):
        return cause
    if not gather_grads and any(x.op == "all_gather" and x.phase != "start_param_sync" for x in launched):
        return "gradients are gathered, although gather_grads is False. Gather only parameters then."
    total = sum(launch.numel for launch in launched)
    if total > 2 * sum(numels):
        counts = Counter(launch.op for launch in launched)
        twice = [f"{op}s" for op in ("reduce_scatter", "all_gather") if counts[op] > len(numels)]
        return f"some buckets are in two launches: there are too many {join_names(twice) or 'elements'}."
    if len(launched) > 2 * len(numels) and total <= 2 * sum(numels):
        counts = Counter(launch.op for launch in launched)
        single = [op for op in ("reduce_scatter", "all_gather") if counts[op] > len(numels)]
        if len(single) == 1:
            return (
                f"the {single[0]}s of a group are launched one by one. Call those of all its buckets in one coalesce "
                "block."
            )
        return (
            "every bucket is launched by itself: the groups have one bucket each, for example because a constructor "
            "does not pass buckets_per_group on, or its calls are not in a coalesce block."
        )
    if len(launched) < 2 * len(numels) and total == 2 * sum(numels):
        return "a launch contains more than buckets_per_group buckets."
    if total < 2 * sum(numels):
        return "some elements of the buffer are not launched. The last group may have fewer buckets than the others."
    return ""


def explain_late_launch(launch, events):
    """Return why a group is launched only when the next one is complete."""
    if cause := find_leftover(events):
        return cause
    if launch.phase == "backward":
        return "a group is launched after it is complete, with a gradient of a later group."
    return "groups are launched only when backward is over."


def explain_blocking(blocking):
    """Return why these launches are awaited too early."""
    if any(launch.sync for launch in blocking):
        return "the launch is synchronous. It must be asynchronous, and its handle must be kept for the finish."
    return "wait() is called too early. The handle must be kept for the finish."


def explain_unwaited(wrong):
    """Return why launches are never awaited or their tensors are changed."""
    return RACED if any(launch.raced for launch in wrong) else NOT_AWAITED
