"""`pytest --module 3` runs every test that says something about module 3: `make module MODULE=3`.

The fixture `brigade` is what the tests of commands share.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from brigade.course.modules import CourseError, Module, get_module

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--module", metavar="N", help="only tests about module N, and those about all modules together")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "all_modules: the test is about all modules together")
    config.addinivalue_line("markers", "module_loop: runs only with --module; make test runs one of its kind")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests about one module if the option names one; otherwise those that are not left to such a run."""
    if config.option.module is None:
        kept = [item for item in items if not item.get_closest_marker("module_loop")]
    else:
        try:
            entry = get_module(config.option.module)
        except CourseError as error:
            raise pytest.UsageError(str(error)) from None
        kept = [item for item in items if is_about(item, entry)]
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = kept


def is_about(item: pytest.Item, entry: Module) -> bool:
    """Return whether a test is a check of the module, or is about it, or about all modules together.

    A test is about a module if one of its parameters is the module, or names its package or its notebook.
    """
    if item.path == entry.checks or item.get_closest_marker("all_modules"):
        return True
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    names = [str(value) for value in values if isinstance(value, (str, Path))]
    return entry in values or any(entry.package.removeprefix("m") in name for name in names)
