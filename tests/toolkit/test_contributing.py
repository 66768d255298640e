"""docs/contributing.md matches the code: the files of a module, the targets of make and the bounds of promises."""

from __future__ import annotations

import re

import pytest

from brigade.course.modules import MODULES, ROOT, get_module

TEXT = (ROOT / "docs" / "contributing.md").read_text()
FOLDERS = {path.stem for path in (ROOT / "brigade").iterdir() if not path.name.startswith("__")}


def test_the_picture_has_every_folder():
    [chart] = re.findall(r"^```mermaid\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
    assert set(re.findall(r"^\s*(\w+)(?: -->.*)?$", chart.partition("\n")[2], re.MULTILINE)) == FOLDERS


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_files_of_a_module_are_there(entry):
    """All files that the table names for one module exist, except optional files."""
    example = get_module(3)
    files = re.findall(r"^\| `([\w./]+)` \| (.*?) \|", TEXT, re.MULTILINE)
    names = [(name, what) for name, what in files if example.name in name]
    assert names
    for name, what in names:
        path = name.replace(example.package[1:], entry.package[1:]).replace(example.name, entry.name)
        assert (ROOT / path).is_file() or what.startswith("optional: "), f"there is no {path}: {what}"


def test_the_targets_of_make_are_listed():
    made = "\n".join(path.read_text() for path in (ROOT / "Makefile", *ROOT.glob("*.mk")))
    targets = set(re.findall(r"^([a-z][\w-]*):", made, re.MULTILINE))
    section = TEXT.partition("\n## make\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `make ([\w-]+)[^`]*` \|", section, re.MULTILINE)) == targets - {"help"}


def test_the_declared_packages_are_those_that_are_pinned():
    declared = (ROOT / "pyproject.toml").read_text().partition("\ndependencies")[2].partition("\n[project.scripts]")[0]
    pinned = (ROOT / "requirements.txt").read_text()
    names = {name for name in re.findall(r'"([\w-]+)(?:[>=][^"]*)?"', declared) if name != "bucket-brigade"}
    assert names == set(re.findall(r"^([\w-]+)==", pinned, re.MULTILINE))
