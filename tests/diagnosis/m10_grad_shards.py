"""Likely causes of failures of module 10's checks."""

import contextlib
from functools import partial

from brigade.checks.expectations import join_names
from brigade.checks.verdict import CheckFailed
from expected.m08_zero_optimizer import compute_weights

WHOLE_AT_START = (
    "the constructor allocates the gradients of all buckets, as module 5's GradBuffer does. Allocate a bucket when its "
    "first gradient is ready."
)
NOT_FREED = "something still refers to a whole bucket, or p.grad was not set to None."
UNBOUNDED = "launch does not wait for the oldest live bucket first."
TOO_EARLY = "backward waits for a reduce-scatter although fewer than max_live_buckets are running, so nothing overlaps."
LATE = "the finish launches buckets that were already complete in backward."
NO_VALUE_ERROR = "the constructor does not check max_live_buckets."
GRADIENTS_LEFT = "the hook copies p.grad into the bucket and does not set it to None."
NOT_SCATTERED = "gradients are averaged on every rank, as in module 5, or not at all."
NARROW_SUM = "gradients accumulate in the parameters' dtype. In bfloat16, 256 + 1 is 256."
POINTS = {
    "two": "the second finish overwrites the shards. It must add to them.",
    "after step": "step clears the shards. Only zero_grad does.",
    "after optimizer.zero_grad()": "the optimizer's zero_grad does not clear the shards.",
    "after ddp.zero_grad() and a finish": (
        "ddp.zero_grad() does not clear the gradients that accumulated inside no_sync, or does not clear the shards."
    ),
}


@contextlib.contextmanager
def explain_point(name):
    """Explain wrong shards in the block by the point at which they were copied."""
    try:
        yield
    except CheckFailed as failed:
        raise failed.with_cause(POINTS[name]) from None


def explain_bytes(hooks, finished, whole):
    """Return why too many bytes are alive at a hook."""
    if any(nbytes >= whole for nbytes in finished):
        return NOT_FREED
    growth = [hook["nbytes"] for hook in hooks if hook["step"] == 0]
    if growth == sorted(growth) and growth[-1] >= whole:
        return "no bucket is freed in backward. Free each bucket after the wait for its reduce-scatter."
    if growth and growth[0] >= whole:
        return "all buckets are allocated when backward begins. Allocate a bucket when its first gradient is ready."
    return (
        "buckets stay alive after their reduce-scatter, or more than max_live_buckets are between launch and wait, or "
        "p.grad is not set to None after it was copied."
    )


def explain_launches(launched, numels):
    """Return why there is not one reduce-scatter per bucket."""
    if not launched:
        return "no reduce-scatter is launched."
    if len(launched) == 1 and len(numels) > 1:
        return "one launch carries all buckets."
    return "a bucket is launched twice, a bucket is missing, or the buckets do not follow module 5's rule."


def explain_volume(launched, op, numel, dtype):
    """Return why the launches have another volume."""
    if any(launch.op == "all_reduce" for launch in launched):
        return "an all-reduce sends twice the bytes of a reduce-scatter."
    others = sorted({launch.dtype for launch in launched} - {dtype})
    if others:
        return (
            f"{join_names(others)} is sent. Gradients travel in grad_dtype if it is wider, weights in their own dtype."
        )
    total = sum(launch.numel for launch in launched if launch.op == op)
    return "something is sent twice." if total > numel else "some buckets are missing."


def suspect_mistakes(case, recipe):
    """Return causes, and the weights to which each of them leads: mistakes in averaging and clearing gradients."""
    size = len(case.group)
    return {
        "the reduce-scatter sums over the ranks, and nothing divides by their number.": partial(
            compute_weights, case, recipe | {"loss_scale": size}
        ),
        "gradients are divided twice by the number of ranks.": partial(
            compute_weights, case, recipe | {"loss_scale": 1 / size}
        ),
        "zero_grad does not clear the shards, so every step adds to the gradients of all earlier steps.": partial(
            compute_weights, case, recipe | {"never_zero": True}
        ),
    }


def suspect_accumulation(case, recipe):
    """Return causes, and the weights to which each of them leads: mistakes in accumulating micro-batches."""
    last = [[step[-1:] for step in batches] for batches in case.batches]
    return {
        "only the last micro-batch of each step counts. A finish must add to the shards, and no_sync must keep "
        "gradients.": partial(compute_with_batches, case, recipe, last),
    }


def compute_with_batches(case, recipe, batches):
    """Return the weights of one process that trains on other batches."""
    before, case.batches = case.batches, batches
    try:
        return compute_weights(case, recipe)
    finally:
        case.batches = before
