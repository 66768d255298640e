"""Check everything that needs a GPU, in one command: python3 -m tools.gpu_check

The command needs this clone and a python3 with torch and pytest, but no setup and no network access: see
docs/gpu_check.md. The exit status is 0 if everything passed, 1 if not, 2 if the command cannot run here.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from brigade.course.modules import MODULES, ROOT, CourseError, Module, get_module
from brigade.lab.script import run_to_status
from brigade.runner import machine
from brigade.runner.ranks import SERVER, RankFailure, run_ranks

FIRST_MODULES = (0, 6, 9, 11)  # messages, coalescing, late waits and freed memory: most of what only NCCL shows
MOST_RANKS = 4  # in the graded checks
RUN_DEADLINE_S = 60
LAUNCH, BENCHMARK = "A first all-reduce", "The benchmark"
# The stages must end when these fractions of the total time are used up.
CHECKS_PART, MUTANTS_PART = 0.7, 0.85


@dataclass
class Stage:
    """The results of one stage. `failures` are pairs (test, what went wrong); `missing` counts tests not reached."""

    title: str
    ends_at: float  # the value of time.monotonic() by which the stage has to end
    how: dict[str, Any]  # the options of `run_ranks` that select the devices
    deadline_s: float = RUN_DEADLINE_S  # for one run of ranks
    passed: int = 0
    failures: list[tuple[str, str]] = field(default_factory=list)
    missing: int = 0
    runs: int = 0  # how often ranks were started
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)  # of the report

    def add(self, name: str, problem: str) -> None:
        """Count one test; `problem` is "" if it passed."""
        self.passed += not problem
        self.failures += [(name, problem)] * bool(problem)

    @property
    def is_good(self) -> bool:
        return not self.failures and not self.missing

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    @property
    def cells(self) -> list[str]:
        """The row of the report."""
        counts = [str(count or "") for count in (self.passed, len(self.failures), self.missing, self.runs)]
        per_run = f"{self.seconds / self.runs:.2f}" if self.runs else ""
        return [self.title, *counts, f"{self.seconds:.1f}", per_run, "passed" if self.is_good else "**failed**"]


def launch_first() -> dict:
    """Launch one all-reduce, then three coalesced ones, and count their kernels on a GPU. This runs in the ranks."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _coalescing_manager

    from brigade.rank.api import device
    from brigade.rank.kernels import record_kernels

    tensors = [torch.ones(1000, device=device()) for _ in range(4)]
    dist.all_reduce(tensors[0])
    with record_kernels():
        with _coalescing_manager(async_ops=True) as manager:
            for tensor in tensors[1:]:
                dist.all_reduce(tensor)
        manager.wait()
    return {"device": str(device()), "sums": sorted({value for tensor in tensors for value in tensor.tolist()})}


def run_launch(stage: Stage) -> None:
    """Run one all-reduce on two ranks to check whether ranks can communicate at all."""
    results = run_ranks(launch_first, world_size=2, deadline=stage.deadline_s, **stage.how)
    sums = [result["sums"] for result in results]
    stage.add("sum", "" if sums == [[2.0]] * 2 else f"an all-reduce of ones on 2 ranks gave {sums}")
    stage.lines.append(f"2 ranks, on {' and '.join(result['device'] for result in results)}")
    for counts in [event["counts"] for event in results.events[0] if event["kind"] == "kernels"]:
        seen = "torch.profiler sees no kernels here" if counts is None else f"{sum(counts.values())} kernel(s)"
        stage.lines.append(f"3 coalesced all-reduces: {seen} {', '.join(counts or ())}".rstrip())


def run_checks(stage: Stage, entry: Module, jobs: int) -> None:
    """Run the graded checks of a module on the reference, `jobs` at the same time."""
    from brigade.checks import collect, render, run, verdict

    conditions = run.Conditions(**stage.how, deadline_s=stage.deadline_s, ends_at=stage.ends_at)
    for outcome in run.run_checks(collect.collect([entry]), "solutions", conditions, at_a_time=jobs):
        if outcome.ending == verdict.NOT_RUN:
            stage.missing += 1
        else:
            stage.add(outcome.check.name, "" if outcome.passed else render.format_message(outcome))


