"""Graded checks of module 3: all-reduces that overlap with backward."""

from functools import partial

import pytest
import torch

from brigade.course.checks.diagnose.evidence import collect_evidence, explain_inside
from brigade.course.checks.expectations import expect_equal, expect_gradients, overlaps, require_launches
from brigade.ranks.claims import Step, after, before, each_step, in_phase, is_awaited_in_step, is_unchanged
from helpers import training
from helpers.odd_steps import expect_second_backward, expect_silence, expect_unsynced
from helpers.steps import expect_averages, expect_four_steps
from m03_overlapped_ddp import causes, scenario

JOB = {"package": "m03_overlapped_ddp", "wrapper": "OverlappedDDP"}


@pytest.mark.points(2)
def test_gradients_are_averaged(submission):
    """Replicas start with equal weights and buffers. All-reduces launched during backward average every gradient."""
    expect_averages(submission, [JOB] * 4, require_overlapped)


@pytest.mark.points(2)
def test_launches_are_asynchronous(submission):
    """Each gradient has its own asynchronous all-reduce during backward. Only finish_grad_sync waits."""
    [world] = submission.worlds(2)
    for model in ("Tied", "Frozen"):
        case = submission.case(model, world, steps=2)
        results = submission.run(training.train, case.make_jobs(proven=1, **JOB), world_size=world)
        numels, setting = list_numels(case), f" (the {model} model)"
        why = partial(causes.explain_launches, numels)
        for step in each_step(results.events, 2):
            launched = carry_gradients(step.launches())
            launched.are_one_for_each("parameter", "all_reduce", numels, setting, in_order=False, cause=why)
            launched.come_during_backward(causes.IN_THE_FINISH).do_not_block_backward(causes.explain_blocking)


@pytest.mark.points(2)
def test_launches_follow_their_gradients(submission):
    """Each all-reduce starts after its gradient is in .grad, and before the gradient after the next one is ready."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, hidden_layers=4)
        results = submission.run(training.train, case.make_jobs(proven=1, **JOB), world_size=world)
        numels = {name: p.numel() for name, p in case.parameters().items()}  # all different
        for step in each_step(results.events, 1):
            missing, what = [name for name in numels if name not in step.gradients], "parameters without a gradient: {}"
            step.equal(f"{what} of the wrapped model, after backward", missing, [], causes.COPIED_PARAMETERS)
            launched = carry_gradients(step.launches())
            for index, (at, name) in enumerate(step.ready):
                own, what = launched.where(lambda one, n=numels[name]: one.numel == n), f"the all_reduce of {name} is"
                own.claim(f"{name} has its own all_reduce", bool(own), "no launch has its size")
                own.satisfy(
                    f"{what} launched after its gradient is in .grad", after(at), causes.TENSOR_HOOK, "it came earlier"
                )
                for next_at, other in step.ready[index + 2 : index + 3]:
                    expected, got = f"{what} launched before {other} is ready", "it comes {place}"
                    own.satisfy(expected, before(next_at), causes.explain_late_launch, got)


@pytest.mark.points(2)
def test_every_handle_is_waited_on(submission):
    """finish_grad_sync waits for every asynchronous launch of its step and for no launch of an earlier step."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, steps=3)
        results = submission.run(training.train, case.make_jobs(proven=1, **JOB), world_size=world)
        why = partial(causes.explain_race, sum(list_numels(case)))
        for step in each_step(results.events, 3):
            launched = step.launches()
            launched.claim("the step launches all-reduces", bool(launched), cause=causes.LAST_HANDLE)
            what = "finish_grad_sync waits on the handle of every all_reduce of the step"
            launched.satisfy(what, is_awaited_in_step, causes.LAST_HANDLE)
            late = launched.where(lambda one: {*one.wait_steps} != {one.step})
            late.are_none("no later step waits on the handles of this step", causes.NEVER_CLEARED)
            launched.satisfy("a gradient does not change between launch and wait", is_unchanged, why)
        require_overlapped(results, case, steps=3)


