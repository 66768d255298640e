"""Write results files: our own JSON, Gradescope's results.json, Classroom 50's result.json, JUnit XML and text.

A file is replaced atomically, so that it is complete whenever it is read. Only its owner may read it.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from brigade.checks import render
from brigade.checks.verdict import Verdict
from brigade.course import written
from brigade.course.modules import CourseError, get_module
from brigade.grade import feedback
from brigade.grade.outcome import UNFINISHED, Grading
from brigade.grade.static_look import HEADING, Finding
from brigade.grade.visibility import VISIBLE, Visibility

SCREEN_CHARACTERS = 4_000  # of feedback for one check

# The fields of Classroom 50's result, and the environment variables in which its runner passes them.
# https://github.com/foundation50/classroom50/blob/main/schemas/result-v1.schema.json
CLASSROOM50_FIELDS = {
    "classroom": "CLASSROOM",
    "assignment": "ASSIGNMENT",
    "assignment_type": "ASSIGNMENT_TYPE",
    "owner": "OWNER",
    "submission": "SUBMISSION_TAG",
    "commit": "COMMIT_URL",
    "release": "RELEASE_URL",
    "review": "REVIEW_URL",
}
CLASSROOM50_OPTIONAL = ("datetime", "submitted_by")
INSTANT = "%Y-%m-%dT%H:%M:%SZ"


def write(path: Path, text: str) -> None:
    """Replace the file atomically. If that fails, leave the existing file as it is and raise OSError."""
    temporary = path.with_name(f".{path.name}.part")  # if we are killed, the next run removes it
    temporary.unlink(missing_ok=True)
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def format_heading(grading: Grading, shows_seed: bool = True) -> str:
    """Return the score, the seed, the written points that the score does not include, and the remarks, one per line."""
    return "\n".join(feedback.list_heading(encode_grading(grading), shows_seed))


def format_written_points(grading: Grading) -> str:
    """Return a sentence on the points of the graded modules' written questions, or "" if there are none."""
    points = written.count_points(get_module(number) for number, _ in grading.modules())
    return f"Not included: {written.format_points(points)} for written answers. A person grades them." if points else ""


def list_remarks(grading: Grading) -> list[str]:
    """Return remarks on an incomplete grading run, and the notes of the run."""
    lines = []
    if left := grading.count_unfinished():
        lines.append(f"The grading run {UNFINISHED}: {left} of {len(grading.outcomes)} checks have not run.")
    elif not grading.finished:
        lines.append(
            f"The grading run {UNFINISHED}: not all failed checks were repeated with the reference's earlier modules."
        )
    return [*lines, *map(make_printable, grading.notes)]


def list_feedback(grading: Grading) -> dict[tuple[int, str], str]:
    """Return the feedback on every check for the student, by module and name. At most one screen for each module."""
    texts = {}
    for number, outcomes in grading.modules():
        explained = render.explain_each(outcomes)
        for outcome in outcomes:
            text = "" if outcome.passed else explained.get(outcome.check.name, UNFINISHED)
            text = make_printable(text)
            texts[number, outcome.check.name] = text[:SCREEN_CHARACTERS] + " ..." * (len(text) > SCREEN_CHARACTERS)
    return texts


def format_findings(findings: Sequence[Finding]) -> str:
    """Return the findings of the static check for the instructor, or "" if there are none."""
    lines = [make_printable(str(finding)) for finding in findings]
    return "\n".join(["For the instructor only. This list does not change the score.", *lines, ""]) if lines else ""


