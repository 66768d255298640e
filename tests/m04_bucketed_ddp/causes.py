"""Likely causes when a check of module 4 fails."""

from collections import Counter

from brigade.course.checks.diagnose.evidence import find_leftover
from brigade.course.checks.diagnose.exceptions import Symptom, get_events
from brigade.ranks.events import launches
from helpers import training
from helpers.late_launches import explain_late_launches
from m04_bucketed_ddp import scenario

# plan_buckets
NOT_REVERSED = "the parameters are not reversed. Reverse the parameters, not the list of buckets."
SEE_RULE = "the wrapper uses the buckets of plan_buckets, and plan_buckets does not follow the rule. See check 4.1."
CAST = "gradients are cast to another dtype. Each bucket must be all-reduced in the dtype of its gradients."
FROM_MIB = "Launch the buckets of plan_buckets, and convert bucket_cap_mb from MiB to bytes: 1 MiB has 2**20 bytes."
MIXED_DTYPES = "a change of dtype does not close the bucket."
CLOSED_TOO_LATE = {1: 338, 10: 242, 100: 65}  # buckets of the XL model, by cap in MiB, if they close only above the cap

RESET = " For example, LaunchQueue.reset() must reset both num_pending and next_to_launch."
NOT_LAUNCHED = (
    "there is no handle, because nothing was launched for it. Before it waits, finish_grad_sync must launch the "
    "buckets that never became complete."
)
READY_ORDER = (
    "a complete bucket is launched before an earlier bucket. It must wait until all earlier buckets are launched."
)
FILLED_IN_READY_ORDER = (
    "a bucket contains gradients in the order in which they become ready, which differs between ranks. Launch the "
    "buckets of plan_buckets, which are the same on every rank."
)


def explain_count(cap, expected, count):
    """Explain why the XL model has `count` buckets at a cap in MiB."""
    if count == CLOSED_TOO_LATE.get(cap):
        return "a bucket closes after the parameter that exceeds the cap. It must close before that parameter."
    if count > expected:
        return "a bucket closes too early. All have the same cap, also the first one, for which torch DDP has 1 MiB."
    return ""


def explain_missing(buckets, count):
    """Explain why the buckets do not contain each of `count` parameters once."""
    return "the last bucket is never closed, so it is lost." if sum(map(len, buckets)) < count else ""


def explain_position(case, sizes, buckets):
    """Explain why the parameters of one dtype are not in reverse order. `sizes` are in bytes."""
    small = [[i for i in bucket if sizes[i] <= case["cap_bytes"]] for bucket in buckets]
    for dtype in set(case["dtypes"]):
        order = [i for bucket in small for i in bucket if case["dtypes"][i] == dtype]
        if order != sorted(order, reverse=True):
            return NOT_REVERSED
    return "a parameter larger than the cap is not at its place. It must close the open bucket and follow it."


def explain_large_bucket(rule, case, sizes, buckets):
    """Explain why a bucket exceeds the cap. `rule` returns buckets for sizes, and `sizes` are in bytes."""
    by_bytes, by_elements = (rule(lengths, case["dtypes"], case["cap_bytes"]) for lengths in (sizes, case["numels"]))
    if buckets == by_elements != by_bytes:
        return "the number of elements is compared with the cap, which is in bytes."
    return "a bucket closes after the parameter that exceeds the cap. It must close before that parameter."


def explain_small_bucket(rule, case, sizes, buckets):
    """Explain why a bucket closes although the next parameter fits. `rule` returns buckets for sizes in bytes."""
    cap = case["cap_bytes"]
    if buckets == rule(sizes, case["dtypes"], cap - 1):
        return "a parameter that fits exactly opens a new bucket. Compare with >, not with >=."
    if buckets == rule([4 * numel for numel in case["numels"]], case["dtypes"], cap):
        return "sizes are computed with 4 bytes for each element. Use element_size(), because bfloat16 has 2 bytes."
    first = buckets[0]  # if the size is never reset, each parameter after the first bucket has a bucket of its own
    if first == rule(sizes, case["dtypes"], cap)[0] and all(len(bucket) == 1 for bucket in buckets[1:]):
        return "the size of the first bucket is never reset. It must start at 0 when a bucket opens."
    return ""


