"""`make promises`: measure what the course promises, on this machine.

Do not run anything else at the same time, because other work makes the times meaningless. The exit status is 0 if all
promises are kept, and 1 if one is missed.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from importlib.metadata import version
from statistics import median

import psutil

from brigade.course.modules import MODULES, ROOT, get_module
from brigade.lab.ladder import EMULATED, TORCH_DDP, TORCH_FSDP, TORCH_ZERO, Ladder, get_variant, run_benchmark
from brigade.rank.emulated_link import Pace

LONG = (8, 11, 14)  # modules with about twice as many checks as the others
NODES = replace(EMULATED, node_size=2, link=Pace(0.8, 0.002, node_size=2, slowdown=8.0))
LEFT_COMMAND = "brigade check 5 --target solutions"  # the command that is killed
GONE_WITHIN_S = 15.0  # after the kill; the fork server needs some time to notice it


def label(number: int) -> str:
    return get_variant(get_module(number)).label


# The step time of a variant is at most this multiple of another's in the same rounds.
RATIOS = [(label(number), TORCH_DDP.label, 1.05) for number in (4, 5, 6, 7)]
RATIOS += [(label(8), TORCH_ZERO.label, 0.85), (label(9), label(8), 0.95), (label(11), TORCH_FSDP.label, 1.00)]


class Report:
    """Prints a line for each promise, and counts the promises that are not kept."""

    missed = 0

    def add(self, figure: str, measured: str, aim: str, is_kept: bool) -> None:
        self.missed += not is_kept
        print(f"{'kept  ' if is_kept else 'MISSED'}  {figure}: {measured} ({aim})", flush=True)

    def add_median(self, figure: str, limit: float, values: list[float], unit: str = "") -> None:
        spread = f", {min(values):.2f} to {max(values):.2f}" if len(values) > 1 else ""
        measured = f"{median(values):.2f}{unit}{spread}"
        self.add(figure, measured, f"at most {limit:g}{unit}", median(values) <= limit)


def make_arguments(command: str) -> list[str]:
    """Return the arguments that run a command with this Python and the course in this directory."""
    program, *rest = shlex.split(command)
    return [sys.executable, "-m", "brigade.cli" if program == "brigade" else program, *rest]


def run(command: str) -> float:
    """Run a command and return the seconds that it took. Exit with its output if it fails."""
    started = time.monotonic()
    done = subprocess.run(make_arguments(command), cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"promises: `{command}` ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.monotonic() - started


def measure_commands(report: Report, repetitions: int) -> None:
    """Measure the times of commands, which must succeed."""
    limits = {f"brigade check {one.number} --target solutions": 6 if one.number in LONG else 3 for one in MODULES}
    for command, limit_s in (limits | {"brigade grade --submission solutions": 25}).items():
        report.add_median(command, limit_s, [run(command) for _ in range(repetitions)], " s")
    report.add_median("make demo", 60, [run("brigade.cli.demo")], " s")


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
    for variant, base, limit in ratios:
        values = [median(one.compute_ratios(one.get_measurement(variant), base)) for one in ladders]
        report.add_median(f"step time, {variant} to {base}", limit, values)


def find_processes(directory: str) -> list[psutil.Process]:
    """Return all processes whose temporary directory is `directory`; child processes inherit it."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == directory:
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def measure_left(report: Report, how: str, sent: signal.Signals | None) -> None:
    """Start checks, send a signal once there are ranks, and look for processes and files that are left."""
    with tempfile.TemporaryDirectory(prefix="promises-") as directory:
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "start_new_session": True}
        environment = os.environ | {"TMPDIR": directory}
        command = subprocess.Popen(make_arguments(LEFT_COMMAND), cwd=ROOT, env=environment, **options)
        while command.poll() is None and len(find_processes(directory)) < 3:  # the command, the fork server and a rank
            time.sleep(0.02)
        if sent == signal.SIGINT:
            os.killpg(command.pid, sent)  # as Ctrl-C does in a terminal
        elif sent:
            command.send_signal(sent)
        command.wait()
        ends_at = time.monotonic() + GONE_WITHIN_S
        while (find_processes(directory) or os.listdir(directory)) and time.monotonic() < ends_at:
            time.sleep(0.1)
        left = [*(process.name() for process in find_processes(directory)), *os.listdir(directory)]
        report.add(f"processes and files left after {how}", ", ".join(left) or "none", "none", not left)


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
    for how, sent in (("a run", None), ("Ctrl-C", signal.SIGINT), ("SIGKILL", signal.SIGKILL)):
        measure_left(report, how, sent)
    print(f"{report.missed or 'no'} promises not kept")
    return 1 if report.missed else 0


if __name__ == "__main__":
    sys.exit(main())
