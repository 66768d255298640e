"""Everything that has to be seen on a GPU, in one command: python3 -m brigade.lab.gpu_check

It needs this clone and a python3 with torch and pytest, no set-up and no network. On NCCL it runs a first all-reduce,
the graded checks of all modules on the reference, two mutants of each module, which the checks must catch, and the
ladder. With fewer GPUs than the checks have ranks, several ranks share one: that shows what is right, and nothing about
time.

Every stage has to be over when its part of the time is used up. What was not reached by then, and what failed, stands
in the report, and the exit status is not zero.
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
from brigade.lab.gpu_jobs import mutants_of
from brigade.lab.script import ended

if TYPE_CHECKING:
    from brigade.lab.ladder import Ladder, Workload

MOST_RANKS = 4  # in the graded checks
RUN_DEADLINE_S = 60  # of one run of ranks

# By which part of the whole time each stage has to be over.
CHECKS_PART, MUTANTS_PART = 0.7, 0.85


@dataclass(frozen=True)
class Plan:
    """What is to be run, and where. `share_gpu` puts several ranks on one GPU where there are fewer than ranks."""

    backend: str = "nccl"
    share_gpu: bool = False
    world_size: int = 2  # of the ladder
    modules: tuple[Module, ...] = MODULES
    minutes: float = 30.0
    jobs: int = 1
    workload: Workload | None = None  # of the ladder; by default one that suits the machine


@dataclass(frozen=True)
class Ran:
    """A check, or a mutant, that was run; `text` says what went wrong."""

    name: str
    passed: bool
    seconds: float
    text: str = ""


@dataclass(frozen=True)
class Stage:
    """What became of one stage: `missing` tests were planned and not reached, `problem` is what went wrong."""

    title: str
    seconds: float
    tests: tuple[Ran, ...] = ()
    missing: int = 0
    problem: str = ""
    lines: tuple[str, ...] = ()  # of the report

    @property
    def good(self) -> bool:
        return not self.problem and not self.missing and all(test.passed for test in self.tests)

    def count(self, passed: bool) -> int:
        return sum(test.passed == passed for test in self.tests)


@dataclass
class Found:
    """All stages, as they come in."""

    plan: Plan
    machine: list[tuple[str, str]]
    stages: list[Stage] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return all(stage.good for stage in self.stages)


# ---- the machine


def machine(backend: str) -> list[tuple[str, str]]:
    """What the report says of the machine: names and values, none of which identifies it."""
    import torch

    rows = [("date", datetime.now(timezone.utc).strftime("%Y-%m-%d"))]
    if backend == "nccl":
        names = Counter(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
        rows.append(("GPU", ", ".join(f"{count} × {name}" for name, count in names.items())))
        rows.append(("driver", driver()))
    rows.append(("torch", str(torch.__version__)))
    if backend == "nccl":
        rows.append(("CUDA", str(torch.version.cuda)))
        rows.append(("NCCL", ".".join(map(str, torch.cuda.nccl.version()))))
    rows.append(("Python", platform.python_version()))
    rows.append(("CPU cores", str(os.cpu_count())))
    return rows


def driver() -> str:
    """The version of the NVIDIA driver, as nvidia-smi says; "unknown" where that cannot be asked."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        said = []
    return said[0] if said else "unknown"


# ---- the stages


def first_launch() -> dict:
    """Runs in the ranks: one all-reduce, then three coalesced ones, whose kernels are counted on a GPU."""
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


def launch_stage(plan: Plan) -> Stage:
    """Whether ranks can talk to each other at all."""
    from brigade.runner.ranks import RankFailure, run_ranks

    started, problem, lines = time.monotonic(), "", []
    try:
        results = run_ranks(
            first_launch,
            world_size=2,
            backend=plan.backend,
            share_gpu=plan.share_gpu,
            deadline=RUN_DEADLINE_S,
        )
        if any(result["sums"] != [2.0] for result in results):
            problem = f"2 ranks of ones were all-reduced to {[result['sums'] for result in results]}"
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


def check_stages(plan: Plan, deadline: float) -> Iterator[Stage]:
    """The graded checks of each module on the reference, `plan.jobs` modules at a time; each as it is done."""

    def run(entry: Module) -> Stage:
        return test_stage(f"Checks of module {entry.number}", plan, {"checks": [entry.number], "mutants": []}, deadline)

    with ThreadPoolExecutor(plan.jobs) as pool:
        yield from pool.map(run, plan.modules)


def mutant_stage(plan: Plan, deadline: float) -> Stage:
    """The sample of mutants, each of which the checks that it names must catch."""
    mutants = [(entry.number, name) for entry in plan.modules for name in mutants_of(entry).SAMPLE]
    return test_stage("Mutants", plan, {"checks": [], "mutants": mutants}, deadline)


