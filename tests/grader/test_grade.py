"""brigade grade: the results are correct, complete at any time, and valid in every format."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from datetime import datetime, timezone
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock
from xml.etree import ElementTree

import hang_guard
import psutil
import pytest
from mutants import find_mutant

from brigade.course.checks.collect import Check
from brigade.course.checks.outcome import Outcome
from brigade.course.cli import main as cli
from brigade.course.table.listing import GradedCheck, Part, list_checks
from brigade.course.table.modules import CORE_MODULES, MODULES, ROOT, WARM_UP, get_module, select_modules
from brigade.course.table.submission import Snapshot
from brigade.grader import formats, grading, incoming, isolation, watchdog
from brigade.grader.cli import grade as grade_command
from brigade.grader.cli import grade_student
from brigade.grader.outcome import UNFINISHED, Grading, make_empty_grading
from brigade.ranks.runner import ranks
from brigade.ranks.verdict import NOT_RUN, Verdict

pytestmark = pytest.mark.usefixtures("few_cases")

META = {
    "CLASSROOM": "parallel",
    "ASSIGNMENT": "brigade",
    "ASSIGNMENT_TYPE": "individual",
    "OWNER": "ada",
    "SUBMISSION_TAG": "submit/2026-01-31T12-00-00Z-1a2b3c4",
    "COMMIT_URL": "https://example.org/commit/1a2b3c4",
    "RELEASE_URL": "https://example.org/releases/1",
    "REVIEW_URL": "https://example.org/compare/1",
}


def read_scores(text):
    """Return the score, the maximum, and whether the run is unfinished, of a results.json of Gradescope."""
    result = json.loads(text)
    assert all(test["score"] == (test["status"] == "passed") * test["max_score"] for test in result["tests"])
    assert result["score"] == sum(test["score"] for test in result["tests"])
    return result["score"], sum(test["max_score"] for test in result["tests"]), UNFINISHED in result["output"]


@pytest.fixture
def grade(tmp_path, capfd, monkeypatch):
    """Grade in this process with the named checks (default: all).

    Return the status, the results, the output and the errors. Even root isolates the ranks only with `real_isolation`,
    because isolation needs a new fork server, but does not change the score.
    """

    def run(submission, *options, only=(), real_isolation=False):
        with monkeypatch.context() as patch:
            if not real_isolation:
                patch.setattr(isolation, "may_isolate", lambda *_: False)
            if only:
                every = grading.collect
                patch.setattr(grading, "collect", lambda entries: [c for c in every(entries) if c.name in only])
            out = tmp_path / "results.json"
            status = cli.main(["grade", "--submission", str(submission), "--out", str(out), *options])
        printed, errors = capfd.readouterr()
        assert "Traceback" not in printed + errors
        result = json.loads(out.read_text()) if out.exists() else None
        return SimpleNamespace(status=status, result=result, printed=printed, errors=errors)

    return run


@pytest.fixture
def submit(tmp_path):
    """Write the reference as a submission, with other texts for some modules. The text None leaves a module out."""

    def write(modules=None, name="submission", upto=2):
        for entry in select_modules(f"1-{upto}"):
            texts = {file: (ROOT / "solutions" / file).read_text() for file in entry.paths}
            texts[entry.path] = (modules or {}).get(entry.number, texts[entry.path])
            (tmp_path / name / entry.path).parent.mkdir(parents=True, exist_ok=True)
            for file, text in texts.items() if texts[entry.path] is not None else ():
                (tmp_path / name / file).write_text(text)
        return tmp_path / name

    return write


def reference(number):
    return (ROOT / "solutions" / get_module(number).path).read_text()


def make_mutated(name):
    """Return the text of module 1 with a mistake."""
    return find_mutant(1, name).apply()[get_module(1).path.name]


def scores(result):
    """Return the points by module and the names of the failed checks."""
    points = {}
    for test in result["tests"]:
        module = int(test["tags"][0].split()[1])
        points[module] = points.get(module, 0) + test["score"]
    return points, {test["tags"][1] for test in result["tests"] if test["status"] == "failed"}


# The forms of results, in every state


def states():
    """Yield the states of a grading run of three checks, from its beginning to its end, with hostile texts."""
    checks = [(1, "test_one", "The first.", 3), (1, "test_two", "The second.", 5), (2, "test_three", "The third.", 8)]
    outcomes = [Outcome(GradedCheck(*check)) for check in checks]
    state = Grading(outcomes, 7, notes=["a \x1b[31mred\x1b[0m file \udcff", "another\n"])
    state.started = datetime(2026, 1, 31, 12, tzinfo=timezone.utc)
    yield state
    outcomes[0].status = "passed"
    outcomes[1].status = outcomes[2].status = "failed"
    outcomes[1].verdict = Verdict("no nonsense", "\x00\x1b[2J\ufffe\udc80]]>&<\r\n" * 50 + "x" * 10_000)
    outcomes[1].printed = ["", "\x1b[2J\n" * 50 + "x" * 10_000]
    outcomes[2].verdict = Verdict("few lines", "\n".join(map(str, range(100))), part=Part(2, "a"))
    yield state  # what failed is to be repeated with the reference's earlier modules
    outcomes[2].status, outcomes[2].verdict, state.finished = "passed", None, True
    yield state


@pytest.mark.parametrize("form", formats.WRITERS)
def test_results_in_every_state(form, monkeypatch, snapshot):
    """No state contains a character that a terminal, XML or a database does not take, or more than a screen of text."""
    for name, value in META.items():
        monkeypatch.setenv(name, value)
    texts = [formats.WRITERS[form](state) for state in states()]
    assert all(set(filter(lambda c: not c.isprintable(), text)) == {"\n"} for text in texts)
    for text in texts:
        ElementTree.fromstring(text.encode()) if form == "junit" else form == "text" or json.loads(text)
    when = r"(?!2026-01-31)\d{4}-\d\d-\d\dT[\d:]+Z"  # but not the start of the run, which is given
    texts = [re.sub(when, "(now)", re.sub("x{99,}", lambda xs: f"({len(xs[0])} x)", text)) for text in texts]
    snapshot(f"results.{form}", "\n".join(texts))


def test_a_file_is_replaced_as_a_whole(tmp_path, monkeypatch):
    out = tmp_path / "results.json"
    formats.write(out, "before")
    (tmp_path / ".results.json.part").write_text("left by one that was killed")

    def disk_full(*_):
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", disk_full)
        with pytest.raises(OSError, match="no space"):
            formats.write(out, "after")
    assert out.read_text() == "before" and len(list(tmp_path.iterdir())) == 1
    formats.write(out, "after \udcff")
    assert out.read_text() == "after ?"
    assert [path.name for path in tmp_path.iterdir()] == ["results.json"]
    assert out.stat().st_mode & 0o077 == 0


# What is graded


@pytest.mark.extended
@pytest.mark.skipif(not isolation.may_isolate(), reason="isolation needs Linux, and root or namespaces")
@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_isolated_reference_gets_all_points(entry, grade):
    """Isolated ranks cannot read the course's files, but a correct answer never needs them."""
    done = grade(ROOT / "solutions", "--modules", str(entry.number), real_isolation=True)
    assert scores(done.result) == ({entry.number: entry.points}, set()), done.result["output"]