def run_mutants(stage: Stage, modules: Sequence[Module]) -> None:
    """Run the sample of mutants. The checks that a mutant names must catch it."""
    from brigade.checks.collect import import_from_tests
    from brigade.checks.run import Conditions

    conditions = Conditions(**stage.how, deadline_s=stage.deadline_s, ends_at=stage.ends_at)
    mutants = import_from_tests("mutants")
    for mutant in [mutant for entry in modules for mutant in mutants.list_mutants(entry) if mutant.in_sample]:
        if stage.left_s > 0:
            stage.add(f"mutant {mutant.number}: {mutant.name}", mutants.escapes(mutant, conditions))
        else:
            stage.missing += 1


def run_benchmark(stage: Stage, world_size: int, is_shared: bool) -> None:
    """Train with all variants. Their losses must equal the loss of one process."""
    from brigade.lab import ladder

    workload = ladder.Workload(rounds=8, warmup=2) if is_shared else ladder.Workload()
    limit_s = stage.left_s / 2  # for the ranks, then for one process
    variants = ladder.add_torch_variants(ladder.get_course_variants())
    results = ladder.run_benchmark(workload, variants, world_size=world_size, deadline=limit_s, **stage.how)
    stage.add("losses", "\n".join(results.list_wrong_losses()))
    stage.lines += [
        f"{world_size} ranks. The loss of one process is {results.expected_loss:.5f}.",
        "\n| variant | step ms | quartiles | ratio to torch DDP | collectives per step | MB sent per step | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in results.variants:
        times = f"{one.median_ms:.2f} | {one.quartiles_ms[0]:.2f} to {one.quartiles_ms[1]:.2f}"
        ratio = median(results.compute_ratios(one))
        sent = f"{one.collectives:g} | {one.sent_bytes / 1e6:.2f}"
        stage.lines.append(f"| {one.label} | {times} | {ratio:.2f} | {sent} | {one.loss:.5f} |")
    stage.lines += ["\nRanks that share a GPU wait for each other, so these times say nothing about NCCL."] * is_shared


def run_stages(options: argparse.Namespace, gpus: int) -> Iterator[Stage]:
    """Run all stages and yield them. If the first all-reduce fails, run no other, because all would fail too."""
    started = time.monotonic()
    modules = [get_module(number) for number in options.modules or [entry.number for entry in MODULES]]
    world_size = next((size for size in (8, 4) if size <= gpus), 2)
    how = {"backend": options.backend, "share_gpu": options.backend == "nccl" and gpus < MOST_RANKS}
    is_shared = options.backend == "nccl" and gpus < 2
    stages = [(LAUNCH, CHECKS_PART, run_launch, ())]
    for entry in sorted(modules, key=lambda entry: entry.number not in FIRST_MODULES):
        stages.append((f"Checks of module {entry.number}", CHECKS_PART, run_checks, (entry, options.jobs)))
    stages.append(("Mutants", MUTANTS_PART, run_mutants, (modules,)))
    stages.append((BENCHMARK, 1.0, run_benchmark, (world_size, is_shared)))
    for title, part, run, arguments in stages:
        begun, before = time.monotonic(), SERVER.num_runs
        stage = Stage(title, started + 60 * options.minutes * part, how, options.deadline)
        try:
            if stage.left_s <= 0:
                raise CourseError("not reached: the time was used up")
            run(stage, *arguments)
        except (RankFailure, CourseError, ValueError) as error:
            stage.add(title, str(error))
        stage.seconds, stage.runs = time.monotonic() - begun, SERVER.num_runs - before
        if title == LAUNCH and not stage.is_good:
            stage.failures.append(("everything else", "not tried: the first all-reduce failed"))
            stages.clear()
        yield stage


def describe_machine(backend: str) -> dict[str, str]:
    """Return the report's information about the machine. CUDA is not used, and no value identifies the machine."""
    import torch

    rows = {"date": datetime.now(timezone.utc).strftime("%Y-%m-%d"), "torch": str(torch.__version__)}
    if backend == "nccl":
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        except (OSError, subprocess.SubprocessError):
            lines = ["unknown"]
        rows["GPUs and driver"] = "; ".join(f"{count} × {line}" for line, count in Counter(lines).items())
        rows |= {"CUDA": str(torch.version.cuda), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}
    return rows | {"Python": platform.python_version(), "CPU cores": str(os.cpu_count())}


def format_report(options: argparse.Namespace, machine: dict[str, str], stages: Sequence[Stage]) -> str:
    """Return the report in Markdown."""
    failures = [failure for stage in stages for failure in stage.failures]
    lines = [
        "# Report of `make gpu-check`\n",
        f"`python3 -m tools.gpu_check --backend {options.backend} --minutes {options.minutes:g}` wrote this report.\n",
        "**Everything passed.**\n" if all(stage.is_good for stage in stages) else "**Not everything passed.**\n",
        "| | |\n|---|---|",
        *(f"| {name} | {value} |" for name, value in machine.items()),
        "\n| stage | passed | failed | not reached | runs | seconds | seconds per run | |",
        "|---|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(stage.cells)} |" for stage in stages),
        *("\n".join([f"\n## {stage.title}\n", *stage.lines]) for stage in stages if stage.lines),
        *["\n## What failed"] * bool(failures),
    ]
    for title, text in failures:
        text = text.replace(str(ROOT), ".").replace("```", "'''").strip()
        lines.append(f"\n### {title}\n\n```\n{text}\n```")
    return "\n".join(lines) + "\n"


