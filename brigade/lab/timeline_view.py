"""Write timelines as one interactive page that works without a network: `save_html(timelines, path)`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brigade.lab.ladder import PHASES
from brigade.lab.timeline import Timeline
from brigade.lab.timeline_plot import OTHER, STYLES, name_kind

TEMPLATE, WIDGETS = (Path(__file__).with_name(name) for name in ("timeline_view.html", "widgets.js"))
FIELDS = {  # the page's name of each field of a collective
    **{name: name for name in ("rank", "labels", "row", "dtype", "phase", "line")},
    **{"kind": "op", "name": "title", "bytes": "nbytes", "tensors": "parts"},
    **{name: f"{name}_ms" for name in ("start", "end", "launched", "waited")},
}


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
        {"rank": one.rank, "kind": one.kind, "name": name_kind(one.kind), "labels": [one.kind]}
        | {"start": one.start_ms, "end": one.end_ms}
        for one in timeline.spans
    ]
    collectives = [{key: getattr(one, name) for key, name in FIELDS.items()} for one in timeline.launched]
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
    page, script = (file.read_text(encoding="utf-8") for file in (TEMPLATE, WIDGETS))
    path.write_text(page.replace("WIDGETS", script, 1).replace("TIMELINES", view, 1), encoding="utf-8")
