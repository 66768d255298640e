"""One mistake, one message: failed checks are grouped by cause, and a check whose need failed does not run."""

from __future__ import annotations

import ast
from dataclasses import replace
from typing import Any

import pytest
from mutants import list_mutants, read_reference

from brigade.course.checks import render, run
from brigade.course.checks.collect import Check, collect
from brigade.course.checks.outcome import Outcome
from brigade.course.checks.run import Conditions, run_checks
from brigade.course.cli.check import list_urgent
from brigade.course.table.listing import Part, list_checks
from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.ranks.verdict import NOT_RUN, USUAL_CAUSE, CheckFailed, Verdict


def make_outcome(place: int, likely_cause: str = "", got: str = "entry 3 is 1, expected 2", **fields: Any) -> Outcome:
    check = Check(4, f"test_{place}", f"Title {place}.", 1, "", place, function=lambda submission: None)
    status = "not written" if "part" in fields else "failed"
    return Outcome(check, status, Verdict("all is well", got, likely_cause, **fields), repeat="brigade check 4")


def group(*outcomes: Outcome) -> list[list[str]]:
    """Return the numbers of the checks in each message."""
    return [[outcome.check.number for outcome in message.outcomes] for message in render.list_messages(outcomes)]


def test_causes_that_differ_in_numbers_are_one():
    """Ranks, sizes, times and the parameter of a case do not make a new mistake. The complete message comes first."""
    first = make_outcome(2, "rank 1 waits 3.5 s for 12 of 64 B of fc1.weight.", parameter="fc1.weight")
    other = make_outcome(5, "rank 0 waits 10 s for 7 of 128 B of fc2.bias.", parameter="fc2.bias")
    assert group(first, other) == [["4.2", "4.5"]]
    [message] = render.list_messages([first, other])
    assert message.text == render.format_message(first)
    assert "4.2" in render.explain_each([first, other])["test_5"]


def test_the_most_specific_cause_comes_first(snapshot):
    vague = make_outcome(1, "it depends.", hypothesis=USUAL_CAUSE)
    unknown, stated = make_outcome(2), make_outcome(3, "it is summed.")
    other = make_outcome(4, "it is late.", got="one\ntwo")
    unwritten = make_outcome(5, part=Part(4, "c"))
    outcomes = [vague, unknown, stated, other, unwritten, make_outcome(6, "it is summed.")]
    assert group(*outcomes) == [["4.3", "4.6"], ["4.4"], ["4.2"], ["4.5"], ["4.1"]]
    told = render.explain_each(outcomes)
    texts = [*map(str, render.list_messages(outcomes)), "", *(f"{name}: {text}" for name, text in told.items())]
    snapshot("messages", "\n".join(texts) + "\n")


def test_a_specific_check_does_not_refer_to_a_vague_one():
    vague, unknown = make_outcome(1, "it depends.", hypothesis=USUAL_CAUSE), make_outcome(2)
    assert group(vague, unknown) == [["4.2"], ["4.1"]]
    assert render.list_messages([vague, unknown])[1].text.endswith("4.2")


def test_a_second_mistake_has_a_line_of_its_own():
    """A deadlock has no likely cause, but it differs from the mistake that is shown first."""
    stated, deadlock = make_outcome(1, "it is summed."), make_outcome(5, got="rank 0 waits", ending="deadlock")
    assert group(stated, deadlock) == [["4.1"], ["4.5"]]
    assert deadlock.reason.got in render.list_messages([stated, deadlock])[1].text


def test_exceptions_and_crashes_are_one_whatever_their_causes():
    line = ("a.py", 3, "finish")
    raised = [
        make_outcome(n, cause, ending="exception", error="RuntimeError", message=f"{n} vs. {n * 7}", location=line)
        for n, cause in ((1, ""), (2, "the shard is empty."))
    ]
    assert group(*raised) == [["4.2", "4.1"]]
    killed = [make_outcome(n, f"cause {'ab'[n]}.", ending="died", error="killed by SIGSEGV") for n in range(2)]
    assert group(*killed) == [["4.0", "4.1"]]
    assert len(group(*raised, replace(killed[0]))) == 2


def test_a_module_never_takes_more_lines_than_a_screen():
    outcomes = [
        make_outcome(n, f"cause {chr(97 + n)}.", got="\n".join("line" * 9 for _ in range(40))) for n in range(17)
    ]
    messages = render.list_messages(outcomes)
    assert len(outcomes) + sum(str(message).count("\n") + 1 for message in messages) <= render.MAX_LINES
    assert "lines more)" in messages[0].text
    assert len(render.list_messages(outcomes, shows_all=True)) == 17


