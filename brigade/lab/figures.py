"""Redraw the picture of every lesson, or of one: python -m brigade.lab.figures 3

Module 0's picture shows which chunks travel around a ring, and module 11's a schedule. The others are timelines of real
runs.
Each figure shows a step of the module below a step of the previous core module, both from one run on the emulated link
of `timeline.WORKLOAD`, on which moving all gradients takes 0.8 of backward. Advanced modules also have memory.png: the
bytes that are alive during a step.
"""

from __future__ import annotations

import argparse
import sys

from brigade.course.modules import ADVANCED, CORE_MODULES, MODULES, ROOT, TRAINING_MODULES, get_module
from brigade.lab import memory_over_step
from brigade.lab.ladder import get_variant
from brigade.lab.plan_config import import_solution
from brigade.lab.ring_figure import draw_ring
from brigade.lab.schedule_figure import draw_schedule
from brigade.lab.script import run_to_status
from brigade.lab.timeline import draw, trace


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m brigade.lab.figures",
        description="Draw the readings' pictures again: module 0's ring.png, module 11's schedule.png, and the "
        "other modules' timeline.png from real runs on an emulated link.",
        epilog="Example: python -m brigade.lab.figures 3",
    )
    parser.add_argument("number", nargs="?", metavar="N", help="the module's number (default: all modules)")
    options = parser.parse_args()
    return run_to_status("figures", lambda: draw_figures(options.number))


def draw_figures(number: str | None = None) -> int:
    """Draw the picture of one module, or of all. Raise CourseError if there is no such module."""
    entries = [get_module(number)] if number else MODULES
    if MODULES[0] in entries:
        path = MODULES[0].lesson / "ring.png"
        draw_ring(path)
        print(f"{path.relative_to(ROOT)} written")
    for entry in entries:
        if "plan_schedule" in entry.public:
            path = entry.lesson / "schedule.png"
            draw_schedule(import_solution("plan_schedule"), path)
            print(f"{path.relative_to(ROOT)} written")
    for entry in TRAINING_MODULES:
        if entry not in entries:
            continue
        before = [module for module in CORE_MODULES if module.number < entry.number]
        compared = [*before[-1:], entry]
        timelines = trace([get_variant(module) for module in compared])
        path = entry.lesson / "timeline.png"
        draw(timelines, path, [f"{timeline.label}, {module.idea}" for module, timeline in zip(compared, timelines)])
        lengths = " and ".join(timeline.lengths for timeline in timelines)
        print(f"{path.relative_to(ROOT)} written: {lengths}")
        if entry.track == ADVANCED:
            path = entry.lesson / "memory.png"
            memory_over_step.draw(memory_over_step.measure([get_variant(module) for module in compared]), path)
            print(f"{path.relative_to(ROOT)} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
