"""The list of the course's files is the same with git, without git, and in the clone of another user."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import hang_guard
import pytest

from tools import course_files
from tools.course_files import list_files

IGNORED = "# made by commands\n__pycache__/\n*.bak\nout/\nbrigade/course/student.zip\n"
KEPT = [".gitignore", "a b/ä.py", "brigade/student.zip", "lessons/m.py", "lessons/new.py"]
MADE = ["lessons/m.bak", "lessons/__pycache__/m.pyc", "out/x/y.py", "brigade/course/student.zip"]


@pytest.fixture
def course(tmp_path: Path) -> Path:
    for name in (*KEPT, *MADE):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(IGNORED)
    return tmp_path


def test_without_git_the_files_are_those_that_gitignore_does_not_name(course, monkeypatch):
    assert list_files(course) == sorted(map(Path, KEPT)), "a directory that is no clone"
    monkeypatch.setenv("PATH", str(course))
    assert list_files(course) == sorted(map(Path, KEPT)), "a machine without git"


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git")
def test_git_lists_the_same_files_even_for_another_owner(course):
    hang_guard.run(["git", "init", "--quiet"], cwd=course, check=True)
    names = [name for name in KEPT if "new" not in name]
    hang_guard.run(["git", "add", *names], cwd=course, check=True)
    (course / ".gitignore").write_text(IGNORED + "new.py\n")  # git and .gitignore now differ only in this file
    kept = [Path(name) for name in names]
    assert list_files(course) == sorted(kept)
    if os.geteuid() == 0:
        for path in (course, course / ".git"):
            os.chown(path, 54_321, 54_321)
        assert list_files(course) == sorted(kept)
    (course / "lessons" / "m.py").unlink()
    assert list_files(course) == sorted(path for path in kept if path.name != "m.py"), "git lists a file that is gone"


@pytest.mark.skipif(not shutil.which("git"), reason="there is no git")
def test_a_hook_of_another_repository_changes_nothing(course, tmp_path_factory, monkeypatch):
    """Git sets GIT_DIR for its hooks."""
    other = tmp_path_factory.mktemp("other")
    for directory in (course, other):
        hang_guard.run(["git", "init", "--quiet"], cwd=directory, check=True)
    hang_guard.run(["git", "add", *KEPT], cwd=course, check=True)
    monkeypatch.setattr(course_files, "ROOT", course)
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert sorted(course_files.list_tracked_files("**")) == sorted(map(Path, KEPT))