def make_printable(text: str) -> str:
    """Replace characters that control a terminal, or that XML or a database does not allow, with question marks."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def make_line(text: str) -> str:
    """Return the text as one printable line, with equal characters in the same form (NFC)."""
    return unicodedata.normalize("NFC", make_printable(text)).replace("\n", "?").replace("\t", "?")


def format_json(grading: Grading) -> str:
    """Return the complete results of a grading run as JSON."""
    return json.dumps(encode_grading(grading), indent=2) + "\n"


def encode_grading(grading: Grading) -> dict[str, Any]:
    """Return the complete results of a grading run as a JSON-serializable dict."""
    feedback_on = list_feedback(grading)
    return {
        "score": grading.score,
        "max_score": grading.max_score,
        "seed": grading.seed,
        "started": grading.started.strftime(INSTANT),
        "seconds": round(grading.seconds, 3),
        "finished": grading.finished,
        "not_included": format_written_points(grading),
        "notes": list_remarks(grading),
        "checks": [
            {
                "module": outcome.check.module,
                "name": outcome.check.name,
                "number": outcome.check.number,
                "title": outcome.check.title,
                "points": outcome.check.points,
                "score": outcome.score,
                "status": outcome.status,
                "seconds": round(outcome.seconds, 3),
                "prior_source": outcome.prior_source,
                "verdict": outcome.verdict and encode_verdict(outcome.verdict),
                "feedback": feedback_on[outcome.check.module, outcome.check.name],
            }
            for outcome in grading.outcomes
        ],
    }


def encode_verdict(verdict: Verdict) -> dict[str, Any]:
    """Return a verdict as a dict with printable texts, each at most one screen long."""
    cut = {
        name: make_printable(value)[:SCREEN_CHARACTERS]
        for name, value in asdict(verdict).items()
        if isinstance(value, str)
    }
    place = verdict.location and asdict(verdict.location)
    place = place and {
        name: make_printable(v)[:SCREEN_CHARACTERS] if isinstance(v, str) else v for name, v in place.items()
    }
    return asdict(verdict) | cut | {"location": place}


def format_gradescope(grading: Grading, visibility: Visibility | None = None) -> str:
    """Return Gradescope's results.json.

    Students do not see the seed, because it is the same for all uploads. If they do not see all checks, their text has
    no score, and there is no leaderboard. Gradescope then hides the total.
    """
    visibility = visibility or {}
    feedback_on = list_feedback(grading)
    shows_all = all(value == VISIBLE for value in visibility.values())
    tests = [
        {
            "score": outcome.score,
            "max_score": outcome.check.points,
            "status": "passed" if outcome.passed else "failed",
            "name": outcome.check.title,
            "number": outcome.check.number,
            "output": feedback_on[number, outcome.check.name],
            "output_format": "text",
            "tags": [f"module {outcome.check.module}", outcome.check.name],
            "visibility": visibility.get((number, outcome.check.name), VISIBLE),
        }
        for number, outcomes in grading.modules()
        for outcome in outcomes
    ]
    if findings := format_findings(grading.findings):
        # Gradescope shows a hidden test only to instructors. Because it has no points, it does not hide the total:
        # https://gradescope-autograders.readthedocs.io/en/latest/specs/#controlling-test-case-visibility
        tests.append(
            {"name": HEADING, "output": findings, "output_format": "text", "tags": [HEADING], "visibility": "hidden"}
        )
    heading = format_heading(grading, shows_seed=False)
    if not shows_all:
        heading = "\n".join(["Some checks and the score are hidden.", *heading.splitlines()[1:]])
    result = {
        "score": grading.score,
        "execution_time": round(grading.seconds, 3),
        "output": heading,
        "visibility": VISIBLE,
        "stdout_visibility": "hidden",
        "tests": tests,
    }
    if shows_all:
        result["leaderboard"] = [{"name": "Points", "value": grading.score, "order": "desc"}]
    return json.dumps(result, indent=2) + "\n"


def format_classroom50(grading: Grading, metadata: Mapping[str, Any]) -> str:
    """Return Classroom 50's result.json. `metadata` comes from `read_classroom50_metadata`."""
    now = datetime.now(timezone.utc).strftime(INSTANT)
    open_end = "" if grading.finished else f" ({UNFINISHED})"
    feedback_on = list_feedback(grading)
    result = {
        "schema": "classroom50/result/v1",
        "datetime": now,  # when it was submitted; Classroom 50's runner replaces it with the time of the commit
        **metadata,
        "graded_at": now,
        "score": grading.score,
        "max-score": grading.max_score,
        "tests": [
            {
                "test-name": f"{outcome.check.number}  {outcome.check.title}" + ("" if outcome.passed else open_end),
                "passed": outcome.passed,
                "score": outcome.score,
                "max-score": outcome.check.points,
                **({} if outcome.passed else {"output": feedback_on[outcome.check.module, outcome.check.name]}),
            }
            for outcome in grading.outcomes
        ],
    }
    summary = {"test-name": "Summary", "passed": True, "score": 0, "max-score": 0, "output": format_heading(grading)}
    result["tests"].append(summary)
    return json.dumps(result, indent=2) + "\n"


