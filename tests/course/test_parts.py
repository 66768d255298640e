"""The parts of a module: their letters give the order of the reading, the hints and the checks.

So a student sees progress after each part.
"""

from __future__ import annotations

import re

import pytest
from mutants import run_on_text, take_first_case

from brigade.course.checks.collect import Check, collect
from brigade.course.checks.run import Conditions
from brigade.course.table import skeletons
from brigade.course.table.listing import find_last_part, list_checks
from brigade.course.table.modules import MODULES, ROOT, Module


def write_until(entry: Module, letter: str) -> dict[str, str]:
    """Return the reference without the parts after this one, like the files of a student on the way."""

    def keep(block: re.Match[str]) -> str:
        return block[0] if find_last_part(block[2]) <= letter else skeletons.make_todo(entry, block)

    return {path.name: skeletons.BLOCK.sub(keep, (ROOT / "solutions" / path).read_text()) for path in entry.paths}


def list_letters(text: str) -> list[str]:
    """Return the letters of the parts in a text's bold labels, such as **(b)** or **Parts (d) to (f).**, once each."""
    letters = []
    for label in re.findall(r"\*\*(?:Parts? )?(\(\w\)[^*]*)\*\*", text):
        first, *others = re.findall(r"\((\w)\)", label)
        is_range = ") to (" in label
        letters += [chr(code) for code in range(ord(first), ord(others[0]) + 1)] if is_range else [first, *others]
    return list(dict.fromkeys(letters))


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_letters_give_the_order_of_the_reading(entry):
    """The reading, each step of the hints, and the headings of the checks mention the parts in alphabetical order."""
    written = "".join(skeletons.make_skeletons(entry).values())
    parts = sorted(re.findall(r"# TODO: part \((\w)\)", written))
    steps = (entry.lesson / "hints.md").read_text().split("\n## ")[1:]
    assert [list_letters((entry.lesson / "README.md").read_text()), *map(list_letters, steps)] == [parts] * 4
    last = [find_last_part(heading) for heading in dict.fromkeys(check.parts for check in list_checks(entry))]
    assert last == [""] or last == sorted(set(last)) and last[-1] == parts[-1]


HEADINGS = [
    pytest.param(
        entry,
        heading,
        id=f"{entry.number}-{find_last_part(heading)}",
        marks=[pytest.mark.extended] * (entry.number > 3),  # make module runs it
    )
    for entry in MODULES
    for heading in dict.fromkeys(check.parts for check in list_checks(entry))
    if heading
]


@pytest.mark.parametrize(("entry", "heading"), HEADINGS)
def test_checks_pass_as_soon_as_their_parts_are_written(entry, heading, request, monkeypatch):
    """With the parts up to a heading, its checks pass. The checks under later headings report unwritten parts."""
    texts = write_until(entry, find_last_part(heading))
    checks = collect([entry])
    last = max(place for place, check in enumerate(checks) if check.parts == heading)
    conditions = Conditions(backend=request.config.option.backend)

    def run(some: list[Check]) -> dict[str, str]:
        return {check.name: run_on_text(check, texts, conditions).status for check in some}

    later = checks[last + 1 :]
    assert run(later) == {check.name: "not written" for check in later}
    take_first_case(monkeypatch)  # other tests try the others
    own = [check for check in checks if check.parts == heading]
    assert run(own) == {check.name: "passed" for check in own}


@pytest.mark.extended
def test_a_wrong_plan_costs_only_its_own_points():
    """A grader judges module 11's wrapper with the reference's plan if the student's is wrong."""
    [check] = [check for check in collect(MODULES) if (check.module, check.name) == (11, "test_volume")]
    plan, wrapper = (
        (ROOT / "solutions/m11_fully_sharded" / name).read_text() for name in ("plan.py", "fully_sharded.py")
    )
    texts = {"plan.py": plan.replace("for unit in order if unit or not backward", "for unit in order")}
    assert run_on_text(check, texts, Conditions()).status == "failed"
    assert run_on_text(check, texts, Conditions(uses_hidden=True)).status == "passed"
    texts |= {"fully_sharded.py": wrapper.replace('!= "gather" or self.reshard_after_forward', '!= "gather" or True')}
    assert run_on_text(check, texts, Conditions(uses_hidden=True)).status == "failed"
