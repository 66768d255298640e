"""Likely causes of failures of module 9's checks."""

import contextlib

from brigade.checks.expectations import join_names
from brigade.checks.verdict import CheckFailed
from brigade.events import launches
from brigade.runner.ranks import PerRank
from scenarios import m09_prefetched_weights

AS_MODULE_8 = "step waits for the all-gathers, as in module 8. It may only launch them; forward waits."
NEVER_AWAITED = "the forward pre-hook of the module that owns these weights does not wait for their group."
INCOMPLETE = (
    "a module ran, or an optimizer stepped, with weights that had not arrived. The strict process group fills the "
    "outputs of an all-gather with NaN until its handle is awaited."
)
NOTHING_AWAITED = (
    "no all-gather is ever awaited, although finish_param_sync is called. wait_for must call finish_param_sync of each "
    "group that is in flight."
)
LAUNCH_ORDER = (
    "the groups are launched in the order of the buffers, which contain the parameters in reverse. Forward needs the "
    "group of the first registered parameter first."
)
UNUSED = (
    "a group that forward did not wait for is still in flight when the next step begins. step must wait for it before "
    "the inner optimizer writes weights."
)
READINGS = {
    "ddp.state_dict()": "the wrapper's state_dict does not wait for the weights that are on their way.",
    "an evaluation": "no hook waits for the weights when gradients are disabled.",
    "a second step": "step does not wait for the weights of the previous step.",
    "load_state_dict": (
        "load_state_dict reads weights that are still on their way. It needs them if the checkpoint has no main "
        "parameters."
    ),
}


@contextlib.contextmanager
def explain_reading(read):
    """Explain wrong weights in the block by the way in which they were read."""
    try:
        yield
    except CheckFailed as failed:
        raise failed.with_cause(READINGS[read]) from None


@contextlib.contextmanager
def explain_incomplete(submission, jobs, events_by_rank, trainable):
    """Explain weights that are NaN in the block: something read them before their all-gather was awaited.

    The ranks recorded `events_by_rank` with `jobs`. `trainable` are the names of the trainable parameters.
    """
    try:
        yield
    except CheckFailed as failed:
        if "nan" in failed.verdict.got:
            cause = find_unfinished(events_by_rank) or find_early_forward(submission, jobs, trainable) or INCOMPLETE
            failed = failed.with_cause(cause)
        raise failed from None


def find_unfinished(events_by_rank):
    """Return which all-gathers the last finish_param_sync did not wait for; "" if there are none."""
    for own in events_by_rank:
        gathers = [launch for launch in launches(own, phase="step") if launch.op == "all_gather"]
        if gathers and not any(launch.sync or launch.waits for launch in gathers):
            return NOTHING_AWAITED
        last = [launch for launch in gathers if launch.step == gathers[-1].step]
        left = [place for place, launch in enumerate(last, 1) if not launch.sync and not launch.waits]
        if left:
            return (
                f"finish_param_sync does not wait for {len(left)} of the last step's {len(last)} all-gathers, in the "
                f"order of their launches number {join_names(left)}. It must wait for every group in flight."
            )
    return ""


def find_early_forward(submission, jobs, trainable):
    """Observe the forwards of the same training without micro-batches, and return why one of them was too early."""
    alone = PerRank(job | {"batches": [[micro[-1]] for micro in job["batches"]]} for job in jobs)
    results = submission.try_run(m09_prefetched_weights.observe, alone, world_size=len(alone))
    causes = (explain_forward(own, trainable) for own in results.events) if results else ()
    return next(filter(None, causes), "")


def explain_forward(events, trainable):
    """Return why the first forward after an all-gather used incomplete weights; "" if it did not.

    Later forwards do not count, because NaN spreads to all weights.
    """
    places = {event["step"]: place for place, event in enumerate(events) if event["kind"] == "step"}
    forward = [event for event in events[places[1] : places[2]] if event["phase"] == "forward"]
    owned = {}
    for name in trainable:
        owned.setdefault(name.rpartition(".")[0], []).append(name)
    started = {}
    for event, after in zip(forward, forward[1:]):
        if event["kind"] != "module" or event["at"] != "start":
            continue
        owner, incomplete = event["name"], set(event["incomplete"])
        started[owner] = incomplete
        late = [name for name in owned.get(owner, []) if name in incomplete]
        if not late:
            continue
        if after["kind"] == "wait":
            return f"{owner} waits for its weights after it has run. Register a forward pre-hook, which runs before."
        arrived = [name for name in owned[owner] if name not in incomplete]
        if arrived:
            return (
                f"{owner} runs with {join_names(arrived)} complete, but {join_names(late)} incomplete. The parameters "
                "of a module may be in several groups. Its pre-hook must wait for all of them."
            )
        return f"{owner} runs before its weights have arrived. Its pre-hook must wait for the groups of its parameters."
    first = next(iter(started.values()), set())  # when the model's own forward began
    silent = [owner for owner, names in owned.items() if owner not in started and first.intersection(names)]
    if silent:
        return (
            f"forward does not call {join_names(silent)}, so no hook waits for these weights. The wrapper's forward "
            "must wait for the groups of modules that are never called."
        )
    return ""


def explain_gathers(gathers, launched):
    """Return why step does not launch one all-gather per group. `launched` are all launches of the rank."""
    if not gathers:
        elsewhere = sorted({launch.phase for launch in launched if launch.op == "all_gather"})
        return (
            f"the all-gathers are launched only in {join_names(elsewhere)}, and the link is idle until then. step must "
            "launch them."
            if elsewhere
            else "step does not gather the weights."
        )
    return "a group is launched twice, or a group is missing."


def explain_early_wait(awaited):
    """Return why step waits for weights."""
    if any(launch.sync for launch in awaited):
        return "the all-gathers are launched without async_op=True."
    return AS_MODULE_8


def explain_places(actual, expected, is_listed, events):
    """Return why forward waits in the wrong places, according to the rank's record."""
    total = sum(expected.values())
    if actual.get("", 0) == total:
        if not any(event["kind"] == "hooks" and event["count"] for event in events):
            return "no module has a forward pre-hook, so the wrapper's forward waits for all groups."
        return (
            "modules have forward pre-hooks, but the wrapper's forward waits for all groups before they run. It may "
            "wait only for the groups of modules that have never been called."
        )
    after = [name for name, count in actual.items() if count and name.startswith("the end of")]
    if after:
        return "forward waits after a module has run, so this module used incomplete weights."
    if is_listed and actual.get("", 0) < expected.get("", 0):
        return (
            "nothing waits in time for the weights of a module whose forward is never called, such as a ParameterList. "
            "The wrapper's own forward must wait for them."
        )
    if actual.get("", 0) > expected.get("", 0):
        return "the wrapper's forward waits for groups that a module's pre-hook should wait for."
    early = [name for name, count in actual.items() if count > expected.get(name, 0)]
    if not early:
        return (
            "some groups are awaited before forward begins, in step or at their launch, or are never awaited. The "
            "pre-hook of a module must wait for its groups."
        )
    return (
        f"forward waits before {join_names(early)} for groups that other modules should wait for. A group belongs to "
        "the first module, in call order, that directly owns one of its parameters."
    )
