"""Likely causes of failures of module 7's checks."""

import contextlib

from brigade.checks.diagnose.evidence import join_names
from brigade.checks.verdict import CheckFailed

WRONG_VIEW = (
    "a view is not the bucket or the shard that it stands for: of this buffer, from its bucket's start on, for this "
    "rank of the group, one of as many as the group has ranks?"
)
OLD_VIEWS = "views of the old tensor are kept beside those of the new one?"
IN_THE_FINISH = "groups are launched only when backward is over?"
BLOCKING = "asynchronous, and its handle kept for later?"


@contextlib.contextmanager
def views_suspected():
    """Module 6 has the same numbers right: where no other cause is known, a view is wrong."""
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
def stale_views_suspected(moved, gather_grads):
    """What is right until the buffers move, and wrong afterwards, is read through views of the memory of before."""
    flat = "grad_data" if gather_grads else "grad_data, or of param_data alone,"
    try:
        yield
    except CheckFailed as failed:
        if moved:
            cause = f"it was right until reallocate(): do the views of {flat} still lie in the memory of before?"
            raise failed.with_cause(cause) from None
        if not gather_grads:
            cause = "shard r of a bucket is rank r's, in grad_data as in param_data: is it another's?"
            raise failed.with_cause(cause) from None
        raise


def new_views(steps, step, package, gather_grads, moved):
    """Why a step makes views; `steps` has those of each step, and `moved` says that the buffers moved before it."""
    views, first = steps[step], sum(view["count"] for view in steps[0])
    earlier = sorted({view["file"] for view in views if not view["module"].startswith(package)})
    own = [view for view in views if view["module"].startswith(package)]
    phases = {view["phase"] for view in own}
    if not own:
        return (
            f"{join_names(earlier)} is an earlier module. Keep the view there, or let CachedDDP do without that line."
        )
    if moved:
        return "before reallocate() there were none: the cache is emptied for the new tensor, but in every step?"
    if not gather_grads and phases >= {"backward", "start_param_sync"}:
        return (
            "without parameter sync there were none: one cache for grad_data and param_data, which the one empties for "
            "the other?"
        )
    if all("param" in phase for phase in phases):
        return "the views of grad_data are kept, those of param_data are not?"
    if sum(view["count"] for view in views) == first:
        return "as many as in the first step: they are not kept, or not found again?"
    return f"{first} in the first step: some views are kept, and some are made anew in every step?"


def wrong_launches(found, sizes, gather_grads):
    """Why a step has not one reduce_scatter and one all_gather for each group; `sizes` are the groups' elements."""
    gathers = sum(launch.op == "all_gather" for launch in found)
    scatters = sum(launch.op == "reduce_scatter" for launch in found)
    if not gather_grads and gathers > scatters:
        return "without gather_grads no gradients are gathered: the all-gathers are those of the parameters?"
    if len(found) > 2 * len(sizes):
        return "each bucket is launched by itself: does it happen inside coalesce, and with all of buckets_per_group?"
    return ""