def test_points_are_what_the_checks_say(grade, submit):
    """Module 1 has one mistake, and module 2 is still the skeleton."""
    unwritten = (ROOT / "lessons" / get_module(2).path).read_text()
    done = grade(submit({1: make_mutated("buffers not broadcast"), 2: unwritten}), "--modules", "1-2", "--prior", "own")
    assert done.status == 0 and "7 of 16" in done.errors and "12 points" in done.errors.splitlines()[-1]
    points, failed = scores(done.result)
    assert points == {1: 7, 2: 0} and failed == {"test_buffers_start_equal", *list_check_names(2)}
    told = {test["output"] for test in done.result["tests"] if test["number"].startswith("2.")}
    assert len(told) == 1 and str(Part(2, "a")) in told.pop()
    assert read_scores(json.dumps(done.result)) == (7, 16, False)


def test_missing_modules_and_broken_checks_count(grade, submit, monkeypatch):
    """A missing file, a file that is not Python, and a check that raises an exception still count in the maximum."""

    def falls_over(submission):
        raise ZeroDivisionError("in the check")

    checks = [Check(number, f"test_{number}", "A check.", 5, function=falls_over) for number in (1, 2, 3)]
    monkeypatch.setattr(grading, "collect", lambda entries: checks)
    done = grade(submit({1: None, 2: "def f(:\n"}, upto=3), "--modules", "1-3")
    assert read_scores(json.dumps(done.result)) == (0, 15, False)
    told = [test["output"] for test in done.result["tests"]]
    assert "naive_ddp.py" in told[0] and "flat_ddp.py, line 1" in told[1]
    assert "ZeroDivisionError" in told[2] and "reference" in told[2]


