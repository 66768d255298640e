"""The parts of a module: its checks are in the order of the parts, so a student sees progress after each part."""

from __future__ import annotations

import re
from itertools import groupby

import pytest
from mutants import run_on_text

from brigade.checks.collect import Check, collect
from brigade.checks.run import Conditions
from brigade.course import skeletons
from brigade.course.listing import find_last_part, list_checks
from brigade.course.modules import MODULES, ROOT, Module

DIVIDED = [entry for entry in MODULES if list_checks(entry)[0].parts]  # their checks have headings


def list_headings(entry: Module) -> list[str]:
    return [heading for heading, _ in groupby(list_checks(entry), key=lambda check: check.parts)]


def write_until(entry: Module, letter: str) -> dict[str, str]:
    """Return the reference without the parts after this one, like the files of a student on the way."""

    def keep(block: re.Match[str]) -> str:
        return block[0] if find_last_part(block[2]) <= letter else skeletons.make_todo(entry, block)

    return {path.name: skeletons.BLOCK.sub(keep, (ROOT / "solutions" / path).read_text()) for path in entry.paths}


def test_the_long_modules_are_divided():
    assert {entry.number for entry in DIVIDED} >= {5, 6, 8}


@pytest.mark.parametrize("entry", DIVIDED, ids=lambda entry: entry.package)
def test_headings_name_the_parts_in_order(entry):
    last_letters = [find_last_part(heading) for heading in list_headings(entry)]
    parts = skeletons.BLOCK.findall("".join((ROOT / "solutions" / path).read_text() for path in entry.paths))
    assert (
        all(last_letters)
        and last_letters == sorted(set(last_letters))
        and last_letters[-1] == max(part for _, part, _ in parts)[-2]
    )


HEADINGS = [
    pytest.param(
        entry,
        heading,
        id=f"{entry.number}-{find_last_part(heading)}",
        marks=[pytest.mark.extended] * (entry.number > 6),  # make module runs it
    )
    for entry in DIVIDED
    for heading in list_headings(entry)[:-1]
]


@pytest.mark.parametrize(("entry", "heading"), HEADINGS)
def test_checks_pass_as_soon_as_their_parts_are_written(entry, heading, request):
    """With the parts up to a heading, its checks pass. The checks under later headings report unwritten parts."""
    texts = write_until(entry, find_last_part(heading))

    def run(check: Check) -> str:
        return run_on_text(check, texts, Conditions(backend=request.config.option.backend)).status

    checks = collect([entry])
    later = checks[max(i for i, check in enumerate(checks) if check.parts == heading) + 1 :]
    statuses = {check.name: run(check) for check in checks if check.parts == heading or check in later}
    assert statuses == {
        check.name: "not written" if check in later else "passed" for check in checks if check.name in statuses
    }
