"""docs/contributing.md matches the code: the diagram, the files of a module, and the targets of make."""

from __future__ import annotations

import ast
import re

import pytest

from brigade.course.modules import MODULES, ROOT, get_module
from tools import promises

TEXT = (ROOT / "docs" / "contributing.md").read_text()
# Folders of brigade from the lowest to the highest. Those of one row do not import each other.
FOLDERS = (
    ("events", "course", "ipc"),
    ("progress", "switch", "sandbox"),
    ("runner", "rank"),
    ("checks",),
    ("grade", "lab"),
    ("cli",),
)
LEVELS = {folder: level for level, row in enumerate(FOLDERS) for folder in row}
MODULES_OF_BRIGADE = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text()
    for path in (ROOT / "brigade").rglob("*.py")
    if path.name not in ("__init__.py", "__main__.py")
}


def imports(modules: dict[str, str]) -> dict[str, set[str]]:
    """Return the modules of brigade that each module imports, at the top or in functions.

    `modules` maps names to texts.
    """
    found = {}
    for name, text in modules.items():
        names = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found[name] = {other for other in names if other in modules}
    return found


def faults(modules: dict[str, str]) -> list[str]:
    """Return the imports from a lower folder to a higher one, and the import cycles."""
    graph = imports(modules)
    wrong = []
    for name, others in sorted(graph.items()):
        for other in sorted(others):
            mine, theirs = name.split(".")[1], other.split(".")[1]
            if mine != theirs and LEVELS[mine] <= LEVELS[theirs]:
                wrong.append(f"{name} imports {other}")
    reached = {name: reachable(graph, name) for name in graph}
    circles = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in graph}
    return wrong + [f"a circle among {', '.join(circle)}" for circle in sorted(circles) if circle]


def reachable(graph: dict[str, set[str]], name: str) -> set[str]:
    """Return the modules that a module imports directly or indirectly, and itself if it is in a cycle."""
    found, waiting = set(), [*graph[name]]
    while waiting:
        other = waiting.pop()
        if other not in found:
            found.add(other)
            waiting += graph[other]
    return found


def test_every_folder_has_its_level():
    assert {name.split(".")[1] for name in MODULES_OF_BRIGADE} == set(LEVELS)


def test_imports_point_from_high_folders_to_low_ones():
    assert faults(MODULES_OF_BRIGADE) == []


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        (
            "brigade.rank.failure",
            "from brigade.checks import plugin",
            "brigade.rank.failure imports brigade.checks.plugin",
        ),
        (
            "brigade.lab.bench",
            "def f():\n    import brigade.grade.formats",
            "brigade.lab.bench imports brigade.grade.formats",
        ),
        (
            "brigade.runner.report",
            "from brigade.runner import ranks",
            "a circle among brigade.runner.monitor, brigade.runner.ranks, brigade.runner.report",
        ),
    ],
)
def test_an_import_in_the_wrong_direction_is_noticed(name, text, fault):
    changed = MODULES_OF_BRIGADE | {name: f"{MODULES_OF_BRIGADE[name]}\n{text}\n"}
    [line] = set(faults(changed)) - set(faults(MODULES_OF_BRIGADE))
    assert line.startswith(fault)


def test_the_picture_has_every_folder():
    [chart] = re.findall(r"^```mermaid\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert {folder for folder in LEVELS if re.search(rf"^\s*{folder}\b", chart, re.MULTILINE)} == set(LEVELS)


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_files_of_a_module_are_there(entry):
    """All files that the table names for one module exist, except optional files."""
    example = get_module(3)
    files = re.findall(r"^\| `([\w./]+)` \| (.*?) \|", TEXT, re.MULTILINE)
    names = [(name, what) for name, what in files if example.name in name]
    assert len(names) == 14
    for name, what in names:
        path = name.replace(example.package[1:], entry.package[1:]).replace(example.name, entry.name)
        assert (ROOT / path).is_file() or what.startswith("optional: "), f"there is no {path}: {what}"


def test_the_targets_of_make_are_listed():
    made = "\n".join(path.read_text() for path in (ROOT / "Makefile", *ROOT.glob("*.mk")))
    targets = set(re.findall(r"^([a-z][\w-]*):", made, re.MULTILINE))
    section = TEXT.partition("\n## make\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `make ([\w-]+)[^`]*` \|", section, re.MULTILINE)) == targets - {"help"}


def test_the_bounds_are_those_that_are_measured():
    section = TEXT.partition("\n## What the course promises")[2].partition("\n## ")[0]
    bounds = dict(re.findall(r"^\| ([^|]+?) \| at most ([\d.]+)(?: s)? \|", section, re.MULTILINE))
    assert [float(bound) for bound in bounds.values()] == [
        promises.MODULE_S, promises.LONG_MODULE_S, promises.CORE_S, promises.DEMO_S,
        promises.BUCKETED_RATIO, promises.ZERO_RATIO, promises.PREFETCHED_RATIO, promises.FULLY_SHARDED_RATIO,
    ]  # fmt: skip
    assert f"`{promises.BENCH}`" in section


WALKS = re.findall(r"^\*\*[^*]+\*\*, in six files:\n\n((?:.+\n)+)", TEXT, re.MULTILINE)


@pytest.mark.parametrize("walk", WALKS, ids=["one check", "one gradient"])
def test_a_walk_leads_through_at_most_six_files_that_have_what_it_names(walk):
    steps = re.split(r"^\d\. ", walk, flags=re.MULTILINE)[1:]
    files = [re.match(r"`([\w/]+\.py)`: ", step)[1] for step in steps]
    assert len(set(files)) == 6
    code = "\n".join((ROOT / file).read_text() for file in files)
    for name in re.findall(r"`([\w.]+)`", "".join(steps)):
        if name not in files:
            assert re.search(rf"\b{name.split('.')[-1]}\b", code), f"no file of the walk has {name}"
