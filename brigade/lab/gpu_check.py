"""Check everything that needs a GPU, in one command: python3 -m brigade.lab.gpu_check

The command needs this clone and a python3 with torch and pytest, but no setup and no network access. With NCCL, it runs
a first all-reduce, the graded checks of all modules on the reference, two mutants of each module, which the checks must
catch, and the ladder. If there are fewer GPUs than the checks have ranks, several ranks share one GPU. Such a run shows
whether results are correct, but says nothing about speed.

Every stage ends at the latest when its part of the time is used up. The report lists the tests that were not reached
and the tests that failed. If there are any, the exit status is not zero.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brigade.course.modules import MODULES, ROOT, CourseError, Module, get_module
from brigade.lab.gpu_jobs import import_mutants
from brigade.lab.script import run_to_status

if TYPE_CHECKING:
    from brigade.lab.ladder import Ladder, Workload

MINUTES = 60.0
FIRST_MODULES = (0, 6, 9, 11)  # messages, coalescing, late waits and freed memory: most of what only NCCL shows
MOST_RANKS = 4  # in the graded checks
RUN_DEADLINE_S = 60  # for one run of ranks

# The checks, then the mutants and the count of overlaps, must end when these fractions of the total time are used up.
CHECKS_PART, MUTANTS_PART, OVERLAP_PART = 0.7, 0.85, 0.88


@dataclass(frozen=True)
class Plan:
    """The modules, the devices and the limits of a run. `share_gpu` puts several ranks on one GPU if necessary."""

    backend: str = "nccl"
    share_gpu: bool = False
    world_size: int = 2  # of the ladder
    modules: tuple[Module, ...] = MODULES
    minutes: float = MINUTES
    jobs: int = 1
    gpus: int = 0
    workload: Workload | None = None  # of the ladder; None selects one that suits the machine

    @property
    def shares_in_ladder(self) -> bool:
        """Whether ranks of the ladder share a GPU."""
        return self.share_gpu and self.world_size > self.gpus


@dataclass(frozen=True)
class JobResult:
    """The result of one check or mutant; `text` says what went wrong."""

    name: str
    passed: bool
    seconds: float
    text: str = ""
    runs: int = 0  # how often ranks were started


@dataclass(frozen=True)
class Stage:
    """The result of one stage. `missing` counts planned tests that were not reached; `problem` says what went wrong."""

    title: str
    seconds: float
    tests: tuple[JobResult, ...] = ()
    missing: int = 0
    problem: str = ""
    lines: tuple[str, ...] = ()  # of the report

    @property
    def is_good(self) -> bool:
        return not self.problem and not self.missing and all(test.passed for test in self.tests)

    def count(self, passed: bool) -> int:
        return sum(test.passed == passed for test in self.tests)

    @property
    def num_runs(self) -> int:
        return sum(test.runs for test in self.tests)


@dataclass
class CheckReport:
    """The results of all stages so far."""

    plan: Plan
    machine: list[tuple[str, str]]
    stages: list[Stage] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        return all(stage.is_good for stage in self.stages)


# ---- the machine


def describe_machine(backend: str) -> list[tuple[str, str]]:
    """Return the report's information about the machine as pairs (name, value). No value identifies the machine."""
    import torch

    rows = [("date", datetime.now(timezone.utc).strftime("%Y-%m-%d"))]
    if backend == "nccl":
        names, drivers = zip(*query_gpus())
        rows.append(("GPU", ", ".join(f"{count} × {name}" for name, count in Counter(names).items())))
        rows.append(("driver", drivers[0]))
    rows.append(("torch", str(torch.__version__)))
    if backend == "nccl":
        rows.append(("CUDA", str(torch.version.cuda)))
        rows.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
    rows.append(("Python", platform.python_version()))
    rows.append(("CPU cores", str(os.cpu_count())))
    return rows


