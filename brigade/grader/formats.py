"""Write results files: our own JSON, Gradescope's results.json, Classroom 50's result.json, JUnit XML and text.

A file is replaced atomically, so that it is complete whenever it is read. Only its owner may read it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from brigade.course.checks import render
from brigade.course.cli.options import give_to_caller
from brigade.course.table import written
from brigade.course.table.modules import Module, get_module
from brigade.grader.outcome import UNFINISHED, Grading
from brigade.grader.tables import format_points
from brigade.ranks.errors import UserError

if TYPE_CHECKING:
    from jinja2 import Template

SCREEN_CHARACTERS = 4_000  # of feedback for one check
NOTHING_READ = "not run, because nothing could be read"

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
EMPTY: Mapping[str, float] = MappingProxyType({})
INSTANT = "%Y-%m-%dT%H:%M:%SZ"


def write(path: Path, text: str, *, is_secret: bool = False) -> None:
    """Replace the file atomically: see `write_bytes`."""
    write_bytes(path, text.encode(errors="replace"), is_secret=is_secret)


def write_bytes(path: Path, content: bytes, *, is_secret: bool = False) -> None:
    """Replace the file atomically. If that fails, leave the existing file as it is and raise OSError.

    Under `sudo`, the file belongs to the user who has called it, because people open, correct and send what we write.
    Root keeps a secret.
    """
    temporary = path.with_name(f".{path.name}.part")  # if we are killed, the next run removes it
    temporary.unlink(missing_ok=True)
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            if not is_secret:
                give_to_caller(handle)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@functools.cache
def load_template(name: str) -> Template:
    """Return the template of a page, such as "mark.html". The page is one file that loads nothing."""
    from jinja2 import Environment, FileSystemLoader  # its import takes time, and most commands do not need it

    loader = FileSystemLoader(Path(__file__).parent)
    return Environment(loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True).get_template(name)


def format_written_points(grading: Grading) -> str:
    """Return a sentence on the points of the graded modules' written questions, or "" if there are none."""
    points = written.count_points(get_module(number) for number, _ in grading.modules())
    return f"Not included: {written.format_points(points)} for written answers. A person grades them." if points else ""


def make_printable(text: str) -> str:
    """Replace characters that control a terminal, or that XML or a database does not allow, with question marks."""
    return "".join(letter if letter.isprintable() or letter in "\n\t" else "?" for letter in text)


def make_line(text: str) -> str:
    """Return the text as one printable line, with equal characters in the same form (NFC)."""
    return unicodedata.normalize("NFC", make_printable(text)).replace("\n", "?").replace("\t", "?").strip()


def encode_grading(grading: Grading) -> dict[str, Any]:
    """Return the complete results of a grading run as a JSON-serializable dict.

    Its texts are printable and at most one screen long, also the feedback on a check for the student.
    """
    settled = f"{grading.count_settled()} of {len(grading.outcomes)} checks have a result so far."
    remarks = [] if grading.finished or grading.unreadable else [f"The grading run {UNFINISHED}: {settled}"]
    pending = NOTHING_READ if grading.unreadable else UNFINISHED
    explained = {number: render.explain_each(outcomes) for number, outcomes in grading.modules()}
    checks = []
    for outcome in grading.outcomes:
        check = outcome.check
        checks.append(
            {
                "module": check.module,
                "name": check.name,
                "number": check.number,
                "title": check.title,
                "points": check.points,
                "score": outcome.score,
                "status": outcome.status,
                "seconds": round(outcome.seconds, 3),
                "prior_source": outcome.prior_source,
                "verdict": outcome.verdict and asdict(outcome.verdict),
                "feedback": "" if outcome.passed else explained[check.module].get(check.name, pending),
            }
        )
    result = {
        "score": grading.score,
        "max_score": grading.max_score,
        "seed": None if grading.is_seed_secret else grading.seed,
        "started": grading.started.strftime(INSTANT),
        "seconds": round(grading.seconds, 3),
        "finished": grading.finished,
        "not_included": format_written_points(grading),
        "modules_found": grading.found,
        "notes": [*remarks, *grading.notes],
        "checks": checks,
    }
    return clean(result)