@pytest.mark.parametrize("form", formats.WRITERS)
def test_a_seed_that_was_given_is_in_no_results(form, monkeypatch):
    """Other uploads are graded with it, so a student who knew it could hand in numbers."""
    for name, value in META.items():
        monkeypatch.setenv(name, value)
    state = make_empty_grading([get_module(1)], 1980804389831955265)
    assert ("1980804389831955265" in formats.WRITERS[form](state)) == (form != "gradescope")
    state.is_seed_secret = True
    assert "1980804389831955265" not in formats.WRITERS[form](state)


def test_the_seed_follows_from_the_texts_and_the_secret(submit, monkeypatch):
    """Equal texts get equal cases, and any other text gets others, also if only an earlier module differs."""
    seeds = {}
    for name, first, second, secret in (
        ("equal", "x = 1\n", "y = 1\n", b"secret"),
        ("again", "x = 1\n", "y = 1\n", b"secret"),
        ("a comment", "x = 1\n", "y = 1\n#\n", b"secret"),
        ("an earlier module", "x = 2\n", "y = 1\n", b"secret"),
        ("another secret", "x = 1\n", "y = 1\n", b"other"),
        ("broken", "x = 1\n", "y = (\n", b"secret"),
    ):
        place = submit({1: first, 2: second, 3: name}, name, upto=3)  # module 3 is not graded
        seeds[name] = grading.derive_seed(secret, Snapshot(place), 2)
    assert seeds.pop("equal") == seeds["again"] and len({*seeds.values()}) == len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds.values()) and max(seeds.values()) > 2**40


@pytest.mark.parametrize("form", formats.WRITERS)
def test_no_output_contains_the_secret(form, submit, tmp_path, monkeypatch, capfd):
    """Results may contain the seed, with which nobody grades another submission."""
    for name, value in META.items():
        monkeypatch.setenv(name, value)
    secret, out = tmp_path / "class.secret", tmp_path / "out"
    secret.write_text("fa1b5be4\n")
    out.mkdir()
    used = []
    monkeypatch.setattr(grading.Schedule, "run", lambda self: used.append(self.conditions.seed))
    monkeypatch.setattr(isolation, "may_isolate", lambda *_: False)
    place = submit({1: "x = 1\n"})
    words = ["grade", "--submission", place, "--modules", "1", "--secret", secret, "--format", form]
    for more in ([], ["--out", out / "results"]):
        assert cli.main([str(word) for word in [*words, *more]]) == 0
    assert used == [grading.derive_seed(b"fa1b5be4", Snapshot(place), 1)] * 2
    shown = "".join(capfd.readouterr()) + "".join(path.read_text() for path in out.iterdir())
    assert "fa1b5be4" not in shown and "".join(map(str, b"fa1b5be4")) not in shown
    assert str(used[0]) in shown


@pytest.mark.parametrize(("content", "line"), [(None, "No such file"), (" \n", "is empty")])
def test_a_secret_that_cannot_be_read_is_one_line(content, line, refuse, tmp_path):
    secret = tmp_path / "class.secret"
    if content:
        secret.write_text(content)
    said = refuse("grade", "--submission", tmp_path, "--secret", secret)
    assert said.startswith(f"brigade: {secret}") and line in said


