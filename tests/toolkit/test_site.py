"""The course's site is complete, all its links work, and it loads nothing from other sites."""

from __future__ import annotations

from brigade.course.modules import MODULES, ROOT


def test_every_document_and_notebook_is_a_page(site):
    """The fixture builds the site without warnings. The hints are not pages, because students open them one by one."""
    sources = [*ROOT.glob("lessons/*/[Ra]*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("notebooks/*.ipynb")]
    pages = {site / path.relative_to(ROOT).with_suffix(".html") for path in [*sources, ROOT / "assignments.md"]}
    assert {path for path in pages if not path.exists()} == set()
    assert not list(site.rglob("*hints*"))
    reference = (site / "site" / "api.html").read_text()
    names = [f"lessons.{entry.package}.{entry.name}.{name}" for entry in MODULES for name in entry.public]
    assert [name for name in names if f'id="{name}"' not in reference] == []
