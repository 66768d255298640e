"""Expectations about unusual orders of backward passes, which the checks of several modules share."""

from functools import partial

import torch

from brigade.course.checks.diagnose.evidence import (
    READ_IN_FORWARD,
    Evidence,
    explain_inside,
    find_leftover,
    find_no_sync_launches,
)
from brigade.course.checks.edge_case_models import OPTIMIZERS, compute_loss, copy_gradients
from brigade.course.checks.expectations import expect_equal, expect_weights, replace_cause
from brigade.ranks.claims import At, Launches, Step, after, each_step, in_phase
from brigade.ranks.events import launches, list_backward_passes
from brigade.ranks.runner.ranks import PerRank
from helpers import training


def expect_restored(events, ranks, number):
    """Expect the last backward of a step to communicate after an exception ended the no_sync blocks of the step."""
    for rank in ranks:
        step = Step(events[rank], rank, number)
        begin = list_backward_passes(step.events, number)[-1]
        step.launches().claim(
            "after an exception inside no_sync, the next backward communicates again",
            bool(step.launches().where(in_phase("backward")).where(after(begin))),
            "the last backward pass launched nothing. The whole step made {these}",
            explain_lasting_no_sync,
        )


def explain_lasting_no_sync(launched):
    """Explain why the last backward of a step launches nothing after an exception inside no_sync."""
    step = launched.step
    start = next(i for i, e in enumerate(step.events) if e["kind"] == "step" and e["step"] == step.number)
    usual = "no_sync restores its state only if the block ends normally. Use try ... finally."
    return find_leftover(step.events[:start]) or usual


def expect_silence(events, ranks, steps=1):
    """Expect the backward passes inside no_sync (all passes of a step except the last) to launch nothing."""
    for step in each_step(events, steps, ranks):
        early = Launches(find_no_sync_launches(step.events, step.number), step)
        early.are_none("backward passes inside no_sync launch nothing", explain_early_launches)


def explain_early_launches(early):
    """Explain why backward passes inside no_sync launch: already the first of them, or only later ones."""
    return explain_inside(list_backward_passes(early.step.events, early.step.number)[1], early)


def expect_unsynced(results, case, step):
    """Expect finish_grad_sync to average gradients if all backward passes of a step were inside no_sync."""
    for rank, events in enumerate(results.events):
        early = Step(events, rank, step).launches().where(in_phase("backward"))
        what = "backward passes inside no_sync launch nothing, even if their forwards are outside"
        early.are_none(what, READ_IN_FORWARD)
    is_launched = all(launches(events, step, phase="finish") for events in results.events)
    why = partial(explain_unsynced, results.events[case.group[0]], step)
    with replace_cause(lambda failed: "" if is_launched or len(case.group) == 1 else why()):
        expect_weights(results, case)


def explain_unsynced(events, step):
    """Explain why the finish of a step, whose backward passes were all inside no_sync, launches nothing."""
    if any(launch.step != step and step in launch.wait_steps for launch in launches(events)):
        return OLD_HANDLES
    return UNSYNCED


