"""Likely causes of failures of module 6's checks."""

from collections import Counter

import torch

from brigade.course.checks.diagnose.evidence import TOO_LARGE, find_leftover, is_averaged, join_names
from brigade.course.checks.diagnose.exceptions import Symptom
from brigade.course.checks.diagnose.tensors import agree
from brigade.ranks.events import follow_steps, launches
from brigade.ranks.progress import Progress

# coalesce
MADE_BY_WAIT = (
    "the block only collects the calls, and handle.wait() launches them. They must be launched when the block ends."
)
OTHER_HANDLE = "coalesce does not yield the handle of the launch."
NESTED = (
    "blocks of one group are nested. The inner block must raise an exception if the group is already capturing calls."
)
OUTER_LOST = "the refusal of an inner block removes the state of the outer block. Refuse before the `try`."
OTHER_GROUP = (
    "blocks of different groups disturb each other. Refuse only a block of the same group, and remove its state alone."
)
SWALLOWED = "coalesce swallows or replaces the exception, in an `except` or with a `return` in `finally`."
BLOCK_LEFT_OVER = "coalesce keeps state from the block that ended with an exception."

# groups
WHOLE_BUFFER = "a group changes or communicates the whole buffer instead of its own buckets."
OTHER_BUCKETS = "a group does not launch exactly the buckets in bucket_indices, which need not be neighbours."
WRONG_NUMEL = (
    "plan_layout does not follow the rule of module 5, or the layout is not planned for the size of the group."
)
VIEWS = "The result of rank r belongs in shard r of each bucket, and `shards` must return views, not copies."
STALE_SHARDS = (
    "the values were correct before buffer.reallocate(), which replaces the flat tensors. `shards` must return views "
    "of its argument `data`, not of an earlier tensor."
)
MIXED_ORDER = (
    "the order of all-gathers and reduce-scatters differs between ranks, because it depends on when gradients become "
    "ready. Launch the all-gather of a group before the reduce-scatter of the next group, or launch every all-gather "
    "in finish_grad_sync."
)
GATHERED_AT_ONCE = (
    "the hook that launches a group also gathers it, because half of the next group was ready before. Gather only in "
    "the hook whose own gradient makes half of the next group ready."
)
WRONG_GROUP = "the process group is not passed on to each BucketGroup, or to coalesce and the calls in its block."
GATHERED_EARLY = (
    "a group is gathered before its reduce-scatter is launched. If gradients become ready in another order, half of "
    "the next group can be ready earlier. Only groups before queue.next_to_launch are launched."
)
UNEQUAL_SHARDS = r"outputShape\[0\] \* worldSize == inputShape\[0\] \((\d+) vs\. (\d+)\)"
SYMPTOMS = [
    Symptom("unequal shards", "", UNEQUAL_SHARDS,
            "reduce_scatter(output, input) received an input of {1} elements, but the outputs of all ranks have {0} "
            "elements in total. The output must be the rank's own shard. The input must be the whole flat tensor, "
            "which is as long as all shards together."),
    Symptom("last bucket", "IndexError", "", "an index is beyond the buffer's last bucket. The last group may have "
            "fewer buckets than the others.", line=r"bucket_ranges\["),
    Symptom("no handle", "", "'wait'", lambda failure, _: GATHERED_EARLY
            * any(function == "launch_next_all_gather" for _, _, function, _ in failure.frames[:-1])),
]  # fmt: skip


def explain_calls(count, launched):
    """Return why a block of `count` coalesced calls is not one launch."""
    if not launched:
        return "the block collects the calls but never launches them."
    if len(launched) > 1:
        return "the calls are not collected. coalesce must collect the calls on the group that it is given."
    if launched[0].parts < count:
        return "some calls of the block are lost: the launch does not contain all of them."
    return ""


def explain_early_wait(waiting):
    """Return why a block waits for its launch."""
    return "coalesce does not pass async_ops=True." if waiting[0].sync else "coalesce calls wait() on its handle."


