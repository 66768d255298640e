"""Likely causes of failures of module 4's checks."""

import contextlib
from collections import Counter

from brigade.checks.diagnose.evidence import find_leftover
from brigade.checks.verdict import CheckFailed
from brigade.events import launches
from diagnosis.easier import explain_late_launches
from scenarios import m04_bucketed_ddp

# plan_buckets
NOT_REVERSED = "reverse the parameters, not the list of buckets?"
SEE_RULE = "plan_buckets does not follow its rule, and these are its buckets: see test_bucket_rule"
CLOSED_TOO_LATE = {1: 338, 10: 242, 100: 65}  # buckets of the XL model, by cap in MiB, closed after exceeding the cap

MIXED_BUCKETS = (
    "the wrapper's buckets are not those of plan_buckets; torch.cat casts tensors of several dtypes to the widest"
)


def wrong_count(cap, count):
    """Why the XL model has so many buckets at a cap in MiB."""
    if count == CLOSED_TOO_LATE.get(cap):
        return "a bucket is closed after a parameter takes it over the cap, not before?"
    return "is the cap in MiB, 2^20 bytes, and compared with bytes?"


def not_each_once(buckets, count):
    """Why not each of so many parameters is in one bucket."""
    return "the last bucket is never closed, and lost?" if sum(map(len, buckets)) < count else ""


def over_the_cap(rule, case, sizes, buckets):
    """Why a bucket exceeds the cap; `rule` makes buckets of sizes, and `sizes` are in bytes."""
    by_bytes, by_elements = (rule(lengths, case["dtypes"], case["cap_bytes"]) for lengths in (sizes, case["numels"]))
    if buckets == by_elements != by_bytes:
        return "elements are compared with the cap, which is in bytes?"
    return "the bucket closes after it has exceeded the cap: the rule is to close before?"


def planned_by(submission, case, cap):
    """The buckets that the submission's plan_buckets makes of the case's model, as lists of names; None: no plan."""
    named = [(name, p) for name, p in case.parameters().items() if p.requires_grad]
    problem = {"numels": [p.numel() for _, p in named], "dtypes": [p.dtype for _, p in named], "cap_bytes": cap}
    answers = submission.try_run(m04_bucketed_ddp.plan, [problem], world_size=1)
    return answers and [[named[i][0] if i >= 0 else "" for i in bucket] for bucket in answers[0][0]]


@contextlib.contextmanager
def plan_suspected(submission, case, cap):
    """Where a check fails and plan_buckets has lost a parameter of the case's model, that is the cause."""
    try:
        yield
    except CheckFailed as failed:
        if failed.verdict.part:
            raise  # it is not written yet
        buckets = planned_by(submission, case, cap)
        names = sorted(name for name, p in case.parameters().items() if p.requires_grad)
        if buckets is not None and sorted(name for bucket in buckets for name in bucket) != names:
            raise failed.with_cause(SEE_RULE) from None
        raise


def wrong_launches(submission, case, buckets, cap, events, step):
    """Why a step's launches are not one for each of these buckets, which have the names of their parameters."""
    parameters = {name: p.numel() for name, p in case.parameters().items() if p.requires_grad}
    found = [launch.numel for launch in launches(events, step)]
    expected = [sum(parameters[name] for name in bucket) for bucket in buckets]
    if planned_by(submission, case, cap) != buckets:
        return SEE_RULE
    if cause := find_leftover(events):
        return cause
    if sorted(found) == sorted(parameters.values()):
        return "every parameter is launched by itself: is bucket_cap_mb, in MiB, compared with bytes?"
    if found == [sum(expected)]:
        return "everything is in one launch: is bucket_cap_mb, in MiB, compared with bytes?"
    if sorted(found) == sorted(expected):
        return "a bucket is launched as soon as it is complete, before those in front of it?"
    if not Counter(found) - Counter(expected):
        return "finish_grad_sync has to launch what never became complete?"
    if set(found) == set(expected):
        return "some buckets are launched twice: those that backward has launched, in finish_grad_sync again?"
    return ""


def not_at_once(submission, jobs, events, step):
    """Why a bucket is not launched as soon as it and those in front of it are complete."""
    several = "several buckets can be due at once, when the one in front of them is complete at last?"
    return explain_late_launches(submission, jobs, events, step) or several
