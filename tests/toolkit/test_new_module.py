"""A new module needs only a row in the table and its own files. The test adds module 99 to a copy of the course."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from brigade.course.handout import BROWSER_NOTEBOOKS
from brigade.course.modules import ROOT

PACKAGE = "m99_scratch"
TABLE = "brigade/course/modules.py"
ROW = '    Module(99, "m99_scratch", "A scratch module", 2, 10, 1, ("ScratchDDP",), "one all-reduce per parameter"),\n'
SOLUTION = f'''"""Module 99: module 1's wrapper, whose last method is written again."""

import torch
import torch.distributed as dist

from ..m01_naive_ddp.naive_ddp import NaiveDDP


class ScratchDDP(NaiveDDP):
    """Like `NaiveDDP`."""

    def finish_grad_sync(self) -> None:
        """Average the gradients over the group."""
        # Sum every gradient over the group, then divide it by the group's size.
        {"### BEGIN"} SOLUTION part (a)
        for parameter in self.module.parameters():
            dist.all_reduce(parameter.grad, group=self.process_group)
            parameter.grad /= dist.get_world_size(self.process_group)
        {"### END"} SOLUTION
'''
CHECKS = '''"""Graded checks of module 99."""

import pytest

from brigade.checks.expectations import expect_gradients
from helpers import training

JOB = {"package": "m99_scratch", "wrapper": "ScratchDDP"}


@pytest.mark.points(2)
def test_scratch_gradients(submission):
    """After finish_grad_sync every gradient is the average over the group."""
    [world] = submission.worlds(2)
    case = submission.case("Plain", world)
    expect_gradients(submission.run(training.train, case.make_jobs(**JOB), world_size=world), case)
'''
MUTANTS = """mutant: summed, not averaged
caught by: test_scratch_gradients
cause: summed
sample: yes
--- a/scratch.py
-            parameter.grad /= dist.get_world_size(self.process_group)
+            pass
"""
HINTS = """# Hints for module 99

## 1. Nudge

**(a)** What did module 1 do?

## 2. Approach

**(a)** One loop over `self.module.parameters()`.

## 3. Almost the code

**(a)**

```python
for parameter in self.module.parameters():
    dist.all_reduce(parameter.grad, group=...)
```
"""
READING = "# Module 99: A scratch module\n\n## Questions\n\n1. How many all-reduces does a step have?\n"
FILES = {
    f"tests/test_{PACKAGE}.py": CHECKS,
    f"tests/{PACKAGE}/mutants.diff": MUTANTS,
    f"tests/{PACKAGE}/alternative.py": SOLUTION,
    f"lessons/{PACKAGE}/README.md": READING,
    f"lessons/{PACKAGE}/hints.md": HINTS,
    f"solutions/{PACKAGE}/answers.md": "# Answers\n\n1. One for each parameter.\n",
}


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """Return a copy of all files that git tracks, with the row and the solution of module 99."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file() and (not name.endswith((".png", ".ipynb")) or name in BROWSER_NOTEBOOKS):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    table = tmp_path / TABLE
    before, _, after = table.read_text().partition(")  # fmt: skip\n")
    table.write_text(f"{before}{ROW})  # fmt: skip\n{after}")
    write(tmp_path, f"solutions/{PACKAGE}/scratch.py", SOLUTION)
    return tmp_path


def write(course: Path, name: str, text: str) -> None:
    (course / name).parent.mkdir(parents=True, exist_ok=True)
    (course / name).write_text(text)


def run(course: Path, *arguments: str, status: int = 0) -> str:
    """Run a Python module in the copy of the course. Return its output."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=course,
        env=os.environ | {"PYTHONPATH": str(course), "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def brigade(course: Path, *arguments: str, status: int = 0) -> str:
    return run(course, "brigade.cli", *arguments, status=status)


def test_a_new_module_needs_its_own_files_and_a_row(course):
    others = {path: path.read_bytes() for path in course.rglob("*") if path.is_file()}

    said = brigade(course, "skeletons", status=2)
    skeleton = course / "lessons" / PACKAGE / "scratch.py"
    assert 'raise NotImplementedError("module 99, part (a)")' in skeleton.read_text(), "its author needs it first"
    assert f"lessons/{PACKAGE}/README.md is missing" in said and f"tests/test_{PACKAGE}.py is missing" in said

    for name, text in FILES.items():
        write(course, name, text)
    brigade(course, "skeletons")
    brigade(course, "skeletons", "--check")
    changed = {path.relative_to(course).as_posix() for path, text in others.items() if path.read_bytes() != text}
    assert changed == {"README.md", "assignments.md"}
    assert f"| 99 | [A scratch module](lessons/{PACKAGE}/README.md) |" in (course / "README.md").read_text()
    handout = (course / "assignments.md").read_text()
    assert "## Module 99: A scratch module" in handout and "| `test_scratch_gradients` | 2 |" in handout

    assert "2 of 2 points" in brigade(course, "check", "99", "--target", "solutions")
    graded = brigade(
        course, "grade", "--submission", "solutions", "--modules", "99", "--seed", "1", "--format", "gradescope",
        "--out", "results.json",
    )  # fmt: skip
    assert json.loads((course / "results.json").read_text())["score"] == 2, graded
