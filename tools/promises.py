"""`make promises`: measure what the course promises, on this machine.

Do not run anything else at the same time, because other work makes the times meaningless. The exit status is 0 if all
promises are kept, and 1 if one is missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
import time
from dataclasses import replace
from importlib.metadata import version
from statistics import median

from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.lab.emulated_link import Pace
from brigade.lab.ladder import EMULATED, TORCH_DDP, TORCH_FSDP, TORCH_ZERO, Ladder, get_variant, run_benchmark

LONG = (8, 11, 14)  # modules with about twice as many checks as the others
NODES = replace(EMULATED, node_size=2, link=Pace(0.8, 0.002, node_size=2, slowdown=8.0))


def label(number: int) -> str:
    return get_variant(get_module(number)).label


# The step time of a variant is at most this multiple of another's in the same rounds.
RATIOS = [(label(number), TORCH_DDP.label, 1.05) for number in (4, 5, 6, 7)]
RATIOS += [(label(8), TORCH_ZERO.label, 0.85), (label(9), label(8), 0.95), (label(11), TORCH_FSDP.label, 1.00)]


class Report:
    """Prints a line for each promise, and counts the promises that are not kept."""

    missed = 0

    def add_median(self, figure: str, limit: float, values: list[float], unit: str = "") -> None:
        is_kept = median(values) <= limit
        self.missed += not is_kept
        spread = f", {min(values):.2f} to {max(values):.2f}" if len(values) > 1 else ""
        measured = f"{median(values):.2f}{unit}{spread} (at most {limit:g}{unit})"
        print(f"{'kept  ' if is_kept else 'MISSED'}  {figure}: {measured}", flush=True)


def run(command: str) -> float:
    """Run a command of the course and return the seconds that it took. Exit with its output if it fails."""
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-m", *shlex.split(command)], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"promises: `{command}` ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.monotonic() - started


def measure_commands(report: Report, repetitions: int) -> None:
    """Measure the times of commands, which must succeed."""
    limits = {f"brigade check {one.number} --target solutions": 6 if one.number in LONG else 3 for one in MODULES}
    for command, limit_s in (limits | {"brigade grade --submission solutions": 25}).items():
        report.add_median(command, limit_s, [run(command) for _ in range(repetitions)], " s")
    report.add_median("make demo", 60, [run("brigade.lab.cli.demo")], " s")


def measure_steps(report: Report, repetitions: int) -> None:
    """Measure step times, and the largest number of bytes of module 11's parameters during a step."""
    modules = [get_variant(get_module(number)) for number in (4, 5, 6, 7, 8, 9, 11)]
    ladders = [run_benchmark(EMULATED, [*modules, TORCH_DDP, TORCH_ZERO, TORCH_FSDP]) for _ in range(repetitions)]
    add_ratios(report, ladders, RATIOS)
    sharded = [get_variant(get_module(number)) for number in (11, 14)]
    nodes = [run_benchmark(NODES, [*sharded, TORCH_DDP], world_size=4) for _ in range(repetitions)]
    add_ratios(report, nodes, [(label(14), label(11), 0.50)])
    names = (label(11), TORCH_FSDP.label)
    own_mb, limit_mb = [ladders[0].get_measurement(name).peak_bytes["parameters"] / 1e6 for name in names]
    report.add_median("parameters of module 11 at the peak, and torch's", limit_mb, [own_mb], " MB")


def add_ratios(report: Report, ladders: list[Ladder], ratios: list[tuple[str, str, float]]) -> None:
    for one in ladders:
        print(f"        {one.verdict.sentence}", flush=True)
    for variant, base, limit in ratios:
        values = [median(one.compute_ratios(one.get_measurement(variant), base)) for one in ladders]
        report.add_median(f"step time, {variant} to {base}", limit, values)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Example: python -m tools.promises --repetitions 1")
    what = "how often to run each command except the demo (default: 3)"
    parser.add_argument("--repetitions", type=int, default=3, metavar="N", help=what)
    options = parser.parse_args()
    print(
        f"Python {platform.python_version()}, torch {version('torch')}, {os.cpu_count()} cores, load {os.getloadavg()}"
    )
    report = Report()
    measure_commands(report, options.repetitions)
    measure_steps(report, options.repetitions)
    print(f"{report.missed or 'no'} promises not kept")
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
