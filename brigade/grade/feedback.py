"""A student's results as text and as a web page, from the dict that `formats.encode_grading` returns."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from brigade.course.modules import get_module
from brigade.grade.web_page import format_page

STYLE = """
.score { margin: .5rem 0 1rem; }
.score b { font-size: 3.5rem; line-height: 1; }
h2 { display: flex; flex-wrap: wrap; gap: 0 1rem; align-items: center; margin: 2rem 0 .5rem; }
progress { accent-color: var(--good); height: .8rem; }
ul { padding: 0; }
li { display: grid; grid-template-columns: 4.5rem minmax(0, 1fr); margin: .35rem 0; }
.passed b { color: var(--good); }
.failed b { color: var(--strong); }
pre, em { grid-column: 2; margin: .3rem 0 .8rem; }
em { margin: 0; color: var(--quiet); font-style: normal; }
@media (max-width: 40rem) { pre { white-space: pre-line; } }
"""


def list_heading(result: Mapping[str, Any], shows_seed: bool = False) -> list[str]:
    """Return the score, perhaps with the seed, the written points that it does not include, and the remarks."""
    score = f"{result['score']} of {result['max_score']} points" + f", seed {result['seed']}" * shows_seed
    return [score, *filter(None, [result["not_included"]]), *result["notes"]]


@dataclass(frozen=True)
class ModuleResult:
    """The checks of one module in a result, with the points that they earned and the points that are possible."""

    number: int
    checks: Sequence[Mapping[str, Any]]

    @property
    def earned(self) -> float:
        return sum(check["score"] for check in self.checks)

    @property
    def possible(self) -> float:
        return sum(check["points"] for check in self.checks)

    @property
    def heading(self) -> str:
        title = get_module(self.number).title
        return f"Module {self.number}: {title}, {self.earned} of {self.possible} points"


def list_modules(result: Mapping[str, Any]) -> list[ModuleResult]:
    """Return the checks of a result by module."""
    grouped = itertools.groupby(result["checks"], key=lambda check: check["module"])
    return [ModuleResult(number, list(checks)) for number, checks in grouped]


def format_instant(instant: str) -> str:
    """Return a sentence with an instant such as "2026-01-31T12:00:00Z"."""
    return f"Graded on {instant.replace('T', ' ').replace('Z', ' UTC')}."


def format_text(result: Mapping[str, Any], shows_seed: bool = False) -> str:
    """Return the score, then every module, with the feedback on failed checks."""
    lines = [*list_heading(result, shows_seed), format_instant(result["started"]), ""]
    for module in list_modules(result):
        lines.append(module.heading)
        for check in module.checks:
            mark = "+" if check["status"] == "passed" else "-"
            lines.append(f"  {mark} {check['score']}/{check['points']}  {check['number']:<5} {check['title']}")
            lines += [" " * 15 + line for line in check["feedback"].splitlines()]
        lines.append("")
    return "\n".join(lines)


def format_html(student: str, result: Mapping[str, Any]) -> str:
    """Return the same content as one web page that needs no other file."""
    score = f"<b>{result['score']}</b> of {result['max_score']} points"
    lines = [f'<p class="score">{score}<br>{format_bar(result["score"], result["max_score"])}</p>']
    lines += [f"<p>{escape(line)}</p>" for line in (*list_heading(result)[1:], format_instant(result["started"]))]
    for module in list_modules(result):
        lines.append(f"<h2>{escape(module.heading)} {format_bar(module.earned, module.possible)}</h2>")
        if module.earned < module.possible:
            repeat = f"brigade check {module.number}"
            lines.append(f"<p>To repeat these checks with other random cases, type <code>{repeat}</code>.</p>")
        lines.append("<ul>")
        for check in module.checks:
            kind, mark = ("passed", "✓") if check["status"] == "passed" else ("failed", "✗")
            title, more = f"{check['number']}  {check['title']}", ""
            if text := escape(check["feedback"]):
                more = f"<pre>{text}</pre>" if "\n" in text else f"<em>{text}</em>"
            points = f"{mark} {check['score']}/{check['points']}"
            lines.append(f'<li class="{kind}"><b>{points}</b><span>{escape(title)}</span>{more}</li>')
        lines.append("</ul>")
    return format_page(f"Feedback for {student}", STYLE, "\n".join(lines))


def format_bar(earned: float, possible: float) -> str:
    return f'<progress value="{earned}" max="{possible}" aria-label="{earned} of {possible}"></progress>'
