"""What documents say about every module is made from the table, the checks and the readings, by `brigade skeletons`.

In a document of `DOCUMENTS` the text between two comments is made, the rest is written by hand:

    <!-- made by `brigade skeletons`: modules -->
    ...
    <!-- end -->
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from brigade.course.listing import list_checks
from brigade.course.modules import MODULES, CourseError, Module

DOCUMENTS = ("README.md", "assignments.md")
MADE = re.compile(r"(<!-- made by `brigade skeletons`: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)
QUESTIONS = "\n## Questions\n"


def documents(root: Path) -> dict[Path, str]:
    """The documents of the course in `root`, as they should be. Raises CourseError as `filled` does."""
    return {root / name: filled((root / name).read_text(), root) for name in DOCUMENTS}


def filled(text: str, root: Path) -> str:
    """The document with its made parts made anew. Raises CourseError where a reading has no questions."""
    parts = {"modules": modules, "deliverables": deliverables, "assignments": assignments, "students": students}
    return MADE.sub(lambda found: f"{found[1]}\n{parts[found[2]](root)}\n{found[3]}", text)


def modules(root: Path) -> str:
    """The table of the README."""
    rows = [
        (e.number, f"[{e.title}](lessons/{e.package}/README.md)", e.idea, e.points, e.minutes, f"{e.difficulty} of 5")
        for e in MODULES
    ]
    total = ("", "", "", f"**{sum(e.points for e in MODULES)}**", f"**{sum(e.minutes for e in MODULES)}**", "")
    return table(("", "module", "idea", "points", "minutes", "difficulty"), [*rows, total])


def students(root: Path) -> str:
    """What the README tells students; the README of the student edition says it too."""
    return (root / "README.md").read_text().partition("\n## Students\n\n")[2].partition("\n## ")[0]


def deliverables(root: Path) -> str:
    """The handout's table of files and points."""
    rows = [(f"{e.number}. {e.title}", f"`lessons/{e.path.as_posix()}`", e.points) for e in MODULES]
    return table(("module", "code", "points"), [*rows, ("**total**", "", f"**{sum(e.points for e in MODULES)}**")])


def assignments(root: Path) -> str:
    """The handout's section on each module."""
    return "\n".join(assignment(entry, root) for entry in MODULES)


def assignment(entry: Module, root: Path) -> str:
    names = [f"`{name}`" for name in entry.public]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    rows = [(f"`{check.name}`", check.points, check.title.rstrip(".")) for check in list_checks(entry, root)]
    return (
        f"## Module {entry.number}: {entry.title}\n\n"
        f"**Hand in** `{entry.path.name}`: {listed}. [Reading](lessons/{entry.package}/README.md), {entry.minutes} "
        f"minutes, difficulty {entry.difficulty} of 5.\n\n"
        + table(("check", "points", "what must hold"), [*rows, ("", f"**{entry.points}**", "")])
        + f"\n**Written questions**\n\n{questions(entry, root)}"
    )


def questions(entry: Module, root: Path) -> str:
    """The reading's list of questions, which is the end of it. Raises CourseError where there is none."""
    reading = (root / "lessons" / entry.package / "README.md").read_text()
    found = reading.partition(QUESTIONS)[2].strip("\n")
    if not found.startswith("1. "):
        raise CourseError(f"lessons/{entry.package}/README.md does not end with a numbered list of questions")
    return found + "\n"


def table(headings: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """A Markdown table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)