def test_seed_repeats_a_grading(grade, submit):
    place, check = submit({1: make_mutated("divided by a literal 2")}), ["test_gradients_are_averaged"]
    first = grade(place, "--modules", "1", only=check)
    seed = first.errors.split("seed ")[1].split(":")[0]
    again = grade(place, "--modules", "1", "--seed", seed, only=check)
    other = grade(place, "--modules", "1", "--seed", str(int(seed) + 1), only=check)
    told = [done.result["tests"][0]["output"] for done in (first, again, other)]
    assert told[0] == told[1] != told[2]
    assert seed not in again.errors + again.printed + json.dumps(again.result)


def list_check_names(number):
    """Return the names of a module's checks, in order."""
    return [check.name for check in list_checks(get_module(number))]


def one_check(number):
    """Return the name of a module's first check that needs equal replicas."""
    return next(name for name in list_check_names(number) if "averaged" in name)


@pytest.mark.parametrize(
    ("prior", "modules", "lost"),
    [
        ("auto", "1-3", {1}),
        ("own", "1-2", {1, 2}),
        pytest.param("auto", "1-5", {1}, marks=pytest.mark.extended),
        pytest.param("reference", "1-2", {1}, marks=pytest.mark.extended),
    ],
)
def test_an_error_costs_its_points_once(prior, modules, lost, grade, submit):
    """Module 1 is wrong, and the others are correct.

    With auto and reference, only module 1 loses points; with own, others too.
    """
    place = submit({1: make_mutated("broadcast from the last rank")}, upto=5)
    names = {"test_parameters_start_equal", "test_one_all_reduce_per_parameter", *map(one_check, range(2, 6))}
    done = grade(place, "--modules", modules, "--prior", prior, only=names)
    points, failed = scores(done.result)
    assert {int(test["number"][0]) for test in done.result["tests"] if not test["score"]} == lost
    assert points[1] == 1 and "test_parameters_start_equal" in failed


def test_a_wrong_method_in_place_of_a_correct_one_of_an_earlier_module_costs_its_points(grade, submit):
    """The student's module 3 is correct. Its `no_sync` calls a method that module 4 replaces, and ours does not."""
    line = "before, self.require_grad_sync = self.require_grad_sync, False"
    assert reference(3).count(line) == 1
    third = reference(3).replace(line, "before = self.require_grad_sync\n        self.silence()")
    third += "\n\ndef silence(self):\n    self.require_grad_sync = False\n\n"
    third += "OverlappedDDP.silence = GradSyncMixin.silence = silence\n"
    place = submit({3: third, 4: reference(4) + "\n\nBucketedDDP.silence = lambda self: None\n"}, upto=4)
    for prior in ("auto", "own"):
        done = grade(place, "--modules", "3-4", "--prior", prior, only={"test_no_sync_accumulates"})
        points, _ = scores(done.result)
        assert points[3] and not points[4], prior


@pytest.mark.parametrize("name", ["GradSyncMixin", pytest.param("require_grad_sync", marks=pytest.mark.extended)])
def test_an_earlier_module_may_lack_the_names_that_ours_gives_to_later_ones(name, grade, submit):
    """Module 3 passes all its checks. Module 4 uses a class or an attribute of it that only our module 3 has."""
    place = submit({3: reference(3).replace(name, "other_name")}, upto=4)
    done = grade(place, "--modules", "3-4", only={one_check(3), one_check(4)})
    assert scores(done.result)[1] == set()


@pytest.mark.extended
@pytest.mark.parametrize("part", [part for part in grade_command.PARTS if part != WARM_UP])
def test_answers_in_another_style_form_one_submission(part, grade, submit):
    """Later modules get their points although the earlier ones lack names that the reference's have."""
    styles = {entry.number: (entry.tests / "alternative.py").read_text() for entry in MODULES}
    done = grade(submit(styles, upto=MODULES[-1].number), "--part", part)
    assert scores(done.result)[1] == set()


