"""Graded checks of module 7: views of buckets and shards that are made once."""

from collections import Counter
from functools import partial

import pytest
import torch
from test_m05_grad_buffer import BUCKET_NUMEL, compute_layout
from test_m06_coalesced import require_halves

from brigade.checks.expectations import (
    blocks_backward,
    expect,
    expect_equal,
    expect_gradients,
    expect_restored,
    expect_silence,
    expect_start,
    expect_weights,
    join_names,
)
from brigade.events import launches, ready, summary
from diagnosis import m07_cached_shards as diagnosis
from scenarios import m05_grad_buffer, m07_cached_shards, training

JOB = {"package": "m07_cached_shards", "wrapper": "CachedDDP"}


def job(buckets_per_group=1, **arguments):
    """What ranks are told of the wrapper."""
    arguments = {"bucket_numel": BUCKET_NUMEL, "buckets_per_group": buckets_per_group} | arguments
    return JOB | {"arguments": arguments}


@pytest.mark.points(1)
def test_gradients_are_averaged(submission):
    """Replicas start equal, buffers included; a reduce-scatter and an all-gather per group average the gradients."""
    models = ("Frozen", "Buffers", "MixedDtypes", "Tied")
    for world, model, buckets_per_group in zip(submission.worlds(1, 2, 3, 4), models, (1, 2, None, 2)):
        case = submission.case(model, world)
        with diagnosis.views_suspected():
            results = submission.run(training.train, case.make_jobs(**job(buckets_per_group)), world_size=world)
            expect_start([result["start"] for result in results], case)
            expect_gradients(results, case, tolerance=2**-6 if model == "MixedDtypes" else 1e-5)
        require_halves(results, case)


@pytest.mark.points(3)
def test_steady_step_makes_no_view(submission):
    """No view is made in hooks, finish_grad_sync or parameter sync, in the third step and the second after a move."""
    cases = zip(submission.worlds(2, 3), (True, False), (2, 1), (None, torch.float32))
    for world, gather_grads, buckets_per_group, grad_dtype in cases:
        case = submission.case("MixedDtypes", world, steps=5)
        jobs = case.make_jobs(gather_grads=gather_grads, reallocate=3, **job(buckets_per_group, grad_dtype=grad_dtype))
        results = submission.run(m07_cached_shards.count_views, jobs, world_size=world)
        volume = sum(numel for numel, _ in groups_of(case, world, 1))
        for rank, (events, steps) in enumerate(zip(results.events, results)):
            expect_no_view(rank, 2, steps, gather_grads)
            expect_no_view(rank, 4, steps, gather_grads, moved=True)
            found = launches(events, 2)
            expect(
                all(sum(x.numel for x in found if x.op == op) == volume for op in ("reduce_scatter", "all_gather")),
                f"such a step reduce-scatters and all-gathers all {volume} elements of the buffers",
                f"rank {rank}: {summary(found)}",
            )


@pytest.mark.points(2)
def test_views_follow_the_buffer(submission):
    """After buffer.reallocate() gradients are averaged and parameters gathered in the new memory, by kept views."""
    moves = [0, 1, 0, 2]  # before each step
    cases = zip(submission.worlds(2, 3, 2), (True, True, False), (torch.float64, torch.float32, torch.float64))
    runs = []
    for world, gather_grads, dtype in cases:
        case = submission.case("Plain", world, micro_batches=len(moves), dtype=dtype)
        # Gradients wider than the parameters have views of their own, main_grad.
        jobs = case.make_jobs(gather_grads=gather_grads, moves=moves, **job(2, grad_dtype=torch.float64))
        results = submission.run(m07_cached_shards.move_buffers, jobs, world_size=world)
        for step in range(len(moves)):
            micro = slice(step, step + 1)
            own = [case.gradients([rank], micro) for rank in range(world)]
            what = (
                "after finish_grad_sync gradients are the average"
                if gather_grads
                else "own shards of averages, put into param_data, are whole after finish_param_sync"
            )
            moved = sum(moves[: step + 1])
            with diagnosis.stale_views_suspected(moved, gather_grads):
                expect_equal(
                    f"{what} (step {step}, after {moved} calls of reallocate())",
                    [result["given"][step] for result in results],
                    case.gradients(micro=micro),
                    scale={name: max(float(grads[name].abs().max()) for grads in own) for name in own[0]},
                )
        runs.append((results, gather_grads))
    for results, gather_grads in runs:
        for rank, result in enumerate(results):
            for step, count in enumerate(result["held"]):
                expect(
                    not count,
                    "when the step after reallocate() is over nothing holds the memory of before",
                    f"rank {rank}, step {step}: {count} flat tensors of before are still held",
                    diagnosis.OLD_VIEWS,
                )
            expect_no_view(rank, 2, result["views"], gather_grads, moved=True)


