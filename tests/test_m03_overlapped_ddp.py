"""Graded checks of module 3: all-reduces that overlap with backward."""

from functools import partial

import pytest
import torch

from brigade.checks.diagnose.evidence import collect_evidence, join_names
from brigade.checks.expectations import (
    expect,
    expect_equal,
    expect_gradients,
    list_steps,
    overlaps,
    require_launches,
)
from brigade.events import find_last_border, launches, list_ready_gradients, summarize
from helpers import training
from helpers.odd_steps import expect_second_backward, expect_silence, expect_unsynced
from helpers.steps import expect_averages, expect_four_steps
from m03_overlapped_ddp import causes as diagnosis
from m03_overlapped_ddp import scenario as m03_overlapped_ddp

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
        trainable = [p for p in case.parameters().values() if p.requires_grad]
        for at, events, launched in list_steps(results.events, 2):
            expect_no_weight(launched, at["rank"])
            right = f"a step of the {model} model launches one all_reduce for each of its {len(trainable)} trainable "
            right += "parameters"
            made, expected = [(x.op, x.numel) for x in launched], [("all_reduce", p.numel()) for p in trainable]
            why = partial(diagnosis.explain_launches, launched, case)
            expect(sorted(made) == sorted(expected), right, f"the step made {summarize(launched)}", why, **at)
            end = find_last_border(events, at["step"])  # the first layer's gradients come later
            is_late = all(launch.place > end for launch in launched)
            late = [launch for launch in launched if is_late or launch.phase != "backward"]
            right = "every all_reduce is launched during backward"
            wrong = f"backward launched only {len(launched) - len(late)} of {len(launched)} all-reduces"
            expect(not late, right, wrong, diagnosis.IN_THE_FINISH, **at)
            blocking = [launch for launch in launched if launch.sync or "backward" in launch.wait_phases]
            right = "during backward, every launch is asynchronous, and the code does not wait on any handle"
            wrong = f"backward waited for {summarize(blocking)}"
            expect(not blocking, right, wrong, partial(diagnosis.explain_blocking, blocking), **at)


@pytest.mark.points(2)
def test_launches_follow_their_gradients(submission):
    """Each all-reduce starts after its gradient is in .grad, and before the gradient after the next one is ready."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, hidden_layers=4)
        results = submission.run(training.train, case.make_jobs(proven=1, **JOB), world_size=world)
        sizes = {name: p.numel() for name, p in case.parameters().items()}  # all different
        for rank, events in enumerate(results.events):
            order = list_ready_gradients(events, 0)
            missing = sorted(set(sizes) - {name for _, name in order})
            right = "backward accumulates a gradient into every parameter of the wrapped model"
            wrong = f"backward accumulated no gradient into {join_names(missing)}"
            expect(not missing, right, wrong, diagnosis.COPIED_PARAMETERS, rank=rank)
            expect_no_weight(launches(events, 0), rank)
            launched_at = {launch.numel: launch.place for launch in launches(events, 0)}
            for index, (ready_at, name) in enumerate(order):
                launch_at = launched_at.get(sizes[name])
                right, wrong = f"{name} has its own all_reduce", f"no launch has the size of {name}"
                expect(launch_at is not None, right, wrong, rank=rank)
                right, wrong = f"the all_reduce of {name} is launched ", "the launch came earlier"
                after = f"{right}after its gradient is in .grad"
                expect(ready_at < launch_at, after, wrong, diagnosis.TENSOR_HOOK, rank=rank)
                if index + 2 < len(order):
                    num_ready = sum(at < launch_at for at, _ in order)
                    wrong = f"{num_ready} of {len(order)} gradients were ready before the launch"
                    why = partial(diagnosis.explain_late_launch, num_ready, len(order))
                    before = f"{right}before {order[index + 2][1]} is ready"
                    expect(launch_at < order[index + 2][0], before, wrong, why, rank=rank)


@pytest.mark.points(2)
def test_every_handle_is_waited_on(submission):
    """finish_grad_sync waits for every asynchronous launch of its step and for no launch of an earlier step."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, steps=3)
        numel = sum(parameter.numel() for parameter in case.parameters().values())
        results = submission.run(training.train, case.make_jobs(proven=1, **JOB), world_size=world)
        for at, events, launched in list_steps(results.events, 3):
            step = at["step"]
            unawaited = [launch for launch in launched if step not in launch.wait_steps]
            right = "finish_grad_sync waits on the handle of every all_reduce of the step"
            wrong = f"the step did not wait on {len(unawaited)} of {len(launched)} handles"
            wrong = wrong if launched else "the step launched nothing"
            expect(bool(launched) and not unawaited, right, wrong, diagnosis.LAST_HANDLE, **at)
            stale = [launch for launch in launched if set(launch.wait_steps) - {step}]
            wrong = f"a later step waited again on {len(stale)} of {len(launched)} handles of step {step}"
            expect(not stale, "a step waits only on its own handles", wrong, diagnosis.NEVER_CLEARED, rank=at["rank"])
            raced = [launch for launch in launched if launch.raced]
            right = "a gradient does not change between its launch and its wait"
            wrong = f"the gradient changed before the wait in {len(raced)} of {len(launched)} launches"
            expect(not raced, right, wrong, partial(diagnosis.explain_race, events, step, numel), **at)
        require_overlapped(results, case, steps=3)


