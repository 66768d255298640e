"""Likely causes of failures of module 10's checks."""

import copy
import re
from collections import defaultdict
from functools import partial

from brigade.course.checks.diagnose.evidence import TOO_LARGE, find_wrong_group, is_averaged
from brigade.course.checks.expectations import join_names
from brigade.ranks.events import launches
from brigade.ranks.runner.ranks import PerRank
from helpers.odd_steps import LATE_FORWARDS, LOST_BETWEEN
from m08_zero_optimizer.expected import compute_weights
from m10_grad_shards import scenario

OTHER_ORDER = (
    "the buckets are launched in another order than their gradients become ready, so complete buckets wait for others."
)
WHOLE_AT_START = "the constructor allocates the gradients of all buckets. Allocate a bucket at its first gradient."
TOO_EARLY = "backward waits before it must, so nothing overlaps. Wait just before a launch that would exceed the limit."
LATE = "finish_grad_sync launches buckets that were already complete during backward."
NO_LAUNCH = "backward launches no bucket. The gradient hook that completes a bucket must launch it."
SUMMED = "the reduce-scatter sums over the ranks, and the code does not divide the sum by the group size."
TWICE = "every average counts twice: finish_grad_sync adds it to a shard that already contains it."
NO_VALUE_ERROR = "the constructor does not check max_live_buckets."
GRADIENTS_LEFT = "the hook copies p.grad into the bucket and does not set it to None."
NOT_SCATTERED = "gradients are averaged on every rank, as in module 5, or not at all."
NARROW_SUM = "gradients accumulate in the parameters' dtype. In bfloat16, 256 + 1 is 256."
CLIPPED_COPY = "clip_grad_norm_ does not scale the views of grad_data: part.shard.grad is only an fp32 copy of them."
CLIPPED_ONLY_THERE = "clip_grad_norm_ scales grad_data, but step does not use the scaled gradients."
NEVER_CLEARED = "zero_grad does not clear the shards, so every step adds to the gradients of all earlier steps."
KEPT_BY_WRAPPER = "ddp.zero_grad() does not clear the shards. It must set grad_data to zero."
KEPT_BY_OPTIMIZER = (
    "ddp.zero_grad() clears the shards, but optimizer.zero_grad() does not. It must call ddp.zero_grad()."
)
NO_FINISH = "step ignores gradients that are not in the shards yet. Raise RuntimeError until finish_grad_sync has run."
SECOND_BACKWARD = "a second backward loses gradients, because its bucket is already on the way. Raise RuntimeError."
UNSYNCED = "finish_grad_sync loses the gradients of a step whose backward passes are all inside no_sync."
KEPT_FROM_NO_SYNC = "ddp.zero_grad() does not clear the gradients that accumulated inside no_sync"
ZEROED = {  # set_to_none -> the point at which gradients of no_sync must be cleared
    "True": "after ddp.zero_grad() and finish_grad_sync",
    "False": "after ddp.zero_grad(set_to_none=False) and finish_grad_sync",
}
POINTS = {
    "two": "the second finish_grad_sync overwrites the shards. It must add to them.",
    "after step": "step clears the shards. Only zero_grad does.",
    "after optimizer.zero_grad()": KEPT_BY_OPTIMIZER,
    "after ddp.zero_grad(set_to_none=False)": "ddp.zero_grad() clears the shards only with set_to_none=True.",
    "after optimizer.zero_grad() and finish_grad_sync": (
        "ddp.zero_grad() clears the gradients that accumulated inside no_sync, but optimizer.zero_grad() does not."
    ),
    "after a second backward": SECOND_BACKWARD,
    "after a second backward inside no_sync": SECOND_BACKWARD,
} | {f"after {name}": LOST_BETWEEN for name in LATE_FORWARDS}


def explain_point(name, points, _):
    """Return why shards are wrong at one of the points at which they were copied."""
    if "zero_grad" in name and points["after ddp.zero_grad()"].any():
        return KEPT_BY_WRAPPER
    if "ddp.zero_grad" in name and "finish" in name:
        kept = [form for form in ("True", "False") if points[ZEROED[form]].any()]
        return KEPT_FROM_NO_SYNC + (f" with set_to_none={kept[0]}." if len(kept) == 1 else ".")
    is_lost = points[name] is not None and not points[name].any()
    return POINTS.get(name) or UNSYNCED * is_lost


def explain_clearing(submission, jobs, failed):
    """Return which zero_grad does not clear the shards, if they are never cleared."""
    is_kept = failed.verdict.likely_cause == NEVER_CLEARED
    alone = PerRank(job | {"batches": [job["batches"][0][:1]]} for job in jobs)
    results = is_kept and submission.try_run(scenario.collect_points, alone, world_size=len(jobs))
    if results and results[0]["after ddp.zero_grad()"].any():
        return KEPT_BY_WRAPPER
    return KEPT_BY_OPTIMIZER if results and results[0]["after optimizer.zero_grad()"].any() else ""


def explain_failed_run(groups, failed):
    """Return why a run fails: a collective outside its group, or a wrong piece of a shard; "" if neither is true."""
    wrong_groups = (find_wrong_group(failed.events, group) for group in groups)
    return next(filter(None, wrong_groups), "") or find_wrong_piece(failed.verdict)


def find_wrong_piece(verdict):
    """Return why a part of a parameter gets a gradient of another length; "" if this is not what happened."""
    lengths = re.search(r"assign a gradient of size '\[(\d+)\]' to a tensor of size '\[(\d+)\]'", verdict.message)
    if not lengths or not verdict.location or not verdict.location[-1].startswith("prepare_grad"):
        return ""
    return (
        f"the piece of grad_data has {lengths[1]} elements instead of {lengths[2]}, because its position in the shard "
        "is wrong. Rank r's shard begins at r * len(shard) in the bucket."
    )