@pytest.mark.points(1)
def test_launches_are_those_of_module_6(submission):
    """One reduce-scatter per group, in backward, and one all-gather of gradients or parameters, on kept views."""
    for world, buckets_per_group, gather_grads in zip(submission.worlds(2, 3), (2, 1), (True, False)):
        case = submission.case("Plain", world, hidden_layers=6, steps=3)
        jobs = case.make_jobs(gather_grads=gather_grads, reallocate=None, **job(buckets_per_group))
        results = submission.run(m07_cached_shards.count_views, jobs, world_size=world)
        groups = groups_of(case, world, buckets_per_group)
        gathers = ["backward", "finish_grad_sync"] if gather_grads else ["start_param_sync"]
        for rank, events in enumerate(results.events):
            for step in range(2):
                where = f"rank {rank}, step {step} (buckets_per_group={buckets_per_group}, gather_grads={gather_grads})"
                expect_launches(events, step, groups, gathers, where)
            expect_no_view(rank, 2, results[rank], gather_grads)


@pytest.mark.points(1)
def test_steps_and_subgroups(submission):
    """Several steps are right with no_sync (also interrupted), other ready orders, subgroups, unused parameters."""
    for world, model in zip(submission.worlds(2, 3, 4), ("Frozen", "Reordered", "Tied")):
        groups = [[1, 3], [0, 2]] if world == 4 else [list(range(world))]
        case = submission.case(
            model,
            world,
            steps=3,
            micro_batches=3 if model == "Frozen" else 1,
            dtype=torch.float64,
            group=groups[0],
            branches=list(range(world)) if model == "Reordered" else None,
        )
        told = case.make_jobs(groups=groups, interrupted=1 if model == "Frozen" else None, **job(2))
        with diagnosis.views_suspected():
            results = submission.run(training.train, told, world_size=world)
            if model == "Frozen":
                expect_silence(results.events, case.group, 3)
                expect_restored(results.events, case.group, 1)
            expect_gradients(results, case)
            expect_weights(results, case)
        require_halves(results, case, steps=3)
    [world] = submission.worlds(2)
    case = submission.case("Branches", world, steps=3, dtype=torch.float64, branches=[1, -1][:world])
    form = submission.rng.choice(["optimizer, to None", "optimizer, to zeros", "model, to None", "model, to zeros"])
    late = submission.rng.random() < 0.5
    results = submission.run(m05_grad_buffer.train, case.make_jobs(zero=form, late=late, **job(2)), world_size=world)
    expect_weights(results, case)


# ---- what the checks use


def groups_of(case, world, buckets_per_group):
    """(elements, names of parameters) of each group, as the rules of modules 5 and 6 have them; dtype by dtype."""
    by_dtype, groups = {}, []
    for name, parameter in reversed(case.parameters().items()):
        by_dtype.setdefault(parameter.dtype, []).append((name, parameter.numel()))
    for named in by_dtype.values():
        layout = compute_layout([numel for _, numel in named], BUCKET_NUMEL, world)
        ranges = layout["bucket_ranges"]
        for first in range(0, len(ranges), buckets_per_group):
            mine = range(first, min(first + buckets_per_group, len(ranges)))
            names = [name for (name, _), bucket in zip(named, layout["bucket_of"]) if bucket in mine]
            groups.append((sum(end - start for start, end in (ranges[i] for i in mine)), names))
    return groups


