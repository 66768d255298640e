"""Check everything that needs a GPU, in one command: python3 -m tools.gpu_check

The command runs the graded checks on the reference, a sample of mutants, and the benchmark. It needs this clone and a
python3 with torch and pytest, but no setup and no network access: see docs/gpu_check.md. The exit status is 0 if
everything passed, 1 if not, and 2 if the command cannot run here.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from brigade.checks import render
from brigade.checks.collect import collect, import_from_tests
from brigade.checks.run import Conditions, prepare
from brigade.checks.run import run_checks as run_graded_checks
from brigade.course.modules import MODULES, CourseError, Module, get_module
from brigade.lab.experiment import run_to_status
from brigade.runner import machine
from brigade.runner.ranks import RankFailure

FIRST_MODULES = (0, 6, 9, 11)  # messages, coalescing, late waits and freed memory: most of what only NCCL shows
MOST_RANKS = 4  # in the graded checks
RUN_DEADLINE_S = 60

Results = Iterator[tuple[str, str]]  # the name of a test and its failure message, which is "" if the test passed


def run_checks(entry: Module, conditions: Conditions, jobs: int) -> Results:
    """Run the graded checks of a module on the reference, `jobs` at the same time."""
    for outcome in run_graded_checks(collect([entry]), "solutions", conditions, at_a_time=jobs):
        yield outcome.check.name, "" if outcome.passed else render.format_message(outcome)


def run_mutants(modules: Sequence[Module], conditions: Conditions) -> Results:
    """Run the sample of mutants. The checks that a mutant names must catch it."""
    mutants = import_from_tests("mutants")
    for mutant in [mutant for entry in modules for mutant in mutants.list_mutants(entry) if mutant.in_sample]:
        yield f"mutant {mutant.number}: {mutant.name}", mutants.escapes(mutant, conditions)


def run_benchmark(conditions: Conditions, world_size: int, is_shared: bool) -> Results:
    """Train with all variants. Their losses must equal the loss of one process."""
    from brigade.lab import ladder

    workload = ladder.Workload(rounds=8, warmup=2) if is_shared else ladder.Workload()
    results = ladder.run_benchmark(
        workload,
        ladder.add_torch_variants(ladder.get_course_variants()),
        world_size=world_size,
        backend=conditions.backend,
        share_gpu=conditions.share_gpu,
        deadline=(conditions.ends_at - time.monotonic()) / 2,  # for the ranks, then for one process
    )
    print(f"{world_size} ranks" + ", whose times mean nothing because they share a GPU" * is_shared)
    for one in results.variants:
        low, high = one.quartiles_ms
        print(f"  {one.label:26} {one.median_ms:8.2f} ms ({low:.2f} to {high:.2f}), loss {one.loss:.5f}")
    yield "losses", "\n".join(results.list_wrong_losses())


def run_stage(title: str, results: Results) -> bool:
    """Run the tests of a stage, print how many passed and why the others failed, and return whether all passed."""
    started, failures, count = time.monotonic(), [], 0
    try:
        for name, problem in results:
            count += 1
            failures += [f"\n{name}: {problem}\n"] * bool(problem)
    except (RankFailure, CourseError, ValueError) as error:
        failures.append(f"{title}: {error}")
    verdict = f"FAILED, {len(failures)} problems of" if failures else "passed,"
    print(f"{title}: {verdict} {count} tests in {time.monotonic() - started:.0f} s", *failures, sep="\n", flush=True)
    return not failures


def run_gpu_check(options: argparse.Namespace) -> int:
    """Run all stages. Return the exit status."""
    if min(options.minutes, options.deadline) <= 0 or options.jobs < 1:
        raise CourseError("--minutes, --deadline and --jobs must be above zero")
    is_nccl = options.backend == "nccl"
    if is_nccl:
        machine.make_nccl_environments(1, share_gpu=False)  # raises an error if there is no usable GPU
    modules = [get_module(number) for number in options.modules or [entry.number for entry in MODULES]]
    prepare()
    import torch

    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, Python {platform.python_version()}", flush=True)
    if is_nccl and shutil.which("nvidia-smi"):
        subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], timeout=30)
    gpus = machine.count_gpus() if is_nccl else 0
    conditions = Conditions(
        backend=options.backend,
        share_gpu=is_nccl and gpus < MOST_RANKS,
        deadline_s=options.deadline,
        ends_at=time.monotonic() + 60 * options.minutes,
    )
    world_size = next((size for size in (8, 4) if size <= gpus), 2)
    first = sorted(modules, key=lambda entry: entry.number not in FIRST_MODULES)
    stages = [(f"Checks of module {entry.number}", run_checks(entry, conditions, options.jobs)) for entry in first]
    stages.append(("Mutants", run_mutants(modules, conditions)))
    stages.append(("Benchmark", run_benchmark(conditions, world_size, is_nccl and gpus < 2)))
    passed = [run_stage(title, results) for title, results in stages]
    print("Everything passed." if all(passed) else "NOT everything passed.")
    return int(not all(passed))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tools.gpu_check",
        description="Run the graded checks on the reference, a sample of mutants and the benchmark on NCCL. This needs "
        "only torch and pytest.",
        epilog="Example: python3 -m tools.gpu_check --minutes 9 --jobs 4",
    )
    add = parser.add_argument
    add("--minutes", type=float, default=60.0, help="time limit for everything together (default: 60)")
    add("--deadline", type=float, default=RUN_DEADLINE_S, help="time limit for one run of ranks, in seconds")
    add("--jobs", type=int, default=1, help="how many checks to run at the same time (default: 1)")
    add("--modules", type=int, nargs="+", metavar="N", help="run only the checks and mutants of these modules")
    add("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo tests this command without a GPU")
    options = parser.parse_args(arguments)
    return run_to_status("gpu-check", lambda: run_gpu_check(options))


if __name__ == "__main__":
    sys.exit(main())