def explain_no_error(compared):
    """Return why a block raises nothing, where `compared` is the property in which its calls differ."""
    if compared == "nested":
        return NESTED
    return (
        f"the manager treats all calls like the first call. Compare the {compared} of all calls before the manager "
        "launches them."
    )


def explain_launch_after_error(compared, _):
    """Return why a block that raises an exception launches; `compared` is None if the exception is the caller's."""
    if compared == "nested":
        return NESTED
    if compared:
        return (
            f"the {compared} are compared too late or not at all. Compare the {compared} of all calls before the "
            "manager's block ends, and raise the exception inside it. Otherwise, the manager launches the calls."
        )
    return (
        "the exception does not reach the manager, for example because a `finally` ends the manager's block. The "
        "manager therefore launches the calls."
    )


def explain_unmade_launch(blocks, failed):
    """Return why the first of `blocks` that launches anything does so, if the switch has refused a launch later."""
    if failed.verdict.ending != "garbled":
        return ""
    events = follow_steps(failed.events[failed.verdict.rank])
    launched = (step for _, step, event in events if event["kind"] == "launch" and event["phase"] == "block")
    number = next(launched, None)
    return explain_launch_after_error(blocks[number][1], None) if number in range(len(blocks)) else ""


def suspect_capturing(inputs):
    """Return what an all_reduce after a block gives if the group is still capturing calls."""
    cause = (
        "the all_reduce did nothing, because the group is still capturing calls. The exception ended the block before "
        "the manager removed the group's state. Remove this state in try ... finally."
    )
    return {cause: [{"the result": value} for value in inputs]}


def suspect_shards(local, average, actual, index, cut, events, is_subgroup):
    """Return what mistakes leave in shard `index`, the shard of the rank with this record, which has `actual`.

    `local` are the flat gradients of the group's ranks, and `cut` takes the shard out of a flat tensor.
    """
    size, launched = len(local), [x for x in launches(events) if x.op == "reduce_scatter"]
    if size == 1:
        return {}
    or_by_world = ", or by the world size" * is_subgroup
    own, got = (torch.cat(list(cut(flat).values())) for flat in (local[index], actual))
    where = f"the rank's own gradients. {VIEWS}"
    divided = f"the rank's own gradients, divided by {size}. {VIEWS}"
    if not launched:
        where = "the rank's own gradients, because nothing is reduced."
    elif not agree(own, got) and not agree(own / size, got):
        where = divided = "the rank's own gradients for some buckets, and the averages for others."
    summed = f"the shard is exactly {size}× too large: gradients are summed over the ranks, not averaged."
    hypotheses = {
        f"the shard contains {where}": local[index],
        f"the shard contains {divided}": local[index] / size,
        TOO_LARGE.format("the shard is", size) if is_averaged(launched) else summed: average * size,
        f"the shard is exactly {size}× too small: gradients are divided twice{or_by_world}.": average / size,
        "each rank divides only its own shard, and the reduction starts later, in a coalesce block when it ends. "
        "Divide the bucket before the launch, or the shard after the wait.": average * size
        - local[index]
        + local[index] / size,
    }
    return {cause: [cut(flat)] for cause, flat in hypotheses.items()}


def find_wrong_buckets(events, lengths, failed):
    """Return why shards are wrong if a rank reduces more or fewer elements than its groups have."""
    total = sum(launch.numel for launch in launches(events, 0) if launch.op == "reduce_scatter")
    if total == sum(lengths):
        return ""
    return f"{OTHER_BUCKETS} Too {'many' if total > sum(lengths) else 'few'} elements are reduced."


def suspect_no_gather(local, cut):
    """Return what is in param_data if it is not gathered; `local` is that of each rank."""
    return {"each rank still has its own parameters: param_data is not gathered.": [cut(data) for data in local]}


def suspect_no_param_views(params, indices):
    """Return what parameters contain if they are not views of param_data."""
    cause = "p.data is not a view of param_data. With with_params=True, module 5's GradBuffer must make it one."
    return {cause: [{f"parameter {i}": tensors[i].flatten() for i in indices} for tensors in params]}