def test_stage(title: str, plan: Plan, jobs: dict[str, Any], deadline: float) -> Stage:
    """Run checks and mutants (see `gpu_jobs`) in their own process, which is ended at `deadline` (time.monotonic())."""
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
        said, errors = process.communicate(timeout=deadline - started)
        if process.returncode:
            problem = f"it ended with status {process.returncode}\n{errors[-2000:].strip()}"
    except subprocess.TimeoutExpired:
        problem = f"stopped after {time.monotonic() - started:.0f} s, when its time was used up"
        said = end(process)
    finally:
        end(process)
    tests, planned = read_lines(said)
    return Stage(title, time.monotonic() - started, tests, max(0, planned - len(tests)), problem)


def end(process: subprocess.Popen) -> str:
    """Interrupt the process, so that it ends its ranks; kill it if it does not listen. Return all that it printed."""
    said = ""
    for number, patience_s in ((signal.SIGINT, 10), (signal.SIGKILL, None)):
        if process.poll() is None:
            process.send_signal(number)
            try:
                said, _ = process.communicate(timeout=patience_s)
            except subprocess.TimeoutExpired:
                continue
    return said


def ladder_stage(plan: Plan, deadline: float) -> Stage:
    """Trains all variants on the GPUs: losses must be those of one process."""
    from brigade.lab import ladder
    from brigade.runner.ranks import RankFailure

    started = time.monotonic()
    if deadline - started < 1:
        return Stage("The ladder", 0.0, problem="not reached: the time was used up")
    workload = plan.workload or (ladder.Workload(rounds=8, warmup=2) if plan.share_gpu else ladder.Workload())
    title = f"The ladder: {plan.world_size} ranks, {workload.rounds - workload.warmup} timed steps each"
    try:
        results = ladder.run_ladder(
            workload,
            world_size=plan.world_size,
            backend=plan.backend,
            share_gpu=plan.share_gpu,
            deadline=(deadline - started) / 2,  # of the ranks, and then of one process
        )
    except (RankFailure, CourseError, ValueError) as error:
        return Stage(title, time.monotonic() - started, problem=str(error))
    problem = "\n".join(results.wrong())
    lines = ladder_lines(results)
    if plan.share_gpu:
        lines += ["", "Ranks that share a GPU wait for each other: these times say nothing about NCCL."]
    return Stage(title, time.monotonic() - started, problem=problem, lines=tuple(lines))


