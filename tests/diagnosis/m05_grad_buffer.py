"""Likely causes of failures of module 5's checks."""

import contextlib

import torch

from brigade.checks.diagnose.evidence import find_leftover, join_names
from brigade.checks.verdict import CheckFailed
from brigade.events import launches

# plan_layout
ALIGNED = "elements, not bytes; a start is rounded up to a multiple of 64?"
LAYOUT = {  # of each field of a BufferLayout
    "bucket_of": "a bucket closes once it holds bucket_numel elements, measured from its start?",
    "param_ranges": "what follows a closed bucket starts after its padding?",
    "bucket_ranges": "the end of a bucket is a multiple of lcm(dp_size, 128), in elements?",
    "numel": "the last bucket's padding belongs to the buffer?",
}

COPIES = "gradients are copied into the buffer or out of it: p.grad must be the view before backward adds to it"
ALLOCATES = "a flat copy is made in every step?"
LEAKS = "the buffer was allocated without zeros, or something is written past a parameter's end?"
IN_READY_ORDER = "a bucket is launched as soon as it is complete, before those in front of it?"
NARROWER = "a grad_dtype that is not wider than the parameters' dtype is ignored: it is used for these parameters too"


def wrong_layout(buffers, names):
    """Why a buffer is not laid out as the rule has it, with the parameters `names` in their order."""
    if len(buffers) == 1 and list(buffers[0]["places"]) == names:
        return "plan_layout does not follow its rule (see test_layout_rule), or is given other numbers?"
    return "parameters are not laid out from the last to the first?"


def wrong_place(results, buffers, names, name):
    """Why the gradient of a parameter is elsewhere than the layout says, in these buffers of one step."""
    return no_view(results) if buffers[0]["places"].get(name) is None else wrong_layout(buffers, names)


def no_view(results):
    """Which gradient is not a view of its buffer after a finish, and why, or nothing. `results` are m05's `train`."""
    for rank, result in enumerate(results):
        for step, buffers in enumerate(result["buffers"]):
            for buffer, before in zip(buffers, result["places_before_finish"][step]):
                lost = [name for name, place in buffer["places"].items() if place is None]
                others = [name for name in lost if name not in buffer["absent"]]
                where = f"after the finish, on rank {rank} in step {step}"
                if others:
                    what = f"the gradient of {join_names(others)} is no view {where}"
                    if all(before.get(name) is not None for name in others):
                        return what + ", and was one before: finish_grad_sync has to change it in place?"
                    return what + ": zero_grad took the view away, and it was not put back, or a copy was?"
                if lost:
                    return (
                        f"the gradient of {join_names(lost)} is None {where}: one that never came has to be taken, too?"
                    )
    return ""


def wrong_launches(buffers, names, layout, events, step):
    """Why a step's launches are not one for each bucket of the layout; `buffers` are those of this step."""
    if buffers[0]["numel"] != layout["numel"]:
        return wrong_layout(buffers, names)
    if len(launches(events, step)) == len(layout["bucket_ranges"]):
        return "the padding of a bucket is reduced with it?"
    return find_leftover(events)


def main_grads(batches, step, results):
    """What mistakes would leave in main_grad after a step; `batches[rank][step][micro][i]` are the gradients."""
    world, count = len(batches), len(batches[0][0][0])

    def averaged(accumulated):
        """By name, the average over the ranks of what a rank accumulates: a function of its micro-batches and i."""
        sums = {i: [accumulated(own[step], i) for own in batches] for i in range(count)}
        return [{f"main_grad of parameter {i}": sum(sums[i]) / world for i in sums}] * world

    before = results[0]["steps"][0]["main_grad"]
    kept = averaged(lambda micro, i: sum(x[i].float() for x in micro) + (before[str(i)] if step else 0))
    hypotheses = {
        "the micro-batches accumulated in bf16, where 1 + 0.002 is 1?": averaged(
            lambda micro, i: partial_sums(micro, i)[-1]
        ),
        "main_grad still holds the step before: zero_grad does not reach it?": kept,
        "p.grad goes on growing, and all of it is added each time: drop it when it has been added?": averaged(
            lambda micro, i: sum(partial_sums(micro, i))
        ),
        "only the last micro-batch is in it: copied, where it has to be added?": averaged(
            lambda micro, i: micro[-1][i].float()
        ),
    }
    if step == 0:
        hypotheses["each rank has its own sum: is main_grad a view of the buffer?"] = [
            {f"main_grad of parameter {i}": sum(x[i].float() for x in own[step]) for i in range(count)}
            for own in batches
        ]
    return hypotheses


def partial_sums(micro, i):
    """The sums of a rank's first micro-batches, accumulated in their own dtype, for 1, 2, ... of them."""
    total, sums = torch.zeros_like(micro[0][i]), []
    for gradients in micro:
        total = total + gradients[i]
        sums.append(total.float())
    return sums


@contextlib.contextmanager
def narrower_dtype_suspected(wide):
    """Where a gradient has the wrong dtype, and some parameters are as wide as grad_dtype, that is ignored for them."""
    try:
        yield
    except CheckFailed as failed:
        if wide and failed.verdict.hypothesis == "assigned gradient":
            raise failed.with_cause(NARROWER) from None
        raise
