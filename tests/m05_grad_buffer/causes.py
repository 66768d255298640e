"""Likely causes of failures of module 5's checks."""

import math
import operator

import torch

from brigade.course.checks.diagnose.evidence import find_leftover
from brigade.course.checks.diagnose.exceptions import Symptom
from brigade.ranks.verdict import join_names
from m02_flat_ddp.causes import OTHER_DTYPE

# plan_layout
SEE_LAYOUT = "plan_layout does not follow its rule (see check 5.1), or it is called with the wrong arguments."
ALIGNED = "the start of a parameter is not rounded up to a multiple of 64 elements. Count elements, not bytes."
RULE = (
    "A bucket closes once it has bucket_numel elements or more, counted from its start to the end of its last "
    "parameter, including gaps."
)
CLOSED_ELSEWHERE = f"a bucket closes at the wrong parameter. {RULE}"
NO_MAIN_GRAD = "grad_dtype is not used, or attach_views does not set parameter.main_grad to the view."
NO_ROUNDED_GRAD = "finish_accumulation does not store the rounded main_grad in p.grad."
COPIED_GRADIENTS = (
    "gradients are copied into the buffer or out of it. p.grad must already be the view when backward adds to it."
)
COPIED_BUCKETS = "whole buckets are copied. The collective must work on a slice of the buffer, in place."
ALLOCATES = "every step allocates new memory, for example for a flat copy of the gradients."
LEAKS = "the buffer is not allocated with zeros, or some code writes past the end of a parameter."
SHARED_BUFFER = "the buffer and the parameter have different dtypes. Parameters of each dtype need their own buffer."
NARROWER = "grad_dtype is used for these parameters, although it is not wider than their dtype. Ignore it in this case."
MAIN_GRAD_AS_GRAD = (
    "main_grad and its parameter have different dtypes, so main_grad cannot be p.grad. Keep the view in p.main_grad. "
    "Only finish_accumulation sets p.grad, to a rounded copy."
)
LOST_VIEW = "p.grad is not its view. The wrapper did not restore the view after zero_grad, or it replaced it later."
SYMPTOMS = [  # no scenario clears a gradient between backward and the finish
    Symptom("assigned gradient", "RuntimeError", OTHER_DTYPE, MAIN_GRAD_AS_GRAD, file="main_grad"),
    Symptom("lost view", "RuntimeError", "^a gradient was cleared", LOST_VIEW, file="def require_same_gradients"),
]


def explain_place(name, when):
    """Return why p.main_grad or p.data is not at its position in a GradBuffer."""
    if when == "after reallocate()":
        return f"attach_views does not set parameter.{name} again when reallocate calls it."
    return f"attach_views does not set parameter.{name} to the parameter's own range of the flat tensor."


def explain_values(name, value, expected):
    """Return why p.main_grad, p.grad or p.data has other values or another shape than before attach_views."""
    if value.shape != expected.shape:
        return f"attach_views does not give the view the shape of the parameter before it sets parameter.{name}."
    if value.dtype != expected.dtype:
        return f"the flat tensor that contains parameter.{name} has another dtype than it should have."
    if name == "main_grad":
        return "attach_views writes to main_grad, or reallocate does not copy the buffer."
    return f"attach_views does not copy parameter.{name} into the buffer before it sets parameter.{name} to the view."


def explain_bucket_of(answer, layout, arguments, keywords):
    """Return why a bucket closes at the wrong parameter, although all parameters have a bucket."""
    bucket_of = answer["bucket_of"]
    count = min(len(bucket_of), len(layout["bucket_of"]))
    wrong = next((i for i in range(count) if bucket_of[i] != layout["bucket_of"][i]), None)
    if wrong is None:
        return CLOSED_ELSEWHERE
    if bucket_of[wrong] > layout["bucket_of"][wrong]:
        return f"a bucket closes before the parameter that fills it. It must contain that parameter. {RULE}"
    bucket = layout["bucket_of"][wrong - 1]  # the bucket that should have closed
    start = layout["bucket_ranges"][bucket][0]
    if layout["param_ranges"][wrong - 1][1] - start == arguments[1]:
        return "a bucket that has exactly bucket_numel elements does not close. Compare with >=, not with >."
    return f"a bucket closes too late. {RULE}"


