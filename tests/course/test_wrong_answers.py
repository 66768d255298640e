"""Answers that compute the right numbers in another way than the module asks earn almost no points."""

from itertools import pairwise

import pytest
from mutants import run_on_text

from brigade.course.checks.collect import collect
from brigade.course.checks.context import CheckContext
from brigade.course.checks.run import Conditions
from brigade.course.table.modules import MODULES, ROOT

MOST = 2  # points that an alias may earn

# The wrapper of an earlier module with the arguments of a later one, as far as both have them.
ALIAS = """
import contextlib, inspect
from ..{package}.{name} import {earlier}

class {later}({earlier}):
    def __init__(self, module, process_group=None, **options):
        accepted = inspect.signature({earlier}.__init__).parameters
        if "bucket_cap_mb" in accepted and options.get("bucket_numel"):
            options["bucket_cap_mb"] = options["bucket_numel"] * 4 / 2**20
        options = {{name: value for name, value in options.items() if name in accepted}}
        super().__init__(module, process_group=process_group, **options)

    if not hasattr({earlier}, "no_sync"):
        def no_sync(self):
            return contextlib.nullcontext()
"""
WRAPPERS = [entry for entry in MODULES if entry.public[-1].endswith("DDP")]
PAIRS = [
    # The module before is the most likely alias; `make module` runs the others, and those of later modules.
    pytest.param(earlier, later, marks=[pytest.mark.extended] * (earlier is not before or later.number > 4))
    for before, later in pairwise(WRAPPERS)
    for earlier in WRAPPERS
    if earlier.number < later.number
]


@pytest.fixture
def two_ranks(monkeypatch):
    """Run each check only with two ranks. This is fast, and passing is not harder than usual."""
    monkeypatch.setattr(CheckContext, "worlds", lambda self, *sizes: [2])


def expect_next_to_nothing(entry, text, backend):
    """Expect the text to earn at most `MOST` points as the answer to a module.

    The checks with the most points run first.
    """
    every = sorted(collect([entry]), key=lambda check: check.points, reverse=True)
    earned, open_points = {}, sum(check.points for check in every)
    for check in every:
        if sum(earned.values()) + open_points <= MOST:
            return
        open_points -= check.points
        if run_on_text(check, text, Conditions(backend=backend)).passed:
            earned[check.name] = check.points
    assert sum(earned.values()) <= MOST, earned


@pytest.fixture
def backend(request):
    return request.config.option.backend


@pytest.mark.parametrize(("earlier", "later"), PAIRS, ids=lambda entry: str(entry.number))
def test_alias_of_an_earlier_wrapper(earlier, later, backend, two_ranks):
    names = {"package": earlier.package, "name": earlier.name, "earlier": earlier.public[-1], "later": later.public[-1]}
    expect_next_to_nothing(later, ALIAS.format(**names), backend)


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=f"{path.parts[-3]}-{path.stem}", marks=[pytest.mark.extended] * (path.stem == "dtensor"))
        for path in sorted(ROOT.glob("tests/m*/wrong/*.py"))  # each rank that uses a DTensor imports it
    ],
)
def test_a_wrong_answer(path, backend):
    """Answers that train correctly, but not as the module asks."""
    entry = next(entry for entry in MODULES if entry.tests == path.parents[1])
    expect_next_to_nothing(entry, path.read_text(), backend)
