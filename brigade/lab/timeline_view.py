"""Write timelines as one interactive page that works without a network: `save_html(timelines, path)`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brigade.lab.ladder import PHASES
from brigade.lab.timeline import Timeline
from brigade.lab.timeline_plot import OTHER, STYLES, name_kind

TEMPLATE = Path(__file__).with_name("timeline_view.html")


def make_view(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the page's data, ready for JSON: the timelines, and a style for each kind of block. Times are in ms."""
    ops = {collective.op for timeline in timelines for collective in timeline.launched}
    kinds = [*PHASES, "wait", *(op for op in [*STYLES, *sorted(ops - STYLES.keys())] if op in ops)]
    styles = {kind: STYLES.get(kind, OTHER) for kind in kinds}
    return {
        "styles": {
            kind: {"name": name_kind(kind), "colour": style["facecolor"], "hatch": style.get("hatch", "")[:1]}
            for kind, style in styles.items()
        },
        "timelines": [describe_timeline(timeline) for timeline in timelines],
    }


def describe_timeline(timeline: Timeline) -> dict[str, Any]:
    """Return the data of one timeline for `make_view`."""
    spans = [
        {
            "rank": span.rank,
            "kind": span.kind,
            "name": name_kind(span.kind),
            "labels": [span.kind],
            "start": span.start_ms,
            "end": span.end_ms,
        }
        for span in timeline.spans
    ]
    collectives = [
        {
            "rank": collective.rank,
            "kind": collective.op,
            "name": collective.title,
            "labels": collective.labels,
            "start": collective.start_ms,
            "end": collective.end_ms,
            "row": collective.row,
            "bytes": collective.nbytes,
            "dtype": collective.dtype,
            "tensors": collective.parts,
            "phase": collective.phase,
            "line": collective.line,
            "launched": collective.launched_ms,
            "waited": collective.waited_ms,
        }
        for collective in timeline.launched
    ]
    return {
        "label": timeline.label,
        "count": timeline.count,
        "lengths": timeline.lengths,
        "link": timeline.link_text,
        "world_size": timeline.world_size,
        "end": timeline.end_ms,
        "spans": spans,
        "collectives": collectives,
    }


def save_html(timelines: Sequence[Timeline], path: Path) -> None:
    """Write the page. It contains the timelines as JSON in which "<" is escaped, so their text cannot add HTML tags."""
    view = json.dumps(make_view(timelines)).replace("<", r"\u003c")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(TEMPLATE.read_text(encoding="utf-8").replace("TIMELINES", view, 1), encoding="utf-8")
