"""Run everything that uses NCCL on simulated GPUs, and print one table: python3 tools/gpu_sim/simulate.py

`build.sh` first creates a virtual environment with the CUDA build of torch and fake NVIDIA libraries, which takes a
download of 0.6 GB and a few minutes. The simulation shows neither times nor kernel counts: see docs/gpu_check.md.
"""

from __future__ import annotations

import argparse
import os
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
def reduce():
    import torch, torch.distributed as dist
    from brigade.rank.api import device
    tensor = torch.ones(3, device=device())
    dist.all_reduce(tensor)
    return str(device()), tensor.tolist()
values = ranks._client[:].apply_sync(reduce)
assert values == [("cuda:0", [2.0] * 3), ("cuda:1", [2.0] * 3)], values
ranks.stop()
"""


class Step(NamedTuple):
    """A command to run with some GPUs. It must end with `status` and print `said`."""

    name: str
    gpus: int
    command: list[str]
    status: int = 0
    said: str = ""
    without_cuda: bool = False  # no process may initialise CUDA
    environment: dict[str, str] = {}


def list_steps(deadline: str, minutes: str, number: list[str]) -> Iterator[Step]:
    """Yield the steps. `number` selects modules, by default all."""
    pytest = ["python", "-m", "pytest", "-q", "--target", "solutions", "--deadline", deadline]
    checks = [str(path) for path in sorted((ROOT / "tests").glob("test_m[0-9]*.py"))]
    if number:
        checks = [path for path in checks if str(int(Path(path).name[6:8])) in number]
    brigade = ["python", "-m", "brigade.cli"]
    selected = ["--modules", *number] if number else []
    for gpus in (1, 2, 4):
        yield Step("graded checks with NCCL", gpus, [*pytest, *NCCL, *checks])
    yield Step("graded checks with gloo", 1, [*pytest, "--backend", "gloo", *checks], without_cuda=True)
    styles = [*pytest, *NCCL, "tests/toolkit/test_mutants.py", "-k", "another_style or right_variant"]
    yield Step("answers in other styles", 1, styles)
    for gpus in (1, 4):
        check = ["python", "-m", "brigade.lab.gpu_check", "--minutes", minutes, "--out", "out/gpu_sim.md", *selected]
        yield Step("gpu-check", gpus, check, said="Everything passed")
    yield Step("benchmark", 1, [*brigade, "bench", "--target", "solutions", *NCCL])
    torchrun = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    yield Step("torchrun: benchmark", 2, [*torchrun, "-m", "brigade.cli", "bench", "--target", "solutions"])
    yield Step("torchrun: launch.py", 2, [*torchrun, "lessons/m00_ring/launch.py"], said="on cuda:1")
    yield Step("ranks of a notebook", 2, ["python", "-c", NOTEBOOK])
    if os.geteuid() == 0:
        grade = [*brigade, "grade", "--submission", "solutions", "--modules", ",".join(number) or "1-8", *NCCL]
        yield Step("grade as root", 1, grade, said=" points")
    for said, environment in (
        ("the NVIDIA driver is too old", {"FAKE_DRIVER": "12040"}),
        ("CUDA_VISIBLE_DEVICES is empty", {"CUDA_VISIBLE_DEVICES": ""}),
        ("2 ranks need 2 GPUs", {}),
    ):
        command = [*brigade, "bench", "--target", "solutions", "--backend", "nccl"]
        yield Step(f"message: {said}", 1, command, status=2, said=said, environment=environment)


def run_step(step: Step, directory: str, log: Path) -> str:
    """Run one step. Return what went wrong, or ""."""
    cuda_log = log.with_suffix(".cuda")
    cuda_log.unlink(missing_ok=True)
    environment = os.environ | {"FAKE_GPUS": str(step.gpus), "FAKE_CUDA_LOG": str(cuda_log)} | step.environment
    with log.open("w") as output:
        status = subprocess.run(
            [HERE / "run.sh", directory, *step.command], cwd=ROOT, env=environment, stdout=output, stderr=output
        ).returncode
    text = log.read_text(errors="replace")
    if status != step.status:
        return f"status {status}: {log}"
    if step.said not in text:
        return f"the output has no {step.said!r}: {log}"
    if step.status == 2 and text.strip().count("\n"):
        return f"more than one line: {log}"
    initialised = cuda_log.read_text() if cuda_log.exists() else ""
    if step.without_cuda and initialised:
        return initialised.splitlines()[0]
    return ""


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
    logs = Path(options.dir) / "logs"
    logs.mkdir(exist_ok=True)
    rows = []
    for index, step in enumerate(list_steps(options.deadline, options.minutes, options.modules)):
        if options.only in step.name:
            started = time.monotonic()
            problem = run_step(step, options.dir, logs / f"{index:02}.txt")
            rows.append(f"| {step.name} | {step.gpus} | {problem or 'passed'} | {time.monotonic() - started:.0f} |")
            print(rows[-1], flush=True)
    print("\n".join(["", "| step | GPUs | result | seconds |", "|---|---|---|---|", *rows]))
    return int(any("| passed |" not in row for row in rows))


if __name__ == "__main__":
    sys.exit(main())