@pytest.mark.parametrize(
    ("helper", "options", "lost", "reason"),
    [
        (5, ["--modules", "1-6"], {1, 4}, ""),
        (5, ["--modules", "6", "--prior", "reference"], set(), ""),
        (4, ["--modules", "6"], {6}, "bucketed_ddp.py, line 1: "),
    ],
)
def test_a_later_module_may_use_a_helper_of_an_earlier_one(helper, options, lost, reason, grade, submit):
    """Modules 1 and 4 are not Python. Module 6 imports a function that only the student's module defines."""
    broken = {1: "def f(:\n", 4: "def f(:\n"}
    mine = {n: text + "\n\ndef keep(value):\n    return value\n" for n, text in ((5, reference(5)), *broken.items())}
    entry = get_module(helper)
    mine[6] = reference(6) + f"\n\nfrom ..{entry.package}.{entry.name} import keep\n\nBucketGroup = keep(BucketGroup)\n"
    done = grade(submit(mine, upto=6), *options, only={"test_buffers_start_equal", *map(one_check, range(2, 7))})
    failed = [test for test in done.result["tests"] if test.get("status") == "failed"]
    assert {int(test["number"][0]) for test in failed} == lost, failed
    assert all(reason in test["output"] for test in failed)


# What takes too long


class Simulated:
    """Grade in simulated time.

    `attempt(module, index of the check, prior source)` returns the ending and the seconds.
    """

    def __init__(self, monkeypatch, attempt):
        self.now, self.attempts, self.attempt = 0.0, [], attempt
        monkeypatch.setattr(grading, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(grading, "run_check", self.run_check)

    def run_check(self, check, target, conditions, prior_source, replaced):
        index = list_check_names(check.module).index(check.name)
        ending, seconds = self.attempt(check.module, index, prior_source)
        if self.now + seconds >= conditions.ends_at:
            ending, seconds = "deadline", conditions.ends_at - self.now
        self.now += seconds
        self.attempts.append((check.module, index, prior_source))
        if ending == "passed":
            return Outcome(check, "passed")
        return Outcome(check, "failed", Verdict("", f"{ending} on {prior_source}", ending=ending))

    def grade(self, prior="auto", total_s=480.0, entries=CORE_MODULES, **how):
        return grading.grade(ROOT / "solutions", make_empty_grading(entries, 1), prior=prior, total_s=total_s, **how)


def count_lost_points(state):
    """Return the points that each module lost."""
    points = {number: sum(o.check.points - o.score for o in outcomes) for number, outcomes in state.modules()}
    return {number: lost for number, lost in points.items() if lost}


OWN_HANGS = ("deadline", 20.0)


@pytest.mark.parametrize("seconds", [0.5, 2.5])
def test_an_endless_loop_costs_its_module_only(monkeypatch, snapshot, seconds):
    """In simulated time, all modules that import module 1 hang. One machine is five times slower than the other."""
    simulated = Simulated(
        monkeypatch, lambda module, _, source: OWN_HANGS if module == 1 or source == "own" else ("passed", seconds)
    )
    state = simulated.grade()
    assert count_lost_points(state) == {1: 8} and state.score == 92
    assert simulated.now == 40 + (sum(COUNTS.values()) - COUNTS[1]) * seconds, (
        "two deadlines, and every check of the other modules once"
    )
    assert all(source == "reference" for module, _, source in simulated.attempts if module > 1)
    verdicts = [outcome.verdict for outcome in state.list_outcomes(1)]
    assert [verdict.ending for verdict in verdicts] == ["deadline"] * 2 + [NOT_RUN] * 5
    snapshot("not_run.stopped", "".join(sorted({f"{verdict}\n" for verdict in verdicts[2:]})))
    assert state.finished and state.count_settled() == len(state.outcomes)


def test_a_module_that_is_slow_costs_itself_only(monkeypatch, snapshot):
    """No check reaches its deadline. Without a share of the time for each module, module 1 would use all of it."""
    simulated = Simulated(monkeypatch, lambda module, _, source: ("passed", 70.0 if source == "own" else 0.5))
    state = simulated.grade()
    assert set(count_lost_points(state)) == {1} and simulated.now <= 480
    simulated = Simulated(monkeypatch, lambda *_: ("passed", 9.0))
    [text] = {str(outcome.verdict) for outcome in simulated.grade("own", total_s=64).list_outcomes(1)[1:]}
    snapshot("not_run.used_up", f"{text}\n")


def test_a_deadlock_sends_later_modules_to_the_reference_and_stops_nothing(monkeypatch):
    def attempt(module, index, source):
        return ("deadlock", 3.0) if source == "own" and (module > 3 or index == 2) else ("passed", 0.5)

    simulated = Simulated(monkeypatch, attempt)
    state = simulated.grade()
    assert count_lost_points(state) == {1: list_checks(get_module(1))[2].points}
    total = sum(COUNTS.values())
    assert len(simulated.attempts) == total and simulated.now == 3 + (total - 1) * 0.5


def test_what_can_still_be_earned_comes_before_what_is_repeated(monkeypatch):
    """Module 1 fails, 2 hangs with the submission's own module 1, and 5 fails with all earlier modules."""

    def attempt(module, _, source):
        if module == 2 and source == "own":
            return OWN_HANGS
        return "failed" if module in (1, 5) else "passed", 1.0

    simulated = Simulated(monkeypatch, attempt)
    state = simulated.grade()
    assert count_lost_points(state) == {1: 8, 5: 15}
    order = list(dict.fromkeys((module, source) for module, _, source in simulated.attempts))
    assert order == [(1, "own"), (2, "own"), *((number, "reference") for number in range(3, 9)), (2, "reference")]


COUNTS = {entry.number: len(list_checks(entry)) for entry in CORE_MODULES}
HANGS = {
    "the first two": lambda module, index: index < 2,
    "the last two": lambda module, index: index >= COUNTS[module] - 2,
    "one": lambda module, index: index == 3,
    "all": lambda module, index: True,
}


@pytest.mark.parametrize("hangs", HANGS.values(), ids=HANGS.keys())
@pytest.mark.parametrize(
    "prior", ["auto", *(pytest.param(prior, marks=pytest.mark.extended) for prior in ("own", "reference"))]
)
def test_every_module_hangs_and_the_limit_of_the_packages_suffices(monkeypatch, prior, hangs):
    """In the worst honest submission, some checks hang and all others fail after a second. The time limit suffices."""
    simulated = Simulated(monkeypatch, lambda module, index, _: OWN_HANGS if hangs(module, index) else ("failed", 1.0))
    state = simulated.grade(prior)
    assert simulated.now < 450 and not any("used up" in outcome.verdict.got for outcome in state.outcomes)


@pytest.mark.parametrize("prior", ["auto", "own", "reference"])
def test_two_checks_at_a_time_get_the_same_points(monkeypatch, prior):
    """Some checks fail, hang or deadlock, so the reference replaces earlier modules in what follows."""
    for first, hangs in itertools.product([1, 4], HANGS.values()):

        def attempt(module, index, source, first=first, hangs=hangs):
            if module == first and hangs(module, index) or source == "own" and module == first + 1:
                return ("deadline" if index else "deadlock"), 1.0
            return ("failed" if module == 3 else "passed"), 1.0

        one, two = (Simulated(monkeypatch, attempt).grade(prior, 1e9, at_a_time=n) for n in (1, 2))
        results = [[(o.check.name, o.status, str(o.verdict)) for o in state.outcomes] for state in (one, two)]
        assert results[0] == results[1]


def test_an_interrupt_leaves_no_check_behind(monkeypatch):
    """The second check of two at a time waits for its ranks when Ctrl-C comes. It ends, and no other one starts."""
    attempts, ended = [], []

    def run_check(check, target, conditions, *_, **__):
        attempts.append(check)
        if len(attempts) > 1:
            ended.append(conditions.stopped.wait(60))
        return Outcome(check, "passed")

    def on_change():
        if attempts:
            raise KeyboardInterrupt

    monkeypatch.setattr(grading, "run_check", run_check)
    with pytest.raises(KeyboardInterrupt):
        grading.grade(ROOT / "solutions", make_empty_grading(CORE_MODULES, 1), on_change=on_change, at_a_time=2)
    assert all(ended) and len(attempts) <= 3


@pytest.mark.parametrize(("is_allowed", "note"), [(True, "Graded in namespaces"), (False, "Graded without isolation")])
def test_without_root_the_results_say_what_is_not_protected(is_allowed, note, grade, submit, monkeypatch):
    if is_allowed and not isolation.may_isolate():
        pytest.skip("no namespaces here")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(isolation.enter, "has_namespaces", lambda: is_allowed)
    done = grade(submit(), "--modules", "1", only=["test_buffers_start_equal"], real_isolation=True)
    assert done.result["score"] == 1 and note in done.result["output"]
    assert ranks.SERVER.sandbox is None


# What the user typed


REFUSED = [
    ["--submission", "does/not/exist"],
    ["--submission", __file__],
    ["--submission", "lessons", "--out", "does/not/exist/results.json"],
    ["--submission", "lessons", "--out", "/"],
    ["--submission", "lessons", "--modules", "99"],
    ["--submission", "lessons", "--modules", "0-1"],
    ["--submission", "lessons", "--format", "classroom50"],
    ["--submission", "lessons", "--gradebook", "a.csv"],
    ["--submission", "lessons", "--limit", "nan"],
    ["--class", "lessons", "--memory-gb", "-1"],
    ["--class", "lessons"],
    ["--class", "does/not/exist", "--gradebook", "a.csv"],
    ["--class", "lessons", "--gradebook", "does/not/exist/a.csv"],
]


def test_wrong_input_gets_one_line(refuse, monkeypatch, snapshot):
    for name in META:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: pytest.fail("said too late"))
    snapshot("refusals.grade", "".join(refuse("grade", *options) for options in REFUSED))


