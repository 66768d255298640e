"""Results files: Gradescope's results.json, Classroom 50's result.json, JUnit XML and text.

A file is replaced as a whole, so that whoever reads it at any instant finds it complete.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from brigade.autograde.outcome import UNFINISHED, Grading, Outcome
from brigade.course import MODULES, CourseError

CLASSROOM50_FIELDS = (
    "classroom",
    "assignment",
    "assignment_type",
    "owner",
    "submission",
    "commit",
    "release",
    "review",
)


def write(path: Path, text: str) -> None:
    """Replaces the file, or leaves the one that is there as it is."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def heading(grading: Grading) -> str:
    """The state of the whole, in a few lines."""
    lines = [f"{grading.score} of {grading.max_score} points, seed {grading.seed}"]
    if not grading.finished:
        left = sum(not outcome.finished for outcome in grading.outcomes)
        lines.append(f"The grading {UNFINISHED}: {left} of {len(grading.outcomes)} checks have not run.")
    return "\n".join(lines + grading.notes)


def gradescope(grading: Grading) -> str:
    """Gradescope's results.json."""
    tests = [
        {
            "score": outcome.score,
            "max_score": outcome.points,
            "status": "passed" if outcome.passed else "failed",
            "name": outcome.title,
            "number": f"{outcome.module}.{place}",
            "output": outcome.text,
            "output_format": "text",
            "tags": [f"module {outcome.module}", outcome.name],
            "visibility": "visible",
        }
        for number in sorted({outcome.module for outcome in grading.outcomes})
        for place, outcome in enumerate(grading.of_module(number), 1)
    ]
    result = {
        "score": grading.score,
        "execution_time": round(grading.seconds, 3),
        "output": heading(grading),
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "leaderboard": [{"name": "Points", "value": grading.score, "order": "desc"}],
    }
    return dumped(result)


def classroom50(grading: Grading, metadata: Mapping[str, Any]) -> str:
    """Classroom 50's result.json; `metadata` has CLASSROOM50_FIELDS."""
    result = {
        "schema": "classroom50/result/v1",
        **{name: metadata[name] for name in CLASSROOM50_FIELDS},
        "datetime": grading.started.isoformat(timespec="seconds"),
        "score": grading.score,
        "max-score": grading.max_score,
        "tests": [
            {
                "test-name": f"{outcome.module}. {outcome.title}",
                "passed": outcome.passed,
                "score": outcome.score,
                "max-score": outcome.points,
            }
            for outcome in grading.outcomes
        ],
    }
    return dumped(result)


def classroom50_metadata(given: Mapping[str, str | None]) -> dict[str, str]:
    """The fields as given, else from the environment (CLASSROOM50_OWNER and so on). CourseError if one is missing."""
    found = {name: given.get(name) or os.environ.get(f"CLASSROOM50_{name.upper()}") for name in CLASSROOM50_FIELDS}
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise CourseError(
            f"--format classroom50 needs {', '.join(missing)}: as --meta {missing[0]}=... or in the environment as "
            f"CLASSROOM50_{missing[0].upper()}"
        )
    return found


def junit(grading: Grading) -> str:
    """JUnit XML: a suite for each module."""
    top = ElementTree.Element("testsuites", name="Bucket Brigade", time=f"{grading.seconds:.3f}")
    for number in sorted({outcome.module for outcome in grading.outcomes}):
        outcomes = grading.of_module(number)
        suite = ElementTree.SubElement(
            top,
            "testsuite",
            name=MODULES[number - 1].package,
            tests=str(len(outcomes)),
            failures=str(sum(not outcome.passed for outcome in outcomes)),
            errors="0",
            skipped="0",
            time=f"{sum(outcome.seconds for outcome in outcomes):.3f}",
            timestamp=grading.started.isoformat(timespec="seconds"),
        )
        for outcome in outcomes:
            case = ElementTree.SubElement(
                suite,
                "testcase",
                classname=MODULES[number - 1].package,
                name=outcome.name,
                time=f"{outcome.seconds:.3f}",
            )
            if not outcome.passed:
                failure = ElementTree.SubElement(case, "failure", message=f"0 of {outcome.points} points")
                failure.text = "".join(c if c in "\n\t" or c.isprintable() else "?" for c in outcome.text)
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="unicode", xml_declaration=True) + "\n"


def text(grading: Grading) -> str:
    """For people: the score, then every module, and of failed checks what the student is told."""
    lines = [heading(grading), time.strftime("%Y-%m-%d %H:%M:%S %Z", grading.started.timetuple()), ""]
    for number in sorted({outcome.module for outcome in grading.outcomes}):
        outcomes = grading.of_module(number)
        earned, possible = sum(o.score for o in outcomes), sum(o.points for o in outcomes)
        lines.append(f"Module {number}: {MODULES[number - 1].title}, {earned} of {possible} points")
        lines += [line for outcome in outcomes for line in shown(outcome)]
        lines.append("")
    return "\n".join(lines)


def shown(outcome: Outcome) -> list[str]:
    mark = "+" if outcome.passed else "-"
    return [f"  {mark} {outcome.score}/{outcome.points}  {outcome.title}"] + [
        " " * 9 + line for line in outcome.text.splitlines()
    ]


def dumped(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "replace").decode() + "\n"


WRITERS: dict[str, Callable[[Grading], str]] = {"gradescope": gradescope, "junit": junit, "text": text}
FORMATS = (*WRITERS, "classroom50")
