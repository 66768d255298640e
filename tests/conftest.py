"""`pytest --module 3`, which `make module MODULE=3` calls, runs the tests about module 3.

`pytest -n auto` distributes the tests over one process more than there are cores, because some tests wait. The longest
tests come first. A test that fails is named at once.

Fixtures: `brigade` runs a command, and `refuse` one that must refuse its input. `snapshot` compares a text with a file
in `support/snapshots`. Ranks wait at a `gate`. With `few_cases`, checks take less time. With `use_switch`, the switch
performs launches as in grading.
"""

from __future__ import annotations

import functools
import gc
import os
import re
import sys
import tempfile
from collections import namedtuple
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from brigade.course.table.modules import MODULES, ROOT, Module, get_module
from brigade.ranks import dynamo_stub
from brigade.ranks.errors import UserError
from brigade.ranks.runner import machine, ranks
from tools.course_files import GIT_VARIABLES

if TYPE_CHECKING:
    from in_ranks.gate import Gate

# jsonschema, which nbformat imports, would build 38 parsers for formats of addresses: most of nbformat's import time.
sys.modules.setdefault("rfc3987_syntax", None)

# A user without an account and without HOME, as in some containers, has no home directory. Jupyter does not start then.
if os.path.expanduser("~") == "~":
    HOME = tempfile.TemporaryDirectory()
    os.environ["HOME"] = HOME.name

# With variables of git, which its hooks have, `git add` in a test would change the index of the hook's repository. With
# those of torchrun, commands would act as ranks. With the others, they print colors where no terminal shows them.
for variable in (*GIT_VARIABLES, *machine.TORCHRUN, "FORCE_COLOR", "TTY_COMPATIBLE", "PYTHON_COLORS"):
    os.environ.pop(variable, None)

dynamo_stub.import_torch()  # before the plugin below imports it with garbage collection
pytest_plugins = ["brigade.testing.plugin"]  # for tests/examples
LOOP = """docs experiments hints messages mutants new_module notebooks prose
requests situations skeletons wrong_answers"""
# The tests that take longest, by the beginnings of their names, so that no process is left alone with one at the end.
LONGEST = """test_browser test_hostile test_edition test_class.py::test_a_class_from test_plan test_train test_bench
test_package test_prose test_new_module test_notebooks test_trace test_grade test_cli test_experiments
test_mutants.py::test_another_style test_mutants.py::test_mutant_is_caught test_lab test_memory test_stored test_success
test_testing test_recording test_ranks test_messages test_class test_parts test_mutants test_wrong_answers
test_validation"""
Done = namedtuple("Done", "returncode stdout stderr")