def test_what_cannot_be_graded_says_so_in_its_results(grade, tmp_path):
    (tmp_path / "mine.zip").write_text("no zip")
    done = grade(tmp_path / "mine.zip")
    assert done.status == 2
    assert read_scores(json.dumps(done.result)) == (0, 100, False)
    assert done.result["output"].splitlines()[-1].startswith("mine.zip ")
    assert {test["output"] for test in done.result["tests"]} == {formats.NOTHING_READ}


def test_a_part_of_the_course_is_graded_alone(submit, capfd):
    assert cli.main(["grade", "--submission", str(submit()), "--part", "warm-up"]) == 0
    assert " of 10 points" in capfd.readouterr().out.splitlines()[0]


# Killed


FINISH = "        for parameter in self.module.parameters():"


@pytest.fixture
def grader(tmp_path, submit):
    """Start a grader with its own temporary directory. Return the process, its results file and that directory.

    The first check passes, and the second one fails. The third one does not end, so the grader always runs when a test
    stops it.
    """
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    out = tmp_path / "results.json"
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as bundle:
        endless = "        import time\n        while True: time.sleep(0.01)\n"
        text = make_mutated("buffers not broadcast")
        assert text.count(FINISH) == 1
        bundle.writestr("naive_ddp.py", text.replace(FINISH, endless + FINISH))
    options = ["grade", "--submission", str(tmp_path / "mine.zip"), "--modules", "1,2", "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", hang_guard.PATIENT, *options],
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(scratch)},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hang_guard.hear_ctrl_c,
    )
    with process:
        yield SimpleNamespace(process=process, out=out, scratch=scratch)
        process.kill()


