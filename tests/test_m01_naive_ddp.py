"""Graded checks of module 1: naive data parallelism."""

from functools import partial

import pytest
import torch

from brigade.course.checks.expectations import expect_gradients, expect_start, expect_weights
from brigade.ranks.claims import each_step
from helpers import training
from helpers.late_launches import blame_visits
from helpers.odd_steps import expect_idle_rank
from helpers.steps import expect_interface
from m01_naive_ddp import causes, scenario

JOB = {"package": "m01_naive_ddp", "wrapper": "NaiveDDP"}


@pytest.mark.parts("Parts (a) and (b): equal replicas")
@pytest.mark.points(1)
def test_parameters_start_equal(submission):
    """After construction, all parameters, including frozen and transposed ones, equal those of rank 0."""
    for world, model in submission.pair_worlds((2, 3), ("Frozen", "Tied")):
        case = submission.case(model, world)
        for states, events in collect_start_states(submission, case, world):
            expect_start(states, case, "parameters", events=events)
    case = submission.case("Transposed", world)
    states = submission.run(scenario.broadcast, case.make_jobs(**JOB), world_size=world)
    expect_start(states, case, "parameters", events=states.events)


@pytest.mark.points(1)
def test_buffers_start_equal(submission):
    """After construction, all buffers (of any dtype, persistent or not) equal those of rank 0."""
    [world] = submission.worlds(2)
    case = submission.case("Buffers", world)
    for states, events in collect_start_states(submission, case, world):
        expect_start(states, case, "buffers", events=events)


@pytest.mark.parts("Part (c): equal steps")
@pytest.mark.points(2)
def test_gradients_are_averaged(submission):
    """After finish_grad_sync, every gradient is the average over the ranks, for world sizes 1 to 4."""
    for world in submission.worlds(1, 2, 3, 4):
        case = submission.case("Plain", world)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        expect_gradients(results, case)


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_several_steps(submission):
    """After four steps with evaluations, and one or two backward passes, the weights equal those from one process."""
    for world, optimizer, count in submission.pair_worlds((2, 3), ("sgd", "adam"), (1, 2)):
        case = submission.case("Tied", world, steps=4, micro_batches=count, dtype=torch.float64, optimizer=optimizer)
        jobs, judge = case.make_jobs(visits=training.VISITS, **JOB), partial(expect_weights, case=case)
        with blame_visits(submission, jobs, judge):
            judge(submission.run(training.train, jobs, world_size=world))


@pytest.mark.points(1)
def test_branches_and_unused_parameters(submission):
    """A gradient counts as zero on ranks that do not use its parameter. If no rank uses it, there is no error."""
    for world, dtype in submission.pair_worlds((2, 3), (torch.float32, torch.float64)):
        case = submission.case("Branches", world, branches=[1, -1, 0][:world], dtype=dtype)
        jobs = case.make_jobs(visits=[training.EVAL_MODE] * (world == 3), **JOB)
        what = "every gradient is the average, even if the ranks use different layers"
        judge = partial(expect_gradients, case=case, what=what)
        with blame_visits(submission, jobs, judge):
            judge(submission.run(training.train, jobs, world_size=world))
    expect_idle_rank(submission, JOB)


@pytest.mark.points(1)
def test_one_all_reduce_per_parameter(submission):
    """A step launches one all-reduce per trainable parameter: none for frozen parameters, one for a tied parameter."""
    [world] = submission.worlds(2)
    for model in ("Frozen", "Tied"):
        case = submission.case(model, world, steps=2)
        results = submission.run(training.train, case.make_jobs(**JOB), world_size=world)
        numels = [p.numel() for p in case.parameters().values() if p.requires_grad]
        setting, why = f" (the {model} model)", partial(causes.explain_launches, case)
        for step in each_step(results.events, 2):
            launched = step.launches()
            launched.are_one_for_each("parameter", "all_reduce", numels, setting, in_order=False, cause=why)


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_subgroups(submission):
    """Ranks 1 and 3 train in their own group: they start with the weights of rank 1 and average over two ranks."""
    [world] = submission.worlds(4)
    groups = [[1, 3], [0, 2]] if world == 4 else [[0]]
    case = submission.case("Plain", world, group=groups[0])
    results = submission.run(training.train, case.make_jobs(groups=groups, **JOB), world_size=world)
    expect_start([result["start"] for result in results], case, events=results.events)
    expect_gradients(results, case)
    expect_interface(results, case)


# ---- what the checks use


def collect_start_states(submission, case, world):
    """Yield states and records of the ranks after broadcast_module_state alone, and after constructing NaiveDDP."""
    for function in (scenario.broadcast, scenario.construct):
        states = submission.run(function, case.make_jobs(**JOB), world_size=world)
        yield states, states.events
