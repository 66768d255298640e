"""The documents say what the code says: points, minutes, checks and names."""

import re

import pytest
from test_mutants import checks

from brigade.course import MODULES, ROOT


def text(*parts):
    return ROOT.joinpath(*parts).read_text()


def points_of(check):
    [mark] = [mark for mark in check.pytestmark if mark.name == "points"]
    return mark.args[0]


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_reading_agrees_with_the_course(entry):
    reading = text("lessons", entry.package, "README.md")
    assert reading.startswith(f"# Module {entry.number}: {entry.title}\n")
    header = f"**Minutes:** {entry.minutes} · **Difficulty:** {entry.difficulty} of 5 · **Points:** {entry.points} · "
    assert header + f"**File:** [`{entry.path.name}`]({entry.path.name})" in reading
    assert f"brigade check {entry.number}" in reading and f"pytest tests/{entry.checks.name}" in reading
    named = dict(re.findall(r"^\| `(test_\w+)` \| (\d+) \|", reading, re.MULTILINE))
    assert named == {name: str(points_of(check)) for name, check in checks(entry).items()}
    parts = set(re.findall(r"part (\(\w\))", text("lessons", entry.path)))
    assert parts and all(f"**{part}**" in reading for part in parts)


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_hints_have_three_steps(entry):
    hints = text("lessons", entry.package, "hints.md")
    assert re.findall(r"^## (.*)$", hints, re.MULTILINE) == ["1. Nudge", "2. Approach", "3. Almost the code"]


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_handout_agrees_with_the_course(entry):
    handout = text("assignments.md")
    assert f"| {entry.number}. {entry.title} | `lessons/{entry.path.as_posix()}` | {entry.points} |" in handout
    section = handout.split(f"## Module {entry.number}: {entry.title}\n")[1].split("\n## ")[0]
    named = dict(re.findall(r"^\| `(test_\w+)` \| (\d+) \|", section, re.MULTILINE))
    assert named == {name: str(points_of(check)) for name, check in checks(entry).items()}
    assert f"| **total** | | **{sum(entry.points for entry in MODULES)}** |" in handout


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_readme_lists_the_module(entry):
    row = (
        f"| {entry.number} | [{entry.title}](lessons/{entry.package}/README.md) | {entry.idea} | {entry.points} | "
        f"{entry.minutes} |"
    )
    assert row in text("README.md")


def documents():
    return [*ROOT.glob("*.md"), *ROOT.glob("lessons/*/*.md"), *ROOT.glob("docs/*.md")]


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(document):
    prose = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)\)", prose):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"
