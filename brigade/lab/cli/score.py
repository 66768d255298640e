"""brigade score N: plan an entry's own step on three fixed problems, after its checks have passed with a new seed."""

from __future__ import annotations

import argparse
import random

from brigade.course.checks.collect import collect
from brigade.course.checks.run import Conditions, prepare, run_check
from brigade.course.cli.console import console
from brigade.course.cli.options import add, add_target
from brigade.course.table.modules import Module, get_module
from brigade.course.table.submission import Snapshot
from brigade.lab.cli.lab import require_training
from brigade.ranks.texts import Sources

SEEDS = 1_000_000


def add_score_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade score`."""
    same = "The score is planned from what your code launches, so it is the same on every machine."
    parser.description = f"{parser.description} {same}"
    parser.add_argument("number", metavar="N", help="the module's number")
    add_target(parser)
    add(parser, "--torch", "also plan torch DDP, torch DDP with ZeroRedundancyOptimizer, and torch's fully_shard")


def run_score(options: argparse.Namespace) -> int:
    """Print the exposed time, the bytes sent and the peak memory of the entry on each problem.

    Return 1 if a check fails. Raise UserError if the plan is not what real ranks do.
    """
    entry = get_module(options.number)
    require_training(entry)
    snapshot = Snapshot(options.target)
    sources = snapshot.read(entry.number)
    if failed := find_failed_check(entry, snapshot, sources):
        console.print(failed, markup=False)
        return 1
    from brigade.lab import score
    from brigade.lab.ladder import PLANNED_TORCH, get_variant

    score.verify(get_variant(entry), sources)
    variants = [get_variant(entry), *(PLANNED_TORCH if options.torch else [])]
    for line in score.format_rows(score.plan_rows(variants, sources)):
        print(line)
    return 0


def find_failed_check(entry: Module, snapshot: Snapshot, sources: Sources) -> str:
    """Run the module's checks with a new seed. Return a sentence about the first that fails, or ""."""
    prepare()
    seed = random.randrange(SEEDS)
    for check in collect([entry]):
        if run_check(check, snapshot, Conditions(seed), sources=sources).status != "passed":
            again = f"brigade check {entry.number} --target {snapshot.name} --seed {seed}"
            return f"No score: check {check.number} of module {entry.number} fails. `{again}` says why."
    return ""