def read_classroom50_metadata(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields from the options or from the environment.

    Raise CourseError if a field is missing, unknown or malformed.
    """
    if unknown := given.keys() - CLASSROOM50_FIELDS - set(CLASSROOM50_OPTIONAL):
        known = ", ".join([*CLASSROOM50_FIELDS, *CLASSROOM50_OPTIONAL])
        raise CourseError(f"--meta {min(unknown)}: Classroom 50 has no such field; its fields are {known}")
    found: dict[str, Any] = {}
    for name, variable in CLASSROOM50_FIELDS.items():
        found[name] = given.get(name) or os.environ.get(variable)
        if not found[name]:
            raise CourseError(
                f"--format classroom50 needs {name}; pass --meta {name}=... or set {variable} in the environment"
            )
    if found["assignment_type"] not in ("individual", "group", "team"):
        raise CourseError(f"assignment_type must be individual, group or team, not {found['assignment_type']}")
    if not found["submission"].startswith("submit/"):
        raise CourseError(
            f"submission must be a tag such as submit/2026-01-31T12-00-00Z-1a2b3c4, not {found['submission']}"
        )
    if "datetime" in given:
        if not re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", given["datetime"]):
            raise CourseError(f"datetime must have the form 2026-01-31T12:00:00Z, not {given['datetime']}")
        found["datetime"] = given["datetime"]
    if "submitted_by" in given:
        found["submitted_by"] = {"username": given["submitted_by"]}
    return found


def format_junit(grading: Grading) -> str:
    """Return JUnit XML with a suite for each module. Each suite's system-out contains the score and the remarks."""
    heading, feedback_on = format_heading(grading), list_feedback(grading)
    top = ElementTree.Element("testsuites", name="Bucket Brigade", time=f"{grading.seconds:.3f}")
    for number, outcomes in grading.modules():
        package = get_module(number).package
        suite = ElementTree.SubElement(
            top,
            "testsuite",
            name=package,
            tests=str(len(outcomes)),
            failures=str(sum(not outcome.passed for outcome in outcomes)),
            errors="0",
            skipped="0",
            time=f"{sum(outcome.seconds for outcome in outcomes):.3f}",
            timestamp=grading.started.strftime(INSTANT),
        )
        for outcome in outcomes:
            seconds = f"{outcome.seconds:.3f}"
            case = ElementTree.SubElement(suite, "testcase", classname=package, name=outcome.check.name, time=seconds)
            if not outcome.passed:
                failure = ElementTree.SubElement(
                    case, "failure", message=f"{outcome.check.number}: 0 of {outcome.check.points} points"
                )
                failure.text = feedback_on[number, outcome.check.name]
        ElementTree.SubElement(suite, "system-out").text = heading
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="utf-8", xml_declaration=True).decode() + "\n"


def format_text(grading: Grading) -> str:
    """Return text for people: the score, then every module, with the feedback on failed checks."""
    return feedback.format_text(encode_grading(grading), shows_seed=True)


WRITERS: dict[str, Callable[[Grading], str]] = {
    "gradescope": format_gradescope,
    "json": format_json,
    "junit": format_junit,
    "text": format_text,
}
FORMATS = (*WRITERS, "classroom50")