@pytest.mark.parametrize("at_a_time", [1, 2])
def test_a_check_whose_need_failed_does_not_run(at_a_time):
    ran = []

    def fail(submission):
        raise CheckFailed(Verdict("a", "b"))

    one = Check(1, "test_one", "One.", 1, "", 1, function=fail)
    two = Check(1, "test_two", "Two.", 1, "", 2, "test_one", function=lambda submission: ran.append("two"))
    three = Check(1, "test_three", "Three.", 1, "", 3, "test_two", function=lambda submission: ran.append("three"))
    outcomes = list(run_checks([one, two, three], "solutions", Conditions(), at_a_time=at_a_time))
    verdicts = [outcome.reason for outcome in outcomes[1:]]
    assert [(verdict.ending, verdict.got) for verdict in verdicts] == [(NOT_RUN, "first 1.1"), (NOT_RUN, "first 1.2")]
    assert list(run_checks([three], "solutions", Conditions()))[0].passed and ran == ["three"]


def test_urgent_checks_start_first_and_outcomes_keep_the_order_of_the_checks(monkeypatch):
    checks = [Check(1, f"test_{n}", "", 1, "", n, function=lambda submission: None) for n in (1, 2, 3)]
    started = []
    monkeypatch.setattr(run, "run_check", lambda check, *_: started.append(check) or Outcome(check, "passed"))
    outcomes = run_checks(checks, "solutions", Conditions(), urgent=[checks[0], checks[2]])
    assert [outcome.check for outcome in outcomes] == checks
    assert started == [checks[0], checks[2], checks[1]]


def test_the_checks_that_failed_start_first_after_those_that_they_need():
    checks = collect([get_module(8)])
    failed = [check for check in checks if check.needs]
    before = {check: Outcome(check, "failed" if check in failed else "passed") for check in checks}
    urgent = list_urgent(checks, before)
    assert failed and {check.name for check in urgent} == {
        checks[0].name, *(check.needs for check in failed), *(check.name for check in failed)
    }  # fmt: skip
    assert urgent == sorted(urgent, key=checks.index)
    assert list_urgent(checks, {}) == checks[:1]


def test_a_check_needs_an_earlier_one():
    for entry in MODULES:
        names: list[str] = []
        for check in list_checks(entry):
            assert not check.needs or check.needs in names, f"{check.name} needs {check.needs}"
            names.append(check.name)


ENTRIES = [pytest.param(e, id=e.package, marks=[pytest.mark.extended] * (e.number > 1)) for e in MODULES]


@pytest.mark.parametrize("entry", ENTRIES)  # make module runs those of the other modules
def test_the_cause_is_told_on_one_screen(entry, tmp_path, request):
    """Among the messages about all checks of a mutant is the cause that the mutant names."""
    mutant = next(mutant for mutant in list_mutants(entry) if mutant.in_sample)
    for other in MODULES[: MODULES.index(entry) + 1]:
        for name, text in (mutant.apply() if other == entry else read_reference(other)).items():
            (tmp_path / name).write_text(text)
    conditions = Conditions(backend=request.config.option.backend)
    outcomes = list(run_checks(collect([entry]), tmp_path, conditions, at_a_time=2))
    messages = [str(message) for message in render.list_messages(outcomes)]
    failed = sum(not outcome.passed for outcome in outcomes)
    assert mutant.cause in " ".join(" ".join(messages).split())
    assert failed + sum(message.count("\n") + 1 for message in messages) <= render.MAX_LINES


def list_overwritten(text: str) -> list[str]:
    """Return the arguments that an assignment in a loop replaces, without reading them."""
    found = []
    for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
        arguments = {argument.arg for argument in [*function.args.args, *function.args.kwonlyargs]}
        for loop in (node for node in ast.walk(function) if isinstance(node, ast.For)):
            for one in (node for node in ast.walk(loop) if isinstance(node, (ast.Assign, ast.For))):
                value, targets = (one.iter, [one.target]) if isinstance(one, ast.For) else (one.value, one.targets)
                read = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
                names = {node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)}
                written = {node.id for node in names if isinstance(node.ctx, ast.Store)}
                found += [f"{function.name}: {name}" for name in sorted((arguments & written) - read)]
    return found


EXAMINE = [*ROOT.glob("tests/test_m*.py"), *ROOT.glob("tests/m*/[ce]*.py"), *ROOT.glob("tests/helpers/*.py")]


@pytest.mark.parametrize("path", [*EXAMINE, *ROOT.glob("brigade/course/checks/**/*.py")], ids=lambda path: path.name)
def test_no_loop_overwrites_what_a_check_expects(path):
    """Otherwise, the message of a later failure says what the loop has expected."""
    assert not list_overwritten(path.read_text())


def test_an_overwritten_argument_is_found():
    loop = "def f(what, size):\n    for rank in x:\n        what, size = 'all is well', size + 1\n"
    assert list_overwritten(loop) == ["f: what"]
