"""A new module needs only a row in the table and its own files. The test adds module 99 to a copy of the course."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brigade.course.handout import BROWSER_NOTEBOOKS
from brigade.course.modules import MODULES, ROOT
from tools.module import TABLE, list_missing, make_files

FILES = make_files(99, "scratch")
CHECK = "test_scratch_averages_gradients"


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """Return a copy of all files that git tracks, in a repository of its own."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and (not name.endswith((".png", ".ipynb")) or name in BROWSER_NOTEBOOKS):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(course: Path, *arguments: str, status: int = 0) -> str:
    """Run a Python module or file in the copy of the course. Return its output."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=course,
        env=os.environ | {"PYTHONPATH": str(course), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def read_files(course: Path) -> dict[str, bytes]:
    paths = [
        path
        for path in course.rglob("*")
        if path.is_file() and not {"__pycache__", ".pytest_cache", "out"} & {*path.parts}
    ]
    return {path.relative_to(course).as_posix(): path.read_bytes() for path in paths}


def test_a_module_is_added_and_removed(course):
    before = read_files(course)
    run(course, "-m", "tools.module", "new", "99", "scratch")
    after = read_files(course)
    made = {"lessons/m99_scratch/scratch.py"}
    assert after.keys() - before.keys() == FILES.keys() - {TABLE} | made
    assert {name for name, text in before.items() if after[name] != text} == {TABLE, "README.md", "assignments.md"}
    assert 'raise NotImplementedError("module 99, part (a)")' in after["lessons/m99_scratch/scratch.py"].decode()
    assert f"`{CHECK.removeprefix('test_')}` 2" in after["assignments.md"].decode()
    run(course, "-m", "brigade.cli", "skeletons", "--check")

    # It works at once, and the list of what it lacks names each of its files.
    assert "2 of 2 points" in run(course, "-m", "brigade.cli", "check", "99", "--target", "solutions")
    grade = ("grade", "--submission", "solutions", "--modules", "99", "--format", "gradescope", "--out", "results.json")
    run(course, "-m", "brigade.cli", *grade)
    assert json.loads((course / "results.json").read_text())["score"] == 2
    lacks = run(course, "-m", "tools.module", "missing", "99", status=1)
    assert all(re.search(rf"^{re.escape(name)}(, line \d+)?: .*TODO", lacks, re.MULTILINE) for name in FILES), lacks

    # An author changes the solution, and makes a mutant of the change.
    solution = course / "solutions/m99_scratch/scratch.py"
    right = solution.read_text()
    run_git(course, "init", "--quiet")
    run_git(course, "add", "solutions")
    solution.write_text(right.replace("/= dist.get_world_size(self.process_group)", "/= 2"))
    run(course, "tests/mutants.py", "99", "divided by a literal 2", CHECK, "--cause", "divided by 2")
    assert solution.read_text() == right
    run(course, "-m", "pytest", "-q", "--target", "solutions", "--module", "99", "tests/toolkit/test_mutants.py")
    shutil.rmtree(course / ".git")

    for name in FILES:
        (course / name).unlink()
    (course / TABLE).write_bytes(before[TABLE])
    for name in ("solutions", "lessons", "tests"):
        shutil.rmtree(course / name / "m99_scratch", ignore_errors=True)
    (course / "results.json").unlink()
    run(course, "-m", "brigade.cli", "skeletons")
    assert read_files(course) == before


def run_git(course: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=course, check=True, capture_output=True)


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_nothing_is_missing(entry):
    assert list_missing(entry) == []
