"""Graded checks of module 7: views of buckets and shards that are created once and cached."""

from collections import Counter
from functools import partial

import pytest
import torch

from brigade.course.checks import expectations
from brigade.course.checks.diagnose.evidence import find_leftover
from brigade.ranks.claims import At, each_step, in_phase
from brigade.ranks.runner.ranks import PerRank
from brigade.ranks.verdict import join_names
from helpers import training
from helpers.buffers import BUCKET_NUMEL, expect_group_overlap, expect_zeroed, list_groups, require_halves
from helpers.odd_steps import expect_no_old_gradients, expect_second_backward
from helpers.steps import expect_all_kinds_of_steps
from m07_cached_shards import causes, scenario

JOB = {"package": "m07_cached_shards", "wrapper": "CachedDDP"}


def make_job(buckets_per_group=1, **arguments):
    """Return what each rank's job says about the wrapper."""
    arguments = {"bucket_numel": BUCKET_NUMEL, "buckets_per_group": buckets_per_group} | arguments
    return JOB | {"arguments": arguments}


@pytest.mark.points(1)
def test_gradients_are_averaged(submission):
    """Replicas start equal. A reduce-scatter and an all-gather per group average gradients, even after reallocate()."""
    models = ("Frozen", "Buffers", "MixedDtypes", "Tied")
    for world, model, buckets_per_group in submission.pair_worlds((1, 2, 3, 4), models, (1, 2, None, 2)):
        is_mixed = model == "MixedDtypes"
        case = submission.case(model, world, steps=2, dtype=None if is_mixed else torch.float64)
        jobs = case.make_jobs(reallocate=1, **make_job(buckets_per_group))
        with expectations.replace_cause(causes.find_wrong_view):
            results = submission.run(training.train, jobs, world_size=world)
            expectations.expect_start([result["start"] for result in results], case, events=results.events)
            tolerance, hypotheses = 2**-6 if is_mixed else 1e-5, partial(causes.suspect_copies, case)
            expectations.expect_gradients(results, case, tolerance=tolerance, hypotheses=hypotheses)
            if not is_mixed:
                with expectations.explain_failures([], partial(causes.describe_stale, "grad_data")):
                    expectations.expect_weights(results, case)
        require_halves(results, case)


@pytest.mark.points(3)
def test_steady_step_makes_no_view(submission):
    """Hooks, finish_grad_sync and the parameter sync create no views once the cache is full, even after a move."""
    cases = submission.pair_worlds((2, 3), (True, False), (2, 1), (None, torch.float32))
    for world, gather_grads, buckets_per_group, grad_dtype in cases:
        case = submission.case("MixedDtypes", world, steps=5)
        job = make_job(buckets_per_group, grad_dtype=grad_dtype) | {"moves": [0, 0, 0, 1, 0], "steady": [2, 4]}
        jobs = case.make_jobs(gather_grads=gather_grads, **job)
        results = submission.run(scenario.run_steps, jobs, world_size=world)
        numels = list_bucket_numels(case, world)
        volume = sum(numels)
        for step in (step for step in each_step(results.events, 3) if step.number == 2):
            for number, is_moved in ((2, False), (4, True)):
                expect_no_view(step.rank, number, results[step.rank], gather_grads, numels, is_moved)
            launched = step.launches()
            launched.claim(
                f"a steady step reduce-scatters and all-gathers all {volume} elements of the buffers",
                {sum(x.numel for x in launched if x.op == op) for op in ("reduce_scatter", "all_gather")} == {volume},
                cause=explain_leftover,
            )


@pytest.mark.points(2)
def test_views_follow_the_buffer(submission):
    """After buffer.reallocate(), gradients and parameters use the new memory, and views are cached again."""
    moves = [0, 1, 0, 2, 0]  # calls of reallocate() before each step
    cases = submission.pair_worlds((2, 3, 2), (True, True, False), (torch.float64, torch.float32, torch.float64))
    runs = []
    for world, gather_grads, dtype in cases:
        case = submission.case("Plain", world, micro_batches=len(moves), dtype=dtype)
        # Gradients that are wider than the parameters are in views of their own, main_grad.
        # If parameters are gathered, the buffers also move between the two collectives of the last step.
        late = {"moves_late": None if gather_grads else len(moves) - 1}
        job = make_job(2, grad_dtype=torch.float64) | {"moves": moves, "steady": [2]}
        jobs = case.make_jobs(gather_grads=gather_grads, **late, **job)
        jobs = PerRank(own | {"batches": [[batch] for batch in own["batches"][0]]} for own in jobs)  # a step each
        results = submission.run(scenario.run_steps, jobs, world_size=world)
        for step in range(len(moves)):
            micro = slice(step, step + 1)
            own = [case.gradients([rank], micro) for rank in range(world)]
            scale = {name: max(float(grads[name].abs().max()) for grads in own) for name in own[0]}
            what = (
                "finish_grad_sync leaves the average over all ranks in every gradient"
                if gather_grads
                else "finish_param_sync leaves the averaged shards of all ranks in param_data"
            )
            num_moves = sum(moves[: step + 1]) + (step == late["moves_late"])
            when = f"after {num_moves} call{'s' * (num_moves != 1)}" if num_moves else "before any call"
            actual = [result["tensors"][step] for result in results]
            expected, what = case.gradients(micro=micro), f"in step {step}, {when} of reallocate(), {what}"
            with expectations.replace_cause(partial(causes.find_stale_views, num_moves, gather_grads, results.events)):
                expectations.expect_equal(what, actual, expected, scale=scale)
        runs.append((results, gather_grads, list_bucket_numels(case, world)))
    for results, gather_grads, numels in runs:
        for rank, result in enumerate(results):
            for step, count in enumerate(result["num_alive"]):
                what = "at the end of the step after reallocate(), {} old flat tensors are still alive"
                At(rank, step).equal(what, count, 0, causes.OLD_VIEWS)
            expect_no_view(rank, 2, result, gather_grads, numels, is_moved=True)