@pytest.fixture
def brigade(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Run a command in this process; return its exit status, output and errors."""

    def run(*arguments: object) -> Done:
        from brigade.course.cli import main as cli

        capfd.readouterr()
        status = cli.main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return Done(status, out, err)

    return run


@pytest.fixture
def refuse(brigade: Callable[..., Done]) -> Callable[..., str]:
    """Run a command that must end with status 2 and print one line of error and nothing else; return the line."""

    def run(*arguments: object) -> str:
        done = brigade(*arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("brigade: ") and done.stderr.find("\n") == len(done.stderr) - 1, done.stderr
        return done.stderr

    return run


@pytest.fixture
def gate(tmp_path: Path) -> Generator[Gate, None, None]:
    """A gate at which ranks wait for the test."""
    from in_ranks.gate import Gate

    own = Gate(tmp_path)
    yield own
    own.close()


@pytest.fixture
def few_cases(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let checks try one number of ranks, unless with --everything or --module.

    It is for tests that a right answer passes, and of what commands do with the results of checks.
    """
    if not request.config.option.everything and request.config.option.module is None:
        from mutants import take_first_case

        take_first_case(monkeypatch)


@pytest.fixture
def use_switch(few_cases: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the switch perform the launches of few cases on the CPU, as when they are graded."""
    from brigade.grader.isolation import load_witness

    monkeypatch.setattr(ranks.SERVER, "load_witness", load_witness)


@pytest.fixture
def snapshot(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str, str], None]:
    """Compare a text with `snapshots/NAME`. With `--update-snapshots`, write it there; then read what git says.

    The directory of the test, that of the course and the number of its last module are not the same everywhere.
    """
    varying = {str(tmp_path): "(directory)", str(ROOT): "(course)", f"0 to {MODULES[-1].number}": "0 to (last)"}

    def compare(name: str, text: str) -> None:
        for old, new in varying.items():
            text = text.replace(old, new)
        path = Path(__file__).parent / "support" / "snapshots" / name
        if request.config.option.update_snapshots:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert path.exists(), f"there is no {path.name}: --update-snapshots writes it"
        assert text == path.read_text(), "if the new text is right, run this test with --update-snapshots"

    return compare


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--module", metavar="N", help="run only the tests about module N, from the files in LOOP")
    parser.addoption("--update-snapshots", action="store_true", help="write the texts in tests/support/snapshots again")
    parser.addoption("--everything", action="store_true", help="also run the tests marked extended")
    parser.addoption("--situation", metavar="NAME", help="run only this one of tests/situations, on every wrapper")
    parser.addoption("--isolated", action="store_true", help="run mutants and right answers as a grader does")


def pytest_configure(config: pytest.Config) -> None:
    if "COVERAGE_PROCESS_CONFIG" in os.environ:
        ranks.SERVER.preload.add("tests.helpers.rank_coverage")
    config.addinivalue_line(
        "markers", "extended: runs only with --everything, or with --module if it is about that module"
    )
    config.addinivalue_line("markers", "sample: a mutant that `make gpu-check` runs")


def pytest_sessionstart(session: pytest.Session) -> None:
    plugins = session.config.pluginmanager
    if terminal := plugins.get_plugin("terminalreporter"):  # the processes of `-n` have none
        plugins.register(NameOfFailure(terminal))


class NameOfFailure:
    """Print the name of a test when it fails. Otherwise, `-q` prints it at the end of the run."""

    def __init__(self, terminal: pytest.TerminalReporter):
        self._terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write(f"\nFAILED {report.nodeid}" + f" ({report.when})" * (report.when != "call") + "\n")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    return machine.count_cores() + 1


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return a scheduler that gives each process that is free the next test, or the next file with shared work."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if has_shared_work(file) else nodeid

    config.option.loadscopereorder = False  # keep the order of `pytest_collection_modifyitems`
    return Scheduling(config, log)


@functools.cache
def has_shared_work(file: str) -> bool:
    """Return whether the tests of a file share a fixture or a `@cache`, so that one process should run them all."""
    return bool(re.search(r'scope="module"|^@cache$', (ROOT / file).read_text(), re.MULTILINE))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --module, import only files with tests about one module."""
    name = collection_path.stem
    if config.option.module is None or not collection_path.is_file() or name.removeprefix("test_") in LOOP.split():
        return None
    return not name.startswith(f"test_m{int(config.option.module):02}_") if config.option.module.isdecimal() else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without garbage collection, which would free nothing and take a seventh of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()  # later collections skip the tests
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests about one module with --module, and all tests with --everything. The longest tests come first.

    Without these options, keep the tests that are not marked extended.
    """
    items.sort(key=find_rank)
    if config.option.everything:
        return
    if config.option.module is None:
        kept = [item for item in items if not item.get_closest_marker("extended")]
    else:
        try:
            entry = get_module(config.option.module)
        except UserError as error:
            raise pytest.UsageError(str(error)) from None
        kept = [item for item in items if is_about(item, entry)]
    config.hook.pytest_deselected(items=list({*items} - {*kept}))
    items[:] = kept


def find_rank(item: pytest.Item) -> int:
    """Return the place of a test in the list of the longest ones. All others come after them."""
    name = f"{item.path.name}::{item.name}"
    return next((rank for rank, beginning in enumerate(LONGEST.split()) if name.startswith(beginning)), 99)


def is_about(item: pytest.Item, entry: Module) -> bool:
    """Return whether a test is a check of the module, or is about it.

    A test is about a module if one of its parameters is the module, or names its package or its notebook.
    """
    if item.path == entry.checks:
        return True
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [str(value) for value in values if isinstance(value, (str, Path))]
    return entry in values or any(entry.package.removeprefix("m") in name for name in names)
