"""Compare the predictions of `brigade plan` with measurements on emulated links: python -m brigade.lab.validate

    points = validate(world_size=2, bucket_mb=1.0)
    median(point.error for point in points)

No part of a prediction is fitted to the step times that it predicts. Two inputs come from the same run: the link, and
the time of steps without communication. Three come from a short run before it: how fast this machine copies memory,
the processor time of a launch, and how much longer a small collective takes here than on the link.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from brigade.course.modules import TRAINING_MODULES, CourseError
from brigade.lab import ladder
from brigade.lab.ladder import (
    COMPUTATION,
    EMULATED,
    TORCH_DDP,
    TORCH_ZERO,
    Ladder,
    Workload,
    get_course_variants,
    get_variant,
)
from brigade.lab.plan import count_backward_flops, find_units, make_model, plan
from brigade.lab.plan_config import OPTIMIZERS, Machine, Setting
from brigade.lab.schedules import make_program, select_with_rule
from brigade.lab.script import run_to_status, show_progress
from brigade.rank import emulated_link
from brigade.rank.emulated_link import Link
from brigade.runner.machine import count_cores
from brigade.runner.ranks import run_ranks

if TYPE_CHECKING:
    from rich.table import Table

POINTS = ((2, 0.5), (2, 1.0), (2, 2.0), (4, 1.0))  # (ranks, MiB)
# The short run:
REPEATS = 30  # of each timing
QUEUE = 8  # launches in a row
LARGE = 2**18  # elements
LATENCY_S = 200e-6  # of the link


@dataclass(frozen=True)
class Overheads:
    """Costs measured in a short run without any variant. The costs of launches are processor time. See `Machine`."""

    copy_bytes_per_s: float
    launch_s: float
    launch_s_per_byte: float
    wake_s: float


@dataclass(frozen=True)
class Point:
    """The predicted and the measured step time of one variant."""

    label: str
    world_size: int
    bucket_mb: float
    predicted_ms: float
    measured_ms: float
    predicted_exposed_ms: float
    measured_exposed_ms: float

    @property
    def error(self) -> float:
        """The relative error of the step time; positive if the prediction is too long."""
        return self.predicted_ms / self.measured_ms - 1


def validate(world_size: int, bucket_mb: float, on_step: Callable[[], None] | None = None) -> list[Point]:
    """Return a point for each variant of the ladder, all from one run. Raise the errors of `run_ladder`."""
    workload = replace(EMULATED, bucket_mb=bucket_mb)
    overheads = measure_overheads(world_size, workload)
    return compare(ladder.run_ladder(workload, world_size=world_size, on_step=on_step), overheads)


def compare(ladder_results: Ladder, overheads: Overheads) -> list[Point]:
    """Return a point for each variant of a ladder that was measured on an emulated link."""
    points = []
    measured = {measurement.label for measurement in ladder_results.variants}
    known = [*map(get_variant, TRAINING_MODULES), TORCH_DDP, TORCH_ZERO]
    variants = select_with_rule(variant for variant in known if variant.label in measured)
    setting = make_setting(ladder_results, overheads)
    alone_s = make_program(COMPUTATION, setting).computation_s  # measured exposed times are relative to this step
    for step in plan(setting, ladder_results.link, variants):
        variant = ladder_results.get_measurement(step.label)
        points.append(
            Point(
                step.label,
                ladder_results.world_size,
                ladder_results.workload.bucket_mb,
                1e3 * step.step_s,
                variant.median_ms,
                1e3 * (step.step_s - alone_s),
                median(ladder_results.compute_exposed_ms(variant)),
            )
        )
    return points


def make_setting(measured: Ladder, overheads: Overheads) -> Setting:
    """Return the setting of a ladder: its model, its ranks, and the times of its steps without communication."""
    workload = measured.workload
    model = make_model(workload.size)
    flops = count_backward_flops(model, workload.batch_size * workload.time // measured.world_size, workload.time)
    alone = measured.computation
    # Phases are medians over all ranks, but the slowest rank determines the length of a step.
    phases = {phase: alone.compute_phase_ms(phase) / 1e3 for phase in ("forward", "backward", "step")}
    slower = alone.median_ms / 1e3 / sum(phases.values())
    backward_s = tuple(slower * phases["backward"] * part_flops / sum(flops) for part_flops in flops)
    optimizer = OPTIMIZERS["sgd"]
    parameters = list(model.parameters())
    touched = (2 + 1 + 2 * optimizer.values) * sum(parameter.nbytes for parameter in parameters)
    shared = max(1.0, measured.world_size / count_cores())  # ranks that share a core take this many times as long
    machine = Machine(
        slower * phases["forward"],
        backward_s,
        touched / (slower * phases["step"]),
        overheads.copy_bytes_per_s / shared,
        overheads.launch_s * shared,
        overheads.launch_s_per_byte * shared,
        overheads.wake_s,
    )
    return Setting(parameters, measured.world_size, workload.bucket_mb, optimizer, machine, find_units(model))


def measure_overheads(world_size: int, workload: Workload) -> Overheads:
    """Return the mean over ranks of the results of `time_overheads`."""
    numels = [parameter.numel() for parameter in make_model(workload.size).parameters()]
    results = run_ranks(time_overheads, sum(numels), sum(numels) // len(numels), world_size=world_size, mode="emulate")
    return Overheads(*(fmean(values) for values in zip(*results)))


def make_validation_table(points: Sequence[Point]) -> Table:
    """Return a table with a row for each point and the median error in the last row, at most 80 columns wide."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False, show_footer=True)
    table.add_column("ranks", justify="right")
    table.add_column(" MiB", justify="right")
    table.add_column(" variant", "median error", no_wrap=True)
    middle = median(abs(point.error) for point in points)
    for heading, footer in (
        ("step ms\npredicted", ""),
        ("\nmeasured", ""),
        ("\nerror", f"{middle:.1%}"),
        ("exposed ms\npredicted", ""),
        ("\nmeasured", ""),
    ):
        table.add_column(heading, footer, justify="right", no_wrap=True)
    for index, point in enumerate(points):
        last = index + 1 == len(points) or points[index + 1].bucket_mb != point.bucket_mb
        table.add_row(
            str(point.world_size),
            f"{point.bucket_mb:g}",
            f" {point.label}",
            f"{point.predicted_ms:.1f}",
            f"{point.measured_ms:.1f}",
            f"{point.error:+.1%}",
            f"{point.predicted_exposed_ms:.1f}",
            f"{point.measured_exposed_ms:.1f}",
            end_section=last,
        )
    return table


