"""The course's site: complete, without broken links, and loaded from nowhere else."""

from __future__ import annotations

from brigade.course.modules import MODULES


def test_every_module_has_its_reading_on_the_site(site):
    for entry in MODULES:
        assert entry.title in (site / "lessons" / entry.package / "README.html").read_text()