def explain_waits(what, launched):
    """Return why start_... waits, or finish_... does not; `what` is "grad_sync" or "param_sync"."""
    if any(launch.sync for launch in launched):
        return "the launch is synchronous. coalesce must use async_ops=True."
    if any("start" in launch.wait_phases for launch in launched):
        return f"start_{what} waits on the handle. It must keep the handle of each launch for finish_{what}."
    if any(launch.phase != "start" for launch in launched):
        return f"finish_{what} launches what start_{what} must launch."
    return f"finish_{what} does not wait on the handle of every launch."


def explain_other_kinds(is_gather_off, others):
    """Return why there are launches of other kinds; with `is_gather_off`, `ddp.gather_grads` is False."""
    ops = {launch.op for launch in others}
    if "all_reduce" in ops:
        return "the code calls all_reduce. Call reduce_scatter and all_gather instead, which together do the same."
    if is_gather_off and ops == {"all_gather"}:
        return "finish_grad_sync does not read gather_grads in every step. If it is False, launch no all-gather."
    return ""


def explain_groups(made, expected, op, is_ddp, launched):
    """Return why the launches `made`, as (dtype, elements), are not the `expected`; `is_ddp` if a wrapper made them."""
    if is_ddp and (cause := find_leftover(launched.step.events, launched.step.number)):
        return cause
    total, expected_total = (sum(numel for _, numel in pairs) for pairs in (made, expected))
    if sorted(made) == sorted(expected):
        return "the groups are not launched in the order of the buckets."
    if len(made) > len(expected) and total <= expected_total:
        return (
            "buckets are launched one by one instead of one group at a time. Make the calls inside coalesce, on its "
            "process group. buckets_per_group=None means all buckets of a buffer."
        )
    if lost := sorted({dtype for dtype, _ in expected} - {dtype for dtype, _ in made}) if made else []:
        return f"no launch carries {join_names(lost)}. A group belongs to one buffer, and each has its own groups."
    if total > expected_total:
        return "some elements are in two launches, or the buckets have more padding than module 5's rule gives them."
    if op == "all_gather" and not Counter(made) - Counter(expected):
        return "some groups are never gathered. finish_grad_sync must gather the last one."
    if made and total < expected_total:
        return (
            "some elements of the buffer are in no launch. A group has buckets_per_group whole buckets, including "
            "their padding, and the last group may have fewer."
        )
    if made:
        return "a group does not have buckets_per_group buckets of one buffer. Only the last group may have fewer."
    return ""


def find_mixed_order(failed):
    """Return MIXED_ORDER if the first mismatch between ranks is an all-gather and a reduce-scatter."""
    progress = Progress(len(failed.events))
    for rank, events in enumerate(failed.events if failed.verdict.ending == "mismatch" else []):
        for event in events:
            progress.add(rank, event)
    if progress.mismatch:
        ops = {progress.mismatch.launch["op"], progress.mismatch.peer_launch["op"]}
        return MIXED_ORDER if ops == {"reduce_scatter", "all_gather"} else ""
    return ""


def suspect_lost_micro_batches(case):
    """Return what the gradients are if only one of 3 micro-batches counts."""
    if len(case.batches[0][0]) == 1:
        return {}
    first, last = case.gradients(micro=slice(0, 1)), case.gradients(micro=slice(2, 3))
    size = len(case.group)
    return {
        "only the first of 3 micro-batches counts.": [first] * size,
        "only the last of 3 micro-batches counts: the gradients accumulated in no_sync are lost.": [last] * size,
    }


def suspect_kept_gradients(expected, before, dtype, world, gather_grads):
    """Return what a rank has in this dtype if the gradients of the previous step are still in it."""
    cause = "the tensor still contains the gradients of the previous step: accumulation does not start from zero."
    if not gather_grads:
        cause += " finish_accumulation(set_grads=False) must reset has_accumulated too."
    kept = {f"parameter {i}": (value + before[i]).to(dtype) for i, value in expected.items()}
    return {cause: [kept] * world}