def expect_no_view(rank, step, steps, gather_grads, moved=False):
    """Expect that a step made no view. `steps` has the views of each step; `moved`: the buffers moved before it."""
    views = steps[step]
    if not views:
        return
    phases, lines, calls = Counter(), Counter(), {}
    for view in views:
        line = f"{view['file']}, line {view['line']}, in {view['in']}: {view['text']}"
        phases["hooks" if view["phase"] == "backward" else view["phase"]] += view["count"]
        lines[line] += view["count"]
        calls.setdefault(line, set()).add(view["call"])
    by_phase = join_names([f"{n} in {name}" for name, n in phases.items()])
    happened = f"rank {rank}, step {step}: {phases.total()} views, {by_phase}"
    for line, count in lines.most_common(3):
        happened += f"\n{line}  ({count} by {join_names(sorted(calls[line]))})"
    before = ", and the second one after reallocate()," * moved
    expect(
        False,
        f"a steady step{before} makes no view, in hooks, finish_grad_sync or parameter sync: it has those of the steps "
        "before",
        happened,
        partial(diagnosis.new_views, steps, step, JOB["package"], gather_grads, moved),
    )


def expect_launches(events, step, groups, gathers, where):
    """The launches of a step: a reduce-scatter and an all-gather for each group, the latter in a phase of `gathers`."""
    found = launches(events, step)
    sizes = [numel for numel, _ in groups]
    scatter, gather = ([x for x in found if x.op == op] for op in ("reduce_scatter", "all_gather"))
    expect(
        [launch.numel for launch in scatter] == sizes
        and sorted(launch.numel for launch in gather) == sorted(sizes)
        and len(found) == 2 * len(sizes),
        f"a step has one reduce_scatter and one all_gather per group ({len(sizes)}), of {join_names(sizes)} elements",
        f"{where}: {summary(found)}",
        partial(diagnosis.wrong_launches, found, sizes, "backward" in gathers),
    )
    complete = {name: place for place, name in ready(events, step)}
    for number, (launch, (_, after)) in enumerate(zip(scatter, groups[1:])):
        expect(
            launch.place < max(complete.get(name, -1) for name in after),
            f"the reduce_scatter of group {number} is launched before the next group's gradients are all ready",
            f"{where}: it was launched in {launch.phase}, when {join_names(after)} were ready",
            diagnosis.IN_THE_FINISH,
        )
    for op, phases in (("reduce_scatter", ["backward"]), ("all_gather", gathers)):
        others = [launch.phase for launch in found if launch.op == op and launch.phase not in phases]
        expect(
            not others,
            f"each {op} is launched in {' or '.join(phases)}",
            f"{where}: {len(others)} were launched in {join_names(others)}",
        )
    nexts = [*(names for _, names in groups[1:]), []] if "backward" in gathers else [[]] * len(groups)
    blocking = [launch for launch, after in zip(scatter, nexts) if blocks_backward(launch, after, complete)]
    blocking += [x for x in gather if x.sync or {"backward", "start_param_sync"} & set(x.wait_phases)]
    expect(
        not blocking,
        "each launch goes on at once, and backward waits for none before a gradient of the next group is ready",
        f"{where}: not so {summary(blocking)}",
        diagnosis.BLOCKING,
    )
    wrong = [launch for launch in found if step not in launch.wait_steps or launch.raced]
    expect(
        not wrong,
        "every handle of the step is waited on, before anything is read or written",
        f"{where}: {len(wrong)} of {len(found)} were never waited on, or changed before",
    )
