"""Likely causes when a check of module 2 fails."""

from collections import Counter

import torch

from brigade.course.checks.diagnose.exceptions import Symptom
from brigade.ranks.events import launches
from brigade.ranks.verdict import join_names
from m01_naive_ddp.causes import ASSIGNED

COPY = (
    "the result is written into a copy of p.grad: contiguous() and reshape() copy a gradient that is not contiguous. "
    "Use p.grad.copy_(piece.view(p.shape))."
)
IN_MEMORY_ORDER = (
    "gradients are flattened in memory order, but the pieces are copied back in row-major order. reshape(-1) flattens "
    "in row-major order."
)
TO_MEMORY_ORDER = (
    "the pieces are copied back in memory order, but gradients are flattened in row-major order. Use "
    "p.grad.copy_(piece.view(p.shape))."
)
LEFT_OUT = "a rank leaves gradients that are None out of its flat tensor. It must include them as zeros."
REPLACED = "p.grad is replaced by another tensor. Copy the average into the existing p.grad instead."
OTHER_DTYPE = f"({ASSIGNED}).*(dtype|different type)"
SYMPTOMS = [
    Symptom("assigned gradient", "RuntimeError", f"^(?!.*grad_dtype 'Double').*{OTHER_DTYPE}",  # nothing is wider
            "p.grad must have its parameter's dtype. torch.cat promotes several dtypes to the widest one. Use one flat "
            "tensor per dtype, and copy the pieces into p.grad.", file=r"torch\.cat\("),
    Symptom("no view", "RuntimeError", "^view size is not compatible", "view(-1) needs row-major memory, which the "
            "gradient of a transposed weight does not have. Read with reshape(-1), and write with p.grad.copy_(...)."),
]  # fmt: skip


def find_left_out_gradients(failed):
    """Explain a mismatch between the single launches of ranks that use different layers."""
    counts = {len(launches(events, 0)) for events in failed.events}
    return LEFT_OUT if failed.verdict.ending == "mismatch" and counts == {1} else ""


def find_padding(case, failed):
    """Explain an error in splitting a flat tensor by a launch that is longer than the gradients."""
    numel = sum(p.numel() for p in case.parameters().values() if p.requires_grad)
    longest = max((launch.numel for events in failed.events for launch in launches(events, 0)), default=0)
    if longest <= numel or "split_with_sizes" not in failed.verdict.message:
        return ""
    return f"the flat tensor has {longest} elements, but the gradients have {numel}. Do not pad it."


def explain_launches(case, launched):
    """Explain why a step does not launch one all_reduce per dtype."""
    trainable = [p for p in case.parameters().values() if p.requires_grad]
    kinds = [(launch.dtype, launch.numel) for launch in launched]
    dtypes = {p.dtype for p in trainable}
    if len(kinds) == 2 * len(dtypes) == 2 * len(set(kinds)):
        return "the same flat tensor is all-reduced twice."
    if len(launched) > 3:
        return "every gradient still has its own all_reduce."
    if len(dtypes) > 1 and [launch.numel for launch in launched] == [sum(p.numel() for p in trainable)]:
        return "gradients get one dtype, as torch.cat casts tensors of several dtypes. Use one flat tensor per dtype."
    carried = {launch.dtype for launch in launched}
    lost = sorted({str(dtype).removeprefix("torch.") for dtype in dtypes} - carried)
    if len(carried) == len(launched) == len(dtypes) - len(lost) and lost:
        return f"the gradients of some dtypes are not reduced: there is no all_reduce of {join_names(lost)}."
    if len(launched) == len(dtypes) > len({launch.dtype for launch in launched}):
        return "the flat tensors do not have the dtypes of their gradients: gradients are cast to another dtype."
    return ""


def explain_copies(case):
    """Return the gradients if only contiguous ones receive the average, or if memory order and shape are mixed up."""
    average, is_copied = case.gradients(), {name: not p.is_contiguous() for name, p in case.parameters().items()}
    local = [case.gradients([rank]) for rank in case.group]
    parameters, size = case.parameters(), len(case.group)
    as_flattened, as_returned = (
        {name: reorder(gradient, parameters[name].stride(), is_inverse) for name, gradient in average.items()}
        for is_inverse in (False, True)
    )
    return {
        COPY: [{name: own[name] if is_copied[name] else average[name] for name in average} for own in local],
        IN_MEMORY_ORDER: [as_flattened] * size,
        TO_MEMORY_ORDER: [as_returned] * size,
    }


def reorder(gradient, stride, is_inverse):
    """Return a gradient whose entries were read, or written (is_inverse), in the order of memory with these strides."""
    in_memory = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype)
    in_order = in_memory.as_strided((gradient.numel(),), (1,))
    if is_inverse:
        in_order.copy_(gradient.flatten())
        return in_memory.clone()
    in_memory.copy_(gradient)
    return in_order.view(gradient.shape).clone()


def explain_split(case, launched):
    """Explain why a step has several launches of one dtype, if not every parameter is reduced by itself."""
    split = [dtype for dtype, count in Counter(launch.dtype for launch in launched).items() if count > 1]
    count = sum(parameter.requires_grad for parameter in case.parameters().values())
    cause = f"gradients of {join_names(split)} are in several flat tensors. All gradients of a dtype share one."
    return cause if split and len(launched) < count else ""


def explain_volume(case, launched):
    """Explain why a step does not send each trainable gradient once."""
    every = case.parameters().values()
    trainable = [p for p in every if p.requires_grad]
    numel, expected = sum(launch.numel for launch in launched), sum(p.numel() for p in trainable)
    if numel == 2 * expected:
        return "every gradient is all-reduced twice."
    if numel > expected:
        if len(trainable) < len(every) and numel == sum(p.numel() for p in every):
            return "the gradients of frozen parameters are all-reduced too."
        return "a gradient is all-reduced twice, for example that of a tied parameter, or padding is all-reduced."
    if numel < expected:
        return f"some gradients are not all-reduced: {expected - numel} of {expected} elements are missing."
    return "gradients are cast to another dtype."
