"""Write timelines as one interactive page that works without a network: `save_html(timelines, path)`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from brigade.lab.ladder import PHASES
from brigade.lab.timeline import Collective, Span, Timeline
from brigade.lab.timeline_plot import OTHER, STYLES, name_kind

TEMPLATE, WIDGETS = (Path(__file__).with_name(name) for name in ("timeline_view.html", "widgets.js"))


def make_view(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return the page's data, ready for JSON: the timelines, and a style for each kind of block. Times are in ms."""
    ops = {collective.kind for timeline in timelines for collective in timeline.launched}
    kinds = [*PHASES, "wait", *(op for op in [*STYLES, *sorted(ops - STYLES.keys())] if op in ops)]
    styles = {kind: STYLES.get(kind, OTHER) for kind in kinds}
    return {
        "styles": {
            kind: {"name": name_kind(kind), "colour": style["facecolor"], "hatch": style.get("hatch", "")[:1]}
            for kind, style in styles.items()
        },
        "timelines": [
            {"label": one.label, "count": one.count, "lengths": one.lengths, "link": one.link_text}
            | {"world_size": one.world_size, "end": one.end_ms}
            | {"spans": [*map(describe, one.spans)], "collectives": [*map(describe, one.launched)]}
            for one in timelines
        ],
    }


def describe(span: Span) -> dict[str, Any]:
    """Return the data of one block for `make_view`."""
    view = {"rank": span.rank, "kind": span.kind, "start": span.start_ms, "end": span.end_ms}
    if not isinstance(span, Collective):
        return view | {"name": name_kind(span.kind), "labels": [span.kind]}
    launch = span.launch
    view |= {"name": span.title, "labels": span.labels, "row": span.row}
    view |= {"launched": span.launched_ms, "waited": span.waited_ms, "phase": launch.phase, "line": launch.line}
    return view | {"bytes": launch.nbytes, "dtype": launch.dtype, "tensors": launch.parts}


def save_html(timelines: Sequence[Timeline], path: Path) -> None:
    """Write the page. It contains the timelines as JSON in which "<" is escaped, so their text cannot add HTML tags."""
    view = json.dumps(make_view(timelines)).replace("<", r"\u003c")
    path.parent.mkdir(parents=True, exist_ok=True)
    page, script = (file.read_text(encoding="utf-8") for file in (TEMPLATE, WIDGETS))
    path.write_text(page.replace("WIDGETS", script, 1).replace("TIMELINES", view, 1), encoding="utf-8")
