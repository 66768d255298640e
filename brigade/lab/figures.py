"""Redraws the timeline of every lesson from real runs: python -m brigade.lab.figures

Each figure shows the module's own step below that of the module before, both from one run.
"""

from __future__ import annotations

import argparse
import sys

from brigade.course import MODULES, ROOT, CourseError, Module
from brigade.lab.ladder import rung_of
from brigade.lab.timeline import Timeline, draw, trace
from brigade.ranks import RankFailure


def title(entry: Module, timeline: Timeline) -> str:
    """Such as: 2 FlatDDP, one all-reduce per dtype, after backward: 31 ms, 1 collective"""
    count = len(timeline.collectives(0))
    calls = f"{count} collective" + ("" if count == 1 else "s")
    return f"{timeline.label}, {entry.idea}: {timeline.end_ms:.0f} ms, {calls}"


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m brigade.lab.figures",
        description="Redraws lessons/mNN_*/timeline.png from real runs on two ranks.",
        epilog="Example: python -m brigade.lab.figures",
    ).parse_args()
    try:
        for before, entry in zip((None, *MODULES), MODULES):
            shown = [entry] if before is None else [before, entry]
            timelines = trace([rung_of(one) for one in shown])
            path = entry.lesson / "timeline.png"
            draw(timelines, path, [title(one, timeline) for one, timeline in zip(shown, timelines)])
            print(f"{path.relative_to(ROOT)} written")
    except (CourseError, RankFailure) as error:
        print(f"figures: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nfigures: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