# The code below runs in the ranks.


def time_overheads(numel: int, small: int) -> list[float]:
    """Return the fields of `Overheads`, in order. All are means, because some launches of a step are interrupted."""
    whole = torch.ones(numel)
    copy_s = fmean(time_call_s(whole.clone) for _ in range(REPEATS))
    link = Link(LATENCY_S, 1e12)
    emulated_link.use(link)
    few, many = torch.zeros(small), torch.zeros(LARGE)
    few_s, many_s = (fmean(time_launch_s(tensor) for _ in range(REPEATS)) for tensor in (few, many))
    per_byte = max(0.0, (many_s - few_s) / (many.nbytes - few.nbytes))
    alone_s = fmean(time_call_s(lambda: dist.all_reduce(few)) for _ in range(REPEATS))
    wake_s = alone_s - few_s - link.seconds("all_reduce", few.nbytes, dist.get_world_size())
    return [2 * whole.nbytes / copy_s, max(0.0, few_s - per_byte * few.nbytes), per_byte, max(0.0, wake_s)]


def time_launch_s(tensor: Tensor) -> float:
    """Return the processor time of one all-reduce, for all threads of this rank together, in seconds."""
    dist.barrier()
    start = time.process_time()
    handles = [dist.all_reduce(tensor, async_op=True) for _ in range(QUEUE)]
    for handle in handles:
        handle.wait()
    return (time.process_time() - start) / QUEUE


def time_call_s(call: Callable[[], object]) -> float:
    """Return how many seconds the call takes. All ranks start it after a barrier."""
    dist.barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def parse_points(texts: Sequence[str]) -> list[tuple[int, float]]:
    """Return (ranks, MiB) for texts such as "2x0.5". Raise CourseError for anything else."""
    points = []
    for text in texts:
        ranks, _, bucket_mb = text.partition("x")
        try:
            points.append((int(ranks), float(bucket_mb)))
        except ValueError:
            raise CourseError(f"{text}: write the number of ranks and the bucket size in MiB, such as 2x0.5") from None
        if points[-1][0] < 2 or EMULATED.batch_size % points[-1][0] or not points[-1][1] > 0:
            raise CourseError(
                f"{text}: the bucket size must be above 0, and the number of ranks must be at least 2 and divide "
                f"{EMULATED.batch_size}, the number of sequences"
            )
    return points


def main() -> int:
    names = [f"{ranks}x{bucket_mb:g}" for ranks, bucket_mb in POINTS]
    parser = argparse.ArgumentParser(
        prog="python -m brigade.lab.validate",
        description="Train every variant on an emulated link and compare its step times with the predictions of "
        "brigade plan. Each point takes about a minute on two cores.",
        epilog="Example: python -m brigade.lab.validate 2x0.5 2x1",
    )
    parser.add_argument(
        "points",
        nargs="*",
        metavar="RANKSxMB",
        help=f"points: a number of ranks and a bucket size in MiB (default: {' '.join(names)})",
    )
    texts = parser.parse_args().points or names
    return run_to_status("validate", lambda: show_points(parse_points(texts)))


def show_points(points_to_run: Sequence[tuple[int, float]]) -> int:
    """Measure the points and print the table. Return the exit status."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    before = os.getloadavg()[0]
    points: list[Point] = []
    with show_progress(
        "steps", len(points_to_run) * ladder.count_steps(EMULATED, [*get_course_variants(), *ladder.TORCH])
    ) as advance:
        for world_size, bucket_mb in points_to_run:
            points += validate(world_size, bucket_mb, on_step=advance)
    console.print(make_validation_table(points))
    console.print(f"{count_cores()} cores, load average {before:.1f} before and {os.getloadavg()[0]:.1f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
