"""Likely causes of failures of module 7's checks."""

import contextlib

from brigade.checks.diagnose.evidence import find_leftover, join_names
from brigade.checks.verdict import CheckFailed

WRONG_VIEW = (
    "a kept view is not the right bucket or shard: it belongs to another buffer, bucket or rank, does not begin at its "
    "bucket's start, or divides the bucket by another number than the size of the group."
)
OLD_VIEWS = "views of the old tensor are kept in addition to those of the new one."
OTHER_SHARD = "shard r of a bucket must belong to rank r, in grad_data and in param_data. Here it is another rank's."
NOT_AWAITED = "wait() is not called on every handle in the step that launched it."
RACED = "the buffer is written to while a collective is in progress."


@contextlib.contextmanager
def suspect_views():
    """Blame a view where no other cause is known, because module 6 gives the right numbers."""
    try:
        yield
    except CheckFailed as failed:
        verdict = failed.verdict
        is_unequal = any(word in verdict.message for word in ("hape", "size"))  # in the words of torch
        is_general = not verdict.likely_cause or verdict.hypothesis in ("ranks_disagree", "unequal shards")
        if is_general and not verdict.part and (is_unequal or not verdict.error):
            failed = failed.with_cause(WRONG_VIEW)
        raise failed from None


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
            cause = f"it was right until reallocate(), and then the views of {flat} still show the old memory."
            raise failed.with_cause(cause) from None
        if not gather_grads and (not failed.verdict.likely_cause or failed.verdict.hypothesis == "ranks_disagree"):
            raise failed.with_cause(OTHER_SHARD) from None
        raise


def explain_views(steps, step, package, gather_grads, is_moved):
    """Return why a step makes views; `steps` has those of each step, and `is_moved` if the buffers moved before it."""
    views, first = steps[step], sum(view["count"] for view in steps[0])
    earlier = sorted({view["file"] for view in views if not view["module"].startswith(package)})
    own = [view for view in views if view["module"].startswith(package)]
    phases = {view["phase"] for view in own}
    if not own:
        return (
            f"{join_names(earlier)} is an earlier module. Keep the view there, or let CachedDDP do without that line."
        )
    if is_moved and not all(steps[:step]):
        return (
            "an earlier step made no view. After reallocate() the cache is emptied in every step, not only when the "
            "tensor is a new one."
        )
    if not gather_grads and phases >= {"backward", "start_param_sync"}:
        return (
            "a cache is emptied whenever it is asked for another tensor, and grad_data and param_data share one. Each "
            "needs a cache of its own, or its tensor must be part of the key."
        )
    if all("param" in phase for phase in phases):
        return "the views of grad_data are kept, but those of param_data are not."
    if sum(view["count"] for view in views) == first:
        return "the step makes as many views as the first one: they are not kept, or not found again."
    return f"the first step made {first} views. Some of them are kept, but others are made again in every step."


def explain_launches(launched, numels, gather_grads, events):
    """Return why a step has not one reduce_scatter and one all_gather per group; `numels` are the groups' elements."""
    if cause := find_leftover(events):
        return cause
    if not gather_grads and any(x.op == "all_gather" and x.phase != "start_param_sync" for x in launched):
        return "gradients are gathered although gather_grads is False. Then only parameters are gathered."
    total = sum(launch.numel for launch in launched)
    if total > 2 * sum(numels):
        return "some buckets are reduced or gathered twice."
    if len(launched) > 2 * len(numels) and total <= 2 * sum(numels):
        return "buckets are launched one by one. All buckets_per_group buckets of a group belong in one coalesce block."
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
