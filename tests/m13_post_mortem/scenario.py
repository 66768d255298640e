"""Functions that a rank runs in the checks of module 13."""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

from brigade.course.checks.forms import ListOf, Maybe, OneOf, returns
from brigade.ranks.rank.api import student

PACKAGE = "m13_post_mortem"
ROW = ListOf([int, Maybe([int, str])])  # [rank, number and line of its call or None]
FORMS = {
    "align": ListOf([str, int, ROW]),
    "find_divergence": Maybe([str, int, ROW]),
    "diagnose": [str, ListOf(int), Maybe(str), Maybe(int), str],
}


@returns(lambda job: [FORMS[job["function"]]] * len(json.loads(job["jobs"])))
def examine(job: dict[str, Any]) -> list[Any]:
    """Call a function of the submission with the traces of each job. Return its results as lists."""
    function = student(PACKAGE, job["function"])
    return [PLAIN[job["function"]](function(make_traces(traces))) for traces in json.loads(job["jobs"])]


examine.most_values = 250_000  # type: ignore[attr-defined]  # the traces contain as many calls


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
    """Return [rank, number and line of its call or None] for each rank of a row."""
    return sorted([rank, call and [call.number, call.line]] for rank, call in row.items())


PLAIN = {
    "align": lambda table: sorted(
        [group, number, describe_row(row)] for group, rows in table.items() for number, row in rows.items()
    ),
    "find_divergence": lambda place: place and [place.group, place.number, describe_row(place.calls)],
    "diagnose": lambda finding: [finding.kind, list(finding.ranks), finding.group, finding.number, finding.text],
}


@returns(lambda job: [[OneOf(int, bool, None), str, Maybe(str), Maybe([str, ListOf(int), str])]] * len(job["runs"]))
def run_main(job: dict[str, Any]) -> list[list]:
    """Call main for each list of texts, with paths of such files. Return [result, text, page, finding] for each.

    The names are dump_0.json and so on. A file whose text is None does not exist. `as_folder`: main gets the path of
    their folder instead. `text` is what it prints, and `page` the text of the HTML file, or None without one. `finding`
    has kind, ranks and text of what diagnose finds in these files. It is None if one cannot be read, or if main returns
    neither 0 nor 1.
    """
    main, load_trace, diagnose = (student(PACKAGE, name) for name in ("main", "load_trace", "diagnose"))
    answers = []
    for files in job["runs"]:
        with tempfile.TemporaryDirectory() as directory, contextlib.redirect_stdout(io.StringIO()) as printed:
            folder, page = Path(directory, "dumps"), Path(directory, "page.html")
            folder.mkdir()
            paths = [folder / f"dump_{number}.json" for number in range(len(files))]
            for path, text in zip(paths, files, strict=True):
                if text is not None:
                    path.write_bytes(text.encode("latin-1"))
            options = {"html": str(page)} if job.get("with_page") else {}
            result = main([str(folder)] if job.get("as_folder") else [str(path) for path in paths], **options)
            finding = None
            with contextlib.suppress(OSError, ValueError):
                found = diagnose([load_trace(path) for path in paths]) if result in (0, 1) else None
                finding = found and [found.kind, list(found.ranks), found.text]
            answers.append([result, printed.getvalue(), page.read_text() if page.is_file() else None, finding])
    return answers
