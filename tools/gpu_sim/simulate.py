"""Run everything that uses NCCL on simulated GPUs, and print one table: python3 -m tools.gpu_sim.simulate

`build.sh` first creates a virtual environment with the CUDA build of torch and fake NVIDIA libraries, which takes a
download of 0.6 GB and a few minutes. The simulation shows neither times nor kernel counts: see docs/gpus.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tools.gpu_first_run import OF_A_CLUSTER

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


class Step(NamedTuple):
    """A command to run with some GPUs. It must succeed and print what the pattern `said` matches."""

    name: str
    gpus: int
    command: list[str]
    said: str = ""
    without_cuda: bool = False  # no process may initialise CUDA
    environment: dict[str, str] = {}


def list_steps(deadline: str, out: str) -> list[Step]:
    """Return the steps, the short ones first. They may write files to the directory `out`."""
    pytest = ["python", "-m", "pytest", "-q", "--target", "solutions", "--deadline", deadline]
    nccl = ["--backend", "nccl", "--share-gpu"]
    checks = [str(path) for path in sorted((ROOT / "tests").glob("test_m[0-9]*.py"))]
    mutants = "tests/course/test_mutants.py"
    brigade = ["-m", "brigade"]
    grade = ["python", *brigade, "grade", "--submission", "solutions", "--out", f"{out}/grades.json", *nccl]
    full_marks = r"\b(\d+) of \1 points"
    torchrun = ["torchrun", "--standalone", "--nproc-per-node"]
    probe = ["python", "-m", "tools.gpu_probes", out]
    is_root = os.geteuid() == 0
    steps = [
        Step("the fakes", 1, [*pytest, "-p", "no:cacheprovider", "tools/gpu_sim/test_fakes.py"]),
        Step("commands", 1, [*pytest, "-p", "no:cacheprovider", "tools/gpu_sim/test_commands.py"]),
        # What a real GPU says (docs/gpu_runs): a lone launch blocks, unless the ranks were connected before.
        Step(
            "lone launches", 1, [*probe, "lone-all_reduce"], said=r"not returned after[^.]*\.\n.*returned after 0\.\d"
        ),
        Step(
            "a missing launch",
            1,
            [*probe, "missing-launch"],
            said=r"=1 .*deadlock.*which rank 1 never launched(?s:.*)=0 .*deadlock",
        ),
        Step(
            "a hang under torchrun",
            2,
            [*probe, "torchrun"],
            said=r"rank 0 on HOST has done nothing for 20 s; it .*#\d+",
        ),
        Step("without NVML", 2, [*pytest, *nccl, checks[1]], environment={"FAKE_NVML": "0"}),
        Step("a cluster's variables", 1, [*pytest, *nccl, *checks[1:4]], environment=OF_A_CLUSTER),
    ]
    for name, value in OF_A_CLUSTER.items() if is_root else ():
        command = [*grade, "--modules", "1", "--limit", "900"]
        steps.append(Step(f"grade with {name}", 1, command, said=full_marks, environment={name: value}))
    launch = [*torchrun, "2", "lessons/m00_ring/measure/launch.py"]
    steps.append(Step("torchrun: launch.py", 2, launch, said="on cuda:1"))
    bench = [*brigade, "bench", "--target", "solutions"]
    steps.append(Step("torchrun: benchmark", 2, [*torchrun, "2", *bench], said="nccl"))
    short = ["--modules", "1", "--rounds", "7"]
    steps.append(Step("torchrun: 16 ranks", 16, [*torchrun, "16", *bench, *short], said="16 ranks"))
    train = ["python", "lessons/capstone/train.py", "--target", "solutions", "--steps", "20", "--rounds", "3"]
    found = {"PYTHONPATH": str(ROOT)}  # the simulation installs no course
    saved = ["--save", f"{out}/trained"]
    steps.append(Step("train", 2, [*train, *saved], said="2 ranks .nccl", environment=found))
    train += ["--resume", f"{out}/trained", "--engine", "11", "--steps", "30", "--ranks", "3", *nccl]
    said = "step +29 .*(?s:.*)3 ranks .nccl"
    steps.append(Step("train: another engine", 1, train, said=said, environment=found))
    for gpus in (1, 2, 8):
        steps.append(Step("notebooks", gpus, ["python", "-m", "tools.notebook_figures", "--out", f"{out}/{gpus}_gpus"]))
    for gpus in (1, 2, 4, 8):
        steps.append(Step("checks", gpus, [*pytest, *nccl, *checks]))
    for gpus in (1, 2, 4):  # with eight GPUs, the mutants' ranks use the same ones as with four
        steps.append(Step("sample of mutants", gpus, [*pytest, *nccl, mutants, "-m", "sample", "--everything"]))
    styles = "right_variant or another_style"
    steps.append(Step("other styles", 1, [*pytest, *nccl, mutants, "-k", styles, "--everything"]))
    steps.append(Step("checks with gloo", 1, [*pytest, "--backend", "gloo", *checks], without_cuda=True))
    if is_root:
        steps += [
            Step(f"grade {part}", 1, [*grade, "--limit", "7200", "--part", part], said=full_marks)
            for part in ("warm-up", "core", "advanced", "beyond")
        ]
    return steps


def run_step(step: Step, directory: str, log: Path) -> str:
    """Run one step. Return what is wrong, or ""."""
    cuda_log = log.with_suffix(".cuda")
    cuda_log.unlink(missing_ok=True)
    environment = os.environ | {"FAKE_GPUS": str(step.gpus), "FAKE_CUDA_LOG": str(cuda_log)} | step.environment
    with log.open("w") as output:
        command = [HERE / "run.sh", directory, *step.command]
        status = subprocess.run(command, cwd=ROOT, env=environment, stdout=output, stderr=output).returncode
    if status:
        return f"status {status}: {log}"
    if not re.search(step.said, log.read_text(errors="replace")):
        return f"the output has no {step.said!r}: {log}"
    return f"CUDA was initialised: {cuda_log}" if step.without_cuda and cuda_log.exists() else ""


def main() -> int:
    """Build the simulated device, run the steps and print a table. Return 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", default=str(ROOT / "out" / "gpu_sim"), help="directory of the virtual environment")
    parser.add_argument("--deadline", default="300", help="time limit for one run of ranks, in seconds")
    parser.add_argument("--only", default="", help="only steps whose name contains this text")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that the step ends, too
    subprocess.run([HERE / "build.sh", options.dir], check=True)
    logs, results = Path(options.dir) / "logs", Path(options.dir) / "results"
    for directory in (logs, results):
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir()
    print("| step | GPUs | result | seconds |\n|---|---|---|---|")
    problems = []
    for index, step in enumerate(list_steps(options.deadline, str(results))):
        if options.only in step.name:
            started = time.monotonic()
            problems.append(run_step(step, options.dir, logs / f"{index:02}.txt"))
            seconds = f"{time.monotonic() - started:.0f}"
            print(f"| {step.name} | {step.gpus} | {problems[-1] or 'passed'} | {seconds} |", flush=True)
    return int(any(problems))


if __name__ == "__main__":
    sys.exit(main())
