"""Graded checks of module 3: all-reduces that overlap with backward."""

from functools import partial

import pytest
import torch

from brigade.checks.diagnose.evidence import collect_evidence, join_names
from brigade.checks.expectations import (
    expect,
    expect_equal,
    expect_gradients,
    expect_silence,
    expect_start,
    expect_weights,
    overlaps,
    require_launches,
)
from brigade.events import launches, ready, summary
from diagnosis import m03_overlapped_ddp as diagnosis
from scenarios import m03_overlapped_ddp, training

JOB = {"package": "m03_overlapped_ddp", "wrapper": "OverlappedDDP"}


@pytest.mark.points(2)
def test_gradients_are_averaged(submission):
    """Replicas start equal, buffers included, and launches in backward make every gradient the average."""
    for world, model in zip(submission.worlds(1, 2, 3, 4), ("Plain", "Buffers", "Frozen", "Tied")):
        case = submission.case(model, world)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        expect_start([result["start"] for result in results], case)
        expect_gradients(results, case)
        require_overlapped(results, case)


@pytest.mark.points(2)
def test_launches_are_asynchronous(submission):
    """Each gradient is all-reduced by itself, asynchronously, during backward; only the finish waits."""
    [world] = submission.worlds(2)
    for model in ("Tied", "Frozen"):
        case = submission.case(model, world, steps=2)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        trainable = [p for p in case.parameters().values() if p.requires_grad]
        for rank, events in enumerate(results.events):
            for step in range(2):
                found = launches(events, step)
                expect(
                    sorted((launch.op, launch.numel) for launch in found)
                    == sorted(("all_reduce", p.numel()) for p in trainable),
                    f"one all_reduce for each of the {len(trainable)} trainable parameters ({model} model)",
                    f"{summary(found)}",
                    rank=rank,
                    step=step,
                )
                late = [launch for launch in found if launch.phase != "backward"]
                expect(
                    not late,
                    "every all_reduce is launched while backward runs",
                    f"{len(late)} of {len(found)} were launched in {late and late[0].phase}",
                    diagnosis.IN_THE_FINISH,
                    rank=rank,
                    step=step,
                )
                blocking = [launch for launch in found if launch.sync or "backward" in launch.wait_phases]
                expect(
                    not blocking,
                    "backward launches and goes on: no launch is synchronous, no handle is waited on in backward",
                    f"{len(blocking)} of {len(found)} launches were waited for in backward",
                    diagnosis.BLOCKING,
                    rank=rank,
                    step=step,
                )


@pytest.mark.points(2)
def test_launches_follow_their_gradients(submission):
    """Each all-reduce is launched when its gradient is in .grad, and before the gradient after the next is ready."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, hidden_layers=4)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        sizes = {name: p.numel() for name, p in case.parameters().items()}  # all different
        for rank, events in enumerate(results.events):
            order = ready(events, 0)
            missing = sorted(set(sizes) - {name for _, name in order})
            expect(
                not missing,
                "backward leaves the gradient of every parameter of the model in its .grad",
                f"backward reported no gradient for {join_names(missing)}",
                diagnosis.COPIED_PARAMETERS,
                rank=rank,
            )
            found = {launch.numel: launch.place for launch in launches(events, 0)}
            for place, (at, name) in enumerate(order):
                launched = found.get(sizes[name])
                expect(launched is not None, f"{name} is all-reduced by itself", "no launch of its size", rank=rank)
                expect(
                    at < launched,
                    f"the all_reduce of {name} is launched when its gradient has been added to .grad",
                    "it was launched before",
                    diagnosis.TENSOR_HOOK,
                    rank=rank,
                )
                if place + 2 < len(order):
                    expect(
                        launched < order[place + 2][0],
                        f"the all_reduce of {name} is launched before {order[place + 2][1]} is ready",
                        f"it was launched later, {sum(p < launched for p, _ in order)} of {len(order)} "
                        "gradients being ready",
                        diagnosis.COLLECTED,
                        rank=rank,
                    )


@pytest.mark.points(2)
def test_every_handle_is_waited_on(submission):
    """finish_grad_sync waits for every asynchronous launch of its step, and for none of an earlier step."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, steps=3)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        for rank, events in enumerate(results.events):
            for step in range(3):
                found = launches(events, step)
                forgotten = [launch for launch in found if step not in launch.wait_steps]
                expect(
                    bool(found) and not forgotten,
                    "finish_grad_sync waits on the handle of every all_reduce of the step",
                    f"{len(forgotten)} of {len(found)} were never waited on",
                    diagnosis.LAST_HANDLE,
                    rank=rank,
                    step=step,
                )
                stale = [launch for launch in found if set(launch.wait_steps) - {step}]
                expect(
                    not stale,
                    "a step waits on its own handles only",
                    f"{len(stale)} handles of step {step} were waited on again in a later step",
                    diagnosis.NEVER_CLEARED,
                    rank=rank,
                )
                raced = [launch for launch in found if launch.raced]
                expect(
                    not raced,
                    "a gradient is left alone between its launch and its wait",
                    f"{len(raced)} of {len(found)} were changed in between",
                    diagnosis.RACED,
                    rank=rank,
                    step=step,
                )
        require_overlapped(results, case, steps=3)


