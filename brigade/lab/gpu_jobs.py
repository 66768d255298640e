"""Run the checks and the mutants of `gpu_check` in a separate process, which can be stopped.

    python -m brigade.lab.gpu_jobs '{"backend": "gloo", "share_gpu": false, "deadline_s": 60, "checks": [2], "mutants":
    [[2, "buckets by size"]]}'

The process prints a line of JSON with the number of jobs, then one line for each job as soon as it ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from brigade.checks import render
from brigade.checks.collect import collect, import_from_tests
from brigade.checks.run import Conditions, prepare, run_check
from brigade.course.modules import Module, get_module
from brigade.runner.server import SERVER


def import_mutants(entry: Module) -> Any:
    """Import the file with the module's mutants, and return it."""
    return import_from_tests(f"{entry.package}.mutants")


def run_jobs(jobs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the checks of the modules in `jobs["checks"]` on the reference, then test that checks catch the mutants.

    Yield the number of jobs, then the result of each job.
    """
    checks = collect([get_module(number) for number in jobs["checks"]])
    yield {"jobs": len(checks) + len(jobs["mutants"])}

    def report(name: str, problem: str, started: float, runs_before: int) -> dict[str, Any]:
        fields = {"seconds": time.monotonic() - started, "runs": SERVER.num_runs - runs_before}
        return {"name": name, "passed": not problem, "text": problem} | fields

    conditions = Conditions(backend=jobs["backend"], share_gpu=jobs["share_gpu"], deadline_s=jobs["deadline_s"])
    for check in checks:
        started, before = time.monotonic(), SERVER.num_runs
        outcome = run_check(check, "solutions", conditions)
        yield report(check.name, "" if outcome.passed else render.format_message(outcome), started, before)
    for number, name in jobs["mutants"]:
        entry, started, before = get_module(number), time.monotonic(), SERVER.num_runs
        [mutant] = [mutant for mutant in import_mutants(entry).MUTANTS if mutant.name == name]
        escaped = import_from_tests("mutants").escapes(entry, mutant, conditions)
        yield report(f"mutant {number}: {name}", escaped, started, before)


def main(arguments: Sequence[str]) -> int:
    """Run the jobs in the first argument, and print their results."""
    prepare()
    for line in run_jobs(json.loads(arguments[0])):
        print(json.dumps(line), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