def explain_param_ranges(answer, layout, arguments, keywords):
    """Return why parameters that start at multiples of 64 have the wrong ranges."""
    count = min(len(answer["param_ranges"]), len(layout["param_ranges"]))
    pairs = list(zip(answer["param_ranges"][:count], layout["param_ranges"][:count], strict=True))
    if any(got[1] - got[0] != right[1] - right[0] for got, right in pairs):
        return "the range of a parameter does not contain exactly its own elements. Padding belongs to no parameter."
    wrong = next((i for i, (got, right) in enumerate(pairs) if got != right), 0)
    if wrong and layout["bucket_of"][wrong] != layout["bucket_of"][wrong - 1]:
        ends = [end for _, end in answer["bucket_ranges"]]
        if answer["param_ranges"][wrong][0] in ends:
            return explain_bucket_ranges(answer, layout, arguments, keywords)
        return "the first parameter after a closed bucket does not start where that bucket's padding ends."
    return "inside a bucket, a parameter does not start at the first multiple of 64 after the previous parameter."


def explain_bucket_ranges(answer, layout, arguments, keywords):
    """Return why buckets have the wrong ranges, although each closes at the right parameter."""
    numbers = f"lcm(dp_size, 128{', 2^16' * bool(keywords)})"
    multiple = math.lcm(arguments[2], 128, 2**16 if keywords else 1)
    if len(answer["bucket_ranges"]) < len(layout["bucket_ranges"]):
        return "the last bucket is missing. It must be closed even if it is not full."
    if any(end % multiple for _, end in answer["bucket_ranges"]):
        return f"the end of a bucket is not padded to a multiple of {numbers} elements."
    starts, right = ([start for start, _ in ranges] for ranges in (answer["bucket_ranges"], layout["bucket_ranges"]))
    if starts != right:
        return "a bucket does not start where the padding of the previous bucket ends."
    return f"a bucket has more padding than it needs to reach the next multiple of {numbers} elements."


LAYOUT = {  # what explains a wrong field of a planned layout if the fields before it are right
    "bucket_of": explain_bucket_of,
    "param_ranges": explain_param_ranges,
    "bucket_ranges": explain_bucket_ranges,
    "numel": lambda *_, **__: "numel must be the end of the last bucket, including its padding.",
}


def explain_buffers(buffers, names):
    """Return why buffers are not laid out as the rule says: one buffer for the parameters `names`, in this order."""
    if len(buffers) != 1:
        return "there must be one buffer per dtype, and all parameters of this model have the same dtype."
    order = list(buffers[0]["offsets"])
    if order == names:
        return SEE_LAYOUT
    if order == names[::-1]:
        return "parameters are laid out from the first to the last. The list must be reversed."
    if set(order) != set(names):
        return "the buffer does not contain exactly the trainable parameters."
    return "parameters are not laid out from the last to the first."


def explain_copies(result):
    """Return what a step copies, from what the scenario `measure_steady_step` returns."""
    has_more = map(operator.gt, result["ddp"]["num_copies"], result["bare"]["num_copies"])
    return COPIED_GRADIENTS if any(has_more) else COPIED_BUCKETS


def explain_offset(results, buffers, names, name):
    """Return why a gradient is not where the layout says; `buffers` are those of one step of one rank."""
    is_view = isinstance(buffers[0]["offsets"].get(name), int)
    return explain_buffers(buffers, names) if is_view else explain_lost_view(results)


def explain_lost_view(results):
    """Return which gradient is not a view of its buffer after finish_grad_sync, and why; "" if all are views.

    `results` are those of the scenario `train`.
    """
    for rank, result in enumerate(results):
        for step, buffers in enumerate(result["buffers"]):
            where = f"after finish_grad_sync on rank {rank} in step {step}, .grad is"
            for buffer in buffers:
                lost = {name: offset for name, offset in buffer["offsets"].items() if isinstance(offset, str)}
                others = [name for name, offset in lost.items() if offset != "absent"]
                what = f"{where} not a view of the buffer for {join_names(others)}"
                if others and all(lost[name] == "replaced" for name in others):
                    return f"{what}, although it was a view before. finish_grad_sync must change it in place."
                if others:
                    return f"{what}. The wrapper did not restore the view after zero_grad, or it attached a copy."
                if lost:
                    what = "finish_grad_sync must also attach the views of gradients that never became ready."
                    return f"{where} None for {join_names(lost)}. {what}"
    return ""


