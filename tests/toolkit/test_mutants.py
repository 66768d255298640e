"""The checks catch every mutant, pass every correct answer, and give no points for a skeleton."""

import ast
import re
from dataclasses import replace

import pytest
from mutants import (
    Change,
    escapes,
    find_mutant,
    format_diff,
    format_entry,
    list_mutants,
    list_variants,
    parse,
    read_reference,
    replace_files,
    run_on_text,
)
from renaming import Renaming

from brigade.checks.collect import collect
from brigade.checks.context import CheckContext
from brigade.checks.run import Conditions, run_check
from brigade.course import validation
from brigade.course.modules import MODULES, ROOT, get_module
from brigade.course.skeletons import read_given
from brigade.course.submission import read


def checks(entry):
    """Return the module's graded checks by name."""
    return {check.name: check for check in collect([entry])}


def outcome_of(check, text, backend, seed=0, **options):
    """Return the outcome of a check on the reference with another text of its module. `options` are `Conditions`."""
    return run_on_text(check, text, Conditions(seed=seed, backend=backend, **options))


@pytest.fixture
def backend(request):
    return request.config.option.backend


@pytest.fixture
def options(request):
    """The `Conditions` of the command line, apart from the backend and the seed."""
    option = request.config.option
    return {"share_gpu": option.share_gpu, "deadline_s": option.deadline}


def list_marks(entry, mutant):
    """Return the marks of a mutant: `extended`, unless it is the first mutant that its check must catch."""
    first = next(other for other in list_mutants(entry) if other.checks[0] == mutant.checks[0])
    return [] if mutant is first else [pytest.mark.extended]


ALL_MUTANTS = [
    pytest.param(entry, mutant, id=f"{entry.number}-{mutant.name.replace(' ', '-')}", marks=list_marks(entry, mutant))
    for entry in MODULES
    for mutant in list_mutants(entry)
]


@pytest.mark.parametrize(("entry", "mutant"), ALL_MUTANTS)
def test_mutant_is_caught(entry, mutant, request):
    """Every check that the mutant names fails as a check, not by accident. The first one names the likely cause."""
    option = request.config.option
    conditions = Conditions(backend=option.backend, share_gpu=option.share_gpu, deadline_s=option.deadline)
    fault = escapes(mutant, conditions)
    assert not fault, f"the mutant {mutant.name!r} of module {entry.number} is not caught as it should be: {fault}"


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_a_diff_read_again_makes_the_same_change(entry):
    """Every entry applies, and the entry that `mutants.py` would write for its change applies to the same effect."""
    for change in [*list_mutants(entry), *list_variants(entry)]:
        texts = change.apply()
        diff = format_diff(read_reference(entry), texts)
        block = format_entry("mutant", change.name, change.checks, change.cause, change.in_sample, diff)
        again = parse(entry, change.origin, block.removeprefix("mutant: "))
        assert again.apply() == texts and replace(again, hunks=change.hunks) == change


@pytest.mark.parametrize(
    ("old", "message"), [("no line of it", "occur 0 times"), ("        ### END SOLUTION", "occur 2 times")]
)
def test_a_hunk_applies_exactly_once(old, message):
    entry = get_module(2)
    hunks = parse(entry, "a.diff", f"a name\ncaught by: a_check\n--- a/flat_ddp.py\n {old}\n+    pass\n").hunks
    with pytest.raises(ValueError, match=f"a.diff, 'a name': the old lines of hunk 1 {message} in flat_ddp.py"):
        Change(2, "a.diff", "a name", ("a_check",), hunks).apply()


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


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_another_style_passes(entry, backend, options):
    text = (entry.tests / "alternative.py").read_text()
    for check in collect([entry]):
        outcome = outcome_of(check, text, backend, **options)
        assert outcome.passed, outcome.verdict


ALL_VARIANTS = [
    pytest.param(entry, variant, id=f"{entry.number}-{variant.name.replace(' ', '-')}")
    for entry in MODULES
    for variant in list_variants(entry)
]


@pytest.mark.parametrize(("entry", "variant"), ALL_VARIANTS)
def test_right_variant_passes(entry, variant, backend, options):
    for name in variant.checks:
        outcome = outcome_of(checks(entry)[name], variant.apply(), backend, **options)
        assert outcome.passed, outcome.verdict


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_skeleton_scores_nothing(entry, backend):
    texts = {path.name: (ROOT / "lessons" / path).read_text() for path in entry.paths}
    for check in collect([entry]):
        outcome = outcome_of(check, texts, backend)
        assert outcome.status == "not written" and outcome.verdict.part.module == entry.number, outcome.verdict


@pytest.mark.parametrize("entry", [entry for entry in MODULES if read_given(entry)], ids=lambda entry: entry.package)
def test_code_to_repair_scores_nothing(entry, backend):
    """The code that students must repair fails every check, and the feedback states the reason."""
    text = re.sub(r" *raise NotImplementedError.*\n", "", (ROOT / "lessons" / entry.path).read_text())
    for check in collect([entry]):
        outcome = outcome_of(check, text, backend)
        assert outcome.status == "failed" and outcome.verdict.likely_cause, f"{check.name}: {outcome.verdict}"


@pytest.mark.extended
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_launching_in_ready_order_fails_every_time(world_size, backend, monkeypatch):
    entry = get_module(4)
    mutant = find_mutant(4, "launched in the order in which they become ready")
    monkeypatch.setattr(CheckContext, "worlds", lambda self, *sizes: [world_size])
    for seed in range(6):
        assert outcome_of(checks(entry)[mutant.checks[0]], mutant.apply(), backend, seed).status == "failed"


# What causes say that are taken from the record of launches, or from a second run. Mutants with such a cause are tried
# with every private attribute renamed, and of each module at least the first two that name a cause.
RECORDED = ("was not reset", "only after backward", "even if there is only one", "A lambda in a loop", "counted too")
RECORDED += ("never became complete", "the group of ranks", "in .grad", "the parameter itself", "was changed")


def with_recorded_causes():
    causes = "\n".join(mutant.cause for entry in MODULES for mutant in list_mutants(entry))
    assert all(text in causes for text in RECORDED), "a text in RECORDED no longer occurs in any cause"
    chosen = []
    for entry in MODULES:
        known = [mutant for mutant in list_mutants(entry) if mutant.cause]
        recorded = [mutant for mutant in known if any(text in mutant.cause for text in RECORDED)]
        others = [mutant for mutant in known if mutant not in recorded]
        for place, mutant in enumerate([*recorded, *others[: max(0, 2 - len(recorded))]]):
            name, marks = mutant.name.replace(" ", "-"), [pytest.mark.extended] * (place > 0)  # make module runs all
            chosen.append(pytest.param(entry, mutant, id=f"{entry.number}-{name}", marks=marks))
    return chosen


@pytest.mark.parametrize(("entry", "mutant"), with_recorded_causes())
def test_causes_do_not_depend_on_private_names(entry, mutant, backend):
    """The cause is the same if every private attribute of all solutions has another name."""
    sources = read("solutions", entry.number).sources
    sources = replace_files(entry, sources, mutant.apply())
    renaming = Renaming([text for _, text in sources.values()])
    renamed = {name: (path, renaming.apply(text)) for name, (path, text) in sources.items()}
    check = checks(entry)[mutant.checks[0]]
    outcome = run_check(check, "solutions", Conditions(backend=backend), sources=renamed)
    assert mutant.cause in " ".join(str(outcome.verdict).split())
