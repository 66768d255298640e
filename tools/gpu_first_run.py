"""Spend the first minutes on a machine with GPUs well: python3 tools/gpu_first_run.py OUT [--minutes 9] [--skip N]

The steps come in the order of what they teach per second. Each has a limit of its own. OUT gets a report, report.md,
the logs, and the files of `brigade trace`. Every line is written at once, so a run that is killed keeps what it has
found. One GPU is enough: ranks share it. The command needs this repository and a Python with torch, pytest and rich; it
needs no set-up and no network.

docs/gpus.md says how a report gets into the repository.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# In these modules, most of what is special about GPUs happens: freed memory, late waits, coalesced calls.
FIRST_MODULES = (17, 4, 7, 11, 9, 6, 15, 10, 12, 8, 5, 1, 2, 13)
LEAST_S = 8.0  # a step is not started if less time is left
GRACE_S = 10.0  # from SIGTERM to SIGKILL
CORES_PER_JOB = 4  # the largest number of ranks in a check
MOST_JOBS = 3  # processes that share a GPU get time slices
# Images for clusters and NVIDIA's containers set these variables. None of them may change a result on one machine.
OF_A_CLUSTER = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
}


SMI = "nvidia-smi"  # a container may not have it
NOT_REACHED = "not reached"


class Step(NamedTuple):
    """A command with a limit in seconds. It passes if it succeeds and prints what the pattern `expects` matches."""

    name: str
    limit_s: float
    log: str
    command: Sequence[str]
    expects: str = ""
    environment: dict[str, str] = {}
    beside: bool = False  # whether the next step may run at the same time


def list_opening_steps(out: Path, backend: str) -> list[Step]:
    """Return the steps that describe the machine. They always run."""
    machine = Step("machine", 90, "machine.log", make_probe_command(out, backend, "machine"))
    return [make_smi_step(SMI), machine] if backend == "nccl" else [machine]


def list_steps(out: Path, backend: str) -> list[Step]:
    """Return the steps that `--skip` counts."""

    def probe(name: str, limit_s: float, *names: str, expects: str = "", beside: bool = True) -> Step:
        return Step(name, limit_s, "probes.log", make_probe_command(out, backend, *names), expects, beside=beside)

    brigade, shared = [sys.executable, "-m", "brigade"], ["--backend", backend, "--share-gpu"]
    pytest = [sys.executable, "-m", "pytest", "-v", "--tb=short", "-p", "no:cacheprovider", "--durations=0"]
    pytest += ["--target", "solutions", "--deadline", "60", *shared]
    grade = [*brigade, "grade", "--submission", "solutions", "--modules", "1", *shared, "--limit", "110"]
    full_marks = r"\b(\d+) of \1 points"

    def train(size: str) -> Step:
        """Return a step that trains with module 8.

        One rank trains, because a collective of ranks that share a GPU takes milliseconds, and a step of a large model
        has thousands.
        """
        command = [sys.executable, "-m", "lessons.capstone.train", "--target", "solutions", "--size", size]
        command += ["--ranks", "1", "--steps", "4", "--rounds", "3", "--backend", backend]
        return Step(f"train.py --size {size}", 300, "checks.log", command, "torch DDP")

    def check(number: int, name: str = "", beside: bool = True) -> Step:
        files = sorted(map(str, (ROOT / "tests").glob(f"test_m{number:02}_*.py")))
        command = [*pytest, "--maxfail=3", *files]
        return Step(name or f"module {number}", 300, "checks.log", command, beside=beside)

    numbers = sorted(int(path.name[6:8]) for path in (ROOT / "tests").glob("test_m[0-9][0-9]_*.py"))
    others = [number for number in numbers if number not in (3, *FIRST_MODULES)]
    log = make_probe_command(out, backend, "nccl-log")
    debug = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ENV,NET,GRAPH"}
    bench = ["bench", "--target", "solutions", "--modules", "1,4,5,8,11", "--rounds", "8"]
    trace = ["trace", "4", "--target", "solutions", "--torch", "--out", str(out / "trace")]
    mutants = [*pytest, "tests/course/test_mutants.py", "-m", "sample", "--everything"]
    is_root = hasattr(os, "geteuid") and os.geteuid() == 0
    steps = [
        probe("measurements", 150, "memory", "times", "sums", "kernels", "bytes", beside=False),
        probe("lone all-reduce", 60, "lone-all_reduce", beside=False),
        Step("NCCL's own log", 60, "nccl.log", log, environment=debug),
        Step("grade module 1 as root", 120, "grade.log", grade, full_marks),
        check(3, beside=False),
        Step("benchmark", 120, "checks.log", [*brigade, *bench, *shared]),
        Step("trace", 90, "checks.log", [*brigade, *trace, *shared]),
        check(3, "module 3 beside others"),
        probe("missing launch", 120, "missing-launch", expects="rank 1 never launched"),
        Step("grade with a cluster's variables", 120, "grade.log", grade, full_marks, OF_A_CLUSTER, beside=True),
        probe("hang under torchrun", 180, "torchrun", expects="rank 0 on HOST .*all_reduce #"),
        probe("lone all-to-all", 90, "lone-all_to_all"),
        *map(check, FIRST_MODULES),
        # This step takes longest, so the last modules run beside it.
        Step("sample of mutants", 1200, "checks.log", mutants, beside=True),
        *map(check, others),
        train("large"),
        train("xl"),
    ]
    if find_spec("matplotlib") is None:
        steps = [step for step in steps if step.name != "trace"]
    return [step for step in steps if is_root or step.log != "grade.log"]


def make_smi_step(name: str) -> Step:
    """Return a step that shows the state of the GPUs."""
    return Step(name, 20, "machine.log", [SMI])


def make_probe_command(out: Path, backend: str, *names: str) -> list[str]:
    """Return a command that runs experiments of `gpu_probes.py`."""
    return [sys.executable, "-m", "tools.gpu_probes", str(out), *names, "--backend", backend]


class FirstRun:
    """Runs steps until the time is used up, and keeps the report up to date."""

    def __init__(self, out: Path, minutes: float):
        self.out, self.began = out, time.monotonic()
        self.ends_at = self.began + 60 * minutes
        self.is_good = True
        self._lock = threading.Lock()
        self._processes: set[subprocess.Popen] = set()
        out.mkdir(parents=True, exist_ok=True)

    def run_all(self, steps: Sequence[Step], jobs: int, first: int = 1) -> None:
        """Run steps, which are numbered from `first`: those that may, `jobs` at a time, the others alone."""
        numbered = list(enumerate(steps, first))
        with ThreadPoolExecutor(jobs) as pool:
            try:
                while numbered:
                    alone = next((i for i, (_, step) in enumerate(numbered) if not step.beside), len(numbered))
                    batch, numbered = numbered[: max(1, alone)], numbered[max(1, alone) :]
                    list(pool.map(lambda one: self.run(one[1], f"{one[0]} "), batch))
            except KeyboardInterrupt:
                self.stop_all()
                raise

    def run(self, step: Step, number: str = "", limit_s: float | None = None) -> bool:
        """Run a step within its limit, and within the time that is left unless `limit_s` is given. Return success."""
        limit_s = limit_s or min(step.limit_s, self.ends_at - time.monotonic())
        if limit_s < LEAST_S:
            return self.add_result(step, number, NOT_REACHED, 0.0, "")
        began, lines = time.monotonic(), []
        self._write(step, f"$ {' '.join(step.command)}\n")
        try:
            process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"} | step.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return self.add_result(step, number, f"cannot start: {error}", 0.0, "")
        self._processes.add(process)

        def copy_lines() -> None:
            for line in process.stdout:
                lines.append(line)
                self._write(step, line)

        reader = threading.Thread(target=copy_lines, daemon=True)
        reader.start()
        try:
            status = process.wait(limit_s)
            result = "passed" if status == 0 else f"status {status}"
        except subprocess.TimeoutExpired:
            result = f"{'cut off' if limit_s < step.limit_s else 'stopped'} after {limit_s:.0f} s"
            stop(process)
        reader.join(GRACE_S)  # a process that has outlived the step may hold the pipe
        self._processes.discard(process)
        last = next((text for line in reversed(lines) if (text := line.strip(" \n=")).strip("-+")), "")
        if result == "passed" and step.expects:
            expected = re.search(step.expects, "".join(lines))
            result, last = ("passed", expected[0]) if expected else (f"prints nothing like {step.expects}", last)
        return self.add_result(step, number, result, time.monotonic() - began, last)

    def add_result(self, step: Step, number: str, result: str, seconds: float, last: str) -> bool:
        """Write the result of a step to facts.jsonl, to the report and to the terminal. Return whether it passed."""
        last = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "HOST", last).replace(f"{self.out}/", "")
        fact = {"step": step.name, "result": result, "seconds": round(seconds, 1), "last": last[:160]}
        with self._lock:
            self.is_good = self.is_good and (result == "passed" or step.name.startswith(SMI))
            with (self.out / "facts.jsonl").open("a") as file:
                print(json.dumps(fact), file=file, flush=True)
            (self.out / "report.md").write_text(format_report(read_facts(self.out)))
            now = time.monotonic() - self.began
            print(f"{now:6.1f} s  {number}{step.name}: {result}, {seconds:.1f} s | {last[:160]}", flush=True)
        return result == "passed"

    def stop_all(self) -> None:
        """End the processes of all steps, and start no other."""
        self.ends_at = self.began
        for process in list(self._processes):
            stop(process)

    def _write(self, step: Step, line: str) -> None:
        """Add a line to the step's log. Steps that run at the same time share it."""
        with self._lock, (self.out / step.log).open("a") as file:
            file.write(f"{step.name} | {line}")


