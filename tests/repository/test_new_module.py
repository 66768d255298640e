"""A new module needs only a row in the table and its own files. The test adds module 99 to a copy of the course."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import hang_guard
import pytest
from installed import install

from brigade.course.table.modules import MODULES, ROOT
from tools.course_files import list_files
from tools.module import make_files

TABLE = "brigade/course/table/modules.py"
FILES = make_files(99, "scratch")
CHECK = "test_scratch_averages_gradients"


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """Return a copy of the course's files."""
    for name in map(str, list_files()):
        if not name.endswith((".png", ".ipynb")) or "template" in name:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(course: Path, *arguments: str, status: int = 0) -> str:
    """Run a Python module or file in the copy of the course. Return its output."""
    _, environment = install(course, course.parent / f"{course.name}-installed")
    command = [sys.executable, *arguments]
    done = hang_guard.run(command, cwd=course, env=environment, capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def read_files(course: Path) -> dict[str, bytes]:
    paths = [path for path in course.rglob("*") if path.is_file()]
    ignored = {"__pycache__", ".pytest_cache", "out"}
    return {path.relative_to(course).as_posix(): path.read_bytes() for path in paths if not ignored & {*path.parts}}


@pytest.mark.extended
def test_a_module_is_added_and_removed(course):
    before = read_files(course)
    run(course, "-m", "tools.module", "99", "scratch")
    after = read_files(course)
    assert after.keys() - before.keys() == FILES.keys() | {"lessons/m99_scratch/scratch.py"}
    assert {name for name, text in before.items() if after[name] != text} == {TABLE, "README.md", "assignments.md"}
    assert f"`{CHECK.removeprefix('test_')}` 2" in after["assignments.md"].decode()
    run(course, "-m", "brigade", "skeletons", "--check")
    assert "2 of 2 points" in run(course, "-m", "brigade", "check", "99", "--target", "solutions")

    # The tests of the module name what its author has to replace.
    pytest_99 = ("-m", "pytest", "-q", "--target", "solutions", "--module", "99")
    lacks = run(course, *pytest_99, "tests/repository/test_new_module.py", status=1)
    assert all(re.search(rf"{re.escape(name)}, line \d+: .*TODO", lacks) for name in FILES), lacks

    for name in FILES:
        (course / name).unlink()
    (course / TABLE).write_bytes(before[TABLE])
    for name in ("solutions", "lessons", "tests"):
        shutil.rmtree(course / name / "m99_scratch")
    run(course, "-m", "brigade", "skeletons")
    assert read_files(course) == before


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_nothing_is_left_to_do(entry):
    left = []
    for name in make_files(entry.number, entry.name):
        lines = (ROOT / name).read_text().splitlines() if (ROOT / name).exists() else ["TODO: this file is missing"]
        left += [f"{name}, line {number}: {line.strip()}" for number, line in enumerate(lines, 1) if "TODO" in line]
    if left:
        pytest.fail("\n".join(left))
