"""Likely causes of failures of module 6's checks."""

from collections import Counter

from brigade.checks.diagnose.evidence import find_leftover

# coalesce
ONE_BY_ONE = "the calls of a block are launched one by one?"
SYNCHRONOUS = "async_ops=True?"
OTHER_HANDLE = "the launch is another handle's?"
NESTED = "blocks of one group cannot be nested: is the group captured already when the inner one begins?"
SWALLOWED = "coalesce swallows or replaces it, in an `except` or with a `return` in `finally`?"
BLOCK_LEFT_OVER = "something of the block before is left over?"

# groups
WHOLE_BUFFER = "the whole buffer is divided, or travels?"
WRONG_NUMEL = "plan_layout does not follow the rule of module 5, or the buffer is not made for the size of the group?"
NOT_AWAITED = "one handle is kept for several groups, or its wait() is not called?"
RACED = "the buffer is divided or written to while a collective is under way?"
TOO_EARLY = "a group counts the gradients of all its buckets, and waits for its turn, in the order of the buckets?"
WRONG_GROUP = "the process group is not passed on to each BucketGroup, or to coalesce and the calls in it?"


def not_one_launch(found):
    """Why a block of coalesced calls is not one launch."""
    if not found:
        return "what is called in the block is collected, and never launched?"
    if len(found) > 1:
        return "the calls are not collected: does coalesce collect those on the group that it is given?"
    return ""


def not_refused(compared):
    """Why a block raises nothing, where `compared` is what tells its calls apart."""
    if compared == "nested":
        return NESTED
    return f"the manager takes all calls to be like the first: compare {compared} before it launches?"


def launched_though_refused(compared):
    """Why a block that ends with an exception launches; `compared` is None if the exception is the caller's."""
    if compared == "nested":
        return NESTED
    if compared:
        return f"compare {compared} before the manager ends, and end it with the exception: else it launches?"
    return "the manager has to end with the exception: ended as usual, in a `finally`, it launches?"


def still_capturing(inputs):
    """What an all_reduce after a block gives, if the group goes on capturing."""
    cause = (
        "it did nothing: the group is still capturing, because the exception ended the block before the manager "
        "removed the group's state; try ... finally?"
    )
    return {cause: [{"its result": value} for value in inputs]}


def own_shards(local, average, place, cut):
    """What mistakes leave in the own shard of rank `place`; `local` are the flat gradients of the group's ranks.

    `cut` takes the shard out of a flat tensor.
    """
    size = len(local)
    if size == 1:
        return {}
    hypotheses = {
        "its own gradients stand there: does rank r's result go to shard r, of each bucket by itself?": local[place],
        f"exactly {size}× too large: summed over the ranks, not averaged?": average * size,
        f"exactly {size}× too small: divided twice, or by the size of the world?": average / size,
        "the own shard was divided in the block, before the block's end reduced it: divide the bucket first?": (
            average * size - local[place]
        )
        + local[place] / size,
    }
    return {cause: [cut(flat)] for cause, flat in hypotheses.items()}


def not_gathered(local, cut):
    """What is in param_data if it is not gathered; `local` is that of each rank."""
    return {"each rank has its own parameters still: param_data was not gathered?": [cut(data) for data in local]}


def no_param_views(params, members):
    """What parameters hold if they are not views of param_data."""
    cause = "module 5: with_params=True makes each p.data a view of param_data?"
    return {cause: [{f"parameter {i}": tensors[i].flatten() for i in members} for tensors in params]}


def waits_at_once(found):
    """Why start_... waits, or finish_... does not."""
    if any(launch.sync for launch in found):
        return "a synchronous launch: async_ops=True in coalesce?"
    return "keep the handle of each launch for the finish?"


def other_kinds(others, ops):
    """Why there are launches of other kinds than `ops`."""
    if any(launch.op == "all_reduce" for launch in others):
        return "a reduce_scatter and an all_gather do together what an all_reduce does, and move as much?"
    if len(ops) == 1:
        return "gather_grads is to be read in every finish_grad_sync: False leaves the all-gather out?"
    return ""


def not_one_for_each_group(made, wanted, op, events):
    """Why the launches `made`, as (dtype, elements), are not the `wanted`; `events` are what a DDP recorded."""
    if cause := find_leftover(events):
        return cause
    if sorted(made) == sorted(wanted):
        return "groups are launched in the order of the buckets?"
    if len(made) > len(wanted):
        return (
            "buckets are launched by themselves: are the calls inside coalesce and on its process group, and does "
            "buckets_per_group=None mean all of a buffer?"
        )
    if op == "all_gather" and not Counter(made) - Counter(wanted):
        return "some groups are never gathered: the last one has to be, in finish_grad_sync?"
    if made:
        return "a group has buckets_per_group buckets of one buffer, padding included; the last one may have fewer?"
    return ""


def one_micro_batch(case):
    """What the gradients are if only one of 3 micro-batches counts."""
    first, last = case.gradients(micro=slice(0, 1)), case.gradients(micro=slice(2, 3))
    size = len(case.group)
    return {
        "only the first of 3 micro-batches counts?": [first] * size,
        "only the last of 3 micro-batches counts: what no_sync accumulated is lost?": [last] * size,
    }


def kept_gradients(expected, before, dtype, world):
    """What a rank has in this dtype if the gradients of the step before are still in it."""
    cause = "the step before is still in it: accumulation does not start anew?"
    kept = {f"parameter {i}": (value + before[i]).to(dtype) for i, value in expected.items()}
    return {cause: [kept] * world}
