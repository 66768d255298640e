"""Likely causes when a check of module 3 fails."""

from brigade.course.checks.diagnose.evidence import find_repeated_reduction
from brigade.ranks.events import launches

IN_THE_FINISH = "finish_grad_sync launches the all-reduce. A hook on the parameter must launch it."
BLOCKING = "a launch blocks backward. Use async_op=True, and wait in finish_grad_sync."
WAITS = "backward waits on the handle of a launch. Only finish_grad_sync must wait."
COPIED_PARAMETERS = "forward uses copies of the parameters, and the gradients are accumulated into the copies."
WEIGHT = "the submission all-reduces the parameter itself. It must all-reduce the gradient, p.grad."
TENSOR_HOOK = (
    "a tensor hook (register_hook) receives the incoming gradient, not the gradient that earlier backward passes "
    "accumulated. Use register_post_accumulate_grad_hook, which runs after accumulation."
)
LAST_HANDLE = "finish_grad_sync does not wait on every handle. Waiting on the last handle does not complete the others."
SHARED_FLAG = "no_sync switches a flag that all wrappers share, in the class or in a global variable. Set it on self."
SHARED_HANDLES = (
    "the handles are kept where all wrappers share them, in the class or in a global variable, so the finish of one "
    "wrapper removes the handles of another. Keep them in self."
)
SWALLOWED = "no_sync ends the exception, with an `except` or with a `return` in `finally`. Use only try ... finally."
NEVER_CLEARED = "the list of handles is never cleared."


def lost_micro_batches(case):
    """Return the gradients if only the last of 3 micro-batches counts, or if only that one is averaged."""
    last = case.gradients(micro=slice(2, 3))
    local = [case.gradients([rank], slice(0, 2)) for rank in case.group]
    return {
        "only the last micro-batch counts: the gradients accumulated inside no_sync are lost.": [last]
        * len(case.group),
        "only the last micro-batch is averaged: the hook reduces the incoming gradient, not the accumulated one.": [
            {name: own[name] + last[name] for name in last} for own in local
        ],
    }


def explain_launches(numels, launched):
    """Explain why a step does not launch one all_reduce for each parameter, of `numels` elements."""
    if not launched:
        return "no all_reduce is launched. The hook is not registered, or it launches nothing."
    if sorted(launch.numel for launch in launched) == sorted(numels * 2):
        return "every gradient is all-reduced twice: the hook is registered twice, or finish_grad_sync launches again."
    if len(launched) == 1:
        return "all gradients are in one launch, as in module 2."
    return ""


def explain_late_launch(late):
    """Explain why a gradient is launched only when several others are ready."""
    are_all_ready = all(place < late[0].place for place, _ in late.step.ready)
    until = "the end of backward" if are_all_ready else "several more gradients are ready"
    return f"the wrapper delays its launches until {until}. Each hook must launch at once."


def explain_blocking(blocking):
    """Explain why backward waits for these launches."""
    return BLOCKING if any(launch.sync for launch in blocking) else WAITS


def explain_race(numel, raced):
    """Explain why a gradient changes between its launch and its wait. All gradients have `numel` elements in total."""
    divided = "the gradient is divided or overwritten while its all_reduce is running."
    return find_repeated_reduction(raced.step.events, raced.step.number, numel) or divided


def explain_silence(launched):
    """Explain why the backward after an exception inside no_sync does not launch."""
    events = launched.step.events
    if mistake := find_repeated_reduction(events, None):
        return mistake
    second = next(place for place, event in enumerate(events) if event.get("part") == "other")  # a second wrapper
    is_hooked = any(launch.place > second for launch in launches(events, phase="backward"))
    if launches(events, phase="finish") and not is_hooked:
        return IN_THE_FINISH
    return (
        "no_sync does not restore its state: an exception skips this, or an inner block has overwritten the saved "
        "state. Save it in a local variable, and use try ... finally."
    )
