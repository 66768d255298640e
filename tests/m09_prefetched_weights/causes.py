"""Likely causes of failures of module 9's checks."""

from collections import Counter
from itertools import pairwise

from brigade.course.checks.diagnose.evidence import find_wrong_group
from brigade.course.checks.expectations import join_names
from brigade.ranks.events import launches, list_step_events
from brigade.ranks.runner.ranks import PerRank
from m09_prefetched_weights import scenario

AS_MODULE_8 = "step waits for the all-gathers, as in module 8. It may only launch them; forward waits."
SOME_AWAITED = "step waits for some of the all-gathers that it launches. It may only launch them; forward waits."
INCOMPLETE = "weights that had not arrived were used. The outputs of an all-gather are NaN until its handle is awaited."
NOTHING_AWAITED = "no all-gather is ever awaited. wait_for must call finish_param_sync of each group in flight."
FORGOTTEN = (
    "some all-gathers are never awaited. wait_for may forget a group only after it has called the group's "
    "finish_param_sync."
)
LAUNCH_ORDER = "the groups are launched in the order of the buffers, in reverse. Forward needs the first layer first."
NOT_BY_FIRST = (
    "the groups are not in the order of their first parameters. A group is needed as soon as forward needs one of its "
    "parameters, so its last parameter does not matter."
)
UNUSED = "a group that forward did not use is still in flight. step must wait for it before it writes weights."
WRITTEN_FIRST = "step waits for old weights only after the inner optimizer has written new ones, which they overwrite."
NOT_IN_EVALUATION = "no hook waits for the weights in an evaluation, that is, in eval mode and without gradients."
NOT_COPIED = "16-bit weights do not change: share_weights must let start_sharing copy main parameters into the buffers."
NOT_CLIPPED = "clip_grad_norm_ scales copies of the averages: prepare_grads must return the views of the buffers."
IN_CHAIN = "step launches some groups and forward the others, as Megatron-LM does. Here, step must launch all groups."
PHASES = {  # of the ways to read weights, one for each step after the first
    "ddp.state_dict()": ["ddp.state_dict()"],
    "a second step": ["step"],
    "load_state_dict and add_param_group": ["load_state_dict", "add_param_group"],
}
READINGS = {
    "ddp.state_dict()": "the wrapper's state_dict does not wait for the weights that are on their way.",
    "step": "step does not wait for the weights of the previous step.",
    "load_state_dict": "load_state_dict reads weights that are on their way, if the checkpoint has no main parameters.",
    "add_param_group": "add_param_group needs weights that are on their way for the main parameters of the new group.",
}


def explain_reading(read, submission, jobs, results, trainable, _):
    """Return why weights that were read in the way `read` are wrong, by what the ranks waited for; "" if unknown."""
    if cause := find_unfinished(results.events):
        return cause
    if "evaluation" in read:
        return find_evaluation(submission, jobs, results.events[0], trainable)
    causes = (find_reader(own, read, has_nan(results)) for own in results.events)
    return next(filter(None, causes), "")


def find_evaluation(submission, jobs, events, trainable):
    """Return why an evaluation after step 0 used incomplete weights, as training does or not; "" if unknown."""
    gathers = [launch for launch in launches(events, 0, phase="step") if launch.op == "all_gather"]
    is_awaited = any("forward" in launch.wait_phases for launch in gathers)
    if is_awaited:
        return explain_forward(events, trainable)
    return find_early_forward(submission, jobs, trainable) or NOT_IN_EVALUATION


def find_reader(events, read, has_nan):
    """Return which reader did not wait for the weights in time; "" if unknown. `has_nan` says whether it read NaN."""
    for step, phase in enumerate(PHASES[read], 1):
        gathers = [launch for launch in launches(events, step - 1, phase="step") if launch.op == "all_gather"]
        awaited = [x for x in gathers if x.sync or (x.waits and (x.wait_phases[0], x.wait_steps[0]) == (phase, step))]
        if phase == "step":
            if any(is_written(x, events) for x in awaited):
                return WRITTEN_FIRST
        elif not has_nan:  # incomplete weights are NaN
            continue
        if not awaited:
            return READINGS[phase]
        if len(awaited) < len(gathers):
            return f"{phase} waits for only {len(awaited)} of {len(gathers)} all-gathers. It must wait for all of them."
    return ""


