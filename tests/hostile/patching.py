"""Submissions that change the code that runs in a rank, as if the verdict were made there."""

from pathlib import Path

from hostile import ONE, Hostile, parse, reference, write

NAMES = ("conftest.py", "sitecustomize.py", "usercustomize.py", "torch/__init__.py", "brigade/__init__.py",
         "brigade/ranks/rank/main.py", "pytest.py", "json.py", "helpers/training.py")  # fmt: skip


def write_shadowing_files(directory: Path) -> None:
    """Write the right answer among files that end every process that imports them."""
    reference("")(directory)
    write(directory / "pytest.ini", "[pytest]\naddopts = --collect-only\n")
    for place in (directory, directory / "m01_naive_ddp"):
        for name in NAMES:
            write(place / name, "import os, pathlib\npathlib.Path('/tmp/was-here').touch()\nos._exit(0)\n")


CASES = parse(
    globals(),
    r"""
=== torch.distributed does nothing | 2 | finish_grad_sync launches nothing | long checks=ALL
dist.all_reduce = dist.distributed_c10d.all_reduce = lambda *args, **kwargs: None
=== timers that stand still | 2 | | checks=ONE
import time
for name in ("time", "monotonic", "perf_counter", "process_time"):
    setattr(time, name, lambda: 0.0)
time.sleep = lambda seconds: None
=== the toolkit's own functions, for the skeleton | 0 | part (b) | skeleton
import sys
for name, module in list(sys.modules.items()):
    if name.startswith("brigade.") and name != "brigade.course.table.submission":
        for inner in ("expect", "expect_equal", "verdict", "passed", "launches"):
            setattr(module, inner, lambda *args, **kwargs: True)
try: import brigade.course.checks.expectations, brigade.grader.grading
except ImportError: pass
""",
) + [Hostile("files that Python, pytest or the toolkit would import", write_shadowing_files, 2, checks=ONE)]