def sample(grader, until):
    """Read the results until `until(finished checks)` is true. Each time, expect valid results and no lower score."""
    best, seen = 0, set()

    def look():
        nonlocal best
        assert grader.process.poll() is None, f"the grader has ended: {seen}"
        if grader.out.exists():
            text = grader.out.read_text()
            score, most, unfinished = read_scores(text)
            assert most == 16 and unfinished and score >= best
            best = score
            finished = sum(test["output"] != UNFINISHED for test in json.loads(text)["tests"])
            seen.add(finished)
            return until(finished)

    hang_guard.wait_until(look)


def wait_for_torch(process):
    """Wait until the process has begun to import torch."""
    if sys.platform != "linux":
        pytest.skip("only Linux shows which libraries a process has loaded")
    hang_guard.wait_until(lambda: "libtorch" in Path(f"/proc/{process.pid}/maps").read_text())


@pytest.mark.parametrize(
    "moment", ["the file is there", pytest.param("torch is imported", marks=pytest.mark.extended), "checks run"]
)
def test_killed_at_any_moment_the_results_are_valid(moment, grader):
    sample(grader, lambda finished: finished >= (2 if moment == "checks run" else 0))
    if moment == "torch is imported":
        wait_for_torch(grader.process)
    children = psutil.Process(grader.process.pid).children(recursive=True)
    grader.process.kill()
    grader.process.wait()
    score, most, unfinished = read_scores(grader.out.read_text())
    assert most == 16 and unfinished and score >= (moment == "checks run")
    hang_guard.wait_for_end(children)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.extended)])