def run_gpu_check(options: argparse.Namespace) -> int:
    """Run all stages, print a line about each, and write the report. Return the exit status."""
    for name in ("torch", "pytest"):
        if find_spec(name) is None:
            raise CourseError(f"this Python, {sys.executable}, has no {name}: use a Python that has torch and pytest")
    if min(options.minutes, options.deadline) <= 0 or options.jobs < 1:
        raise CourseError("--minutes, --deadline and --jobs must be above zero")
    if options.backend == "nccl":
        machine.make_nccl_environments(1, share_gpu=False)  # raises an error if there is no usable GPU
    from brigade.checks.run import prepare

    prepare()
    out = options.out or ROOT / ("docs" if options.backend == "nccl" else "out") / "gpu_report.md"
    rows, stages = describe_machine(options.backend), []
    for stage in run_stages(options, machine.count_gpus() if options.backend == "nccl" else 0):
        stages.append(stage)
        title, *counts, verdict = stage.cells
        names = ("passed", "failed", "not reached", "runs", "s", "s per run")
        counted = [f"{count} {name}" for count, name in zip(counts, names) if count]
        reasons = [text.partition("\n")[0] for _, text in stage.failures[:1]]
        print(": ".join([title, ", ".join([verdict.strip("*"), *counted]), *reasons]), flush=True)
    is_good = all(stage.is_good for stage in stages)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(format_report(options, rows, stages))
    print(f"{'Everything passed' if is_good else 'NOT everything passed'}: {out}")
    return int(not is_good)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python3 -m tools.gpu_check",
        description="Run the graded checks on the reference, a sample of mutants and the benchmark on NCCL, and write "
        "a report. This needs only torch and pytest.",
        epilog="Example: python3 -m tools.gpu_check --minutes 9 --jobs 4",
    )
    add = parser.add_argument
    add("--out", type=Path, help="the report (default: docs/gpu_report.md; with gloo, out/gpu_report.md)")
    add("--minutes", type=float, default=60.0, help="time limit for all stages together (default: 60)")
    add("--deadline", type=float, default=RUN_DEADLINE_S, help="time limit for one run of ranks, in seconds")
    add("--jobs", type=int, default=1, help="how many checks to run at the same time (default: 1)")
    add("--modules", type=int, nargs="+", metavar="N", help="run only the checks and mutants of these modules")
    add("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo tests this command without a GPU")
    options = parser.parse_args(arguments)
    return run_to_status("gpu-check", lambda: run_gpu_check(options))


if __name__ == "__main__":
    sys.exit(main())