def has_nan(tensors_by_rank):
    """Return whether any tensor of any rank contains NaN, which strict mode writes into incomplete weights."""
    return any(tensor.isnan().any() for tensors in tensors_by_rank for tensor in tensors.values())


def is_written(launch, events):
    """Return whether the inner optimizer wrote weights between a launch and the first wait for it."""
    return any(event["kind"] == "write" for event in events[launch.place : (launch.waits or [0])[0]])


def explain_unused(left):
    """Return why the next step does not wait for the launches `left` of a step before it writes weights."""
    events, step = left.step.events, left.step.number
    if cause := find_unfinished([events]):
        return cause
    is_late = any(launch.waits and launch.wait_steps[0] == step + 1 and is_written(launch, events) for launch in left)
    return WRITTEN_FIRST if is_late else UNUSED


def explain_incomplete(submission, jobs, results, case, _):
    """Return why weights are wrong: by a wrong group, or if they are NaN, by what did not wait for them; else "".

    The ranks returned `results` for the `jobs` of the case.
    """
    cause = find_wrong_group(results.events, case.group)
    if cause or not has_nan(result["weights"] for result in results):
        return cause
    trainable = [name for name, parameter in case.parameters().items() if parameter.requires_grad]
    return find_unfinished(results.events) or find_early_forward(submission, jobs, trainable) or INCOMPLETE


def find_unfinished(events_by_rank):
    """Return which all-gathers the last finish_param_sync did not wait for; "" if there are none."""
    for own in events_by_rank:
        gathers = [launch for launch in launches(own, phase="step") if launch.op == "all_gather"]
        if gathers and not any(launch.sync or launch.waits for launch in gathers):
            return NOTHING_AWAITED
        last = [launch for launch in gathers if launch.step == gathers[-1].step]
        left = [number for number, launch in enumerate(last, 1) if not launch.sync and not launch.waits]
        if left:
            return (
                f"finish_param_sync does not wait for {len(left)} of the last step's {len(last)} all-gathers: number "
                f"{join_names(left)}. It must pass every group to wait_for, which may forget a group only after it has "
                "waited for it."
            )
    return ""


def explain_forgotten(left):
    """Return why nothing ever waits for some of the all-gathers in a rank's record."""
    gathers = [launch for launch in launches(left.step.events, phase="step") if launch.op == "all_gather"]
    return FORGOTTEN if any(launch.waits for launch in gathers) else NOTHING_AWAITED


def explain_order(hooks, _):
    """Return why a step launches all-gathers in another order than the hooks, numbered as they run, wait for them."""
    return LAUNCH_ORDER if hooks == sorted(hooks, reverse=True) else NOT_BY_FIRST


def find_early_forward(submission, jobs, trainable):
    """Observe the forwards of the same training without micro-batches, and return why one of them was too early."""
    alone = PerRank(job | {"batches": [[micro[-1]] for micro in (job["batches"] * 2)]} for job in jobs)
    results = submission.try_run(scenario.observe, alone, world_size=len(alone))
    causes = (explain_forward(own, trainable) for own in results.events) if results else ()
    return next(filter(None, causes), "")


