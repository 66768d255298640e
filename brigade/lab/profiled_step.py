"""What the ranks of `brigade trace --backend nccl` do: record one step of each variant with torch's profiler.

`gpu_timeline.py` starts these ranks and reads the profiles. This file needs only torch.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from brigade.lab.engine import Engine
from brigade.lab.timed_step import (
    make_start,
    prepare_training,
    repeat_step_before,
    synchronize,
    take_own_part,
    take_step,
)
from brigade.ranks.rank import recording

MARK = "brigade mark"  # the name of the annotations between the phases of a step
PROFILED = 2  # the last steps of each variant; the first of them starts the profiler's own machinery and is dropped


def profile_steps(workload: dict, variants: list[dict]) -> dict[str, bytes]:
    """Take `workload["rounds"]` steps of each variant. Return, by label, the profile of the last one.

    A profile is what `export_chrome_trace` writes, JSON in Chrome's Trace Event Format. It contains six annotations
    called `MARK`: one before the launches that belong to the step before, and five that `take_step` makes.
    The first steps are not profiled: CUDA loads a kernel when it is first used, which delays the launches behind it.
    """
    engines, draw_batch = prepare_training(workload, variants, *make_start(workload))
    profiles = {}
    for turn in range(workload["rounds"]):
        batch = take_own_part(draw_batch(workload["batch_size"]))
        for index, engine in enumerate(engines):
            recording.note("step", step=turn * len(engines) + index, variant=engine.label)
            if turn < workload["rounds"] - PROFILED:
                take_marked_step(engine, batch)
            else:
                profiles[engine.label] = profile_step(engine, batch)
    recording.note("step", step=None)
    return profiles


def profile_step(engine: Engine, batch: list[torch.Tensor]) -> bytes:
    """Return the profile of one step. The ranks begin it together."""
    file = Path(f"profile-{dist.get_rank()}.json")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        dist.barrier()
        synchronize()
        take_marked_step(engine, batch)
        synchronize()
    profiler.export_chrome_trace(str(file))
    content = file.read_bytes()
    file.unlink()
    return content


def take_marked_step(engine: Engine, batch: list[torch.Tensor]) -> None:
    """Take one step, with an annotation called `MARK` at its start, and after each of `ladder.PHASES`."""

    def mark() -> None:
        with record_function(MARK):
            pass

    mark()
    repeat_step_before(engine)
    take_step(engine, *batch, mark=mark)
    engine.finish_param_sync()