def explain_launches(buffers, names, layout, launched):
    """Return why a step's launches are not one all_reduce per bucket; `buffers` are those of this step."""
    offsets = list(buffers[0]["offsets"].values()) if buffers else []
    starts = [start for start, _ in layout["param_ranges"]]
    is_placed = len(offsets) == len(starts) and all(
        isinstance(a, str) or a == b for a, b in zip(offsets, starts, strict=True)
    )
    if len(buffers) != 1 or buffers[0]["numel"] != layout["numel"] or not is_placed:
        return explain_buffers(buffers, names)
    expected = [end - start for start, end in layout["bucket_ranges"]]
    if others := sorted({launch.op for launch in launched} - {"all_reduce"}):
        return f"the buckets are not all-reduced: the step launches {join_names(others)}."
    if cause := find_leftover(launched.step.events, launched.step.number):
        return cause
    numels = [launch.numel for launch in launched]
    if sorted(numels) == sorted(expected):
        return "the buckets are not launched in the order of the buffer."
    if len(numels) == len(expected) and all(numel <= most for numel, most in zip(numels, expected, strict=True)):
        return "the padding of a bucket is not reduced with it."
    if len(expected) > 1 and layout["numel"] in numels:
        return "a launch contains the whole buffer instead of the slice of one bucket."
    if len(numels) > len(expected) and sum(numels) <= sum(expected):
        return "a bucket is launched in several pieces instead of as one slice of the buffer."
    return ""


def explain_early_launch(ready_at, launch, groups, unit):
    """Return why a `unit`, a group or a bucket, is launched early, from the positions of ready gradients."""
    latest = max((at for at in ready_at.values() if at <= launch.place), default=-1)
    complete = {
        number: max(ready_at[name] for name in names)  # when its last gradient was ready
        for number, (_, numel, names) in enumerate(groups)
        if numel == launch.numel and all(ready_at[name] <= launch.place for name in names)
    }
    if complete:
        carried = next((f"{unit} {number}" for number, at in complete.items() if at == latest), f"a {unit}")
        return f"{carried} is launched as soon as it is complete, not in the order of the buckets."
    return f"a {unit} is launched before it is complete. Count the ready gradients of all its parameters."


def suspect_main_grads(batches, step, results):
    """Return what mistakes would leave in main_grad after a step; gradients are `batches[rank][step][micro][i]`."""
    world, count = len(batches), len(batches[0][0][0])

    def average(accumulate):
        """Return, by name, the average over the ranks of accumulate(micro_batches, i)."""
        sums = {i: [accumulate(own[step], i) for own in batches] for i in range(count)}
        return [{f"main_grad of parameter {i}": sum(sums[i]) / world for i in sums}] * world

    before = results[0]["steps"][0]["main_grad"]
    hypotheses = {
        "the micro-batches are accumulated in bf16, in which 1 + 0.002 is rounded to 1. Add each micro-batch to "
        "main_grad in fp32, also inside no_sync.": average(lambda micro, i: add_up(micro, i)[-1]),
        "main_grad of a parameter that the step does not use still contains the gradients of the previous step. None "
        "counts as zeros.": average(
            lambda micro, i: sum(x[i].float() for x in micro) if micro[0][i].any() else before[str(i)]
        ),
        "main_grad still contains the gradients of the previous step. An optimizer's zero_grad does not clear it, "
        "so finish_accumulation must make it start from zero.": average(
            lambda micro, i: sum(x[i].float() for x in micro) + (before[str(i)] if step else 0)
        ),
        "p.grad keeps growing, and the whole sum is added to main_grad each time. Set p.grad to None after you add "
        "it.": average(lambda micro, i: sum(add_up(micro, i)) + add_up(micro, i)[-1]),  # launch adds it once more
        "an evaluation starts main_grad from zero again. Only the first backward after a finish may do so.": average(
            lambda micro, i: sum(x[i].float() for x in micro[1:])
        ),
        "main_grad contains only the last micro-batch. Gradients are copied into main_grad instead of added, or a "
        "forward starts it from zero again. Only the first backward after a finish may do so.": average(
            lambda micro, i: micro[-1][i].float()
        ),
    }
    if step == 0:
        hypotheses["each rank has its own sum: main_grad is not a view of the buffer that is reduced."] = [
            {f"main_grad of parameter {i}": sum(x[i].float() for x in own[step]) for i in range(count)}
            for own in batches
        ]
    return hypotheses


def add_up(micro, i):
    """Return the sums of a rank's first micro-batches, accumulated in their own dtype, for 1, 2, ... of them."""
    total, sums = torch.zeros_like(micro[0][i]), []
    for gradients in micro:
        total = total + gradients[i]
        sums.append(total.float())
    return sums


def find_buffer_dtype(wide, failed):
    """Explain a gradient of the wrong dtype: grad_dtype must be ignored for parameters of the dtypes in `wide`."""
    if failed.verdict.hypothesis != "assigned gradient":
        return ""
    if wide and "'BFloat16'" in failed.verdict.message:
        return MAIN_GRAD_AS_GRAD
    return NARROWER if wide else SHARED_BUFFER