def query_gpus() -> list[tuple[str, str]]:
    """Return the name and the driver's version of each visible GPU, as nvidia-smi reports them, without using CUDA."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command.append(f"--id={visible}")
    try:
        lines = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()
        return [tuple(line.split(", ")) for line in lines] or [("unknown", "unknown")]
    except (OSError, subprocess.SubprocessError):
        return [("unknown", "unknown")]


# ---- the stages


def run_first_launch() -> dict:
    """Launch one all-reduce, then three coalesced ones. On a GPU, count the kernels of the coalesced ones.

    This function runs in the ranks.
    """
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


def run_launch_stage(plan: Plan) -> Stage:
    """Run one all-reduce on two ranks to check whether ranks can communicate at all. Return the stage."""
    from brigade.runner.ranks import RankFailure, run_ranks

    started, problem, lines = time.monotonic(), "", []
    try:
        results = run_ranks(
            run_first_launch,
            world_size=2,
            backend=plan.backend,
            share_gpu=plan.share_gpu,
            deadline=RUN_DEADLINE_S,
        )
        if any(result["sums"] != [2.0] for result in results):
            problem = f"an all-reduce of ones on 2 ranks gave {[result['sums'] for result in results]}"
        lines.append(f"2 ranks, on {' and '.join(result['device'] for result in results)}")
        for event in results.events[0]:
            if event["kind"] == "kernels":
                counts = event["counts"]
                seen = "torch.profiler sees no kernels here" if counts is None else f"{sum(counts.values())} kernel(s)"
                lines.append(f"3 coalesced all-reduces: {seen} {', '.join(counts or ())}".rstrip())
    except RankFailure as failure:
        problem = str(failure)
    except CourseError as error:
        problem = str(error)
    return Stage("A first all-reduce", time.monotonic() - started, problem=problem, lines=tuple(lines))


def run_check_stages(plan: Plan, deadline: float) -> Iterator[Stage]:
    """Run the graded checks of each module on the reference. Yield the stages, those of `FIRST_MODULES` first.

    Up to `plan.jobs` modules run at the same time.
    """

    def run_checks(entry: Module) -> Stage:
        return run_jobs_stage(
            f"Checks of module {entry.number}", plan, {"checks": [entry.number], "mutants": []}, deadline
        )

    with ThreadPoolExecutor(plan.jobs) as pool:
        yield from pool.map(run_checks, sorted(plan.modules, key=lambda entry: entry.number not in FIRST_MODULES))


def run_mutant_stage(plan: Plan, deadline: float) -> Stage:
    """Run the sample of mutants. The checks that a mutant names must catch it."""
    mutants = [(entry.number, name) for entry in plan.modules for name in import_mutants(entry).SAMPLE]
    return run_jobs_stage("Mutants", plan, {"checks": [], "mutants": mutants}, deadline)


def run_jobs_stage(title: str, plan: Plan, jobs: dict[str, Any], deadline: float) -> Stage:
    """Run checks and mutants (see `gpu_jobs`) in a separate process, and stop it at `deadline` (time.monotonic())."""
    started = time.monotonic()
    if deadline - started < 1:
        return Stage(title, 0.0, problem="not reached: the time was used up")
    jobs = jobs | {"backend": plan.backend, "share_gpu": plan.share_gpu, "deadline_s": RUN_DEADLINE_S}
    process = subprocess.Popen(
        [sys.executable, "-m", "brigade.lab.gpu_jobs", json.dumps(jobs)],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    problem = ""
    try:
        printed, errors = process.communicate(timeout=deadline - started)
        if process.returncode:
            problem = f"the process ended with status {process.returncode}\n{errors[-2000:].strip()}"
    except subprocess.TimeoutExpired:
        problem = f"stopped after {time.monotonic() - started:.0f} s, when its time was used up"
        printed = stop_process(process)
    finally:
        stop_process(process)
    tests, planned = read_lines(printed)
    return Stage(title, time.monotonic() - started, tests, max(0, planned - len(tests)), problem)


def stop_process(process: subprocess.Popen) -> str:
    """Interrupt the process, so that it ends its ranks; kill it if it does not react. Return everything it printed."""
    printed = ""
    for number, patience_s in ((signal.SIGINT, 10), (signal.SIGKILL, None)):
        if process.poll() is None:
            process.send_signal(number)
            try:
                printed, _ = process.communicate(timeout=patience_s)
            except subprocess.TimeoutExpired:
                continue
    return printed


def run_ladder_stage(plan: Plan, deadline: float) -> Stage:
    """Train all variants on the GPUs. Their losses must equal the loss of one process."""
    from brigade.lab import ladder
    from brigade.runner.ranks import RankFailure

    started = time.monotonic()
    if deadline - started < 1:
        return Stage("The benchmark", 0.0, problem="not reached: the time was used up")
    workload = plan.workload or (ladder.Workload(rounds=8, warmup=2) if plan.shares_in_ladder else ladder.Workload())
    title = f"The benchmark: {plan.world_size} ranks, {workload.rounds - workload.warmup} timed steps each"
    try:
        results = ladder.run_ladder(
            workload,
            world_size=plan.world_size,
            backend=plan.backend,
            share_gpu=plan.share_gpu,
            deadline=(deadline - started) / 2,  # half for the ranks, half for one process
        )
    except (RankFailure, CourseError, ValueError) as error:
        return Stage(title, time.monotonic() - started, problem=str(error))
    problem = "\n".join(results.list_wrong_losses())
    lines = format_ladder(results)
    if plan.shares_in_ladder:
        lines += ["", "Ranks that share a GPU wait for each other, so these times say nothing about NCCL."]
    return Stage(title, time.monotonic() - started, problem=problem, lines=tuple(lines))


def run_overlap_stage(plan: Plan, deadline: float) -> Stage:
    """Count gathers and reductions of modules 8 to 11 that overlap with computation. Only errors make this fail."""
    from brigade.lab import ladder, overlap
    from brigade.runner.ranks import RankFailure

    title, started = "Overlap: one step on 2 ranks", time.monotonic()
    if deadline - started < 1:
        return Stage(title, 0.0, problem="not reached: the time was used up")
    how = {"world_size": 2, "backend": plan.backend, "share_gpu": plan.share_gpu, "deadline": deadline - started}
    try:
        lines = overlap.measure_overlap(plan.workload or ladder.Workload(), **how)
    except (RankFailure, CourseError) as error:
        return Stage(title, time.monotonic() - started, problem=str(error))
    if plan.share_gpu and plan.gpus < 2:
        lines += ["", "Kernels of ranks that share a GPU do not run at the same time."]
    return Stage(title, time.monotonic() - started, lines=tuple(lines))


def format_ladder(results: Ladder) -> list[str]:
    """Return the ladder's table in Markdown."""
    rows = [
        "| variant | step ms | quartiles | ratio to torch DDP | collectives per step | MB sent per step | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in results.variants:
        lower, upper = variant.quartiles_ms
        rows.append(
            f"| {variant.label} | {variant.median_ms:.2f} | {lower:.2f} to {upper:.2f} "
            f"| {results.compute_ratio(variant):.2f} | {variant.collectives:g} | {variant.sent_bytes / 1e6:.2f} "
            f"| {variant.loss:.5f} |"
        )
    rows += ["", f"The loss of one process is {results.expected_loss:.5f}."]
    return rows


def run_stages(plan: Plan, say: Callable[[str], None]) -> CheckReport:
    """Run all stages. If the first all-reduce fails, run no other stage, because all of them would fail too."""
    started = time.monotonic()

    def compute_deadline(part: float) -> float:
        return started + 60 * plan.minutes * part

    results = CheckReport(plan, describe_machine(plan.backend))
    for stages in (
        lambda: [run_launch_stage(plan)],
        lambda: run_check_stages(plan, compute_deadline(CHECKS_PART)),
        lambda: [run_mutant_stage(plan, compute_deadline(MUTANTS_PART))],
        lambda: [run_overlap_stage(plan, compute_deadline(OVERLAP_PART))],
        lambda: [run_ladder_stage(plan, compute_deadline(1.0))],
    ):
        for stage in stages():
            results.stages.append(stage)
            say(describe_stage(stage))
        if not results.stages[0].is_good:
            results.stages.append(Stage("Everything else", 0.0, problem="not tried: the first all-reduce failed"))
            break
    return results


def read_lines(text: str) -> tuple[tuple[JobResult, ...], int]:
    """Return the results that were printed, and the number of planned tests. The last line may be incomplete."""
    tests, planned = [], 0
    for line in text.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if "jobs" in fields:
            planned = fields["jobs"]
        else:
            tests.append(JobResult(**fields))
    return tuple(tests), planned


# ---- the report


def describe_stage(stage: Stage) -> str:
    """Return one line about a stage for the terminal."""
    verdict = "passed" if stage.is_good else "FAILED"
    named = ((True, "passed"), (False, "failed"))
    counts = [f"{stage.count(passed)} {name}" for passed, name in named if stage.count(passed)]
    counts += [f"{stage.missing} not reached"] if stage.missing else []
    if stage.num_runs:
        counts.append(f"{stage.num_runs} runs of {stage.seconds / stage.num_runs:.2f} s")
    first = stage.problem.partition("\n")[0]
    return f"{stage.title}: {', '.join([verdict, *counts, f'{stage.seconds:.1f} s'])}" + (
        f" ({first})" if first else ""
    )


def format_report(results: CheckReport) -> str:
    """Return the report in Markdown."""
    plan = results.plan
    where = f"`--backend {plan.backend}`" + (", several ranks on one GPU" if plan.share_gpu else "")
    lines = [
        "# Report of `make gpu-check`",
        "",
        f"Written by `python3 -m brigade.lab.gpu_check`, {where}, {plan.minutes:g} minutes at most.",
        "",
        "**Everything passed.**"
        if results.is_good
        else "**Not everything passed.** The end of this page lists what failed.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in results.machine),
        "",
        "| stage | passed | failed | not reached | runs | seconds | seconds per run | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for stage in results.stages:
        counts = [str(stage.count(passed)) for passed in (True, False)] if stage.tests else [""] * 2
        cells = [*counts, str(stage.missing or ""), str(stage.num_runs or ""), f"{stage.seconds:.1f}"]
        cells.append(f"{stage.seconds / stage.num_runs:.2f}" if stage.num_runs else "")
        lines.append(f"| {stage.title} | {' | '.join(cells)} | {'passed' if stage.is_good else '**failed**'} |")
    for stage in results.stages:
        if stage.lines:
            lines += ["", f"## {stage.title}", "", *stage.lines]
    lines += ["", "## Checks and mutants", "", "| test | | seconds |", "|---|---|---|"]
    lines += [
        f"| `{test.name}` | {'passed' if test.passed else 'failed'} | {test.seconds:.1f} |"
        for stage in results.stages
        for test in stage.tests
    ]
    failures = list(list_failures(results.stages))
    if failures:
        lines += ["", "## What failed"]
        for title, text in failures:
            lines += ["", f"### {title}", "", "```", text.replace("```", "'''").strip(), "```"]
    return "\n".join(lines) + "\n"


def list_failures(stages: Iterable[Stage]) -> Iterable[tuple[str, str]]:
    """Yield the title and the text of everything that failed."""
    for stage in stages:
        if stage.problem:
            yield stage.title, stage.problem.replace(str(ROOT), ".")
        for test in stage.tests:
            if not test.passed:
                yield f"{stage.title}: {test.name}", test.text.replace(str(ROOT), ".")


# ---- the command


def make_plan(options: argparse.Namespace) -> Plan:
    """Return the plan that the options request on this machine. Raise CourseError if they are impossible here."""
    for name in ("torch", "pytest"):
        if find_spec(name) is None:
            raise CourseError(f"this Python, {sys.executable}, has no {name}: use a Python that has torch and pytest")
    entries = tuple(get_module(number) for number in options.modules or [entry.number for entry in MODULES])
    if options.minutes <= 0 or options.jobs < 1:
        raise CourseError("--minutes and --jobs must be above zero")
    if options.backend != "nccl":
        return Plan(options.backend, modules=entries, minutes=options.minutes, jobs=options.jobs)
    if options.share_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    from brigade.runner.machine import count_gpus, make_nccl_environments

    make_nccl_environments(1, share_gpu=False)
    gpus = count_gpus()
    return Plan(
        gpus=gpus,
        share_gpu=gpus < MOST_RANKS,
        world_size=next((size for size in (8, 4) if size <= gpus), 2),
        modules=entries,
        minutes=options.minutes,
        jobs=options.jobs,
    )


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m brigade.lab.gpu_check",
        description="Run the graded checks on the reference, a sample of mutants and the benchmark on NCCL, and write "
        "a report. This needs only torch and pytest.",
        epilog="Example: python3 -m brigade.lab.gpu_check --minutes 9 --jobs 4",
    )
    parser.add_argument(
        "--share-gpu",
        action="store_true",
        help=f"put all ranks on one GPU (default: one GPU per rank if there are at least {MOST_RANKS} GPUs)",
    )
    parser.add_argument(
        "--out", type=Path, help="where to write the report (default: docs/gpu_report.md; with gloo, out/gpu_report.md)"
    )
    parser.add_argument(
        "--minutes", type=float, default=MINUTES, help=f"the time limit for all stages together (default: {MINUTES:g})"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many modules to check at the same time (default: 1)")
    parser.add_argument(
        "--modules", type=int, nargs="+", metavar="N", help="run only the checks and mutants of these modules"
    )
    parser.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        default="nccl",
        help="gloo tests this command without a GPU (default: nccl)",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status.

    The status is 0 if everything passed, 1 if something failed, 2 if the command cannot run here, and 130 after Ctrl-C.
    """
    options = parse_arguments(arguments)
    return run_to_status("gpu-check", lambda: run_gpu_check(options))


def run_gpu_check(options: argparse.Namespace) -> int:
    """Run all stages and write the report. Return the exit status."""
    out = options.out or ROOT / ("docs" if options.backend == "nccl" else "out") / "gpu_report.md"
    results = run_stages(make_plan(options), lambda line: print(line, flush=True))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(format_report(results))
    print(f"{'Everything passed' if results.is_good else 'NOT everything passed'}: {out}")
    return 0 if results.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