def ladder_lines(results: Ladder) -> list[str]:
    """The ladder's table in Markdown."""
    rows = [
        "| variant | step ms | quartiles | ratio to torch DDP | collectives per step | MB sent per step | loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for variant in results.variants:
        lower, upper = variant.quartiles_ms
        rows.append(
            f"| {variant.label} | {variant.median_ms:.2f} | {lower:.2f} to {upper:.2f} | {results.ratio(variant):.2f} "
            f"| {variant.collectives:g} | {variant.sent_bytes / 1e6:.2f} | {variant.loss:.5f} |"
        )
    rows += ["", f"The loss of one process is {results.truth:.5f}."]
    return rows


def run(plan: Plan, say: Callable[[str], None]) -> Found:
    """All stages. After a first all-reduce that fails nothing else is tried, for everything else would fail too."""
    started = time.monotonic()

    def until(part: float) -> float:
        return started + 60 * plan.minutes * part

    found = Found(plan, machine(plan.backend))
    for stages in (
        lambda: [launch_stage(plan)],
        lambda: check_stages(plan, until(CHECKS_PART)),
        lambda: [mutant_stage(plan, until(MUTANTS_PART))],
        lambda: [ladder_stage(plan, until(1.0))],
    ):
        for stage in stages():
            found.stages.append(stage)
            say(sentence(stage))
        if not found.stages[0].good:
            found.stages.append(Stage("Everything else", 0.0, problem="not tried: the first all-reduce failed"))
            break
    return found


def read_lines(text: str) -> tuple[tuple[Ran, ...], int]:
    """Return the tests that were run, and how many there were to be run. A last line may be cut off."""
    tests, planned = [], 0
    for line in text.splitlines():
        try:
            fields = json.loads(line)
        except ValueError:
            continue
        if "jobs" in fields:
            planned = fields["jobs"]
        else:
            tests.append(Ran(**fields))
    return tuple(tests), planned


# ---- the report


def sentence(stage: Stage) -> str:
    """One line for the terminal."""
    verdict = "good" if stage.good else "NOT GOOD"
    named = ((True, "passed"), (False, "failed"))
    counts = [f"{stage.count(passed)} {name}" for passed, name in named if stage.count(passed)]
    counts += [f"{stage.missing} not reached"] if stage.missing else []
    first = stage.problem.partition("\n")[0]
    return f"{stage.title}: {', '.join([verdict, *counts, f'{stage.seconds:.1f} s'])}" + (
        f" ({first})" if first else ""
    )


def report(found: Found) -> str:
    """The report in Markdown."""
    plan = found.plan
    where = f"`--backend {plan.backend}`" + (", several ranks on one GPU" if plan.share_gpu else "")
    lines = [
        "# Report of `make gpu-check`",
        "",
        f"Written by `python3 -m brigade.lab.gpu_check`, {where}, {plan.minutes:g} minutes at most.",
        "",
        "**Everything passed.**" if found.good else "**Not everything passed.** What failed stands at the end.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in found.machine),
        "",
        "| stage | passed | failed | not reached | seconds | |",
        "|---|---|---|---|---|---|",
    ]
    for stage in found.stages:
        counts = [str(stage.count(passed)) for passed in (True, False)] if stage.tests else [""] * 2
        cells = [*counts, str(stage.missing) if stage.missing else "", f"{stage.seconds:.1f}"]
        lines.append(f"| {stage.title} | {' | '.join(cells)} | {'good' if stage.good else '**not good**'} |")
    for stage in found.stages:
        if stage.lines:
            lines += ["", f"## {stage.title}", "", *stage.lines]
    lines += ["", "## Checks and mutants", "", "| test | | seconds |", "|---|---|---|"]
    lines += [
        f"| `{test.name}` | {'passed' if test.passed else 'failed'} | {test.seconds:.1f} |"
        for stage in found.stages
        for test in stage.tests
    ]
    failures = list(failed(found.stages))
    if failures:
        lines += ["", "## What failed"]
        for title, text in failures:
            lines += ["", f"### {title}", "", "```", text.replace("```", "'''").strip(), "```"]
    return "\n".join(lines) + "\n"


def failed(stages: Iterable[Stage]) -> Iterable[tuple[str, str]]:
    """Title and text of everything that went wrong."""
    for stage in stages:
        if stage.problem:
            yield stage.title, stage.problem.replace(str(ROOT), ".")
        for test in stage.tests:
            if not test.passed:
                yield f"{stage.title}: {test.name}", test.text.replace(str(ROOT), ".")


# ---- the command


def planned(options: argparse.Namespace) -> Plan:
    """What the options ask for on this machine. Raises CourseError where it cannot be done."""
    for name in ("torch", "pytest"):
        if find_spec(name) is None:
            raise CourseError(f"this Python, {sys.executable}, has no {name}: it takes one that has torch and pytest")
    entries = tuple(get_module(number) for number in options.modules or [entry.number for entry in MODULES])
    if options.minutes <= 0 or options.jobs < 1:
        raise CourseError("--minutes and --jobs must be above zero")
    if options.backend != "nccl":
        return Plan(options.backend, modules=entries, minutes=options.minutes, jobs=options.jobs)
    if options.share_gpu:
        os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    import torch

    from brigade.runner.machine import make_nccl_environments

    make_nccl_environments(1, share_gpu=False)
    gpus = torch.cuda.device_count()
    return Plan(
        share_gpu=gpus < MOST_RANKS,
        world_size=next((size for size in (8, 4) if size <= gpus), 2),
        modules=entries,
        minutes=options.minutes,
        jobs=options.jobs,
    )


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python3 -m brigade.lab.gpu_check",
        description="Runs the graded checks on the reference, a sample of mutants and the ladder on NCCL, and writes a "
        "report. It needs torch and pytest, nothing else.",
        epilog="Example: python3 -m brigade.lab.gpu_check --minutes 9 --jobs 4",
    )
    parser.add_argument(
        "--share-gpu",
        action="store_true",
        help=f"all ranks on one GPU; without it, one GPU for each rank where there are {MOST_RANKS} or more",
    )
    parser.add_argument(
        "--out", type=Path, help="the report (default: docs/gpu_report.md; with gloo, out/gpu_report.md)"
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="that it may take in all (default 30)")
    parser.add_argument("--jobs", type=int, default=1, help="how many modules are checked at a time (default 1)")
    parser.add_argument("--modules", type=int, nargs="+", metavar="N", help="only the checks and mutants of these")
    parser.add_argument(
        "--backend", choices=("nccl", "gloo"), default="nccl", help="gloo tries this command without a GPU"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status: 0 everything passed, 1 something did not, 2 it cannot run here, 130 stopped."""
    options = parse(arguments)
    return ended("gpu-check", lambda: checked(options))


def checked(options: argparse.Namespace) -> int:
    out = options.out or ROOT / ("docs" if options.backend == "nccl" else "out") / "gpu_report.md"
    found = run(planned(options), lambda line: print(line, flush=True))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(report(found))
    print(f"{'Everything passed' if found.good else 'NOT everything passed'}: {out}")
    return 0 if found.good else 1


if __name__ == "__main__":
    sys.exit(main())