def explain_left(nbytes, gradients, buckets, kept):
    """Return why `nbytes` are alive after finish_grad_sync: `gradients` in p.grad, and `kept` in the shards."""
    if gradients:
        return GRADIENTS_LEFT
    are_whole = nbytes - kept == sum(buckets)
    what = f"all {len(buckets)} whole buckets" if are_whole else f"{nbytes - kept} bytes beside the shards"
    return f"after finish_grad_sync, {what} are still alive. Drop every reference to a bucket after the wait."


def explain_bytes(step, result, events, buckets, world, max_live):
    """Return why too many bytes are alive at a gradient hook of a rank, whose buckets have `buckets` bytes."""
    growth, finished, whole = [*result["hooks"][0].values()], result["finished"], sum(buckets)
    kept = whole // world
    launched = [launch for launch in launches(events, step) if launch.op == "reduce_scatter"]
    sent = [4 * launch.numel for launch in launched]
    if sent != buckets and sorted(sent) == sorted(buckets):
        return OTHER_ORDER
    if growth and growth[0] - kept >= whole:
        return f"at the first gradient hook, all {len(buckets)} buckets exist. Allocate each when it is needed."
    if finished[0] > kept + max(buckets) // world:
        return explain_left(finished[0], result["left"][0], buckets, kept)
    if growth == sorted(growth) and growth[-1] >= whole + kept:
        return "no bucket is freed during backward. Free each bucket after the wait for its reduce-scatter."
    if count_live(launched) > max_live:
        return explain_unbounded(max_live, launched)
    return "after the wait for a reduce-scatter, its bucket or its output stays alive. Drop every reference to both."


def explain_late(late):
    """Return why buckets are launched after backward."""
    return NO_LAUNCH if len(late) == len(late.step.launches("reduce_scatter")) else LATE


def explain_launches(numels, launched):
    """Return why there is not one reduce-scatter per bucket."""
    if len(launched) == 1 and len(numels) > 1:
        return "one launch carries all buckets."
    return "a bucket is launched twice, a bucket is missing, or the buckets do not follow module 5's rule."


def explain_unbounded(max_live, launched):
    """Return why more than `max_live` buckets are between launch and wait."""
    if not any("backward" in launch.wait_phases for launch in launched):
        return "backward waits for no bucket. launch must first wait for the oldest live bucket if there are too many."
    most, by_dtype = count_live(launched), defaultdict(list)
    for launch in launched:
        by_dtype[launch.dtype].append(launch)
    if most > max_live >= max(map(count_live, by_dtype.values())):
        return "live buckets are counted for each dtype, but max_live_buckets is a limit for all dtypes together."
    return f"launch waits too late: up to {most} buckets are live, but max_live_buckets is {max_live}."


def count_live(launched):
    """Return the largest number of launches that were live at once, that is, between launch and wait."""
    most = 0
    for number, launch in enumerate(launched):
        live = [one for one in launched[:number] if not one.waits or one.waits[0] > launch.place]
        most = max(most, len(live) + 1)
    return most


def explain_clipping(result):
    """Return why weights are wrong after a step with clipped gradients, where all weights and gradients were 1."""
    if result["lowest"] or result["highest"]:
        return ""
    return CLIPPED_COPY if result["after"] == result["before"] else CLIPPED_ONLY_THERE


def explain_volume(op, numel, dtype, is_wider, launched):
    """Return why the launches have another volume. `is_wider` says whether grad_dtype is wider than the weights."""
    if any(launch.op == "all_reduce" for launch in launched):
        return "an all-reduce sends twice the bytes of a reduce-scatter."
    others = sorted({launch.dtype for launch in launched} - {dtype})
    if others:
        if op == "all_gather":
            return f"weights are sent in {join_names(others)}. They must be sent in their own dtype."
        rule = "wider than the parameters, so buckets and shards must have grad_dtype"
        rule = rule if is_wider else "narrower than the parameters, so it must be ignored"
        return f"gradients are sent in {join_names(others)}. grad_dtype is {rule}."
    total = sum(launch.numel for launch in launched if launch.op == op)
    return "something is sent twice." if total > numel else "some buckets are missing."


def suspect_mistakes(case, recipe, events):
    """Return causes, and the weights to which each of them leads: mistakes in averaging and clearing gradients.

    `events` is the record of one of the ranks.
    """
    size = len(case.group)
    has_average = is_averaged([x for x in launches(events) if x.op == "reduce_scatter"])
    too_large = TOO_LARGE.format("the weights change as if gradients were", size)
    changes = {
        too_large if has_average else SUMMED: {"loss_scale": size},
        "gradients are divided twice by the number of ranks.": {"loss_scale": 1 / size},
        NEVER_CLEARED: {"never_zero": True},
    }
    if size != 2:
        changes[TWICE] = {"loss_scale": 2}
    return {cause: partial(compute_weights, case, recipe | change) for cause, change in changes.items()}


def suspect_accumulation(case, recipe, finish_each):
    """Return causes, and the weights to which each of them leads: mistakes in accumulating micro-batches."""
    last = copy.copy(case)
    last.batches = [[step[-1:] for step in batches] for batches in case.batches]
    rule = "In no_sync, a hook must add the gradient to the bucket, not overwrite it."
    rule = "A finish must add the averages to the shards, not overwrite them." if finish_each else rule
    return {
        f"only the last micro-batch of each step counts. {rule}": partial(compute_weights, last, recipe),
        NEVER_CLEARED: partial(compute_weights, case, recipe | {"never_zero": True}),
    }
