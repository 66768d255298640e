"""docs/contributing.md describes the code that is there: the picture, the files of a module, the targets of make."""

from __future__ import annotations

import ast
import re

import promises
import pytest

from brigade.course import MODULES, ROOT

TEXT = (ROOT / "docs" / "contributing.md").read_text()
TABLE = "course"  # almost everything reads it, so the picture leaves arrows to it out
CORE = {path.stem for path in (ROOT / "brigade").glob("*.py")} - {"__init__", "cli"}


def imports(module: str) -> tuple[set[str], set[str]]:
    """The modules of the core that one imports while it is loaded, and those that it imports later, to use them."""
    tree = ast.parse((ROOT / "brigade" / f"{module}.py").read_text())
    preloaded = [node for one in tree.body if getattr(one, "name", "") == "preload" for node in ast.walk(one)]
    at_once: set[str] = set()
    later: set[str] = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if node in preloaded:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        found = {name.split(".")[1] for name in names if name.startswith("brigade.")} & CORE
        (at_once if node in tree.body else later).update(found)
    return at_once - {TABLE}, later - at_once - {TABLE}


def picture(text: str) -> tuple[list[str], set[tuple[str, str, str]]]:
    """The modules that a mermaid flowchart has in its boxes, and its arrows as (from, kind, to)."""
    [chart] = re.findall(r"^```mermaid\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    modules, arrows = [], set()
    for line in map(str.strip, chart.splitlines()):
        if arrow := re.fullmatch(r"(\w+) (-->|-\.->) (\w+(?: & \w+)*)", line):
            arrows |= {(arrow[1], arrow[2], to) for to in arrow[3].split(" & ")}
        elif re.fullmatch(r"\w+", line) and line != "end":
            modules.append(line)
        else:
            assert re.fullmatch(r'flowchart TB|subgraph \w+ \["[^"]*"\]|end', line), f"what is {line!r}?"
    return modules, arrows


def faults(text: str) -> list[str]:
    """What the picture shows and the code has not, and the other way round."""
    modules, arrows = picture(text)
    code = {
        (module, kind, to) for module in CORE for kind, others in zip(("-->", "-.->"), imports(module)) for to in others
    }
    return [
        *(f"{module} is missing" for module in CORE - set(modules)),
        *(f"{module} is no module of the core, or is there twice" for module in modules if modules.count(module) > 1),
        *(f"there is no module {module}" for module in set(modules) - CORE),
        *(f"{' '.join(arrow)} is not in the code" for arrow in arrows - code),
        *(f"{' '.join(arrow)} is not in the picture" for arrow in code - arrows),
    ]


def test_the_picture_is_the_code():
    assert faults(TEXT) == []


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("        wire\n", "", "wire is missing"),
        ("    holding --> recording\n", "    holding --> wire\n", "holding --> wire is not in the code"),
        ("    pacing --> recording\n", "", "pacing --> recording is not in the picture"),
        ("ranks -.-> wire", "ranks --> wire", "ranks --> wire is not in the code"),
        ("        traps\n", "        trap\n", "there is no module trap"),
    ],
)
def test_a_picture_of_other_code_is_noticed(old, new, fault):
    assert TEXT.count(old) == 1
    assert fault in faults(TEXT.replace(old, new))


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_files_of_a_module_are_there(entry):
    """Those that the table names for one module; only a scenario may be missing."""
    example = MODULES[2]
    files = re.findall(r"^\| `([\w./]+)` \| (.*?) \|", TEXT, re.MULTILINE)
    names = [(name, what) for name, what in files if example.name in name]
    assert len(names) == 11
    for name, what in names:
        path = name.replace(example.package[1:], entry.package[1:]).replace(example.name, entry.name)
        assert (ROOT / path).is_file() or "may be missing" in what, f"there is no {path}"


def test_the_targets_of_make_are_listed():
    made = "\n".join(path.read_text() for path in (ROOT / "Makefile", *ROOT.glob("*.mk")))
    targets = set(re.findall(r"^([a-z][\w-]*):", made, re.MULTILINE))
    section = TEXT.partition("\n## make\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `make ([\w-]+)` \|", section, re.MULTILINE)) == targets - {"help"}


def test_the_bounds_are_those_that_are_measured():
    section = TEXT.partition("\n## What the course promises")[2].partition("\n## ")[0]
    bounds = dict(re.findall(r"^\| ([\w ,]+?) \| at most ([\d.]+)(?: s)? \|", section, re.MULTILINE))
    assert [float(bound) for bound in bounds.values()] == [
        promises.MODULE_S, promises.TWO_MODULES_S, promises.CHECKS_S, promises.DEMO_S,
        promises.BUCKETED_RATIO, promises.ZERO_RATIO,
    ]  # fmt: skip
    assert f"`{promises.BENCH}`" in section