def explain_forward(events, trainable, step=1):
    """Return why the forward of a step used incomplete weights; "" if it did not.

    Step 1 has the first forward after an all-gather. After incomplete weights, NaN spreads to all weights, so later
    forwards do not count.
    """
    forward = [event for _, event in list_step_events(events, step) if event["phase"] == "forward"]
    forward = [x for x in forward if x["kind"] != "end"]  # the end of a transfer, which may come at any time
    owned = {}
    for name in trainable:
        owned.setdefault(name.rpartition(".")[0], []).append(name)
    started = {}
    for event, after in pairwise(forward):
        if event["kind"] != "module" or event["at"] != "start":
            continue
        owner, incomplete = event["name"], set(event["incomplete"])
        started[owner] = incomplete
        late = [name for name in event["own"] if name in incomplete]
        if not late:
            continue
        if after["kind"] == "wait":
            return f"{owner} waits for its weights after it has run. Register a forward pre-hook, which runs before."
        others = {name.rpartition(".")[0] for name in late}  # the first owners of these weights
        if not others & {event.get("name") for event in forward}:
            return (
                f"{owner} shares {join_names(late)} with {join_names(sorted(others))}, which this forward skips. Each "
                "module that owns a parameter must wait for its group, even if another module owns it too."
            )
        arrived = [name for name in event["own"] if name not in incomplete]
        if arrived:
            return (
                f"{owner} runs with {join_names(arrived)} complete, but {join_names(late)}, in another group, "
                "incomplete. groups_of must list all of them, and before_forward must wait for all of them."
            )
        return (
            f"{owner} runs before its weights have arrived. Its own pre-hook must wait for the groups of its "
            "parameters, even if modules before it have parameters in these groups."
        )
    first = next(iter(started.values()), set())  # when the model's own forward began
    silent = [owner for owner, names in owned.items() if owner not in started and first.intersection(names)]
    if silent:
        never = f"forward does not call {join_names(silent)}, so no hook waits for these weights."
        return f"{never} The wrapper's forward must wait for them."
    return ""


def explain_gathers(numels, gathers):
    """Return why step does not launch one all-gather per group, of these `numels`."""
    elsewhere = sorted({launch.phase for launch in launches(gathers.step.events) if launch.op == "all_gather"})
    if not gathers:
        late = f"the all-gathers are launched only in {join_names(elsewhere)}, and the link is idle until then."
        return late if elsewhere else "step does not gather the weights."
    extra, missing = Counter(launch.numel for launch in gathers), Counter(numels)
    extra, missing = sorted((extra - missing).elements()), sorted((missing - extra).elements())
    if missing and "forward" in elsewhere:
        return IN_CHAIN
    what = f"an all-gather of {join_names(extra or missing)} elements"
    return f"step launches {what} again." if extra else f"step does not launch {what}."


def explain_early_wait(count, awaited):
    """Return why step waits for the all-gathers `awaited` among the `count` ones that it has launched."""
    if any(launch.sync for launch in awaited):
        return "the all-gathers are launched without async_op=True."
    return AS_MODULE_8 if len(awaited) == count else SOME_AWAITED


def explain_places(actual, expected, is_listed, gathers):
    """Return why forward waits for the launches `gathers` in the wrong places, according to the rank's record."""
    surplus = {name: actual.get(name, 0) - expected.get(name, 0) for name in {*actual, *expected}}
    if actual.get("", 0) == sum(expected.values()):
        if not any(event["kind"] == "hooks" and event["count"] for event in gathers.step.events):
            return "no module has a forward pre-hook, so the wrapper's forward waits for all groups."
        return (
            "modules have forward pre-hooks, but the wrapper's forward waits for all groups before they run. It may "
            "wait only for modules that were never called, and a module owns only its direct parameters."
        )
    if any(count and name.startswith("the end of") for name, count in actual.items()):
        return "forward waits after a module has run, so this module used incomplete weights."
    if is_listed and surplus[""] < 0:
        return "nothing waits in time for the weights of a ParameterList, which has no forward. The wrapper's must."
    if surplus[""] > 0:
        return "the wrapper's forward waits for groups that a module's pre-hook should wait for."
    if early := [name for name in actual if surplus[name] > 0]:
        return (
            f"forward waits before {join_names(early)} for groups that other modules should wait for. A group belongs "
            "to the first module, in call order, that directly owns one of its parameters."
        )
    if awaited := [x for x in gathers if x.sync or (x.wait_phases[0], x.wait_steps[0]) == ("step", x.step)]:
        return explain_early_wait(len(gathers), awaited)
    silent = [name for name in expected if name and surplus[name] < 0]
    return f"no hook of {join_names(silent)} waits for its own weights, although its forward is called."
