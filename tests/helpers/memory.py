"""Runs of ranks that have little memory. They prove that an answer frees what it should, whatever the ranks report.

The kernel limits the address space of an isolated rank to what torch needs and a budget. The budget is in the middle
between the memory of a right answer and that of one that keeps everything. The ranks cannot only pretend to work:
the launches have to deliver results that depend on all ranks' data. If ranks are not isolated, the runs do not happen.
"""

import random

import torch

from brigade.course.checks.expectations import replace_cause
from brigade.grader.witness.content import Values, collect, list_factors
from brigade.ranks.claims import At
from brigade.ranks.runner.ranks import PerRank
from helpers.training import draw

SAMPLE = 1000  # numbers for which the grader looks in the launches
CLOSE = 1e-9  # relative to the largest of them; no other float64 numbers are as close
WORLD = 4


def run_with_little_memory(submission, scenario, job, mib, cause="", world=WORLD):
    """Run a scenario in which each rank has this many MiB. Return the results and each rank's seed; None without limit.

    `cause` is the likely cause if a rank needs more.
    """
    if not submission.limits_memory:
        return None
    seeds = [submission.rng.randrange(1 << 31) for _ in range(world)]
    jobs = PerRank(job | {"seed": seed} for seed in seeds)
    with replace_cause(lambda failed: cause if "MiB of memory" in failed.verdict.expected else ""):
        return submission.run(scenario, jobs, world_size=world, mode="record", memory=mib << 20), seeds


def draw_sample(rng: random.Random, numel: int) -> torch.Tensor:
    """Return the places of the numbers for which the grader looks."""
    return torch.tensor([rng.randrange(numel) for _ in range(SAMPLE)])


def average(seeds, number, numel, at, dtype=torch.float64):
    """Return the averages of the tensors that the ranks draw from their seeds plus `number`, at these places."""
    return sum(draw(seed + number, numel)[at].to(dtype).double() for seed in seeds) / len(seeds)


def expect_delivered(results, step, expected, what):
    """Expect the launches of a step to have delivered these numbers, or instead of sums over the ranks, averages."""
    world = len(results)
    delivered = Values(collect(results.events, results.carried, set(range(world))).get(step, []))
    limit = CLOSE * float(expected.abs().max())
    is_right = any(delivered.contain(factor * expected, factor * limit) for factor in list_factors(world))
    At().claim(f"the launches of step {step} carry {what}", is_right, "they carry other numbers")
