"""Generate the parts of documents that list all modules or contain the address of the course.

`brigade skeletons` calls this module. In each of `DOCUMENTS`, the text between two comments is generated, and the
rest is written by hand:

    <!-- made by `brigade skeletons`: modules -->
    ...
    <!-- end -->

In each of `BROWSER_NOTEBOOKS`, the value of `COURSE` is generated.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from brigade.course import written
from brigade.course.listing import list_checks
from brigade.course.modules import CORE_MODULES, MODULES, Module

REPOSITORY = "YOUR-ORGANISATION/bucket-brigade"  # on GitHub; docs/publishing.md explains how to publish a copy
DOCUMENTS = ("README.md", "assignments.md", "docs/browser.md")
BROWSER_NOTEBOOKS = ("notebooks/kaggle.ipynb", "notebooks/colab.ipynb")
GENERATED = re.compile(r"(<!-- made by `brigade skeletons`: (\w+) -->\n).*?(<!-- end -->\n)", re.DOTALL)


def make_documents(root: Path) -> dict[Path, str]:
    """Return the up-to-date text of each document of the course in `root`. Raise CourseError if `fill_in` does."""
    texts = {root / name: fill_in((root / name).read_text(), root) for name in DOCUMENTS}
    return texts | {root / name: set_address((root / name).read_text()) for name in BROWSER_NOTEBOOKS}


def set_address(notebook: str) -> str:
    """Return the text of a notebook file with `COURSE` set to the address of the repository."""
    return re.sub(r'(COURSE = \\")[^"\\]*', rf"\g<1>https://github.com/{REPOSITORY}", notebook)


def fill_in(text: str, root: Path) -> str:
    """Return the document with its generated parts up to date. Raise CourseError if a reading has no questions."""
    makers = {
        "modules": make_module_table,
        "deliverables": make_deliverables_table,
        "assignments": make_assignments,
        "students": read_student_section,
        "badges": make_badges,
        "environments": make_environment_list,
    }
    return GENERATED.sub(lambda match: f"{match[1]}\n{makers[match[2]](root)}\n{match[3]}", text)


def make_module_table(root: Path) -> str:
    """Return the README's table of modules."""
    rows = [
        (
            e.number,
            f"[{e.title}](lessons/{e.package}/README.md)",
            e.idea,
            format_points(e),
            e.minutes,
            f"{e.difficulty} of 5",
        )
        for e in MODULES
    ]
    minutes = sum(entry.minutes for entry in CORE_MODULES)
    total = ("", "**total of the core**", "", f"**{count_core_points()}**", f"**{minutes}**", "")
    return format_table(("", "module", "idea", "points", "minutes", "difficulty"), [*rows, total])


def read_student_section(root: Path) -> str:
    """Return the README's section for students. The student edition's README contains it too."""
    return (root / "README.md").read_text().partition("\n## Students\n\n")[2].partition("\n## ")[0]


def list_environments() -> list[tuple[str, str, str]]:
    """Return the services that run the course in a browser: name, address of the badge, address of the course."""
    notebooks = f"{REPOSITORY}/blob/main/notebooks"
    return [
        (
            "Kaggle",
            "https://kaggle.com/static/images/open-in-kaggle.svg",
            f"https://kaggle.com/kernels/welcome?src=https://github.com/{notebooks}/kaggle.ipynb",
        ),
        (
            "Colab",
            "https://colab.research.google.com/assets/colab-badge.svg",
            f"https://colab.research.google.com/github/{notebooks}/colab.ipynb",
        ),
        ("Codespaces", "https://github.com/codespaces/badge.svg", f"https://codespaces.new/{REPOSITORY}"),
    ]


def make_badges(root: Path) -> str:
    """Return the README's badges: the state of the tests, the site, and links that open the course in a browser."""
    owner, _, name = REPOSITORY.partition("/")
    workflows = f"https://github.com/{REPOSITORY}/actions/workflows"
    badges = [
        ("tests", f"{workflows}/tests.yml/badge.svg", f"{workflows}/tests.yml"),
        ("site", f"{workflows}/site.yml/badge.svg", f"https://{owner}.github.io/{name}/"),
        *((f"Open in {name}", badge, link) for name, badge, link in list_environments()),
    ]
    return " ".join(f"[![{text}]({image})]({link})" for text, image, link in badges) + "\n"


def make_environment_list(root: Path) -> str:
    """Return a list of links that open the course in a browser."""
    return "".join(f"- [Open the course with {name}]({link})\n" for name, _, link in list_environments())


def make_deliverables_table(root: Path) -> str:
    """Return the handout's table of modules: code files, points for the code, and points for the written answers."""
    rows = [
        (
            f"{e.number}. {e.title}",
            f"`lessons/{e.path.as_posix()}`" + " and the files beside it" * bool(e.more_files),
            format_points(e),
            written.count_points([e], root) or "",
        )
        for e in MODULES
    ]
    points = count_core_points(), written.count_points(CORE_MODULES, root)
    total = ("**total of the core**", "", *(f"**{number}**" for number in points))
    return format_table(("module", "code", "points", "written points"), [*rows, total])


def format_points(entry: Module) -> str:
    """Return the points of a module, and its track if it is not in the core."""
    return str(entry.points) if entry.is_core else f"{entry.points} ({entry.track})"


def count_core_points() -> int:
    """Return the points of all modules of the core: 100."""
    return sum(entry.points for entry in CORE_MODULES)


def make_assignments(root: Path) -> str:
    """Return the handout's sections on all modules."""
    return "\n".join(make_assignment(entry, root) for entry in MODULES)


def make_assignment(entry: Module, root: Path) -> str:
    """Return the section on one module. What a check requires is in the terminal, in the words of its file."""
    names = [f"`{name}`" for name in entry.public]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    files = ", ".join(f"`{path.name}`" for path in entry.paths)
    checks = ", ".join(f"`{check.name.removeprefix('test_')}` {check.points}" for check in list_checks(entry, root))
    return (
        f"## Module {entry.number}: {entry.title}\n\n"
        f"**Hand in** {files}: {listed}. [Reading](lessons/{entry.package}/README.md), {entry.minutes} minutes, "
        f"difficulty {entry.difficulty} of 5.\n\n"
        f"**Checks and their points:** {checks}.\n\n"
        f"**Written questions**{make_points_remark(entry, root)}: "
        f"[{written.ANSWERS}](lessons/{entry.package}/{written.ANSWERS}).\n"
    )


def make_points_remark(entry: Module, root: Path) -> str:
    """Return the points of a module's written questions in parentheses, or "" if they have none."""
    points = written.count_points([entry], root)
    return f" ({written.format_points(points)})" if points else ""


def format_table(headings: Iterable[object], rows: Iterable[Iterable[object]]) -> str:
    """Return a Markdown table."""
    headings = list(headings)
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(str(cell) for cell in line)} |\n" for line in lines)
