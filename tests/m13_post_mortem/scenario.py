"""Functions that a rank runs in the checks of module 13."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from brigade.rank.api import student

PACKAGE = "m13_post_mortem"


def examine(job: dict[str, Any]) -> str:
    """Call a function of the submission with the traces of each job. Return its results as JSON."""
    function = student(PACKAGE, job["function"])
    return json.dumps([PLAIN[job["function"]](function(make_traces(traces))) for traces in json.loads(job["jobs"])])


def make_traces(traces: list[dict]) -> list[Any]:
    """Return the dictionaries as objects of the submission's classes."""
    trace_type, call_type = student(PACKAGE, "Trace"), student(PACKAGE, "Call")

    def make_call(call: dict) -> Any:
        return call_type(**call | {"ranks": tuple(call["ranks"]), "sizes": tuple(map(tuple, call["sizes"]))})

    return [
        trace_type(**trace | {kind: tuple(map(make_call, trace[kind])) for kind in ("calls", "messages")})
        for trace in traces
    ]


def describe_row(row: dict[int, Any]) -> list[list]:
    """Return [rank, line of its call or None] for each rank of a row."""
    return sorted([rank, call and [call.number, call.line]] for rank, call in row.items())


PLAIN = {
    "align": lambda table: sorted(
        [group, number, describe_row(row)] for group, rows in table.items() for number, row in rows.items()
    ),
    "find_divergence": lambda place: place and [place.group, place.number, describe_row(place.calls)],
    "diagnose": lambda finding: [finding.kind, list(finding.ranks), finding.group, finding.number, finding.text],
}


def run_main(job: dict[str, Any]) -> list[list]:
    """Call main for each list of texts, with paths of such files. Return [result, printed text, page] for each list.

    The names are dump_0.json and so on. A file whose text is None does not exist. `as_folder`: main gets the path of
    their folder instead. `page` is the text of the HTML file, or None without one.
    """
    main = student(PACKAGE, "main")
    answers = []
    for files in job["runs"]:
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()) as printed:
            folder, page = Path(directory, "dumps"), Path(directory, "page.html")
            folder.mkdir()
            paths = [folder / f"dump_{number}.json" for number in range(len(files))]
            for path, text in zip(paths, files):
                if text is not None:
                    path.write_bytes(text.encode("latin-1"))
            options = {"html": str(page)} if job.get("with_page") else {}
            result = main([str(folder)] if job.get("as_folder") else [str(path) for path in paths], **options)
            answers.append([result, printed.getvalue(), page.read_text() if page.is_file() else None])
    return answers
