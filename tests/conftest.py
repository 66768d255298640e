"""`pytest --module 3`, which `make module MODULE=3` calls, runs the tests about module 3.

Fixtures: `brigade` runs a command, `snapshot` compares a text with a file in `toolkit/snapshots`, and `site` is the
course's site, built once for all tests that read it.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from brigade.course.modules import ROOT, CourseError, Module, get_module
from brigade.runner import ranks

# jsonschema, which nbformat imports, would build 38 parsers for formats of addresses: most of nbformat's import time.
sys.modules.setdefault("rfc3987_syntax", None)

# A user without an account and without HOME, as in some containers, has no home directory. Jupyter does not start then.
if os.path.expanduser("~") == "~":
    HOME = tempfile.TemporaryDirectory()
    os.environ["HOME"] = HOME.name

LOOP = """docs experiments hints messages mutants new_module notebooks prose
requests skeletons wrong_answers"""
Done = namedtuple("Done", "returncode stdout stderr")


@pytest.fixture
def brigade(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command in this process; return its exit status, output and errors."""

    def run(*arguments: object) -> Done:
        from brigade.cli import main as cli

        status = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return Done(status, out, err)

    return run


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """Return the directory of the site, built as `make site` does. The workers of one test run share it."""
    base = tmp_path_factory.getbasetemp()
    shared = base if worker_id == "master" else base.parent
    out = shared / "site"
    with open(shared / "site.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            command = [sys.executable, "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-d", shared / "doctrees"]
            done = subprocess.run([*command, "-c", ROOT / "site", ROOT, out], capture_output=True, text=True)
            assert done.returncode == 0 and not done.stderr, done.stderr
    return out


@pytest.fixture
def snapshot(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with `snapshots/NAME`. With `--update-snapshots`, write it there; then read what git says."""

    def compare(name: str, text: str) -> None:
        path = Path(__file__).parent / "toolkit" / "snapshots" / name
        if request.config.option.update_snapshots:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"there is no {path.name}: --update-snapshots writes it"
        assert text == path.read_text(), "if the new text is right, run this test with --update-snapshots"

    return compare


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--module", metavar="N", help="run only the tests about module N, from the files in LOOP")
    parser.addoption("--update-snapshots", action="store_true", help="write the texts in tests/toolkit/snapshots again")
    parser.addoption("--everything", action="store_true", help="also run the tests marked extended")
    parser.addoption("--situation", metavar="NAME", help="run only this one of tests/situations, on every wrapper")
    parser.addoption("--isolated", action="store_true", help="run mutants and right answers as a grader does, as root")


def pytest_configure(config: pytest.Config) -> None:
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        ranks.SERVER.preload.add("tests.helpers.rank_coverage")
    config.addinivalue_line(
        "markers", "extended: runs only with --everything, or with --module if it is about that module"
    )
    config.addinivalue_line("markers", "sample: a mutant that `make gpu-check` runs")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --module, import only files with tests about one module."""
    name = collection_path.stem
    if config.option.module is None or not collection_path.is_file() or name.removeprefix("test_") in LOOP.split():
        return None
    return not name.startswith(f"test_m{int(config.option.module):02}_") if config.option.module.isdecimal() else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests about one module with --module, and all tests with --everything.

    Without these options, keep the tests that are not marked extended.
    """
    if config.option.everything:
        return
    if config.option.module is None:
        kept = [item for item in items if not item.get_closest_marker("extended")]
    else:
        try:
            entry = get_module(config.option.module)
        except CourseError as error:
            raise pytest.UsageError(str(error)) from None
        kept = [item for item in items if is_about(item, entry)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def is_about(item: pytest.Item, entry: Module) -> bool:
    """Return whether a test is a check of the module, or is about it.

    A test is about a module if one of its parameters is the module, or names its package or its notebook.
    """
    if item.path == entry.checks:
        return True
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [str(value) for value in values if isinstance(value, (str, Path))]
    return entry in values or any(entry.package.removeprefix("m") in name for name in names)
