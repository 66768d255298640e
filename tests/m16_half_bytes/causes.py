"""Likely causes of failures of module 16's checks."""

from collections import Counter

import torch

from brigade.ranks.events import launches
from m16_half_bytes.expected import compress_alone, is_same
from m16_half_bytes.scenario import MARK

BLOCKED = "the collective is launched without async_op=True, or something waits for it at once."
NO_ALL_TO_ALL = "a reducing collective adds in 16 bits. Only an all-to-all leaves the sum to you."
INPUT_CHANGED = "the values are divided, rounded or received in place. Work on a copy."
WRITTEN_EARLY = "the output is used as scratch memory, or the result is written before the wait."
WRITTEN_TWICE = "every wait computes the average again, although the caller may have overwritten the output."
SHARED = "reductions in flight share their scratch memory."
UNAWAITED = "nothing waits for the all_to_all."
KEPT = "the handle keeps its scratch tensors after the wait. Set them to None."
KEPT_ELSEWHERE = "something other than the handle keeps the scratch tensors after the wait, even without the handle."
KEPT_BY_GROUP = "a bucket group keeps its scratch tensors between steps. Drop them when their collective has ended."
OWN_PART = "a rank keeps its own part in float32, and the others have it in bfloat16. Replicas drift apart."
LATE = "the reductions wait for finish_grad_sync, or for a later bucket."
ROUNDED_AGAIN = "the average is rounded to 16 bits once more before the optimizer gets it."
SAME_RESULT = "compress returns the same tensor in each call."
VALUES_CHANGED = "the error is added to values in place."
WIDE_WEIGHTS = "the weights are gathered in bfloat16. They travel in float32: only gradients are rounded."
GATHERED = "the gradients are gathered although gather_grads is False."
FLOAT16 = "gradients above 65504 are infinite in float16. The wrapper uses bfloat16."
WIDE_GATHER = "the averages are gathered in float32."
OTHER_GROUP = "the all_to_all is launched in another group. Pass it process_group."
ONE_EACH = "each group has one bucket. Pass buckets_per_group to CachedDDP's constructor."


def explain_error(output, values, index, world, is_elsewhere, wire=torch.bfloat16):
    """Return why the output of the rank at `index` of a group is not the average of the values. `world` counts all.

    `is_elsewhere` says whether the group has launched an all_to_all in another group.
    """
    if output.isnan().any():
        return "the output contains NaN, as the result of an all_to_all does until you wait on its handle."
    if is_elsewhere:
        return OTHER_GROUP
    size = len(values)
    parts = [value.chunk(size)[index] for value in values]
    sent = [part.to(wire) for part in parts]
    average = sum(part.float() for part in sent) / size
    total = sent[0]
    for part in sent[1:]:
        total = total + part
    early = sum((part / size).to(wire).float() for part in parts)
    scale = float(max(value.abs().max() for value in values))
    if not torch.equal(average, early) and torch.allclose(output, early, rtol=1e-6, atol=0):
        return "the values are divided before they travel, so the smallest ones become zero. Divide the sum."
    if wire != torch.bfloat16 and torch.equal(output, sum(part.bfloat16().float() for part in parts) / size):
        return "the values travel in bfloat16, because wire_dtype is ignored."
    is_rounded = torch.equal(output, output.to(wire).float()) and not torch.equal(average, average.to(wire).float())
    is_near = torch.allclose(output, average, rtol=0.02, atol=0.01 * scale)
    if size == 1 and torch.equal(output, sent[0].float()):
        return "a rank that is alone in its group rounds its values. Nothing travels, so copy them."
    if size > 1 and (is_rounded and is_near or torch.equal(output, total.float() / size)):
        return "the sum, or its average, is rounded to 16 bits. Add in float32, and round nothing after the wire."
    for cause, wrong in (
        (f"the sum of {size} ranks is not divided.", average * size),
        ("the rank still has its own values.", parts[index]),
        ("the average is added to what the output contained. Overwrite it.", average + MARK),
        *(
            (f"this is part {i} of the average, but the rank's part is {index}.", sum(others) / size)
            for i, others in enumerate(zip(*(value.chunk(size) for value in values), strict=True))
        ),
        ("the sum is divided by the size of the world instead of the group's.", average * size / world),
    ):
        fits, is_right = (torch.allclose(wrong, other, rtol=0.02, atol=0.01 * scale) for other in (output, average))
        if fits and not is_right:
            return cause
    return ""


