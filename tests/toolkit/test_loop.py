"""`pytest --module 3`, which `make module MODULE=3` runs, selects every test about module 3."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from conftest import is_about, pytest_collection_modifyitems

from brigade.course.modules import ROOT, get_module

FIRST, SECOND = get_module(1), get_module(2)


def item(*values, path="test_any.py"):
    """Return a stand-in for a test, with the values of its parameters and its file."""
    found = SimpleNamespace(path=ROOT / "tests" / path, get_closest_marker=lambda name: None)
    if values:
        found.callspec = SimpleNamespace(params=dict(enumerate(values)))
    return found


@pytest.mark.parametrize(
    "chosen",
    [
        item(path=FIRST.checks.name),
        item(FIRST, "another parameter"),
        item(ROOT / "lessons" / FIRST.package / "README.md"),
        item(ROOT / "notebooks" / f"{FIRST.package[1:]}.ipynb"),
    ],
)
def test_what_is_about_a_module(chosen):
    assert is_about(chosen, FIRST)


@pytest.mark.parametrize(
    "other", [item(), item(path=SECOND.checks.name), item(SECOND), item(ROOT / "lessons" / SECOND.package), item(1)]
)
def test_what_is_about_something_else(other):
    assert not is_about(other, FIRST)


def select(number, items):
    """Select tests as the option does. Return the selected tests and the number of deselected tests."""
    deselected = []
    hook = SimpleNamespace(pytest_deselected=lambda items: deselected.extend(items))
    pytest_collection_modifyitems(
        SimpleNamespace(option=SimpleNamespace(module=number, everything=False), hook=hook), items
    )
    return items, len(deselected)


def test_the_option_keeps_the_tests_of_one_module():
    first, second = item(FIRST), item(SECOND)
    assert select(None, [first, second]) == ([first, second], 0)
    assert select("1", [first, second]) == ([first], 1)
    with pytest.raises(pytest.UsageError, match="there is no module 77: the course has modules 0 to"):
        select("77", [first])
