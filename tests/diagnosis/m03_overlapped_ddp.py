"""Likely causes of failures of module 3's checks."""

from brigade.events import launches

IN_THE_FINISH = "the launch belongs into a hook on the parameter, not into finish_grad_sync?"
BLOCKING = "async_op=True, and wait in finish_grad_sync?"
COPIED_PARAMETERS = "forward uses copies of the parameters, which have gradients of their own"
TENSOR_HOOK = (
    "a tensor's hook (register_hook) gets the incoming gradient, which does not have what earlier backward passes "
    "accumulated; register_post_accumulate_grad_hook runs when it is added"
)
COLLECTED = "launches are collected, and made only at the end of backward?"
LAST_HANDLE = "waiting on the last handle does not mean that the others are complete"
NEVER_CLEARED = "the list of handles is never cleared?"
RACED = "the gradient was divided or overwritten while its all_reduce was under way?"


def lost_micro_batches(case):
    """What gradients are if only the last of 3 micro-batches counts, or only that one is averaged."""
    last = case.gradients(micro=slice(2, 3))
    local = [case.gradients([rank], slice(0, 2)) for rank in case.group]
    return {
        "only the last micro-batch counts: what no_sync accumulated is lost?": [last] * len(case.group),
        "only the last micro-batch was averaged: the hook reduces the incoming gradient, not the accumulated one?": [
            {name: own[name] + last[name] for name in last} for own in local
        ],
    }


def not_silent(nested):
    """Why launches are made inside no_sync; `nested` of them inside the inner of two blocks."""
    if nested:
        return "is the flag of no_sync asked before anything is launched?"
    return "the inner no_sync switches synchronisation on when it ends, instead of restoring what was?"


def not_restored(events):
    """Why the backward after an exception inside no_sync does not launch."""
    if launches(events, phase="finish"):
        return IN_THE_FINISH
    return "no_sync restores its state only when the block ends normally: try ... finally?"