@pytest.mark.points(2)
def test_no_sync_accumulates(submission):
    """Inside no_sync, backward launches nothing. The last backward, or the finish, averages what was accumulated."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, micro_batches=3, steps=3, dtype=torch.float64)
        results = submission.run(training.train, case.make_jobs(unsynced=2, **JOB), world_size=world)
        expect_silence(results.events, range(world), steps=2)
        what = "every gradient is the average over the ranks of the sum over 3 micro-batches"
        expect_gradients(results, case, what, hypotheses=partial(diagnosis.lost_micro_batches, case))
        expected = len(case.parameters())
        for at, _, launched in list_steps(results.events, 1):
            right = f"a step of 3 micro-batches has {expected} launches: one per parameter, in the last backward"
            wrong = f"the step made {len(launched)} launch{'es' * (len(launched) != 1)}"
            expect(len(launched) == expected, right, wrong, rank=at["rank"])
        require_overlapped(results, case, steps=2)
        expect_unsynced(results, case, step=2)


@pytest.mark.points(1)
def test_no_sync_restores_its_state(submission):
    """no_sync can be nested, and left by an exception. A second backward is averaged or raises RuntimeError."""
    [world] = submission.worlds(2)
    case = submission.case("Plain", world, micro_batches=3)
    results = submission.run(m03_overlapped_ddp.interrupted_no_sync, case.make_jobs(**JOB), world_size=world)
    count = len(case.parameters())
    for rank, events in enumerate(results.events):
        parts = {event["part"]: place for place, event in enumerate(events) if "part" in event}
        backward = launches(events, phase="backward")
        inside = [launch for launch in backward if launch.place < parts["after"]]
        nested = sum(launch.place < parts["outer"] for launch in inside)
        right = "backward passes inside no_sync launch nothing, even after an inner no_sync has ended"
        wrong = (
            f"{len(inside)} launch{'es' * (len(inside) != 1)} came inside no_sync, {nested} of them in the inner block"
        )
        expect(not inside, right, wrong, diagnosis.FLAG_IGNORED if nested else diagnosis.INNER_NO_SYNC, rank=rank)
        right, wrong = "an exception inside no_sync leaves the block", "no exception left it"
        expect("exception" in parts, right, wrong, diagnosis.SWALLOWED, rank=rank)
        outside = sum(parts["after"] < launch.place < parts["other"] for launch in backward)
        right = "after an exception inside no_sync, the next backward launches all its all-reduces"
        wrong = "this backward launched {} all-reduces for {} parameters"
        why = partial(diagnosis.explain_silence, events)
        expect(outside == count, right, wrong.format(outside, count), why, rank=rank)
        others = sum(launch.place > parts["other"] for launch in backward)
        right = "no_sync of one wrapper does not change another wrapper, whose backward launches all its all-reduces"
        expect(others == count, right, wrong.format(others, count), diagnosis.SHARED_FLAG, rank=rank)
        again = launches(events, phase="finish")
        right = "finish_grad_sync launches nothing that backward has launched, even if another wrapper finishes before"
        cause = diagnosis.SHARED_HANDLES if len(again) == count else ""  # of one of the two finishes
        expect(not again, right, f"it made {summarize(again)}", cause, rank=rank)
    texts = ("the sum over all three micro-batches", "the gradient of another wrapper, which finishes later")
    for number, (text, micro) in enumerate(zip(texts, (slice(0, 3), slice(0, 1)))):
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


# ---- what the checks of this module and of later ones use


def expect_no_weight(launched, rank):
    """Expect no launch to carry a parameter instead of its gradient."""
    count = sum(launch.memory == "weight" for launch in launched)
    wrong = f"{count} of {len(launched)} launches carry the parameter itself"
    cause = "the submission all-reduces the parameter itself. It must all-reduce the gradient, p.grad."
    expect(not count, "every all_reduce carries a gradient", wrong, cause, rank=rank)


def require_overlapped(results, case, steps=1):
    """Give points for correct numbers only if backward launches one asynchronous all_reduce per gradient."""
    count = sum(parameter.requires_grad for parameter in case.parameters().values())

    def accepts(launched):
        return len(launched) == count and all(map(overlaps, launched))

    kind = "one asynchronous all_reduce per gradient, launched in backward and waited for in finish_grad_sync"
    require_launches(results.events, case.group, kind, accepts, steps)