UNSYNCED = (
    "all backward passes of the step were inside no_sync, and finish_grad_sync launched nothing. It must launch the "
    "gradients that backward has not launched."
)
OLD_HANDLES = (
    "finish_grad_sync launches nothing for a step in no_sync, and waits on handles of an earlier step. Keep no "
    "handles, and launch the gradients that backward has not launched."
)
SECOND_BACKWARD = (
    "a second backward adds to gradients that are already launched, and the wrapper does not notice it. Raise "
    "RuntimeError in the hook if the gradient's collective is already launched."
)
OLD_GRADIENTS = (
    "a bucket is launched with gradients of an earlier step for parameters that this step has not used. Before each "
    "launch, make every view of the bucket contain this step's gradient or zeros."
)
ADDED_TO_OLD = (
    "a new gradient is added to its view, which still contains the gradient of an earlier step. Overwrite the view."
)
IDLE = (
    "a rank whose gradients are all None launches nothing in finish_grad_sync. It must launch the same collectives as "
    "the others, with zeros."
)
REPLACED_BY_ZEROS = (
    "a gradient that was accumulated inside no_sync is lost if the last backward does not use its parameter. Only a "
    "gradient that is None counts as zeros."
)
FORGETS = (
    "a forward between the two backward passes removes the record of what is launched, so the second one is not "
    "refused. Forward must not change the state of the step."
)
SHARED_STATE = (
    "wrapping a second model changes the first wrapper, which alone is right. State that all wrappers share, in the "
    "class or in a global variable, belongs in self."
)
TWO_BACKWARDS = {
    "a second backward": ("forward", "backward", "forward", "backward", "finish"),
    "a second backward inside no_sync": ("forward", "backward", "forward", "backward in no_sync", "finish"),
}
LATE_FORWARDS = {
    f"a step in no_sync with {kind} before the finish": ("forward", "backward in no_sync") * 2 + (kind, "finish")
    for kind in training.KINDS
}
LOST_BETWEEN = "a forward between backward passes in no_sync and the finish changes the step, which it must not do."


def expect_second_backward(submission, world, job):
    """Expect a second backward before finish_grad_sync, synchronising or not, to be refused or averaged.

    The finish averages gradients of no_sync even if a forward came in between. If it is discarded, it may be refused.
    """
    case = submission.case("Plain", world, micro_batches=2)
    orders = TWO_BACKWARDS | LATE_FORWARDS
    jobs = [case.make_jobs(order=order, **job) for order in orders.values()]

    def find_forgetful_forward(what, failed):
        order = sorted(orders[what], key=lambda action: action != "forward")
        results = submission.try_run(training.take_odd_step, case.make_jobs(order=order, **job), world_size=world)
        is_refused = results is not None and not any(results)  # without a forward between them
        return FORGETS if is_refused and what in TWO_BACKWARDS else ""

    for what, results in zip(orders, submission.run_each(training.take_odd_step, jobs), strict=True):
        cause = LOST_BETWEEN if what in LATE_FORWARDS else SECOND_BACKWARD
        if training.KINDS[0] in what:
            At().claim(f"{what} is accepted", None not in results, "RuntimeError", cause)
        with replace_cause(partial(find_forgetful_forward, what)):
            expect_right_or_refused(f"{what} is averaged", results, case.gradients(), evidence=Evidence(cause))


def expect_accumulated(submission, world, job):
    """Expect the finish to keep gradients that the last backward did not complete, also if there is another wrapper."""
    case = submission.case("Branches", world, micro_batches=2, branches=[0] * world)
    for own in case.batches:
        own[0][1]["branch"] = 1
    order = ("forward", "backward in no_sync", "forward", "backward", "finish")
    jobs = case.make_jobs(order=order, **job | {"arguments": {}})  # one bucket
    what, expected = "the average contains layers that only a backward inside no_sync has used", case.gradients()
    last = case.gradients(micro=slice(1, 2))
    lost = {name: expected[name] if last[name] is not None else None for name in expected}
    results = submission.run(training.take_odd_step, jobs, world_size=world)
    expect_accepted(what, results)
    expect_equal(what, list(results), expected, hypotheses={REPLACED_BY_ZEROS: [lost] * world})
    jobs = PerRank(own | {"has_other": True} for own in jobs)
    with replace_cause(lambda failed: SHARED_STATE):
        results = submission.run(training.take_odd_step, jobs, world_size=world)
        expect_accepted(f"with a second wrapper in the same process, {what}", results)
        expect_equal(f"with a second wrapper in the same process, {what}", list(results), expected)


def expect_accepted(what, results):
    """Expect that no rank refused the step with RuntimeError."""
    for rank, result in enumerate(results):
        At(rank).claim(what, result is not None, "RuntimeError is raised")