def run_plan(submission, case, cap):
    """Return the buckets that the submission plans for the case's model, as lists of names, or None."""
    named = [(name, p) for name, p in case.parameters().items() if p.requires_grad]
    problem = {"numels": [p.numel() for _, p in named], "dtypes": [p.dtype for _, p in named], "cap_bytes": cap}
    answers = submission.try_run(scenario.plan, [problem], world_size=1)
    return answers and [[named[i][0] if i >= 0 else "" for i in bucket] for bucket in answers[0][0]]


def find_lost_parameter(submission, case, cap, failed):
    """Blame plan_buckets for a failure if it loses a parameter of the case's model."""
    if failed.verdict.part:
        return ""  # a part is not written yet
    buckets = run_plan(submission, case, cap)
    names = sorted(name for name, p in case.parameters().items() if p.requires_grad)
    return SEE_RULE if buckets is not None and sorted(n for bucket in buckets for n in bucket) != names else ""


def explain_launches(submission, case, buckets, cap, launched):
    """Explain why a step does not launch each of these buckets once. They are lists of parameter names."""
    parameters = {name: p.numel() for name, p in case.parameters().items() if p.requires_grad}
    step, launched = launched.step, [launch.numel for launch in launched]
    expected = [sum(parameters[name] for name in bucket) for bucket in buckets]
    planned = run_plan(submission, case, cap)
    if planned != buckets:
        return SEE_RULE
    if cause := find_leftover(step.events, step.number):
        return cause
    if sorted(launched) == sorted(parameters.values()):
        return f"every parameter has its own launch. {FROM_MIB}"
    in_megabytes = run_plan(submission, case, int(cap / 2**20 * 10**6))
    if in_megabytes and launched == [sum(parameters[name] for name in bucket) for bucket in in_megabytes]:
        return f"bucket_cap_mb is multiplied by a million. {FROM_MIB}"
    if launched == [sum(expected)]:
        return f"all parameters are in one launch. {FROM_MIB}"
    if sorted(launched) == sorted(expected):
        return explain_order(submission)
    if not Counter(launched) - Counter(expected):
        return "finish_grad_sync does not launch the buckets that never became complete."
    if set(launched) == set(expected):
        return "finish_grad_sync launches buckets that backward has already launched."
    return "the wrapper does not launch the buckets of plan_buckets, which follow the rule."


def find_ready_order(submission, failed):
    """Explain a mismatch of collectives if the launches depend on the order of ready gradients."""
    return explain_order(submission) if failed.verdict.ending == "mismatch" else ""


def explain_order(submission):
    """Return how launches depend on the order in which gradients become ready, or "" if they do not depend on it."""
    case, launched = submission.case("Reordered", 2), []
    parameters = case.parameters()
    cap = sum(p.nbytes for name, p in parameters.items() if name.startswith("parallel.3"))
    arguments = {"bucket_cap_mb": cap / 2**20}
    for branch in (0, 3):  # both ranks have this order. By the rule, each parallel layer has its own bucket
        jobs = case.make_jobs(package="m04_bucketed_ddp", wrapper="BucketedDDP", arguments=arguments)
        for job in jobs:
            job["batches"][0][0]["branch"] = branch
        results = submission.try_run(training.train, jobs, world_size=2)
        launched.append([launch.numel for launch in launches(results.events[0], 0)] if results else [])
    first, second = launched
    if not first or not second or len(first) >= len(parameters) or first == second:
        return ""
    return READY_ORDER if sorted(first) == sorted(second) else FILLED_IN_READY_ORDER


def explain_delay(submission, jobs, launched):
    """Explain why a bucket is not launched as soon as it and all buckets before it are complete."""
    several = "the hook launches only one bucket. When a bucket becomes complete, several buckets may be due at once."
    return explain_late_launches(submission, jobs, launched) or several


def explain_no_handle(failure, sources):
    """Return why finish_grad_sync waits on a handle that is None, if it has waited on those of all launches."""
    events = get_events(failure)
    steps = [event["step"] for event in events if event["kind"] == "step"]
    if not steps or events[-1].get("phase") not in ("finish", "finish_grad_sync"):
        return ""
    launched = launches(events, steps[-1])
    if any(launch.sync for launch in launched):
        return "a launch without async_op=True returns no handle."
    return NOT_LAUNCHED if all(steps[-1] in launch.wait_steps for launch in launched) else ""


def explain_leftover(failure, sources):
    """Return which launch of a later step differs from those of step 0."""
    cause = find_leftover(get_events(failure))
    return cause and cause + RESET


SYMPTOMS = [
    Symptom("left over", "", "", explain_leftover, file="LaunchQueue"),
    Symptom("no handle", "", "'wait'", explain_no_handle),
]