def clean(value: Any) -> Any:
    """Return a value with printable texts, each at most one screen long."""
    if isinstance(value, dict):
        return {name: clean(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(inner) for inner in value]
    if isinstance(value, str):
        return make_printable(value[:SCREEN_CHARACTERS]) + " ..." * (len(value) > SCREEN_CHARACTERS)
    return value


def list_modules(result: Mapping[str, Any]) -> list[tuple[Module, list[Mapping[str, Any]]]]:
    """Return the modules of a result with their checks."""
    grouped = itertools.groupby(result["checks"], key=lambda check: check["module"])
    return [(get_module(number), list(checks)) for number, checks in grouped]


def format_module(entry: Module, checks: Sequence[Mapping[str, Any]], points: Mapping[str, float]) -> str:
    """Return the heading of a module: see `format_result`."""
    earned, possible = (sum(check[key] for check in checks) for key in ("score", "points"))
    earned = points.get(f"module {entry.number}", earned)
    return f"Module {entry.number}: {entry.title}, {format_points(earned)} of {possible} points"


def list_heading(result: Mapping[str, Any], shows_seed: bool = False) -> list[str]:
    """Return the score, the written points that it does not include, and the remarks.

    With `shows_seed`, name the seed too, unless it is secret.
    """
    seed = f", seed {result['seed']}" if shows_seed and result["seed"] is not None else ""
    score = f"{result['score']} of {result['max_score']} points{seed}"
    return [score, *filter(None, [result["not_included"]]), *result["notes"]]


def format_result(result: Mapping[str, Any], points: Mapping[str, float] = EMPTY, shows_seed: bool = False) -> str:
    """Return the text of a result for people: the score, then every module, with the feedback on failed checks.

    `points` are those of the modules if a person may have corrected them, by the columns of a gradebook.
    """
    instant = result["started"].replace("T", " ").replace("Z", " UTC")
    lines = [*list_heading(result, shows_seed), f"Graded on {instant}.", ""]
    for entry, checks in list_modules(result):
        lines.append(format_module(entry, checks, points))
        for check in checks:
            mark = "+" if check["status"] == "passed" else "-"
            lines.append(f"  {mark} {check['score']}/{check['points']}  {check['number']:<5} {check['title']}")
            lines += [" " * 15 + line for line in check["feedback"].splitlines()]
        lines.append("")
    return "\n".join(lines)


def format_gradescope(grading: Grading) -> str:
    """Return Gradescope's results.json."""
    result = encode_grading(grading)
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
        }
        for check in result["checks"]
    ]
    extra = [bool(outcome.check.file) for outcome in grading.outcomes]
    for test, is_extra in zip(tests, extra, strict=True):
        if grading.visibility and (is_extra or not any(extra)):
            test["visibility"] = grading.visibility
    gradescope = {
        "score": result["score"],
        "execution_time": result["seconds"],
        "output": "\n".join(list_heading(result)[bool(grading.visibility) :]),  # the score may tell what is hidden
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
    }
    return json.dumps(gradescope, indent=2) + "\n"


def format_classroom50(grading: Grading) -> str:
    """Return Classroom 50's result.json. Raise UserError if its runner has not set an environment variable."""
    if missing := [variable for variable in CLASSROOM50_FIELDS.values() if not os.environ.get(variable)]:
        raise UserError(f"--format classroom50 needs the environment variables {', '.join(missing)}")
    now = datetime.now(timezone.utc).strftime(INSTANT)
    result = encode_grading(grading)
    tests: list[dict[str, Any]] = []
    for check in result["checks"]:
        passed = check["status"] == "passed"
        test = {"test-name": f"{check['number']}  {check['title']}", "passed": passed}
        test |= {"score": check["score"], "max-score": check["points"]}
        tests.append(test if passed else test | {"output": check["feedback"]})
    heading = "\n".join(list_heading(result, shows_seed=True))
    tests.append({"test-name": "Summary", "passed": True, "score": 0, "max-score": 0, "output": heading})
    classroom50 = {
        "schema": "classroom50/result/v1",
        "datetime": now,  # when it was submitted; Classroom 50's runner replaces it with the time of the commit
        **{field: os.environ[variable] for field, variable in CLASSROOM50_FIELDS.items()},
        "graded_at": now,
        "score": result["score"],
        "max-score": result["max_score"],
        "tests": tests,
    }
    return json.dumps(classroom50, indent=2) + "\n"


def format_junit(grading: Grading) -> str:
    """Return JUnit XML with a suite for each module. Each suite's system-out contains the score and the remarks."""
    result = encode_grading(grading)
    top = ElementTree.Element("testsuites", name="Bucket Brigade", time=f"{result['seconds']:.3f}")
    for module, checks in list_modules(result):
        failed = [check for check in checks if check["status"] != "passed"]
        counts = {"tests": str(len(checks)), "failures": str(len(failed)), "errors": "0", "skipped": "0"}
        seconds = sum(check["seconds"] for check in checks)
        times = {"time": f"{seconds:.3f}", "timestamp": result["started"]}
        suite = ElementTree.SubElement(top, "testsuite", {"name": module.package, **counts, **times})
        for check in checks:
            named = {"classname": module.package, "name": check["name"], "time": f"{check['seconds']:.3f}"}
            case = ElementTree.SubElement(suite, "testcase", named)
            if check in failed:
                message = f"{check['number']}: 0 of {check['points']} points"
                ElementTree.SubElement(case, "failure", message=message).text = check["feedback"]
        ElementTree.SubElement(suite, "system-out").text = "\n".join(list_heading(result, shows_seed=True))
    ElementTree.indent(top)
    return ElementTree.tostring(top, encoding="utf-8", xml_declaration=True).decode() + "\n"


WRITERS: dict[str, Callable[[Grading], str]] = {
    "gradescope": format_gradescope,
    "json": lambda grading: json.dumps(encode_grading(grading), indent=2) + "\n",
    "junit": format_junit,
    "text": lambda grading: format_result(encode_grading(grading), shows_seed=True),
    "classroom50": format_classroom50,
}