def expect_idle_rank(submission, job):
    """Expect zeros from a rank that calls nothing but finish_grad_sync."""
    [world] = submission.worlds(2)
    case = submission.case("Plain", world)
    orders = [["forward", "backward", "finish"]] + [["finish"]] * (world - 1)
    jobs = PerRank(own | {"order": order} for own, order in zip(case.make_jobs(**job), orders, strict=True))
    with replace_cause(
        lambda failed: IDLE if failed.events and not launches(failed.events[-1], phase="finish") else ""
    ):
        results = submission.run(training.take_odd_step, jobs, world_size=world)
    expected = {name: gradient / world for name, gradient in case.gradients([0]).items()}
    actual = [result or dict.fromkeys(expected) for result in results]
    expect_equal("every gradient is the average, even if a rank runs no backward", actual, expected)


def expect_right_or_refused(what, results, expected, **clues):
    """Expect these tensors from every rank whose result is not None: the others refused with RuntimeError."""
    answered = [rank for rank, result in enumerate(results) if result is not None]
    actual = [results[rank] for rank in answered]
    expect_equal(f"{what}, or RuntimeError is raised", actual, expected, ranks=answered, **clues)


def expect_no_old_gradients(submission, world, job):
    """Expect zeros for a parameter that a rank does not use, even if a second backward completes its bucket."""
    case = submission.case("Branches", world, micro_batches=3, hidden_layers=0, branches=list(range(world)))
    twice = ["forward", "forward", "zero_grad", "backward in no_sync", "backward"]
    arguments = job["arguments"] | {"bucket_numel": None}  # each backward makes half of the bucket's gradients ready
    jobs = case.make_jobs(order=["forward", "backward", "finish", *twice, "finish"], **job | {"arguments": arguments})
    results = submission.run(training.take_odd_step, jobs, world_size=world)
    expect_right_or_refused(
        "after two forwards, zero_grad and two backwards, parameters that a rank does not use count as zero",
        results,
        case.gradients(micro=slice(1, 3)),
        hypotheses=partial(suspect_old_gradients, case, results),
    )


def suspect_old_gradients(case, results):
    """Return what mistakes would leave after micro-batches 1 and 2 if the views still contain the average of batch 0.

    Leave out ranks without a result. On the others, the gradient of a parameter that the rank does not use may be None.
    """
    size, old = len(results), case.gradients(micro=slice(1))
    local = [case.gradients([rank], slice(1, 3)) for rank in range(size)]
    own = {name: [g[name] for g in local if g[name] is not None] for name in old if old[name] is not None}
    values = {
        OLD_GRADIENTS: {name: (sum(used) + (size - len(used)) * old[name]) / size for name, used in own.items()},
        ADDED_TO_OLD: {name: (sum(used) + len(used) * old[name]) / size for name, used in own.items()},
    }
    answered = [(result, gradients) for result, gradients in zip(results, local, strict=True) if result]
    return {
        cause: [
            {n: v for n, v in averages.items() if result[n] is not None or g[n] is not None} for result, g in answered
        ]
        for cause, averages in values.items()
    }


OLD_AVERAGE = (
    "where a gradient is None, the flat tensor still contains the average of the step before. If you keep the tensor, "
    "write zeros there."
)


def train_on_old_averages(case):
    """Return the weights after all steps if a rank without a gradient sends the average of the step before instead."""
    model, size = case.build(), len(case.group)
    optimizer, old = OPTIMIZERS[case.optimizer](model.parameters()), {}
    for step in range(len(case.batches[0])):
        local = []
        for rank in case.group:
            model.zero_grad()
            compute_loss(model, case.batches[rank][step][0]).backward()
            local.append(copy_gradients(model))
        for name, parameter in model.named_parameters():
            parts = [old.get(name) if own[name] is None else own[name] for own in local]
            parameter.grad = sum((part for part in parts if part is not None), torch.zeros_like(parameter)) / size
            old[name] = parameter.grad
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def find_old_averages(results, case, failed):
    """Explain wrong weights by averages of earlier steps that flat tensors still contain."""
    expected = train_on_old_averages(case)
    weights = [results[rank]["weights"] for rank in case.group]
    is_old = all(torch.allclose(own[name], value, rtol=1e-6) for own in weights for name, value in expected.items())
    return OLD_AVERAGE * is_old
