"""Write the report on similar submissions (`brigade similarity`): a table of pairs, then the texts side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from brigade.course.modules import get_module
from brigade.grade.formats import make_printable
from brigade.grade.similarity import ALIKE, RUN, ClassTexts, Pair, find_groups, match_pair
from brigade.grade.web_page import format_page

MOST = 50  # pairs in the report

STYLE = """
summary { font-weight: bold; margin: 1rem 0 .5rem; cursor: pointer; }
.texts { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 1rem; }
.texts pre { font-size: .75rem; white-space: pre; margin: 0; }
.texts span { display: block; }
.texts i { color: var(--quiet); font-style: normal; user-select: none; }
.texts .same { background: var(--mark); }
"""


def format_report(pairs: Sequence[Pair], texts: ClassTexts) -> str:
    """Return a web page that needs no other file: the table of the first MOST pairs, then their texts."""
    shown = pairs[:MOST]
    matches = [match_pair(pair, texts) for pair in shown]
    lines = [
        "<p>The comparison ignores names, numbers, comments, formatting, the order of functions, and all code that the "
        f"course gives to everybody. Pairs in bold share {ALIKE:.0%} or more of a long answer. Independent short "
        "answers can be similar too. A listed pair is a reason to read both texts, not proof.</p>",
        *format_groups(pairs),
        f"<p>This table shows {len(shown)} of {len(pairs)} similar pairs, the most similar first. It leaves out pairs "
        "that the other pairs of a group connect. Open a pair below the table to read both texts. Length is the "
        f"number of runs of {RUN} syntax nodes in the shorter answer. The second number of a marked line is the number "
        "of the matching line in the other text.</p>",
        "<table><tr><th>Shared</th><th>Module</th><th>Submissions</th><th>Shared lines</th><th>Length</th></tr>",
    ]
    for number, pair in enumerate(shown):
        one, other = map(escape, pair.names)
        names = f'<a href="#pair{number}">{one} and {other}</a>'
        names = f"<b>{names}</b>" if pair.is_striking else names
        same = " and ".join(str(len(lines)) for lines in matches[number])
        lines.append(
            f"<tr><td>{pair.share:.0%}</td><td>{pair.module}</td><td>{names}</td><td>{same}</td><td>{pair.size}</td></tr>"
        )
    lines.append("</table>")
    for number, pair in enumerate(shown):
        title = f"{pair.share:.0%} of module {pair.module}, {get_module(pair.module).title}: {' and '.join(pair.names)}"
        columns = [
            format_column(name, texts.own[name][pair.module], shared)
            for name, shared in zip(pair.names, matches[number])
        ]
        lines.append(f"<details><summary>{escape(title)}</summary>")
        lines.append(f'<div class="texts" id="pair{number}">{"".join(columns)}</div></details>')  # a link opens it
    return format_page("Similar submissions", STYLE, "\n".join(lines), width="100rem")


def format_groups(pairs: Sequence[Pair]) -> list[str]:
    """Return a list of the groups of near-identical answers."""
    groups = [
        f"<li>Module {group.module}, {group.share:.0%}: {escape(', '.join(group.names))}</li>"
        for group in find_groups(pairs)
    ]
    return ["<h2>Near-identical long answers</h2><ul>", *groups, "</ul>"] if groups else []


def format_column(name: str, text: str, matches: Mapping[int, int]) -> str:
    """Return a text with line numbers. Mark each shared line, and add the number of the line that matches it."""
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        same, arrow = (' class="same"', f"{matches[number]:>5}") if number in matches else ("", " " * 5)
        lines.append(f"<span{same}><i>{number:>4} {arrow}</i>  {escape(make_printable(line))}</span>")
    return f'<div><h3>{escape(name)}</h3><pre tabindex="0">{"".join(lines)}</pre></div>'