def explain_calls(numel, launched):
    """Return why a reduction's launches are not one all_to_all in 16 bits."""
    ops = {launch.op for launch in launched}
    if ops & {"reduce_scatter", "all_reduce"}:
        return NO_ALL_TO_ALL
    if ops == {"all_gather"}:
        return "every rank receives all values of all ranks. An all-to-all brings each rank its part only."
    if [launch.nbytes for launch in launched] == [4 * numel]:
        return "the values travel in float32. Convert them to wire_dtype first."
    return ""


def explain_buckets(nbytes, launched):
    """Return why a step does not have one 16-bit all_to_all per bucket."""
    exchanges = [launch for launch in launched if launch.op == "all_to_all"]
    if "float16" in {launch.dtype for launch in exchanges}:
        return FLOAT16
    if not exchanges:
        return "the gradients are reduced as in module 7. Give the wrapper a group_class of its own." * (
            {launch.op for launch in launched} == {"reduce_scatter", "all_gather"}
        )
    if len(exchanges) < len(nbytes) and not Counter(x.nbytes for x in exchanges) - Counter(nbytes):
        return "not all buckets of a group are reduced."
    return ""


def explain_scratch(result, launched):
    """Return why scratch memory is alive after the wait."""
    if not all(x.waits for x in launched):
        return UNAWAITED
    return KEPT_ELSEWHERE if result["without"] else KEPT


def explain_gathers(nbytes, gathers):
    """Return why a step's all_gathers do not carry all averages in 16 bits."""
    if "float16" in {launch.dtype for launch in gathers}:
        return FLOAT16
    return WIDE_GATHER if sum(x.nbytes for x in gathers) == 2 * sum(nbytes) else ""


def explain_refusals(answers):
    """Return why the wrapper accepts or refuses the wrong dtypes."""
    if None in answers[:2]:
        return "the constructor does not look at the dtypes of all trainable parameters."
    if answers[2]:
        return "frozen parameters are refused, too, although they are never reduced."
    return ""


def explain_zero(launched):
    """Return why the training with ZeroOptimizer goes wrong, judging by the launches of a step."""
    if any(x.op == "all_gather" and x.dtype in ("bfloat16", "float16") and x.phase == "step" for x in launched):
        return WIDE_WEIGHTS
    if any(x.op == "all_gather" and x.phase != "step" for x in launched):
        return GATHERED
    return ""


def suspect_mistakes(case, results, nbytes):
    """Return the gradients that mistakes would produce on each rank. A step has one all_to_all for each of `nbytes`."""
    size = len(case.group)
    summed = {name: None if grad is None else grad * size for name, grad in case.gradients().items()}
    last = case.gradients(micro=slice(-1, None))
    hypotheses = {
        f"the gradients are {size}× too large, as if they were summed over {size} ranks but not divided.": [summed]
        * size
    }
    if why := explain_buckets(nbytes, launches(results.events[case.group[0]], 0)):
        hypotheses[why] = [results[rank]["gradients"][0] for rank in case.group]
    if len(case.batches[0][0]) > 1:
        hypotheses["the gradients accumulated inside no_sync are lost."] = [last] * size
    return hypotheses if size > 1 else {}


FEEDBACK = {
    "the error is computed, but not added to the next values.": lambda v, e: (v, v),
    "the error is subtracted instead of added.": lambda v, e: (v - e, v - e),
    "the new error does not contain the old one: compare the rounded numbers with values + error, not with values.": (
        lambda v, e: (v + e, v)
    ),
    "the old error is added to the new one, so it counts twice.": lambda v, e: (v + e, v + 2 * e),
}


def explain_feedback(steps, result):
    """Return which mistake produces these rounded values."""
    if all(torch.equal(error, 0 * error) for error in result["errors"]):
        return "error stays zero."
    shared = "all ErrorFeedback objects share one error. Set self.error, and not an attribute of the class."
    hypotheses = {cause: compress_alone(steps, compute) for cause, compute in FEEDBACK.items()}
    hypotheses[shared] = compress_alone(steps, lambda values, error: (values + error, values + error), num_objects=1)
    for cause, wrong in hypotheses.items():
        if all(is_same(rounded, other) for rounded, (other, _) in zip(result["rounded"], wrong, strict=True)):
            return cause
    return ""
