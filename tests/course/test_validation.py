"""The handout, the student edition and the autograder are not built from an inconsistent course."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from brigade.course.cli import main as cli
from brigade.course.table import skeletons, validation
from brigade.course.table.modules import MODULES, ROOT, get_module
from brigade.ranks.errors import UserError
from tools import gradescope, student_edition

FIRST = get_module(1)
CHECKS = f"tests/{FIRST.checks.name}"
SOLUTION = f"solutions/{FIRST.path.as_posix()}"
CHECK = '\n\n@pytest.mark.points(2)\ndef test_five_ranks(submission):\n    """Every gradient is averaged."""\n'
PARAMETERS = "@pytest.mark.points(1)\ndef test_parameters"


@pytest.fixture
def course(tmp_path, monkeypatch) -> Path:
    """Return a copy of the course that tests may break."""
    for name in ("brigade", "lessons", "solutions", "tests"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "*.bak", "*.png"))
    monkeypatch.setattr(skeletons, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.extended  # `make lint` and `make module` look at this, too
def test_the_course_agrees_with_itself():
    validation.validate_course()
    validation.import_checks()


@pytest.mark.parametrize(
    ("file", "old", "new", "fault"),
    [
        # An instructor who follows only half of the steps in `Checks of your own` gets an error.
        (CHECKS, "", CHECK, "10 points"),
        (CHECKS, PARAMETERS, "def test_parameters", "one mark"),
        (CHECKS, PARAMETERS, "@pytest.mark.points()\ndef test_parameters", "one mark"),
        (CHECKS, PARAMETERS, "@pytest.mark.points(0.5)\ndef test_parameters", "one mark"),
        (CHECKS, "def test_buffers_start_equal(", "def test_parameters_start_equal(", "defines test_parameters_start"),
        (CHECKS, "def test_buffers_start_equal(submission)", "def test_buffers_start_equal()", "argument"),
        (CHECKS, 'start_equal(submission):\n    """', 'start_equal(submission):\n    b"""', "docstring"),
        (CHECKS, "import pytest\n", "import pytest as\n", "invalid syntax"),
        (SOLUTION, "### END SOLUTION", "### END", "### END SOLUTION"),
    ],
)  # fmt: skip
def test_a_fault_is_named(course, file, old, new, fault):
    text = (course / file).read_text()
    assert old in text
    (course / file).write_text(text.replace(old, new, 1) if old else text + new)
    (course / "lessons" / get_module(2).package / "hints.md").unlink()
    with pytest.raises(UserError) as caught:
        validation.validate_course(course)
    beginning, first, second = str(caught.value).split("\n  ")
    assert file in first and fault in first and "hints.md" in second and "hints.md" not in beginning


@pytest.mark.parametrize(
    ("text", "fault"),
    [("import no_such_module\n", "ModuleNotFoundError"), ("del test_buffers_start_equal\n", "AttributeError")],
)
def test_checks_that_cannot_be_imported(course, text, fault):
    (course / CHECKS).write_text((course / CHECKS).read_text() + text)
    validation.validate_course(course)  # reading the file shows nothing
    with pytest.raises(UserError) as caught:
        validation.import_checks(course)
    assert CHECKS in str(caught.value) and fault in str(caught.value)


def test_nothing_is_made_from_a_contradiction(tmp_path, monkeypatch, capsys):
    """The table gives module 1 one point more than its checks have."""
    monkeypatch.setattr(validation, "MODULES", (replace(FIRST, points=9), *MODULES[1:]))
    monkeypatch.setattr(gradescope, "ARCHIVE", tmp_path / "gradescope.zip")
    monkeypatch.setattr(student_edition, "OUT", tmp_path / "student")
    monkeypatch.setattr(skeletons, "write", lambda: pytest.fail("skeletons were written"))
    monkeypatch.setattr("sys.argv", ["edition"])
    for make in (lambda: cli.main(["skeletons"]), lambda: gradescope.main([]), student_edition.main):
        assert make() == 2
        assert re.search(r"\b8 points.*modules\.py.*\b9\b", capsys.readouterr().err)
    assert list(tmp_path.iterdir()) == []


def test_what_checks_need_and_the_package_lacks_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setattr(gradescope, "NEEDED", tuple(name for name in gradescope.NEEDED if "scenario" not in name))
    with pytest.raises(UserError, match="ImportError: .*'scenario'"):
        gradescope.build(tmp_path / "gradescope.zip", [], b"secret")
    assert list(tmp_path.iterdir()) == []
