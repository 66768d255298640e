"""A student's results as text and as a web page, from the dict that `formats.encode_grading` returns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from html import escape
from typing import Any

from brigade.course.modules import get_module
from brigade.grade.web_page import format_page

STYLE = """
h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
ul { padding: 0; }
li { display: grid; grid-template-columns: 4rem minmax(0, 1fr); margin: .35rem 0; }
.failed b { color: var(--strong); }
pre { grid-column: 2; background: var(--soft); margin: .3rem 0 .8rem; padding: .5rem; }
"""


def list_heading(result: Mapping[str, Any], shows_seed: bool = False) -> list[str]:
    """Return the score, perhaps with the seed, the written points that it does not include, and the remarks."""
    score = f"{result['score']} of {result['max_score']} points" + f", seed {result['seed']}" * shows_seed
    return [score, *filter(None, [result["not_included"]]), *result["notes"]]


def list_modules(result: Mapping[str, Any]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    """Return a heading for each module, with the title and the points, and the module's checks."""
    modules = []
    for number, group in itertools.groupby(result["checks"], key=lambda check: check["module"]):
        checks = list(group)
        earned, possible = sum(check["score"] for check in checks), sum(check["points"] for check in checks)
        modules.append((f"Module {number}: {get_module(number).title}, {earned} of {possible} points", checks))
    return modules


def split_feedback(check: Mapping[str, Any]) -> tuple[str, str]:
    """Return the title of a check, followed by feedback of one line, and feedback that needs several lines."""
    if check["status"] == "passed":
        return check["title"], ""
    title, text = f"{check['number']}  {check['title']}", check["feedback"]
    return (title, text) if "\n" in text else (f"{title} → {text}", "")


def format_instant(instant: str) -> str:
    """Return an instant such as "2026-01-31T12:00:00Z" in a readable form."""
    return instant.replace("T", " ").replace("Z", " UTC")


def format_text(result: Mapping[str, Any], shows_seed: bool = False) -> str:
    """Return the score, then every module, with the feedback on failed checks."""
    lines = [*list_heading(result, shows_seed), format_instant(result["started"]), ""]
    for heading, checks in list_modules(result):
        lines.append(heading)
        for check in checks:
            mark = "+" if check["status"] == "passed" else "-"
            title, text = split_feedback(check)
            lines.append(f"  {mark} {check['score']}/{check['points']}  {title}")
            lines += [" " * 9 + line for line in text.splitlines()]
        lines.append("")
    return "\n".join(lines)


def format_html(student: str, result: Mapping[str, Any]) -> str:
    """Return the same content as one web page that needs no other file."""
    lines = [f"<p>{escape(line)}</p>" for line in (*list_heading(result), format_instant(result["started"]))]
    for heading, checks in list_modules(result):
        lines += [f"<h2>{escape(heading)}</h2>", "<ul>"]
        for check in checks:
            kind, mark = ("passed", "+") if check["status"] == "passed" else ("failed", "&minus;")
            title, text = split_feedback(check)
            more = f"<pre>{escape(text)}</pre>" if text else ""
            points = f"{mark} {check['score']}/{check['points']}"
            lines.append(f'<li class="{kind}"><b>{points}</b><span>{escape(title)}</span>{more}</li>')
        lines.append("</ul>")
    return format_page(f"Feedback for {student}", STYLE, "\n".join(lines))