def test_interrupted_it_puts_everything_away(number, grader):
    sample(grader, lambda finished: finished >= (2 if number == signal.SIGINT else 0))
    if number == signal.SIGTERM:
        wait_for_torch(grader.process)
    children = psutil.Process(grader.process.pid).children(recursive=True)
    grader.process.send_signal(number)
    _, errors = hang_guard.communicate(grader.process)
    # While torch is imported, SIGTERM ends the process as if there were no Python in it.
    ended = (-number, "") if number == signal.SIGTERM else (130, "\nbrigade: stopped\n")
    assert (grader.process.returncode, errors) == ended
    assert read_scores(grader.out.read_text())[2]
    hang_guard.wait_for_end(children)
    assert not list(grader.scratch.iterdir()) or number == signal.SIGTERM  # the next grader removes it
    assert not list(grader.out.parent.glob(".*"))


IN_C = "import sys; from brigade.grader.watchdog import watch\n"
IN_C += "with watch({}, patience_s=0.1):\n    print('in', flush=True)"
DAYS = "\n    sum([[0]] * 10_000_000, [])"


@pytest.mark.parametrize("ends", ["by SIGTERM", "at its limit"])
def test_a_grader_in_a_long_call_of_c_code_is_killed(ends):
    """Python would handle the signal after days."""
    program = IN_C.format("1000" if ends == "by SIGTERM" else "0.0, 0.1") + DAYS
    handler = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)\n"  # it may come before that call
    process = subprocess.Popen(
        [sys.executable, "-c", handler + program], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "in\n"
    if ends == "by SIGTERM":
        process.terminate()
    _, errors = hang_guard.communicate(process)
    assert process.returncode == -signal.SIGKILL
    assert errors.startswith("brigade: killed, because the grader did not stop 0 s after"), errors


def test_the_grader_is_watched_from_before_it_opens_a_submission_until_all_is_put_away(tmp_path, monkeypatch, brigade):
    happened = []

    @contextlib.contextmanager
    def note(what):
        try:
            yield tmp_path, happened.append(what)
        finally:
            happened.append(f"{what} no more")

    for module, name in ((watchdog, "watch"), (incoming, "open_submission"), (isolation, "isolate_ranks")):
        monkeypatch.setattr(module, name, lambda *_, name=name: note(name))
    monkeypatch.setattr(grade_student, "prepare", Mock(side_effect=KeyboardInterrupt))
    assert brigade("grade", "--submission", tmp_path, "--out", tmp_path / "results.json").returncode == 130
    assert happened[0] == "watch" and happened[-1] == "watch no more" and len(happened) == 6


def test_a_grader_that_ends_is_not_killed():
    done = hang_guard.run([sys.executable, "-c", IN_C.format("1000")], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "in\n", "")
