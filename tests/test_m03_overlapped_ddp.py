"""Graded checks of module 3: all-reduces that overlap with backward."""

from functools import partial

import pytest
import torch

from brigade.checks.diagnose.evidence import collect_evidence, describe_missed, join_names
from brigade.checks.expectations import (
    describe_share,
    expect,
    expect_equal,
    expect_gradients,
    expect_silence,
    expect_start,
    expect_steps,
    overlaps,
    require_launches,
)
from brigade.events import find_last_border, launches, list_ready_gradients, summarize
from helpers import training
from helpers.easier import blame_visits
from helpers.odd_steps import expect_second_backward, expect_unsynced
from m03_overlapped_ddp import causes as diagnosis
from m03_overlapped_ddp import scenario as m03_overlapped_ddp

JOB = {"package": "m03_overlapped_ddp", "wrapper": "OverlappedDDP"}


@pytest.mark.points(2)
def test_gradients_are_averaged(submission):
    """Replicas start with equal weights and buffers. All-reduces launched during backward average every gradient."""
    for world, model in zip(submission.worlds(1, 2, 3, 4), ("Plain", "Buffers", "Frozen", "Tied")):
        case = submission.case(model, world)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        expect_start([result["start"] for result in results], case, events=results.events)
        expect_gradients(results, case)
        require_overlapped(results, case)


@pytest.mark.points(2)
def test_launches_are_asynchronous(submission):
    """Each gradient has its own asynchronous all-reduce during backward. Only finish_grad_sync waits."""
    [world] = submission.worlds(2)
    for model in ("Tied", "Frozen"):
        case = submission.case(model, world, steps=2)
        results = submission.run(training.train, case.make_jobs(proven=1, **JOB), world_size=world)
        trainable = [p for p in case.parameters().values() if p.requires_grad]
        for rank, events in enumerate(results.events):
            for step in range(2):
                launched = launches(events, step)
                expect_no_weight(launched, rank)
                expect(
                    sorted((launch.op, launch.numel) for launch in launched)
                    == sorted(("all_reduce", p.numel()) for p in trainable),
                    f"a step of the {model} model launches one all_reduce for each of its {len(trainable)} trainable "
                    "parameters",
                    f"the step made {summarize(launched)}",
                    partial(diagnosis.explain_launches, launched, case),
                    rank=rank,
                    step=step,
                )
                end = find_last_border(events, step)  # the first layer's gradients come later
                is_late = all(launch.place > end for launch in launched)
                late = [launch for launch in launched if is_late or launch.phase != "backward"]
                expect(
                    not late,
                    "every all_reduce is launched during backward",
                    f"backward launched only {len(launched) - len(late)} of {len(launched)} all-reduces",
                    diagnosis.IN_THE_FINISH,
                    rank=rank,
                    step=step,
                )
                blocking = [launch for launch in launched if launch.sync or "backward" in launch.wait_phases]
                expect(
                    not blocking,
                    "during backward, every launch is asynchronous, and the code does not wait on any handle",
                    f"backward waited for {describe_share(len(blocking), len(launched))}",
                    diagnosis.BLOCKING,
                    rank=rank,
                    step=step,
                )


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
            expect(
                not missing,
                "backward accumulates a gradient into every parameter of the wrapped model",
                f"backward accumulated no gradient into {join_names(missing)}",
                diagnosis.COPIED_PARAMETERS,
                rank=rank,
            )
            expect_no_weight(launches(events, 0), rank)
            launched_at = {launch.numel: launch.place for launch in launches(events, 0)}
            for index, (ready_at, name) in enumerate(order):
                launch_at = launched_at.get(sizes[name])
                expect(
                    launch_at is not None,
                    f"{name} has its own all_reduce",
                    f"no launch has the size of {name}",
                    rank=rank,
                )
                expect(
                    ready_at < launch_at,
                    f"the all_reduce of {name} is launched after its gradient is in .grad",
                    "the launch came earlier",
                    diagnosis.TENSOR_HOOK,
                    rank=rank,
                )
                if index + 2 < len(order):
                    num_ready = sum(at < launch_at for at, _ in order)
                    expect(
                        launch_at < order[index + 2][0],
                        f"the all_reduce of {name} is launched before {order[index + 2][1]} is ready",
                        f"{num_ready} of {len(order)} gradients were ready before the launch",
                        partial(diagnosis.explain_late_launch, num_ready, len(order)),
                        rank=rank,
                    )


