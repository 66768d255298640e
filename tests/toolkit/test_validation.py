"""The handout, the student edition and the autograder are not built from an inconsistent course."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from brigade.cli import gradescope
from brigade.cli import main as cli
from brigade.course import skeletons, student_edition, validation
from brigade.course.modules import MODULES, ROOT, CourseError, get_module
from brigade.grade import gradescope_package as package

FIRST = get_module(1)
CHECKS = f"tests/{FIRST.checks.name}"
SOLUTION = f"solutions/{FIRST.path.as_posix()}"
CHECK = '''

@pytest.mark.points(2)
def test_five_ranks(submission):
    """Every gradient is the average over five ranks."""
'''


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """Return a copy of the course that tests may break."""
    for name in ("lessons", "solutions", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.bak", "*.png"))
    monkeypatch.setattr(skeletons, "ROOT", tmp_path)
    return tmp_path


def change_file(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def find_fault(course: Path) -> str:
    with pytest.raises(CourseError) as caught:
        validation.validate_course(course)
    beginning, *faults = str(caught.value).split("\n  ")
    assert beginning == "the course is inconsistent:" and len(faults) == 1, faults
    return faults[0]


def test_the_course_agrees_with_itself():
    validation.validate_course()
    validation.import_checks()


def test_a_check_whose_points_are_not_in_the_table(course):
    """An instructor who follows only half of the steps in `Checks of your own` gets an error."""
    (course / CHECKS).write_text((course / CHECKS).read_text() + CHECK)
    assert find_fault(course) == (
        f"{CHECKS}: its checks have 10 points, but brigade/course/modules.py says 8: change one of them"
    )


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("@pytest.mark.points(1)\ndef test_parameters", "def test_parameters", "needs one mark such as"),
        ("@pytest.mark.points(1)\ndef test_parameters", "@pytest.mark.points()\ndef test_parameters", "needs one mark"),
        ("@pytest.mark.points(1)\ndef test_parameters", "@pytest.mark.points(0.5)\ndef test_parameters", "one mark"),
        ("def test_buffers_start_equal(", "def test_parameters_start_equal(", "defines test_parameters_start_equal 2"),
        ("def test_buffers_start_equal(submission)", "def test_buffers_start_equal()", "must take the argument"),
        ('start_equal(submission):\n    """', 'start_equal(submission):\n    b"""', "needs a docstring"),
        ("import pytest\n", "import pytest as\n", "invalid syntax"),
    ],
)  # fmt: skip
def test_a_check_that_a_grader_cannot_use(course, old, new, line):
    change_file(course / CHECKS, old, new)
    assert line in find_fault(course)


def test_files_and_names_of_the_table(course):
    (course / CHECKS).unlink()
    assert find_fault(course) == f"{CHECKS} is missing"
    shutil.copy(ROOT / CHECKS, course / CHECKS)
    change_file(course / SOLUTION, "class NaiveDDP(", "class NaiveDpp(")
    assert find_fault(course) == f"{SOLUTION}: it does not define NaiveDDP, which brigade/course/modules.py names"
    shutil.copy(ROOT / SOLUTION, course / SOLUTION)
    change_file(course / SOLUTION, "### END SOLUTION", "### END")
    assert find_fault(course).startswith(f"{SOLUTION}: ### BEGIN SOLUTION and")


def test_all_faults_are_named_at_once(course):
    change_file(course / CHECKS, "@pytest.mark.points(1)", "@pytest.mark.points(2)")
    (course / "tests" / get_module(2).checks.name).unlink()
    with pytest.raises(CourseError) as caught:
        validation.validate_course(course)
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("import no_such_module\n", f"{CHECKS} cannot be imported: ModuleNotFoundError: No module named"),
        ("raise SystemExit\n", "the checks cannot be imported: no message"),
        (
            "from test_m02_flat_ddp import test_bytes_on_the_wire\n",
            f"{CHECKS}: test_bytes_on_the_wire is not defined there",
        ),
    ],
)
def test_checks_that_cannot_be_imported(course, text, line):
    (course / CHECKS).write_text((course / CHECKS).read_text() + text)
    validation.validate_course(course)  # reading the file shows nothing
    with pytest.raises(CourseError, match=".") as caught:
        validation.import_checks(course)
    assert line in str(caught.value)


@pytest.fixture
def contradiction(monkeypatch):
    """Make the table give module 1 one point more than its checks have."""
    monkeypatch.setattr(validation, "MODULES", (replace(FIRST, points=9), *MODULES[1:]))


def test_nothing_is_made_from_a_contradiction(contradiction, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gradescope, "ROOT", tmp_path)
    monkeypatch.setattr(student_edition, "OUT", tmp_path / "student")
    monkeypatch.setattr(skeletons, "write", lambda: pytest.fail("skeletons were written"))
    monkeypatch.setattr("sys.argv", ["edition"])
    for make in (lambda: cli.main(["skeletons"]), lambda: gradescope.main([]), student_edition.main):
        assert make() == 2
        printed = capsys.readouterr().err
        assert "its checks have 8 points, but brigade/course/modules.py says 9: change one of them" in printed
    assert list(tmp_path.iterdir()) == []


def test_what_checks_need_and_the_package_lacks_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(package, "NEEDED", tuple(name for name in package.NEEDED if "scenario" not in name))
    with pytest.raises(CourseError, match="cannot be imported: ImportError: cannot import name 'scenario'"):
        package.build(tmp_path / "gradescope.zip")
    assert list(tmp_path.iterdir()) == []
