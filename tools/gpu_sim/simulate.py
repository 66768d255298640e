"""Run everything that uses NCCL on simulated GPUs, and print one table: python3 tools/gpu_sim/simulate.py

`build.sh` first creates a virtual environment with the CUDA build of torch and fake NVIDIA libraries, which takes a
download of 0.6 GB and a few minutes. The simulation shows neither times nor kernel counts: see docs/gpu_check.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NCCL = ["--backend", "nccl", "--share-gpu"]
NOTEBOOK = """
import torch
from brigade.lab.notebook import start_ranks
ranks = start_ranks(2)
assert ranks.backend == "nccl"
ranks.run('''
import torch, torch.distributed as dist
from brigade.rank.api import device
tensor = torch.ones(3, device=device())
dist.all_reduce(tensor)
value = str(device()), tensor.tolist()
''')
values = ranks["value"]
assert values == [("cuda:0", [2.0] * 3), ("cuda:1", [2.0] * 3)], values
ranks.stop()
"""


FULL_MARKS = r"(\d+) of \1 points"


class Step(NamedTuple):
    """A command to run with some GPUs. It must end with `status` and print what the pattern `said` matches."""

    name: str
    gpus: int
    command: list[str]
    status: int = 0
    said: str = ""
    without_cuda: bool = False  # no process may initialise CUDA
    environment: dict[str, str] = {}


def list_steps(deadline: str, minutes: str, number: list[str], styles: Path) -> Iterator[Step]:
    """Yield the steps. `number` selects modules, by default all. `styles` is a submission of another style."""
    pytest = ["python", "-m", "pytest", "-q", "--target", "solutions", "--deadline", deadline]
    checks = [str(path) for path in sorted((ROOT / "tests").glob("test_m[0-9]*.py"))]
    if number:
        checks = [path for path in checks if str(int(Path(path).name[6:8])) in number]
    brigade = ["python", "-m", "brigade.cli"]
    check = ["python", "-m", "tools.gpu_check", "--minutes", minutes, "--deadline", deadline]
    for gpus in (1, 2, 4):
        selected = ["--modules", *number] if number else []
        yield Step("gpu-check", gpus, [*check, *selected], said="Everything passed")
    yield Step("graded checks with gloo", 1, [*pytest, "--backend", "gloo", *checks], without_cuda=True)
    is_root = os.geteuid() == 0  # then the grader checks the other styles
    styled = "right_variant" if is_root else "right_variant or another_style"
    yield Step("right variants", 1, [*pytest, *NCCL, "tests/toolkit/test_mutants.py", "-k", styled])
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    yield Step("torchrun: benchmark", 2, [*torchrun, "-m", *brigade[2:], "bench", "--target", "solutions"], said="nccl")
    yield Step("torchrun: launch.py", 2, [*torchrun, "lessons/m00_ring/launch.py"], said="on cuda:1")
    yield Step("ranks of a notebook", 2, ["python", "-c", NOTEBOOK])
    for modules in (number or ("0", "1-8", "9-11", "12-16")) if is_root else ():
        graded = ["--modules", modules, "--limit", "7200", "--out", "out/gpu_sim.json", *NCCL]
        for submission in ("solutions", str(styles)):
            grade = [*brigade, "grade", "--submission", submission, "--prior", "reference", *graded]
            yield Step(f"grade {Path(submission).name} as root, modules {modules}", 1, grade, said=FULL_MARKS)
    for gpus, said, environment in (
        (0, "there is no NVIDIA driver", {"FAKE_DRIVER": "0"}),
        (0, "torch finds none", {}),
        (1, "the NVIDIA driver is too old", {"FAKE_DRIVER": "12040"}),
        (1, "CUDA_VISIBLE_DEVICES is empty", {"CUDA_VISIBLE_DEVICES": ""}),
        (1, "2 ranks need 2 GPUs", {}),
    ):
        command = [*brigade, "bench", "--target", "solutions", "--backend", "nccl"]
        yield Step(f"message: {said}", gpus, command, status=2, said=said, environment=environment)


def run_step(step: Step, directory: str, log: Path) -> str:
    """Run one step. Return the row of the table without the time."""
    cuda_log = log.with_suffix(".cuda")
    cuda_log.unlink(missing_ok=True)
    environment = os.environ | {"FAKE_GPUS": str(step.gpus), "FAKE_CUDA_LOG": str(cuda_log)} | step.environment
    with log.open("w") as output:
        status = subprocess.run(
            [HERE / "run.sh", directory, *step.command], cwd=ROOT, env=environment, stdout=output, stderr=output
        ).returncode
    text = log.read_text(errors="replace")
    problem = ""
    if status != step.status:
        problem = f"status {status}: {log}"
    elif not re.search(step.said, text):
        problem = f"the output has no {step.said!r}: {log}"
    elif step.status == 2 and text.strip().count("\n"):
        problem = f"more than one line: {log}"
    elif step.without_cuda and cuda_log.exists():
        problem = f"CUDA was initialised: {cuda_log}"
    tests = sum(map(int, re.findall(r"\b(\d+) passed", text)))
    return f"| {step.name} | {step.gpus} | {problem or 'passed'} | {tests or ''} |"


def main() -> int:
    """Build the simulated device, run the steps and print the table. Return 1 if a step failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--dir", default=str(ROOT / "out" / "gpu_sim"), help="directory of the virtual environment")
    parser.add_argument("--deadline", default="300", help="time limit for one run of ranks, in seconds")
    parser.add_argument("--minutes", default="60", help="time limit for gpu-check, which also limits its runs to 60 s")
    parser.add_argument("--modules", nargs="*", default=[], help="only these modules")
    parser.add_argument("--only", default="", help="only steps whose name contains this text")
    options = parser.parse_args()
    subprocess.run([HERE / "build.sh", options.dir], check=True)
    logs, styles = Path(options.dir) / "logs", Path(options.dir) / "other_styles"
    for path in (logs, styles):
        path.mkdir(exist_ok=True)
    for path in (ROOT / "tests").glob("m*/alternative.py"):
        shutil.copy(path, styles / f"{path.parent.name.partition('_')[2]}.py")
    rows = []
    for index, step in enumerate(list_steps(options.deadline, options.minutes, options.modules, styles)):
        if options.only in step.name:
            started = time.monotonic()
            row = run_step(step, options.dir, logs / f"{index:02}.txt")
            rows.append(f"{row} {time.monotonic() - started:.0f} |")
            print(rows[-1], flush=True)
    print("\n".join(["", "| step | GPUs | result | tests passed | seconds |", "|---|---|---|---|---|", *rows]))
    return int(any("| passed |" not in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