def stop(process: subprocess.Popen) -> None:
    """End a process and its group: first SIGTERM, then SIGKILL."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
        except (ProcessLookupError, PermissionError):
            return
        except subprocess.TimeoutExpired:
            continue


def read_facts(out: Path) -> list[dict[str, Any]]:
    """Return the facts that have been found so far, also by earlier runs with the same OUT."""
    path = out / "facts.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def format_report(facts: Sequence[dict[str, Any]]) -> str:
    """Return the report in Markdown."""
    machine: dict[str, str] = {}
    for fact in facts:
        machine |= fact.get("rows", {})
    ran = [fact for fact in facts if "step" in fact]
    ran.sort(key=lambda fact: fact["result"] != NOT_REACHED)
    steps = {fact["step"]: fact for fact in ran}  # the last result of each
    says = [line for fact in facts if "fact" in fact and fact["fact"] != "machine" for line in fact["says"]]
    lines = [f"# {machine.get('GPUs', 'No GPU')}", "", "`tools/gpu_first_run.py` has written this report."]
    lines += ["Ranks share a GPU if there are too few. Their times then say nothing about the speed of NCCL.", ""]
    lines += ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in machine.items())]
    if says:
        lines += ["", "## What was measured", "", *(f"- {escape(text)}" for text in says)]
    lines += ["", "## What ran", "", "| step | result | seconds | last line |", "|---|---|---|---|"]
    lines += [
        f"| {name} | {fact['result']} | {fact['seconds']:.1f} | {escape(fact['last'])} |"
        for name, fact in steps.items()
        if not name.startswith(SMI) and fact["result"] != NOT_REACHED
    ]
    if missing := [name for name, fact in steps.items() if fact["result"] == NOT_REACHED]:
        lines += ["", f"Not reached: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def escape(text: str) -> str:
    """Return a text for one cell of a Markdown table, without the directory of this copy of the repository."""
    return text.replace(f"{ROOT}/", "").replace("|", "\\|").replace("<", "&lt;")


def count_jobs() -> int:
    """Return how many checks may run at the same time: as many as have a core for each of their ranks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_JOBS, cores // CORES_PER_JOB))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps. Return 0 if all have passed, 1 if not, and 2 if there is no usable GPU."""
    parser = argparse.ArgumentParser(
        description="Run experiments, graded checks, a sample of mutants and a benchmark on NCCL, and write a report.",
        epilog="Example: python3 tools/gpu_first_run.py out/gpu_run --minutes 9",
    )
    parser.add_argument("out", type=Path, help="the directory of the report and of its logs")
    parser.add_argument("--minutes", type=float, default=60.0, help="stop after so many minutes (default: 60)")
    parser.add_argument("--skip", type=int, default=0, metavar="N", help="leave out the first N steps")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="nccl", help="gloo needs no GPU")
    options = parser.parse_args(arguments)
    out = options.out.resolve()
    run = FirstRun(out, options.minutes)
    try:
        for step in list_opening_steps(out, options.backend):
            if not run.run(step) and step.name == "machine":
                return 2
        steps = list_steps(out, options.backend)[options.skip :]
        run.run_all(steps, count_jobs(), options.skip + 1)
        if options.backend == "nccl":
            run.run(make_smi_step(f"{SMI} at the end"), limit_s=20)
    except KeyboardInterrupt:
        return 130
    return 0 if run.is_good else 1


if __name__ == "__main__":
    sys.exit(main())
