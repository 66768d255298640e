"""Redraw the pictures of all lessons, or of one lesson: python -m brigade.lab.figures 3

Computed pictures are the same on every machine: the concept diagrams of `diagrams.py`, and the schematic.png of each
module that trains. A schematic shows a step as the α–β model predicts it. Measured pictures are timeline.png,
memory.png and module 7's views.png. A timeline shows real runs on the emulated link of `timeline.WORKLOAD`, on which
all-reducing all gradients takes 0.8 times as long as backward. Advanced modules also have memory.png: the bytes that
are alive during a step. In timelines and schematics, a step of the module is below a step of the previous core module.
"""

from __future__ import annotations

import argparse
import sys

from brigade.course.modules import ADVANCED, CORE_MODULES, MODULES, ROOT, TRAINING_MODULES, Module, get_module
from brigade.lab import memory_over_step, views_figure
from brigade.lab.diagrams import DIAGRAMS
from brigade.lab.ladder import get_variant
from brigade.lab.schematic import make_timelines
from brigade.lab.script import run_to_status
from brigade.lab.timeline import describe_lengths, draw, trace


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m brigade.lab.figures",
        description="Redraw the readings' pictures: the concept diagrams, schematic.png from the cost model, and "
        "timeline.png, memory.png and module 7's views.png from real runs.",
        epilog="Example: python -m brigade.lab.figures 3",
    )
    parser.add_argument("number", nargs="?", metavar="N", help="the module's number (default: all modules)")
    parser.add_argument("--computed", action="store_true", help="draw only the pictures that need no run")
    options = parser.parse_args()
    return run_to_status("figures", lambda: draw_figures(options.number, options.computed))


def draw_figures(number: str | None = None, only_computed: bool = False) -> int:
    """Draw the pictures of one module, or of all modules. Raise CourseError if there is no such module.

    Return 1 if a timeline was not written because it cannot be trusted.
    """
    entries = [get_module(number)] if number else MODULES
    status = 0
    for entry in entries:
        if entry.number in DIAGRAMS:
            name, draw_diagram = DIAGRAMS[entry.number]
            path = entry.lesson / f"{name}.png"
            draw_diagram(path)
            print(f"{path.relative_to(ROOT)} written")
    for entry in TRAINING_MODULES:
        if entry not in entries:
            continue
        compared = list_compared(entry)
        variants = [get_variant(module) for module in compared]
        titles = [f"{variant.label}, {module.idea}" for module, variant in zip(compared, variants)]
        kinds = {"schematic": make_timelines} if only_computed else {"schematic": make_timelines, "timeline": trace}
        for name, make in kinds.items():
            path = entry.lesson / f"{name}.png"
            timelines = make(variants)
            if doubts := [f"{line.label}: {line.doubt}" for line in timelines if line.doubt]:
                status = 1
                print(f"{path.relative_to(ROOT)} not written, because the machine was busy ({'; '.join(doubts)})")
                continue
            draw(timelines, path, titles)
            print(f"{path.relative_to(ROOT)} written: {describe_lengths(timelines)}")
        if "CachedDDP" in entry.public and not only_computed:
            path = entry.lesson / "views.png"
            views_figure.draw(views_figure.measure(), path)
            print(f"{path.relative_to(ROOT)} written")
        if entry.track == ADVANCED and not only_computed:
            path = entry.lesson / "memory.png"
            memory_over_step.draw(memory_over_step.measure(variants), path)
            print(f"{path.relative_to(ROOT)} written")
    return status


def list_compared(entry: Module) -> list[Module]:
    """Return the modules in a module's pictures: the core module before it, if there is one, and the module itself."""
    return [*[module for module in CORE_MODULES if module.number < entry.number][-1:], entry]


if __name__ == "__main__":
    sys.exit(main())