@pytest.mark.points(2)
def test_every_handle_is_waited_on(submission):
    """finish_grad_sync waits for every asynchronous launch of its step and for no launch of an earlier step."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, steps=3)
        numel = sum(parameter.numel() for parameter in case.parameters().values())
        results = submission.run(training.train, case.make_jobs(proven=1, **JOB), world_size=world)
        for rank, events in enumerate(results.events):
            for step in range(3):
                launched = launches(events, step)
                unawaited = [launch for launch in launched if step not in launch.wait_steps]
                expect(
                    bool(launched) and not unawaited,
                    "finish_grad_sync waits on the handle of every all_reduce of the step",
                    f"the step did not wait on {describe_missed(len(unawaited), len(launched))}"
                    if launched
                    else "the step launched nothing",
                    diagnosis.LAST_HANDLE,
                    rank=rank,
                    step=step,
                )
                stale = [launch for launch in launched if set(launch.wait_steps) - {step}]
                expect(
                    not stale,
                    "a step waits only on its own handles",
                    f"a later step waited again on {len(stale)} of {len(launched)} handles of step {step}",
                    diagnosis.NEVER_CLEARED,
                    rank=rank,
                )
                raced = [launch for launch in launched if launch.raced]
                expect(
                    not raced,
                    "a gradient does not change between its launch and its wait",
                    f"the gradient changed before the wait in {len(raced)} of {len(launched)} launches",
                    partial(diagnosis.explain_race, events, step, numel),
                    rank=rank,
                    step=step,
                )
        require_overlapped(results, case, steps=3)


@pytest.mark.points(2)
def test_no_sync_accumulates(submission):
    """Inside no_sync, backward launches nothing. The last backward, or the finish, averages what was accumulated."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, micro_batches=3, steps=3, dtype=torch.float64)
        results = submission.run(training.train, case.make_jobs(unsynced=2, **JOB), world_size=world)
        expect_silence(results.events, range(world), steps=2)
        expect_gradients(
            results,
            case,
            "every gradient is the average over the ranks of the sum over 3 micro-batches",
            hypotheses=partial(diagnosis.lost_micro_batches, case),
        )
        for rank, events in enumerate(results.events):
            count = len(launches(events, 0))
            expected = len(case.parameters())
            expect(
                count == expected,
                f"a step of 3 micro-batches has {expected} launches: one per parameter, in the last backward",
                f"the step made {count} launch{'es' * (count != 1)}",
                rank=rank,
            )
        require_overlapped(results, case, steps=2)
        expect_unsynced(results, case, step=2)


@pytest.mark.points(1)
def test_no_sync_restores_its_state(submission):
    """no_sync can be nested, and left by an exception. A second backward is averaged or raises RuntimeError."""
    [world] = submission.worlds(2)
    case = submission.case("Plain", world, micro_batches=3)
    results = submission.run(m03_overlapped_ddp.interrupted_no_sync, case.make_jobs(**JOB), world_size=world)
    for rank, events in enumerate(results.events):
        after = next(place for place, event in enumerate(events) if event.get("part") == "after")
        outer = next(place for place, event in enumerate(events) if event.get("part") == "outer")
        inside = [launch for launch in launches(events, phase="backward") if launch.place < after]
        nested = sum(launch.place < outer for launch in inside)
        expect(
            not inside,
            "backward passes inside no_sync launch nothing, even after an inner no_sync has ended",
            f"{len(inside)} launch{'es' * (len(inside) != 1)} came inside no_sync, {nested} of them in the inner block",
            partial(diagnosis.explain_noise, nested),
            rank=rank,
        )
        expect(
            any(event.get("part") == "exception" for event in events),
            "an exception inside no_sync leaves the block",
            "no exception left it",
            diagnosis.SWALLOWED,
            rank=rank,
        )
        other = next(place for place, event in enumerate(events) if event.get("part") == "other")
        outside = [launch for launch in launches(events, phase="backward") if after < launch.place < other]
        expect(
            len(outside) == len(case.parameters()),
            "after an exception inside no_sync, the next backward launches all its all-reduces",
            f"this backward launched {len(outside)} all-reduces for {len(case.parameters())} parameters",
            partial(diagnosis.explain_silence, events),
            rank=rank,
        )
        num_launches = sum(launch.place > other for launch in launches(events, phase="backward"))
        expect(
            num_launches == len(case.parameters()),
            "no_sync of one wrapper does not change another wrapper, whose backward launches all its all-reduces",
            f"this backward launched {num_launches} all-reduces for {len(case.parameters())} parameters",
            diagnosis.SHARED_FLAG,
            rank=rank,
        )
        again = launches(events, phase="finish")
        expect(
            not again,
            "finish_grad_sync launches nothing that backward has launched, even if another wrapper finishes before",
            f"it made {summarize(again)}",
            diagnosis.SHARED_HANDLES if len(again) == len(case.parameters()) else "",  # of one of the two finishes
            rank=rank,
        )
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
    for world, optimizer in zip(submission.worlds(2, 4), ("adam", "sgd")):
        groups = [[1, 3], [0, 2]] if world == 4 else [list(range(world))]
        case = submission.case("Tied", world, steps=4, dtype=torch.float64, optimizer=optimizer, group=groups[0])
        jobs = case.make_jobs(groups=groups, visits=training.VISITS, **JOB)
        judge = partial(expect_steps, case, partial(require_overlapped, steps=4))
        with blame_visits(submission, jobs, judge):
            judge(submission.run(training.train, jobs, world_size=world))


# ---- what the checks of this module and of later ones use


def expect_no_weight(launched, rank):
    """Expect no launch to carry a parameter instead of its gradient."""
    count = sum(launch.memory == "weight" for launch in launched)
    expect(
        not count,
        "every all_reduce carries a gradient",
        f"{describe_share(count, len(launched))} carry the parameter itself",
        "the submission all-reduces the parameter itself. It must all-reduce the gradient, p.grad.",
        rank=rank,
    )


def require_overlapped(results, case, steps=1):
    """Give points for correct numbers only if backward launches one asynchronous all_reduce per gradient."""
    count = sum(parameter.requires_grad for parameter in case.parameters().values())

    def accepts(launched):
        return len(launched) == count and all(map(overlaps, launched))

    kind = "one asynchronous all_reduce per gradient, launched in backward and waited for in finish_grad_sync"
    require_launches(results.events, case.group, kind, accepts, steps)
