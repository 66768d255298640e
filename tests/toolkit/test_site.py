"""The course's site is complete, all its links work, and it loads nothing from other sites."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from brigade.course.modules import MODULES, ROOT

find_problems = runpy.run_path(str(ROOT / "site" / "links.py"))["find_problems"]
PAGE = '<h1 id="top">A page</h1><a href="#top">up</a><a href="https://example.org">elsewhere</a><img src="a.png">'
FAULTS = {
    '<a href="b.html">': "index.html: b.html does not exist",
    '<a href="#bottom">': "index.html: #bottom has no such anchor",
    '<script src="https://example.org/a.js">': "index.html: https://example.org/a.js is on another site",
}


def test_every_document_and_notebook_is_a_page(site):
    """The fixture builds the site without warnings. The hints are not pages, because students open them one by one."""
    sources = [*ROOT.glob("lessons/*/[Ra]*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    pages = {site / path.relative_to(ROOT).with_suffix(".html") for path in [*sources, ROOT / "assignments.md"]}
    assert {path for path in pages if not path.exists()} == set()
    assert not list(site.rglob("*hints*"))
    reference = (site / "site" / "api.html").read_text()
    names = [f"lessons.{entry.package}.{entry.name}.{name}" for entry in MODULES for name in entry.public]
    assert [name for name in names if f'id="{name}"' not in reference] == []


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_links_are_found(tmp_path: Path, fault):
    (tmp_path / "a.png").touch()
    index = tmp_path / "index.html"
    index.write_text(PAGE)
    assert find_problems(tmp_path) == []
    index.write_text(PAGE + fault)
    assert find_problems(tmp_path) == [FAULTS[fault]]
