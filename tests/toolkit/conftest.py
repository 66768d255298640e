"""The course's site, which is built once for all tests that read it."""

from __future__ import annotations

import fcntl
import subprocess
import sys
from pathlib import Path

import pytest

from brigade.course.modules import ROOT


def build_site(course: Path, out: Path) -> str:
    """Build the site of a course as `make site` does. Return the errors and warnings."""
    command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-d", out.with_suffix(".doctrees")]
    done = subprocess.run([*command, "-c", course / "site", course, out], capture_output=True, text=True)
    return done.stderr or f"sphinx ended with status {done.returncode}" * (done.returncode != 0)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the directory of the built site. The workers of one test run share it."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    out = shared / "site"
    with open(shared / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            assert build_site(ROOT, out) == ""
    return out
