"""CHANGELOG.md: an instructor finds the changes of a module at once, and every edition has a date and a tag."""

import datetime
import re
import shutil

import hang_guard
import pytest

from brigade.course.table.modules import MODULES, ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text()
KINDS = ["stricter", "more lenient", "message", "new", "removed"]  # of changes to a module
OTHER_KINDS = ["new", "changed", "fixed", "moved", "removed"]
AREAS = ["course", "commands", "grader", "lab", "notebooks", "repository"]
HEADINGS = re.findall(r"^## (.*)$", TEXT, re.MULTILINE)
EDITIONS = dict(zip(HEADINGS, re.split(r"^## .*$", TEXT, flags=re.MULTILINE)[1:], strict=True))


def parse_heading(heading):
    """Return the version and the date of an edition, such as "[2026.11] - 2026-11-26"."""
    match = re.fullmatch(r"\[(\d{4}\.\d{1,2}(?:\.\d+)?)\] - (\S+)", heading)
    assert match, f"## {heading}: write it as ## [2026.11] - 2026-11-26"
    return match[1], datetime.date.fromisoformat(match[2])


RELEASED = [parse_heading(heading) for heading in HEADINGS if heading != "[Unreleased]"]


def read_rows(section):
    """Return the rows of the table of a section, without its two lines of heading."""
    rows = [line.strip("|").split(" | ", 2) for line in section.splitlines() if line.startswith("|")][2:]
    assert all(len(row) == 3 for row in rows), "a row has three cells"
    return [[cell.strip() for cell in row] for row in rows]


def test_the_newest_edition_comes_first_and_every_edition_has_a_date():
    assert "[Unreleased]" not in HEADINGS[1:]
    assert sorted(RELEASED, key=lambda edition: edition[1], reverse=True) == RELEASED
    assert len({version for version, _ in RELEASED}) == len(RELEASED)


@pytest.mark.parametrize("heading", HEADINGS)
def test_the_rows_are_in_the_order_of_the_modules(heading):
    """Rows of one module are together, sorted by kind. So an instructor reads only these lines."""
    _, modules, rest = re.split(r"^### .*$", EDITIONS[heading], flags=re.MULTILINE)
    numbers = [str(entry.number) for entry in MODULES]
    rows = [(numbers.index(number), KINDS.index(kind)) for number, kind, _ in read_rows(modules)]
    assert rows == sorted(rows)
    rows = [(AREAS.index(area), OTHER_KINDS.index(kind)) for area, kind, _ in read_rows(rest)]
    assert rows == sorted(rows)


def test_the_newest_version_is_that_of_the_package_and_the_citation():
    version, date = RELEASED[0]
    assert f'\nversion = "{version}"\n' in (ROOT / "pyproject.toml").read_text()
    citation = (ROOT / "CITATION.cff").read_text()
    assert f'\nversion: "{version}"\n' in citation and f"\ndate-released: {date}\n" in citation


def run_git(*arguments):
    return hang_guard.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True)


def test_every_edition_has_a_tag():
    """A new edition gets its tag before it is pushed, as "An edition" in docs/new_module.md says."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is not a clone")
    answer = run_git("tag")
    if answer.returncode or "true" in run_git("rev-parse", "--is-shallow-repository").stdout:
        pytest.skip(f"this clone is shallow, or git cannot read it: {answer.stderr.strip()}")
    versions = {version for version, _ in RELEASED}
    missing = versions - set(answer.stdout.split())
    if missing == versions:
        pytest.skip("this copy has no tags of editions: git fetch --tags")
    assert missing == set()
