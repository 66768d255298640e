"""The buckets of modules 5 to 10 in their checks."""

import math
from functools import partial

import torch

from brigade.course.checks import expectations
from brigade.course.checks.diagnose.evidence import find_unreduced
from brigade.ranks.claims import At, each_step, in_phase
from m05_grad_buffer import causes, scenario
from m05_grad_buffer.expected import compute_layout

BUCKET_NUMEL = 150


def list_groups(parameters, size, buckets_per_group, bucket_numel=BUCKET_NUMEL):
    """Return the groups that the rules of modules 5 and 6 give: (dtype, elements, names of parameters), by dtype."""
    trainable = [(name, p) for name, p in reversed(parameters.items()) if p.requires_grad]
    groups = []
    for dtype in dict.fromkeys(p.dtype for _, p in trainable):
        named = [(name, p.numel()) for name, p in trainable if p.dtype == dtype]
        layout = compute_layout([numel for _, numel in named], bucket_numel, size)
        ranges = layout["bucket_ranges"]
        length = buckets_per_group or len(ranges)
        for first in range(0, len(ranges), length):
            names = [
                name for (name, _), b in zip(named, layout["bucket_of"], strict=True) if first <= b < first + length
            ]
            groups.append((dtype, sum(end - start for start, end in ranges[first : first + length]), names))
    return groups


def compute_padded_numel(params, world):
    """Return the elements of all buckets of a buffer of these parameters, padding included."""
    numels = [p.numel() for p in reversed(list(params)) if p.requires_grad]
    return compute_layout(numels, BUCKET_NUMEL, world)["numel"]


def require_halves(results, case, steps=1):
    """Require reduce_scatters, launched asynchronously while backward runs, and all_gathers."""

    def accepts(launched):
        return {launch.op for launch in launched} == {"reduce_scatter", "all_gather"} and all(
            expectations.overlaps(launch) for launch in launched if launch.op == "reduce_scatter"
        )

    kind = "asynchronous reduce_scatters, launched during backward, and all_gathers"
    expectations.require_launches(results.events, case.group, kind, accepts, steps)


def expect_zeroed(submission, job, variants):
    """Expect the weights of one process after three steps with unused parameters and some forms of zero_grad.

    A variant is a form, as for the scenario's `zero_gradients`, and whether it comes after forward.
    """
    [world] = submission.worlds(2)
    options = {"steps": 3, "dtype": torch.float64, "branches": [1, -1][:world]}
    cases = [submission.case("Branches", world, **options) for _ in variants]
    for case in cases:
        case.batches[0][0][0]["x"].zero_()  # on rank 0, the gradient of the first weight is zero, as its view is
    jobs = [case.make_jobs(zero=form, late=late, **job) for case, (form, late) in zip(cases, variants, strict=True)]
    for (form, late), case, results in zip(variants, cases, submission.run_each(scenario.train, jobs), strict=True):
        (owner, value), when = form.split(", to "), "between forward and backward" if late else "before forward"
        zero = f"{owner}.zero_grad(set_to_none={value == 'None'}) {when}"
        is_known = job["arguments"].get("bucket_numel") == BUCKET_NUMEL
        padded = compute_padded_numel(case.parameters().values(), world) if is_known else 0
        lost = partial(find_unreduced, results.events, case, padded)
        with expectations.explain_failures(results.events, lost, partial(causes.explain_lost_view, results)):
            what = f"three steps with {zero} give the same weights as training in one process"
            expectations.expect_trained(what, [result["weights"] for result in results], case)
        for rank, result in enumerate(results):
            for step, buffers in enumerate(result["buffers"]):
                expect_members(At(rank, step), buffers, case)


def expect_members(at, buffers, case):
    """Expect each trainable parameter in one of the buffers that module 5's scenario describes."""
    trainable = sorted(name for name, parameter in case.parameters().items() if parameter.requires_grad)
    members = sorted(name for buffer in buffers for name in buffer["offsets"])
    is_filled = members == trainable and all(buffer["offsets"] for buffer in buffers)
    got = f"the grad buffers have the gradients of {expectations.join_names(members)}"
    at.claim("each trainable parameter has its gradient in one grad buffer, and no buffer is empty", is_filled, got)


def expect_group_overlap(launched, groups, setting, why_late, gathered=True):
    """Expect the reduce-scatters among the launches of a step to overlap with backward: see `list_groups`."""
    scatters, names = launched.where(lambda one: one.op == "reduce_scatter"), [names for *_, names in groups]
    options = {"unit": "group", "gathered": gathered, "why_late": why_late, "setting": setting}
    with expectations.replace_cause(
        lambda failed: expectations.find_leftover(launched.step.events, launched.step.number)
    ):
        expectations.expect_overlap(scatters, names, why_blocked=find_gather_at_once, **options)


def find_gather_at_once(scatters):
    """Describe an all-gather that backward launches in the hook that launches its group's reduce-scatter."""
    launched = scatters.step.launches().where(in_phase("backward"))
    ready = [place for place, _ in scatters.step.ready]
    for launch in launched:
        later = [*ready, *(x.place for x in launched if x.op == "reduce_scatter")]
        after = min((place for place in later if place > launch.place), default=math.inf)
        waits = [place for place, phase in zip(launch.waits, launch.wait_phases, strict=True) if phase == "backward"]
        gathers = [x.place for x in launched if x.op == "all_gather" and x.place < after]
        if launch.op == "reduce_scatter" and any(wait < gather for wait in waits if wait < after for gather in gathers):
            return (
                "the all-gather of a group follows its reduce-scatter at once, so the hook waits for the "
                "reduce-scatter. Wait until half of the next group's gradients are ready."
            )
    return ""


def judge_order(buckets_per_group, op, unit, records, case):
    """Expect each launch of `op` in step 0 when all gradients of its `unit`, a group or a bucket, are ready."""
    for step in each_step(records, 1, case.group):
        expect_complete(step, list_groups(case.parameters(), len(case.group), buckets_per_group), op, unit)


def expect_complete(step, groups, op, unit):
    """Expect launch i of `op` in a step when all gradients of `groups[i]` are ready. The rank uses all parameters."""
    ready_at = {name: math.inf for _, _, names in groups for name in names}  # the record may end before it is ready
    ready_at |= {name: place for place, name in step.ready}
    launched = step.launches(op)[: len(groups)]  # a run that fails may have fewer
    for number, (launch, (_, _, names)) in enumerate(zip(launched, groups[: len(launched)], strict=True)):
        missing = [name for name in names if ready_at[name] > launch.place]
        step.claim(
            f"{unit}s are launched in order, each when all its gradients are ready",
            not missing,
            f"launch {number} ({unit} {number}) came before these gradients were ready: "
            + expectations.join_names(missing),
            partial(causes.explain_early_launch, ready_at, launch, groups, unit),
        )
