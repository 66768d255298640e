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
CLASSROOM50_FORMS = {
    "assignment_type": ("individual|group|team", "be individual, group or team"),
    "submission": ("submit/.*", "be a tag such as submit/2026-01-31T12-00-00Z-1a2b3c4"),
    "datetime": (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", "have the form 2026-01-31T12:00:00Z"),
}
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
        "modules_found": grading.found,
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
                "verdict": outcome.verdict and clean(asdict(outcome.verdict)),
                "feedback": feedback_on[outcome.check.module, outcome.check.name],
            }
            for outcome in grading.outcomes
        ],
    }


def clean(value: Any) -> Any:
    """Return a value with printable texts, each at most one screen long."""
    if isinstance(value, dict):
        return {name: clean(inner) for name, inner in value.items()}
    return make_printable(value)[:SCREEN_CHARACTERS] if isinstance(value, str) else value


def format_gradescope(grading: Grading, visibility: Visibility | None = None) -> str:
    """Return Gradescope's results.json.

    Students do not see the seed, because it is the same for all uploads. If they do not see all checks, their text has
    no score, and there is no leaderboard. Gradescope then hides the total.
    """
    visibility = visibility or {}
    result = encode_grading(grading)
    shows_all = all(value == VISIBLE for value in visibility.values())
    tests = [
        {
            "score": check["score"],
            "max_score": check["points"],
            "status": "passed" if check["status"] == "passed" else "failed",
            "name": check["title"],
            "number": check["number"],
            "output": check["feedback"],
            "output_format": "text",
            "tags": [f"module {check['module']}", check["name"]],
            "visibility": visibility.get((check["module"], check["name"]), VISIBLE),
        }
        for check in result["checks"]
    ]
    if findings := format_findings(grading.findings):
        # Gradescope shows a hidden test only to instructors. Because it has no points, it does not hide the total:
        # https://gradescope-autograders.readthedocs.io/en/latest/specs/#controlling-test-case-visibility
        tests.append(
            {"name": HEADING, "output": findings, "output_format": "text", "tags": [HEADING], "visibility": "hidden"}
        )
    heading = feedback.list_heading(result)
    gradescope = {
        "score": result["score"],
        "execution_time": result["seconds"],
        "output": "\n".join(heading if shows_all else ["Some checks and the score are hidden.", *heading[1:]]),
        "visibility": VISIBLE,
        "stdout_visibility": "hidden",
        "tests": tests,
    }
    if shows_all:
        gradescope["leaderboard"] = [{"name": "Points", "value": result["score"], "order": "desc"}]
    return json.dumps(gradescope, indent=2) + "\n"


def format_classroom50(grading: Grading, metadata: Mapping[str, Any]) -> str:
    """Return Classroom 50's result.json. `metadata` comes from `read_classroom50_metadata`."""
    now = datetime.now(timezone.utc).strftime(INSTANT)
    result = encode_grading(grading)
    open_end = "" if grading.finished else f" ({UNFINISHED})"
    tests: list[dict[str, Any]] = []
    for check in result["checks"]:
        name, passed = f"{check['number']}  {check['title']}", check["status"] == "passed"
        test = {"test-name": name + ("" if passed else open_end), "passed": passed}
        test |= {"score": check["score"], "max-score": check["points"]}
        tests.append(test if passed else test | {"output": check["feedback"]})
    heading = "\n".join(feedback.list_heading(result, shows_seed=True))
    tests.append({"test-name": "Summary", "passed": True, "score": 0, "max-score": 0, "output": heading})
    classroom50 = {
        "schema": "classroom50/result/v1",
        "datetime": now,  # when it was submitted; Classroom 50's runner replaces it with the time of the commit
        **metadata,
        "graded_at": now,
        "score": result["score"],
        "max-score": result["max_score"],
        "tests": tests,
    }
    return json.dumps(classroom50, indent=2) + "\n"


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
    if "datetime" in given:
        found["datetime"] = given["datetime"]
    for name, (form, description) in CLASSROOM50_FORMS.items():
        if name in found and not re.fullmatch(form, found[name]):
            raise CourseError(f"{name} must {description}, not {found[name]}")
    if "submitted_by" in given:
        found["submitted_by"] = {"username": given["submitted_by"]}
    return found


def format_junit(grading: Grading) -> str:
    """Return JUnit XML with a suite for each module. Each suite's system-out contains the score and the remarks."""
    result = encode_grading(grading)
    top = ElementTree.Element("testsuites", name="Bucket Brigade", time=f"{result['seconds']:.3f}")
    heading = "\n".join(feedback.list_heading(result, shows_seed=True))
    for module in feedback.list_modules(result):
        package, suite = get_module(module.number).package, ElementTree.SubElement(top, "testsuite")
        failed = [check for check in module.checks if check["status"] != "passed"]
        counts = {"tests": str(len(module.checks)), "failures": str(len(failed)), "errors": "0", "skipped": "0"}
        seconds = sum(check["seconds"] for check in module.checks)
        suite.attrib |= {"name": package, **counts, "time": f"{seconds:.3f}", "timestamp": result["started"]}
        for check in module.checks:
            time = f"{check['seconds']:.3f}"
            case = ElementTree.SubElement(suite, "testcase", classname=package, name=check["name"], time=time)
            if check in failed:
                message = f"{check['number']}: 0 of {check['points']} points"
                ElementTree.SubElement(case, "failure", message=message).text = check["feedback"]
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
