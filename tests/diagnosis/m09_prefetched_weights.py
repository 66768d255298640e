"""Likely causes of failures of module 9's checks."""

import contextlib

from brigade.checks.expectations import join_names
from brigade.checks.verdict import CheckFailed

AS_MODULE_8 = "step waits for the all-gathers, as in module 8. It may only launch them; forward waits."
NEVER_AWAITED = "the forward pre-hook of the module that owns these weights does not wait for their group."
INCOMPLETE = (
    "a module ran, or an optimizer stepped, with weights that had not arrived. The strict process group fills the "
    "outputs of an all-gather with NaN until its handle is awaited."
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
def explain_incomplete():
    """Explain weights that are NaN in the block: something read them before their all-gather was awaited."""
    try:
        yield
    except CheckFailed as failed:
        raise (failed.with_cause(INCOMPLETE) if "nan" in failed.verdict.got else failed) from None


def explain_gathers(gathers, launched):
    """Return why step does not launch one all-gather per group."""
    if not gathers:
        elsewhere = sorted({launch.phase for launch in launched if launch.op == "all_gather"})
        return (
            f"the all-gathers are launched in {join_names(elsewhere)}, and the link is idle until then."
            if elsewhere
            else "step does not gather the weights."
        )
    return "a group is launched twice, or a group is missing."


def explain_early_wait(awaited):
    """Return why step waits for weights."""
    if any(launch.sync for launch in awaited):
        return "the all-gathers are launched without async_op=True."
    return AS_MODULE_8


def explain_places(actual, expected, is_listed):
    """Return why forward waits in the wrong places."""
    total = sum(expected.values())
    if actual.get("", 0) == total:
        return "the wrapper's forward waits for all groups at once, before the first module runs."
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
    return (
        f"forward waits before {join_names(early)} for groups that other modules should wait for. A group belongs to "
        "the first module, in call order, that directly owns one of its parameters."
    )