@pytest.mark.points(2)
def test_no_sync_accumulates(submission):
    """Micro-batches inside no_sync launch nothing; launches in the last backward average what was accumulated."""
    for world in submission.worlds(2, 3):
        case = submission.case("Plain", world, micro_batches=3, steps=2)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        expect_silence(results.events, range(world), steps=2)
        expect_gradients(
            results,
            case,
            "gradients are the average of what 3 micro-batches accumulated",
            hypotheses=partial(diagnosis.lost_micro_batches, case),
        )
        for rank, events in enumerate(results.events):
            count = len(launches(events, 0))
            expected = len(case.parameters())
            expect(
                count == expected,
                f"{expected} launches in a step of 3 micro-batches: one for each parameter, in the last backward",
                f"{count} launches",
                rank=rank,
            )
        require_overlapped(results, case, steps=2)


@pytest.mark.points(1)
def test_no_sync_restores_its_state(submission):
    """no_sync nests, and after an exception inside it the next backward synchronises again."""
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
            "no launch in backward passes inside no_sync, after an inner no_sync has ended too",
            f"{nested} launches inside the inner no_sync, {len(inside) - nested} after it has ended",
            partial(diagnosis.not_silent, nested),
            rank=rank,
        )
        outside = [launch for launch in launches(events, phase="backward") if launch.place > after]
        expect(
            len(outside) == len(case.parameters()),
            "after an exception inside no_sync, the next backward launches all its all-reduces",
            f"{len(outside)} launches for {len(case.parameters())} parameters",
            partial(diagnosis.not_restored, events),
            rank=rank,
        )
    expect_equal(
        "gradients are the average of all three",
        [result[0] for result in results],
        case.gradients(),
        evidence=collect_evidence(results.events, case, step=None),
    )


@pytest.mark.points(1)
def test_steps_and_subgroups(submission):
    """Over four overlapped steps, and in a group of ranks 1 and 3 of four, the weights are those of one process."""
    for world, optimizer in zip(submission.worlds(2, 4), ("adam", "sgd")):
        groups = [[1, 3], [0, 2]] if world == 4 else [list(range(world))]
        case = submission.case("Tied", world, steps=4, dtype=torch.float64, optimizer=optimizer, group=groups[0])
        results = submission.run(training.train, case.make_jobs(groups=groups, **JOB), world_size=world)
        expect_gradients(results, case)
        expect_weights(results, case)
        require_overlapped(results, case, steps=4)


# ---- what the checks use


def require_overlapped(results, case, steps=1):
    """The numbers count only if each step launches one asynchronous all_reduce per gradient, while backward runs."""
    count = sum(parameter.requires_grad for parameter in case.parameters().values())

    def accepts(found):
        return len(found) == count and all(map(overlaps, found))

    kind = "one asynchronous all_reduce for each gradient, launched while backward runs and awaited in the finish"
    require_launches(results.events, case.group, kind, accepts, steps)