@pytest.mark.points(2)
def test_no_sync_accumulates(submission):
    """Inside no_sync, backward launches nothing. The last backward, or the finish, averages what was accumulated."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, micro_batches=3, steps=3, dtype=torch.float64)
        results = submission.run(training.train, case.make_jobs(unsynced=2, **JOB), world_size=world)
        expect_silence(results.events, range(world), steps=2)
        what = "every gradient is the average over the ranks of the sum over 3 micro-batches"
        expect_gradients(results, case, what, hypotheses=partial(causes.lost_micro_batches, case))
        count = len(case.parameters())
        for step in each_step(results.events, 1):
            what = "a step of 3 micro-batches makes {}: one per parameter, in the last backward"
            step.launches().are_so_many(what, count)
        require_overlapped(results, case, steps=2)
        expect_unsynced(results, case, step=2)


@pytest.mark.points(1)
def test_no_sync_restores_its_state(submission):
    """no_sync can be nested, and left by an exception. A second backward is averaged or raises RuntimeError."""
    [world] = submission.worlds(2)
    case = submission.case("Plain", world, micro_batches=3)
    results = submission.run(scenario.interrupted_no_sync, case.make_jobs(**JOB), world_size=world)
    for rank, events in enumerate(results.events):
        expect_parts(Step(events, rank, None), len(case.parameters()))
    texts = ("the sum over all three micro-batches", "the gradient of another wrapper, which finishes later")
    for number, (text, micro) in enumerate(zip(texts, (slice(0, 3), slice(0, 1)), strict=True)):
        expect_equal(
            f"every gradient is the average over the ranks of {text}",
            [result[number] for result in results],
            case.gradients(micro=micro),
            evidence=collect_evidence(results.events, case, step=None),
        )
    expect_second_backward(submission, world, JOB)


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_steps_and_subgroups(submission):
    """Four overlapped steps with evaluations give the weights of one process, even in a group of ranks 1 and 3."""
    expect_four_steps(submission, JOB, require_overlapped)


# ---- what the checks use


def list_numels(case):
    """Return the number of elements of each trainable parameter."""
    return [parameter.numel() for parameter in case.parameters().values() if parameter.requires_grad]


def carry_gradients(launched):
    """Claim that no launch carries a parameter instead of its gradient, and return the launches."""
    got = "{count} of {all} launches carry the parameter itself"
    return launched.satisfy("every all_reduce carries a gradient", lambda x: x.memory != "weight", causes.WEIGHT, got)


def expect_parts(step, count):
    """Expect the parts of the scenario to launch nothing inside no_sync and, after it, each of `count` all-reduces."""
    parts = {event["part"]: place for place, event in enumerate(step.events) if "part" in event}
    launched = step.launches().where(after(parts["inside"]))
    backward = launched.where(in_phase("backward"))
    backward.where(before(parts["after"])).are_none(
        "backward passes inside no_sync launch nothing, even after an inner no_sync has ended",
        partial(explain_inside, parts["outer"]),
    )
    step.claim(
        "an exception inside no_sync leaves the block", "exception" in parts, "no exception left it", causes.SWALLOWED
    )
    outside = backward.where(lambda one: parts["after"] < one.place < parts["other"])
    what = "after an exception inside no_sync, the next backward makes {}: one per parameter"
    outside.are_so_many(what, count, causes.explain_silence)
    what = "no_sync of one wrapper does not change another wrapper, whose backward makes {}: one per parameter"
    other = backward.where(after(parts["other"])).are_so_many(what, count, causes.SHARED_FLAG)
    other.come_during_backward()  # and not after it, where a rank could say that it is backward
    again = launched.where(in_phase("finish"))
    again.are_none(
        "finish_grad_sync launches nothing that backward has launched, even if another wrapper finishes before",
        causes.SHARED_HANDLES if len(again) == count else "",  # of one of the two finishes
    )
    elsewhere = launched.where(lambda one: one.phase not in ("backward", "finish"))
    elsewhere.are_none("after the constructor, nothing launches anything except backward and finish_grad_sync")


def require_overlapped(results, case, steps=1):
    """Give points for correct numbers only if backward launches one asynchronous all_reduce per gradient."""
    count = len(list_numels(case))

    def accepts(launched):
        return len(launched) == count and all(map(overlaps, launched))

    kind = "one asynchronous all_reduce per gradient, launched in backward and waited for in finish_grad_sync"
    require_launches(results.events, case.group, kind, accepts, steps)
