"""Generate the parts of documents that copy the table of modules: lists of modules, points, minutes.

`brigade skeletons` calls this module. In each of `DOCUMENTS`, the text between two comments is generated, and the
rest is written by hand. The line under the title of a reading is generated, too.

    <!-- made by `brigade skeletons`: modules -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import re

from brigade.course.table import written
from brigade.course.table.listing import list_checks
from brigade.course.table.modules import CORE_MODULES, MODULES, Module, get_module
from brigade.course.table.submission import read_given

DOCUMENTS = ("README.md", "assignments.md", "docs/instructors.md")
GENERATED = re.compile(r"(<!-- made by `brigade skeletons`: (\w+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)
HEADER = re.compile(r"^\*\*Minutes:\*\* .* · \*\*File:\*\* \S+", re.MULTILINE)  # of a reading


def fill_in(text: str) -> str:
    """Return the document with its generated parts up to date."""
    makers = {
        "modules": lambda _: make_module_table(),
        "assignments": lambda _: "\n".join(map(make_assignment, MODULES)),
        "schedule": fill_in_schedule,
    }
    return GENERATED.sub(lambda match: f"{match[1]}\n{makers[match[2]](match[3])}\n{match[4]}", text)


def fill_in_header(entry: Module, reading: str) -> str:
    """Return the reading with the minutes, the points and the file of the table of modules under its title."""
    header = (
        f"**Minutes:** {entry.minutes} · **Difficulty:** {entry.difficulty} of 5 · **Points:** {entry.points} · "
        f"**File:** [`{entry.path.name}`]({entry.path.name})"
    )
    return HEADER.sub(lambda match: header + "," * match[0].endswith(","), reading, count=1)


def fill_in_schedule(table: str) -> str:
    """Return the table of a term's weeks: minutes and points follow from the modules in the second column."""
    lines = table.strip().splitlines()
    for index, line in enumerate(lines):
        week, numbers, *_, topics = (cell.strip() for cell in line.strip("|").split("|"))
        entries = [get_module(number) for number in re.findall(r"\d+", numbers)]
        if entries:
            sums = [sum(entry.minutes for entry in entries), sum(entry.points for entry in entries)]
            cells = [week, numbers, *sums, written.count_points(entries), topics]
            lines[index] = f"| {' | '.join(map(str, cells))} |"
    return "\n".join(lines) + "\n"


def make_module_table() -> str:
    """Return the table of modules of the README and the handout."""
    lines: list[tuple[object, ...]] = [
        ("", "module", "idea", "points", "written points", "minutes", "difficulty"),
        ("---",) * 7,
    ]
    for entry in MODULES:
        title = f"[{entry.title}](lessons/{entry.package}/README.md)"
        points = f"{entry.points}" if entry.is_core else f"{entry.points} ({entry.track})"
        points_written = written.count_points([entry]) or ""
        difficulty = f"{entry.difficulty} of 5"
        lines.append((entry.number, title, entry.idea, points, points_written, entry.minutes, difficulty))
    points, minutes = (sum(getattr(one, name) for one in CORE_MODULES) for name in ("points", "minutes"))
    sums = (points, written.count_points(CORE_MODULES), minutes)
    lines.append(("", "**total of the core**", "", *(f"**{number}**" for number in sums), ""))
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def make_assignment(entry: Module) -> str:
    """Return the section on one module. What a check requires is in the terminal, in the words of its file."""
    names = [f"`{name}`" for name in entry.public]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    files = ", ".join(f"`{path.name}`" for path in entry.paths if not read_given(entry, path.name))
    checks = ", ".join(f"`{check.name.removeprefix('test_')}` {check.points}" for check in list_checks(entry))
    points = written.count_points([entry])
    remark = f" ({written.format_points(points)})" if points else ""
    return (
        f"## Module {entry.number}: {entry.title}\n\n"
        f"**Hand in** {files}: {listed}. [Reading](lessons/{entry.package}/README.md), {entry.minutes} minutes, "
        f"difficulty {entry.difficulty} of 5.\n\n"
        f"**Checks and their points:** {checks}.\n\n"
        f"**Written questions**{remark}: [{written.ANSWERS}](lessons/{entry.package}/{written.ANSWERS}).\n"
    )
