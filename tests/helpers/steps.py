"""What the checks of modules 2 to 7 have in common: averages, several steps, and sub-groups."""

from functools import partial

import torch

from brigade.course.checks.expectations import expect_gradients, expect_start, expect_weights, find_cause, replace_cause
from brigade.ranks.claims import At
from helpers import training
from helpers.buffers import BUCKET_NUMEL, compute_padded_numel
from helpers.late_launches import blame_visits
from helpers.odd_steps import expect_restored, expect_silence, expect_unsynced


def split_ranks(world):
    """Return the groups in which the ranks of a run train: four ranks are two groups."""
    return [[1, 3], [0, 2]] if world == 4 else [list(range(world))]


def expect_interface(results, case):
    """Expect every wrapper to have its model as .module and its group as .process_group."""
    for rank in case.group:
        for name, expected in (("module", True), ("process_group", str(case.group))):
            is_kept = results[rank]["interface"][name] == expected
            cause = f"the constructor does not keep its argument in self.{name}, which other modules read."
            At(rank).claim(f"the wrapper's .{name} is the one that it was given", is_kept, "it is not", cause)


def expect_steps(case, require, results):
    """Expect a right start, gradients, weights and interface. `require(results, case)` judges the launches."""
    expect_start([result["start"] for result in results], case, events=results.events)
    expect_gradients(results, case)
    expect_weights(results, case)
    require(results, case)
    expect_interface(results, case)


def expect_averages(submission, jobs, require):
    """Expect equal replicas, averaged gradients and this module's launches on 1 to 4 ranks.

    `jobs` are what the ranks' jobs say about the wrapper, by number of ranks. `require(results, case)` judges launches.
    """
    for world, model, job in submission.pair_worlds((1, 2, 3, 4), ("Plain", "Buffers", "Frozen", "Tied"), jobs):
        case = submission.case(model, world)
        results = submission.run(training.train, case.make_jobs(**job), world_size=world)
        expect_start([result["start"] for result in results], case, events=results.events)
        is_padded = job.get("arguments", {}).get("bucket_numel") == BUCKET_NUMEL
        padded = compute_padded_numel(case.parameters().values(), world) if is_padded else 0
        expect_gradients(results, case, padded=padded)
        require(results, case)


def expect_four_steps(submission, job, require, micro_batches=(1, 1)):
    """Expect the weights of one process after four steps with evaluations, on two ranks and in a group of two of four.

    `require(results, case, steps=4)` judges the launches.
    """
    for world, optimizer, count in submission.pair_worlds((2, 4), ("adam", "sgd"), micro_batches):
        options = {"dtype": torch.float64, "optimizer": optimizer, "group": split_ranks(world)[0]}
        case = submission.case("Tied", world, steps=4, micro_batches=count, **options)
        jobs = case.make_jobs(groups=split_ranks(world), visits=training.VISITS, **job)
        judge = partial(expect_steps, case, partial(require, steps=4))
        with blame_visits(submission, jobs, judge):
            judge(submission.run(training.train, jobs, world_size=world))


def expect_all_kinds_of_steps(submission, first, job, require, inspect=None, hypotheses=None, judge_order=None):
    """Expect right steps in three runs, whose last one has evaluations, and is in a group of two of four ranks.

    In the first run, of the model `first`, there are micro-batches inside no_sync, and exceptions end a block. In the
    second run, gradients become ready in a different order on each rank. `require(results, case, steps=3)` judges the
    launches, `inspect(results, case)` does so before the numbers, and `hypotheses(case)` are about the gradients.
    `judge_order(records, case)` judges the order of launches in the second run, also if it has ended in a mismatch.
    """

    def explain_mismatch(failed):
        is_mismatch = failed.verdict.ending == "mismatch" and case.model == "Reordered" and judge_order
        return find_cause(partial(judge_order, failed.events, case)) if is_mismatch else ""

    for world, model in submission.pair_worlds((2, 3, 4), (first, "Reordered", "Tied")):
        case = submission.case(
            model,
            world,
            steps=4 if model == first else 3,
            micro_batches=3 if model == first else 1,
            dtype=torch.float64,
            group=split_ranks(world)[0],
            branches=[0, 3, 1][:world] if model == "Reordered" else None,
        )
        visits = training.VISITS if model == "Tied" else ()
        jobs = case.make_jobs(groups=split_ranks(world), interrupted=2, unsynced=3, visits=visits, **job)
        judge = partial(expect_steps, case, partial(require, steps=3))
        with blame_visits(submission, jobs, judge), replace_cause(explain_mismatch):
            results = submission.run(training.train, jobs, world_size=world)
            if visits:
                judge(results)
        if model == first:
            expect_silence(results.events, case.group, 3)
            expect_restored(results.events, case.group, 2)
            expect_unsynced(results, case, step=3)
        if judge_order and model == "Reordered":
            judge_order(results.events, case)
        if inspect:
            inspect(results, case)
        expect_gradients(results, case, hypotheses=hypotheses and partial(hypotheses, case))
        expect_weights(results, case)
        require(results, case, steps=3)
