"""What is stored is what was judged: a pass belongs to the text that ranks ran, and to the checks that judged it."""

import os
import sys

import hang_guard
import pytest

from brigade.course.checks import run
from brigade.course.cli import check, progress_file
from brigade.course.table.modules import ROOT, get_module
from brigade.course.table.submission import Snapshot, read
from brigade.grader import grading
from brigade.grader.outcome import make_empty_grading

FIRST = get_module(1)
RIGHT = (ROOT / "solutions" / FIRST.path).read_text()
WRONG = RIGHT.replace("[*module.parameters(), *module.buffers()]", "module.parameters()")

pytestmark = pytest.mark.usefixtures("few_cases")


@pytest.fixture(autouse=True)
def progress(tmp_path_factory, monkeypatch):
    """Use a new progress file, and do not compare modules with their predecessors."""
    monkeypatch.setattr(progress_file, "PROGRESS", tmp_path_factory.mktemp("progress") / "progress.json")
    monkeypatch.setattr(check, "compare", lambda *_: None)


@pytest.fixture
def file(tmp_path):
    """Return the path of a correct module 1 in a directory of its own."""
    path = tmp_path / "submission" / FIRST.path
    path.parent.mkdir(parents=True)
    path.write_text(RIGHT)
    return path


@pytest.fixture
def before_the_second_check(monkeypatch):
    """Return a function that sets what happens when the second check starts."""

    def happens(action, module=run):
        original, started = module.run_check, []

        def run_check(check, *args, **options):
            started.append(check)
            if len(started) == 2:
                action()
            return original(check, *args, **options)

        monkeypatch.setattr(module, "run_check", run_check)

    return happens


@pytest.mark.parametrize(
    ("command", "judged", "saved"),
    [
        pytest.param(("check", 1), RIGHT, WRONG, id="right-check"),
        pytest.param(("next",), WRONG, RIGHT, id="wrong-next"),
        pytest.param(("check", 1), WRONG, RIGHT, id="wrong-check", marks=pytest.mark.extended),
        pytest.param(("next",), RIGHT, WRONG, id="right-next", marks=pytest.mark.extended),
    ],
)
def test_a_save_between_two_checks_is_not_judged(command, judged, saved, file, brigade, before_the_second_check):
    target = file.parents[1]
    file.write_text(judged)
    before_the_second_check(lambda: file.write_text(saved))
    shown = brigade(*command, "--target", target, "--seed", 0).stdout
    assert file.read_text() == saved, "the file was saved while the checks ran"
    assert ("✗ " in shown or "→ Module 1" in shown) == (judged == WRONG), shown
    assert progress_file.find_state(FIRST, target) == "written", "nobody has judged this text"
    file.write_text(judged)
    failed = "fails" if "check" in command else "written"  # `next` records only what passes
    assert progress_file.find_state(FIRST, target) == ("passes" if judged == RIGHT else failed)


def test_all_checks_of_a_grading_run_judge_one_text(file, before_the_second_check):
    before_the_second_check(lambda: file.write_text(WRONG), grading)
    state = grading.grade(file.parents[1], make_empty_grading([FIRST], 1))
    assert file.read_text() == WRONG and state.score == state.max_score == FIRST.points


def test_all_checks_of_a_pytest_run_judge_one_text(file):
    """The second check would find the mistake in the text that is saved after the first one."""
    plugin = f"""
        from pathlib import Path

        def pytest_runtest_logfinish():
            Path({str(file)!r}).write_text({WRONG!r})
    """
    (file.parents[2] / "saver.py").write_text("\n".join(line[8:] for line in plugin.splitlines()))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "saver", "--target", file.parents[1], FIRST.checks]
    command += ["-p", "no:cacheprovider", "-k", "start_equal"]
    environment = os.environ | {"PYTHONPATH": f"{file.parents[2]}"}
    done = hang_guard.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert file.read_text() == WRONG and "2 passed" in done.stdout, done.stdout


def test_a_snapshot_reads_each_file_once(file):
    snapshot = Snapshot(file.parents[1])
    first = snapshot.read(1)
    file.unlink()
    assert snapshot.read(1) == snapshot.read(1, "reference") == first
    assert RIGHT in [text for _, text in first.values()]


NINTH, RECORDS = get_module(9), get_module(13)
JUDGES = (
    NINTH.checks,
    NINTH.tests / "scenario.py",
    get_module(8).tests / "scenario.py",  # which module 9's imports
    ROOT / "tests" / "helpers" / "zero.py",
    ROOT / "tests" / "helpers" / "training.py",  # which ranks run
    ROOT / "brigade" / "course" / "checks" / "borders.py",
    ROOT / "brigade" / "ranks" / "rank" / "strict.py",
    ROOT / "brigade" / "ranks" / "events.py",
)
OTHERS = (
    get_module(14).checks,
    get_module(14).tests / "scenario.py",
    ROOT / "tests" / "mutants.py",
    ROOT / "brigade" / "lab" / "bench.py",
    ROOT / "brigade" / "course" / "cli" / "check.py",
    NINTH.lesson / "README.md",
)


def change(path, monkeypatch):
    """Let the next command find another edition of one of the course's files."""
    monkeypatch.setitem(progress_file.COURSE_FILES, path, path.read_bytes() + b"\n# repaired\n")


@pytest.mark.parametrize(("path", "state"), [(p, "written") for p in JUDGES] + [(p, "passes") for p in OTHERS])
def test_a_pass_ends_with_the_edition_of_its_checks(path, state, monkeypatch):
    target = ROOT / "solutions"
    key = progress_file.hash_submission(NINTH, read(target, NINTH.number))
    progress_file.remember("passed", NINTH.package, key)
    assert progress_file.find_state(NINTH, target) == "passes"
    change(path, monkeypatch)
    assert progress_file.find_state(NINTH, target) == state


def test_the_data_beside_the_checks_belongs_to_them(monkeypatch):
    sources = read("solutions", RECORDS.number)
    before = progress_file.hash_submission(RECORDS, sources)
    change(next(RECORDS.tests.glob("dumps/*.txt")), monkeypatch)
    assert progress_file.hash_submission(RECORDS, sources) != before


def test_a_pass_depends_on_the_earlier_modules_that_the_module_uses():
    sixth = get_module(6)
    sources = read("solutions", 6)
    keys = set()
    for package in ("none", "m05_grad_buffer", "m02_flat_ddp"):
        changed = {name: (path, text + "# mine\n" * (package in name)) for name, (path, text) in sources.items()}
        keys.add(progress_file.hash_submission(sixth, changed))
    assert len(keys) == 2, "module 6 uses module 5, and nothing of module 2"


@pytest.mark.parametrize("command", [("check", 1), ("next",)], ids=["check", "next"])
def test_no_pass_is_recorded_if_the_course_changes_meanwhile(
    command, file, brigade, before_the_second_check, monkeypatch
):
    target = file.parents[1]
    before_the_second_check(lambda: change(FIRST.tests / "scenario.py", monkeypatch))
    assert progress_file.CHANGED in " ".join(brigade(*command, "--target", target).stdout.split())
    assert not progress_file.recall("passed")
