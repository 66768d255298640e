"""The checks catch every mutant, pass every correct answer, and give no points for a skeleton."""

import ast
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
from mutants import escapes, find_mutant, list_mutants, list_variants, parse, read_reference, run_on_text

from brigade.course.checks.collect import collect
from brigade.course.checks.context import CheckContext
from brigade.course.checks.run import Conditions
from brigade.course.table import validation
from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.course.table.skeletons import read_given
from brigade.grader.isolation import isolate_ranks, may_isolate


def checks(entry):
    """Return the module's graded checks by name."""
    return {check.name: check for check in collect([entry])}


@pytest.fixture(scope="session")
def conditions(request):
    """Yield the `Conditions` of the command line. The random cases differ between runs only with --everything.

    With --isolated, ranks communicate through the grader's switch.
    """
    option = request.config.option
    assert not option.isolated or may_isolate(), "--isolated needs Linux, and root or namespaces"
    seed = option.seed if option.everything else 0
    with isolate_ranks((), option.backend) if option.isolated else nullcontext():
        yield Conditions(seed, backend=option.backend, share_gpu=option.share_gpu, deadline_s=option.deadline)


LAST_TRIED = 4  # `make module` also tries mutants, skeletons and answers in another style of the modules above this one


def choose_marks(entry, mutant):
    """Return the marks of a mutant: one of the sample runs without --everything if its module is an early one."""
    is_extended = not mutant.in_sample or entry.number > LAST_TRIED
    return [pytest.mark.sample] * mutant.in_sample + [pytest.mark.extended] * is_extended


ALL_MUTANTS = [
    pytest.param(entry, mutant, id=f"{entry.number}-{mutant.name.replace(' ', '-')}", marks=choose_marks(entry, mutant))
    for entry in MODULES
    for mutant in list_mutants(entry)
]


@pytest.mark.parametrize(("entry", "mutant"), ALL_MUTANTS)
def test_mutant_is_caught(entry, mutant, conditions):
    """Every check that the mutant names fails as a check, not by accident. The first one names the likely cause."""
    fault = escapes(mutant, conditions)
    assert not fault, f"the mutant {mutant.name!r} of module {entry.number} is not caught as it should be: {fault}"


def test_a_mutant_that_escapes_is_reported(conditions):
    """The mutant names a check that it does not break."""
    nothing = replace(list_mutants(get_module(2))[0], checks=("test_one_all_reduce_per_dtype",), hunks=())
    assert escapes(nothing, conditions).startswith("test_one_all_reduce_per_dtype: passed")


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_the_sample_has_two_mutants_of_each_module(entry):
    """`make gpu-check` runs them."""
    assert sum(mutant.in_sample for mutant in list_mutants(entry)) == 2


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_every_diff_applies(entry):
    for change in [*list_mutants(entry), *list_variants(entry)]:
        assert change.apply() != read_reference(entry)


@pytest.mark.parametrize(("old", "times"), [("no line of it", 0), ("        ### END SOLUTION", 2)])
def test_a_hunk_applies_exactly_once(old, times):
    """An entry may contain the output of `git diff` as it is."""
    file = "solutions/m02_flat_ddp/flat_ddp.py"
    diff = f"diff --git a/{file} b/{file}\nindex 1..2 100644\n--- a/{file}\n+++ b/{file}\n@@ -3,0 +4 @@ def f():\n"
    change = parse(get_module(2), "a.diff", f"a name\ncaught by: a_check\n{diff} {old}\n+    pass\n")
    with pytest.raises(ValueError, match=rf"a\.diff, 'a name': .* {times} times .*flat_ddp\.py"):
        change.apply()


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_every_check_catches_a_mutant(entry):
    caught = {name for mutant in list_mutants(entry) for name in mutant.checks}
    file = f"tests/{entry.package}/mutants.diff"
    unproved = sorted(set(checks(entry)) - caught)
    assert not unproved, f"no mutant of {file} is `caught by` these checks: {', '.join(unproved)}"
    few, many = len(list_mutants(entry)), len(checks(entry))
    assert 3 * few >= 4 * many, f"{file} has {few} mutants for {many} checks; at least four for three checks are needed"


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_points_add_up(entry):
    """The points in the text of the file and in the imported checks equal the points of the module."""
    faults = validation.find_check_faults(entry, ast.parse(entry.checks.read_text()))
    assert not faults, f"tests/{entry.checks.name}: {'; '.join(faults)}"
    assert sum(check.points for check in collect([entry])) == entry.points


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.package, marks=[pytest.mark.extended] * (entry.number > LAST_TRIED))
        for entry in MODULES
    ],
)
def test_another_style_passes(entry, conditions, few_cases):
    text = (entry.tests / "alternative.py").read_text()
    for check in collect([entry]):
        outcome = run_on_text(check, text, conditions)
        assert outcome.passed, outcome.verdict


ALL_VARIANTS = [
    pytest.param(
        entry,
        variant,
        id=f"{entry.number}-{variant.name.replace(' ', '-')}",
        marks=[pytest.mark.extended] * (entry.number > LAST_TRIED),
    )
    for entry in MODULES
    for variant in list_variants(entry)
]


@pytest.mark.parametrize(("entry", "variant"), ALL_VARIANTS)
def test_right_variant_passes(entry, variant, conditions, few_cases):
    for name in variant.checks:
        outcome = run_on_text(checks(entry)[name], variant.apply(), conditions)
        assert outcome.passed, outcome.verdict


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=entry.package, marks=[pytest.mark.extended] * (entry.number > LAST_TRIED))
        for entry in MODULES
    ],
)
def test_skeleton_scores_nothing(entry, conditions):
    texts = {path.name: (ROOT / "lessons" / path).read_text() for path in entry.paths}
    for check in collect([entry]):
        outcome = run_on_text(check, texts, conditions)
        assert outcome.status == "not written" and outcome.verdict.part.module == entry.number, outcome.verdict


@pytest.mark.parametrize("entry", [entry for entry in MODULES if read_given(entry)], ids=lambda entry: entry.package)
def test_code_to_repair_scores_nothing(entry, conditions):
    """The code that students must repair fails every check, and the feedback states the reason."""
    text = re.sub(r" *raise NotImplementedError.*\n", "", (ROOT / "lessons" / entry.path).read_text())
    for check in collect([entry]):
        outcome = run_on_text(check, text, conditions)
        assert outcome.status == "failed" and outcome.verdict.likely_cause, f"{check.name}: {outcome.verdict}"


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_launching_in_ready_order_fails_every_time(world_size, conditions, monkeypatch):
    mutant = find_mutant(4, "launched in the order in which they become ready")
    check = checks(get_module(4))[mutant.checks[0]]
    monkeypatch.setattr(CheckContext, "worlds", lambda self, *sizes: [world_size])
    for seed in range(6):
        assert run_on_text(check, mutant.apply(), replace(conditions, seed=seed)).status == "failed"