@pytest.mark.points(1)
def test_launches_are_those_of_module_6(submission):
    """Each group has one reduce-scatter in backward and one all-gather of gradients or parameters. Views are cached."""
    for world, buckets_per_group, gather_grads in submission.pair_worlds((2, 3), (2, 1), (True, False)):
        case = submission.case("Plain", world, hidden_layers=6, steps=3)
        job = make_job(buckets_per_group) | {"moves": [0] * 3, "steady": [2]}
        jobs = case.make_jobs(proven=1, gather_grads=gather_grads, **job)
        results = submission.run(scenario.run_steps, jobs, world_size=world)
        groups = list_groups(case.parameters(), world, buckets_per_group)
        gathers = ["backward", "finish_grad_sync"] if gather_grads else ["start_param_sync"]
        setting = f" (buckets_per_group={buckets_per_group}, gather_grads={gather_grads})"
        for step in each_step(results.events, 2):
            expect_launches(step.launches(), groups, gathers, setting)
        for rank, result in enumerate(results):
            expect_no_view(rank, 2, result, gather_grads, list_bucket_numels(case, world))


@pytest.mark.points(1)
@pytest.mark.needs("test_gradients_are_averaged")
def test_steps_and_subgroups(submission):
    """Gradients stay correct with no_sync, evaluations and reallocate(), in any ready order, and in sub-groups."""
    with expectations.replace_cause(causes.find_wrong_view):
        job = make_job(2) | {"reallocate": 1}
        expect_all_kinds_of_steps(submission, "Frozen", job, require_halves, hypotheses=causes.suspect_copies)
    [world] = submission.worlds(2)
    expect_second_backward(submission, world, make_job(2))
    expect_no_old_gradients(submission, world, make_job(2))
    form = submission.rng.choice(["optimizer, to None", "optimizer, to zeros", "model, to None", "model, to zeros"])
    expect_zeroed(submission, make_job(2), [(form, submission.rng.random() < 0.5)])


# ---- what the checks use


def list_bucket_numels(case, world):
    """Return the number of elements of each bucket."""
    return [numel for _, numel, _ in list_groups(case.parameters(), world, 1)]


def expect_no_view(rank, step, result, gather_grads, numels, is_moved=False):
    """Expect that a step of the scenario made no view; `is_moved` says whether buffers moved before it."""
    views = result["views"][step]
    if not views:
        return
    phases, lines, calls = Counter(), Counter(), {}
    for view in views:
        line = f"{view['file']}, line {view['line']}, in {view['in']}: {view['text']}"
        phases["hooks" if view["phase"] == "backward" else view["phase"]] += view["count"]
        lines[line] += view["count"]
        calls.setdefault(line, set()).add(view["call"])
    by_phase = join_names([f"{n} in {name}" for name, n in phases.items()])
    where = f": {by_phase}" if len(phases) > 1 else f" in {next(iter(phases))}"
    got = f"the step created {phases.total()} view{'s' * (phases.total() != 1)}{where}"
    for line, count in lines.most_common(3):
        got += f"\n{line}  ({count} by {join_names(sorted(calls[line]))})"
    which = "the second step after reallocate()" if is_moved else "a steady step"
    what = f"{which} creates no view in hooks, finish_grad_sync or the parameter sync, because it reuses the views of "
    num_views = result["num_views"]
    why = partial(causes.explain_views, views, num_views, step, JOB["package"], gather_grads, is_moved, numels)
    At(rank, step).claim(f"{what}earlier steps", False, got, why)


def expect_launches(launched, groups, gathers, setting):
    """Expect one reduce-scatter and one all-gather per group in a step, the latter in phases `gathers`.

    `setting` ends the text of what is expected.
    """
    numels = [numel for _, numel, _ in groups]
    scatters, all_gathers = launched.step.launches("reduce_scatter"), launched.step.launches("all_gather")
    is_right = [launch.numel for launch in scatters] == numels and len(launched) == 2 * len(numels)
    launched.claim(
        f"a step launches one reduce_scatter and one all_gather for each of {len(numels)} groups, with "
        f"{join_names(numels, len(numels))} elements{setting}",
        is_right and sorted(launch.numel for launch in all_gathers) == sorted(numels),
        cause=partial(causes.explain_launches, numels, "backward" in gathers),
    )
    is_gathered = "backward" in gathers
    expect_group_overlap(launched, groups, setting, causes.explain_late_launches, gathered=is_gathered)
    for own, phases in ((scatters, ["backward"]), (all_gathers, gathers)):
        where = " or ".join("during backward" if phase == "backward" else f"in {phase}" for phase in phases)
        came = join_names(sorted({launch.phase for launch in own} - {*phases}))
        got = f"{{count}} of {{all}} launches came in {came} instead"
        own.satisfy(f"each {own[0].op} is launched {where}{setting}", in_phase(*phases), explain_leftover, got)
    all_gathers.satisfy(
        f"backward and start_param_sync wait for no all_gather{setting}",
        lambda one: not one.sync and not {"backward", "start_param_sync"} & {*one.wait_phases},
        causes.explain_blocking,
        "the step waited too early for {these}",
    )
    expectations.expect_waited(launched, setting)


def explain_leftover(launched):
    """Return which launch of a later step differs from those of step 0."""
    return find_leftover(launched.step.events, launched.step.number)
