"""A student's results as one web page that needs no other file and no script, with a light and a dark mode."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from brigade.grade.formats import list_heading, list_modules

# Okabe and Ito's vermilion and green, lighter in dark mode, where they must stand out against black.
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>Feedback for {student}</title>
<style>
:root {{ color-scheme: light dark; --strong: #b84a00; --good: #00734f; --soft: #f3f3f3; --quiet: #666; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --strong: #ff9d5c; --good: #4cc79f; --soft: #262626; --quiet: #aaa; }}
}}
body {{ font: 1rem/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 50rem; padding: 1rem; }}
pre, code {{ font: .85rem/1.4 ui-monospace, monospace; }}
pre {{ overflow-x: auto; white-space: pre-wrap; background: var(--soft); border-radius: 4px; padding: .5rem; }}
pre div {{ padding-left: 2ch; text-indent: -2ch; }}
h1 {{ font-size: 1.5rem; }}
h2 {{ display: flex; flex-wrap: wrap; gap: 0 1rem; align-items: center; margin: 2rem 0 .5rem; font-size: 1.1rem; }}
h2 {{ border-bottom: 1px solid var(--soft); padding-bottom: .3rem; }}
.score {{ margin: .5rem 0 1rem; }}
.score b {{ font-size: 3.5rem; line-height: 1; }}
progress {{ accent-color: var(--good); height: .8rem; }}
ul {{ padding: 0; }}
li {{ display: grid; grid-template-columns: 4.5rem minmax(0, 1fr); margin: .35rem 0; }}
.passed b {{ color: var(--good); }}
.failed b {{ color: var(--strong); }}
pre, em {{ grid-column: 2; margin: .3rem 0 .8rem; }}
em {{ margin: 0; color: var(--quiet); font-style: normal; }}
@media (max-width: 40rem) {{ pre {{ white-space: pre-line; }} }}
</style>
</head>
<body>
<h1>Feedback for {student}</h1>
{body}
</body>
</html>
"""


def format_page(student: str, result: Mapping[str, Any]) -> str:
    """Return the page for a result, a dict as `formats.encode_grading` returns it."""
    bar = format_bar(result["score"], result["max_score"])
    lines = [f'<p class="score"><b>{result["score"]}</b> of {result["max_score"]} points<br>{bar}</p>']
    lines += [f"<p>{escape(line)}</p>" for line in list_heading(result)[1:]]
    for module in list_modules(result):
        lines.append(f"<h2>{escape(module.heading)} {format_bar(module.earned, module.possible)}</h2>")
        if module.earned < module.possible:
            repeat = f"brigade check {module.module.number}"
            lines.append(f"<p>To repeat these checks with other random cases, type <code>{repeat}</code>.</p>")
        lines.append("<ul>")
        for check in module.checks:
            kind, mark = ("passed", "✓") if check["status"] == "passed" else ("failed", "✗")
            text, more = escape(check["feedback"]), ""
            if text:
                lines_of_text = "".join(f"<div>{line or ' '}</div>" for line in text.splitlines())
                more = f"<pre>{lines_of_text}</pre>" if "\n" in text else f"<em>{text}</em>"
            points, title = f"{mark} {check['score']}/{check['points']}", escape(f"{check['number']}  {check['title']}")
            lines.append(f'<li class="{kind}"><b>{points}</b><span>{title}</span>{more}</li>')
        lines.append("</ul>")
    return PAGE.format(student=escape(student), body="\n".join(lines))


def format_bar(earned: float, possible: float) -> str:
    """Return a bar whose filled part is the earned part of the points."""
    return f'<progress value="{earned}" max="{possible}" aria-label="{earned} of {possible}"></progress>'
