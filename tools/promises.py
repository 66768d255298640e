"""`make promises`: measure what the course promises, on this machine.

The title of each table is a command that prints the same figures. Do not run anything else at the same time, because
other work makes the times meaningless. The exit status is 0 if all promises are kept, 1 if one is missed, 2 if a
command fails, and 130 if the run is stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from brigade.cli.grade import PARTS
from brigade.course.modules import MODULES, ROOT, CourseError, get_module
from brigade.lab.ladder import TORCH_DDP, TORCH_FSDP, TORCH_ZERO, get_variant

MODULE_S, LONG_MODULE_S, CORE_S, DEMO_S = 3.0, 6.0, 25.0, 60.0
LONG = (8, 11)  # modules with about twice as many checks as the others
BUCKETED = (4, 5, 6, 7)  # modules with the same buckets as torch DDP
ZERO, PREFETCHED, FULLY_SHARDED = 8, 9, 11
BUCKETED_RATIO, ZERO_RATIO, PREFETCHED_RATIO, FULLY_SHARDED_RATIO = 1.05, 0.85, 0.95, 1.00
BENCH = "brigade bench --modules 4-9,11 --comm-ratio 0.8 --target solutions"
LEFT_COMMAND = "brigade check 5 --target solutions"  # the command that is killed
GONE_WITHIN_S = 15.0  # after the kill; the fork server needs some time to notice it


@dataclass(frozen=True)
class Promise:
    """A figure, the command that prints it, the aim, the measured value, and whether the promise is kept."""

    figure: str
    command: str
    aim: str
    measured: str
    is_kept: bool


def make_promise(figure: str, command: str, limit: float, values: Sequence[float], unit: str = "") -> Promise:
    """Return the promise that the median of one or several measurements is at most `limit`."""
    unit = f" {unit}" if unit else ""
    measured = f"{median(values):.2f}{unit}"
    if len(values) > 1:
        measured += f" ({min(values):.2f} to {max(values):.2f})"
    return Promise(figure, command, f"at most {limit:g}{unit}", measured, median(values) <= limit)


def make_ladder_promises(contents: Sequence[dict[str, Any]]) -> list[Promise]:
    """Return the promises on step times, relative to others in the same rounds, and on module 8's optimizer state.

    `contents` are those of the files that `brigade bench --json` wrote.
    """
    benches = [{row["variant"]: row for row in content["rows"]} for content in contents]
    zero, prefetched, fully_sharded = (get_variant(get_module(n)).label for n in (ZERO, PREFETCHED, FULLY_SHARDED))
    wanted = [(get_variant(get_module(n)).label, TORCH_DDP.label, BUCKETED_RATIO) for n in BUCKETED]
    wanted.append((zero, TORCH_ZERO.label, ZERO_RATIO))
    wanted.append((prefetched, zero, PREFETCHED_RATIO))
    wanted.append((fully_sharded, TORCH_FSDP.label, FULLY_SHARDED_RATIO))
    rows = []
    for label, base, limit in wanted:
        pairs = [zip(bench[label]["rounds_ms"], bench[base]["rounds_ms"]) for bench in benches]
        values = [median(time / other for time, other in pair) for pair in pairs]
        rows.append(make_promise(f"step time, {label} to {base}", BENCH, limit, values))
    ranks = contents[0]["ranks"]
    # One fp32 moment for each fp32 gradient, on 1/N of the buffer including padding.
    limit_mb = benches[0][zero]["kept_mb"]["gradients"] / ranks
    state_mb = max(bench[zero]["kept_mb"]["optimizer state"] for bench in benches)
    whole_mb = benches[0][TORCH_DDP.label]["kept_mb"]["optimizer state"]
    aim = f"{limit_mb:.3f} MB, 1/{ranks} of {whole_mb:.3f} plus padding"
    measured_mb = f"{state_mb:.3f} MB on the fullest rank"
    rows.append(Promise(f"optimizer state, {zero}", BENCH, aim, measured_mb, state_mb <= limit_mb))
    return rows


def make_left_promise(how: str, command: str, processes: Sequence[str], files: Sequence[str]) -> Promise:
    """Return the promise that a run leaves no processes and no files."""
    measured = f"{len(processes)} and {len(files)}"
    if named := [*processes, *files]:
        measured += ": " + ", ".join(named)
    return Promise(f"left {how}: processes, files", command, "0 and 0", measured, not named)


def make_arguments(command: str) -> list[str]:
    """Return the arguments that run a command of the table with this Python and the course in this directory."""
    program, *rest = shlex.split(command)
    return [sys.executable, *(["-m", "brigade.cli", *rest] if program == "brigade" else rest)]


def run(command: str, **options: str) -> float:
    """Run a command of the table with additional options. Return the seconds it took. Raise CourseError if it fails."""
    more = [word for name, value in options.items() for word in (f"--{name}", value)]
    started = time.monotonic()
    done = subprocess.run([*make_arguments(command), *more], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise CourseError(f"`{command}` ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.monotonic() - started


def time_command(figure: str, command: str, limit_s: float, repetitions: int) -> Promise:
    return make_promise(figure, command, limit_s, [run(command) for _ in range(repetitions)], "s")


def check_points(part: str) -> Promise:
    """Grade the reference, and return the promise that it gets all points of a part of the course."""
    command = f"brigade grade --submission solutions --part {part}"
    with tempfile.TemporaryDirectory(prefix="brigade-promises-") as directory:
        path = Path(directory) / "results.json"
        run(command, out=str(path), format="json")
        return make_points_promise(part, command, json.loads(path.read_text()))


def make_points_promise(part: str, command: str, result: dict[str, Any]) -> Promise:
    """Return the promise that a result of `brigade grade` contains all points."""
    score, max_score = result["score"], result["max_score"]
    return Promise(f"points of the reference, {part}", command, str(max_score), str(score), score == max_score)


def run_benches(repetitions: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="brigade-promises-") as directory:
        paths = [Path(directory) / f"{number}.json" for number in range(repetitions)]
        for path in paths:
            run(BENCH, json=str(path))
        return [json.loads(path.read_text()) for path in paths]


def find_processes(directory: Path) -> list[psutil.Process]:
    """Return all processes whose temporary directory is `directory`; child processes inherit it."""
    processes = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(directory):
                processes.append(process)
        except psutil.Error:
            continue
    return processes


def check_left_after(how: str, end: Callable[[subprocess.Popen], None], again: bool = False) -> Promise:
    """Start a run of checks, let `end` end it once its ranks exist, and look for processes and files that are left.

    With `again`, first run the command once more, because some things are removed only when the next run starts.
    """
    with tempfile.TemporaryDirectory(prefix="promises-") as directory:
        root = Path(directory)
        started = {
            "cwd": ROOT,
            "env": os.environ | {"TMPDIR": directory},
            "stdout": subprocess.DEVNULL,
            "stderr": subprocess.DEVNULL,
        }
        command = subprocess.Popen(make_arguments(LEFT_COMMAND), **started, start_new_session=True)
        while command.poll() is None and len(find_processes(root)) < 3:  # the command, the fork server and a rank
            time.sleep(0.02)
        end(command)
        command.wait()
        if again:
            subprocess.run(make_arguments(LEFT_COMMAND), **started)
        ends_at = time.monotonic() + GONE_WITHIN_S
        while (find_processes(root) or any(root.iterdir())) and time.monotonic() < ends_at:
            time.sleep(0.1)
        left = [process.name() for process in find_processes(root)]
        return make_left_promise(how, LEFT_COMMAND, left, [path.name for path in root.iterdir()])


def interrupt(command: subprocess.Popen) -> None:
    """Send SIGINT to the process group, as Ctrl-C does in a terminal."""
    os.killpg(command.pid, signal.SIGINT)


def kill_all(command: subprocess.Popen) -> None:
    """Kill the command and its fork server, so that no process is left to clean up."""
    everyone = [command, *psutil.Process(command.pid).children()]
    for process in everyone:
        process.kill()


def measure_all(repetitions: int, on_stage: Callable[[str], None]) -> list[Promise]:
    """Return all promises with their measurements. Call `on_stage` with the name of each stage."""
    rows = []
    for entry in MODULES:
        on_stage(f"checks of module {entry.number}")
        command = f"brigade check {entry.number} --target solutions"
        limit_s = LONG_MODULE_S if entry.number in LONG else MODULE_S
        rows.append(time_command(f"checks of module {entry.number}", command, limit_s, repetitions))
    on_stage("all core checks")
    rows.append(time_command("all core checks", "brigade grade --submission solutions", CORE_S, repetitions))
    for part in PARTS:
        on_stage(f"points of the reference, {part}")
        rows.append(check_points(part))
    on_stage("the demo")
    rows.append(time_command("make demo", "python -m brigade.cli.demo", DEMO_S, 1))
    on_stage(f"{repetitions} benches")
    rows += make_ladder_promises(run_benches(repetitions))
    on_stage("what is left")
    rows.append(check_left_after("after a run", lambda command: None))
    rows.append(check_left_after("after Ctrl-C", interrupt))
    rows.append(check_left_after("after SIGKILL", subprocess.Popen.kill))
    rows.append(
        check_left_after(
            "after SIGKILL of the command and its fork server, once another run has ended", kill_all, again=True
        )
    )
    return rows


def make_tables(rows: Sequence[Promise]) -> list[Table]:
    """Return one table for each command, which is its title; at most 80 columns wide."""
    tables_by_command = []
    for command, group in groupby(rows, lambda row: row.command):
        tables_by_command.append(
            Table(
                title=command, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0)
            )
        )
        for heading, width in (("figure", 30), ("aim", 18), ("measured", 22), ("kept", 4)):
            tables_by_command[-1].add_column(heading, width=width, overflow="fold")
        for row in group:
            tables_by_command[-1].add_row(row.figure, row.aim, row.measured, "yes" if row.is_kept else "NO")
    return tables_by_command


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Measure what the course promises. Do not run anything else at the same time.",
        epilog="Example: python -m tools.promises --repetitions 1",
    )
    parser.add_argument(
        "--repetitions",
        type=int,
        default=3,
        metavar="N",
        help="how often to run each command except the demo (default: 3)",
    )
    options = parser.parse_args()
    if options.repetitions < 1:
        parser.error("--repetitions must be at least 1")
    console = Console(highlight=False)
    load = os.getloadavg()[0]
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    try:
        with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=1) as progress:
            task = progress.add_task("", total=None)
            rows = measure_all(options.repetitions, lambda stage: progress.update(task, description=stage))
    except CourseError as error:
        print(f"promises: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\npromises: stopped", file=sys.stderr)
        return 130
    for table in make_tables(rows):
        console.print(table, "")
    missed = sum(not row.is_kept for row in rows)
    console.print(
        f"{missed} of {len(rows)} promises not kept. Python {platform.python_version()}, torch {version('torch')}, "
        f"{os.cpu_count()} cores, load average before the run {load:.1f}.",
        soft_wrap=True,
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
