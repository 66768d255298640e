"""The pytest plugin for graded checks: options, the `submission` fixture, points, and feedback without tracebacks.

pytest selects and reports the graded checks; `run.run_check` runs them, as it does for every command. A check takes one
argument, `submission`, which is a `CheckContext`.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from typing import Any

import pytest

from brigade.course.checks import render
from brigade.course.checks.collect import Check
from brigade.course.checks.outcome import Outcome
from brigade.course.checks.run import Conditions, choose_backend, import_needed, prepare, run_check
from brigade.course.table.listing import list_checks
from brigade.course.table.modules import MODULES
from brigade.course.table.submission import Snapshot, resolve_target
from brigade.ranks.errors import UserError
from brigade.ranks.runner import machine
from brigade.ranks.verdict import CheckFailed

OUTCOME = pytest.StashKey[Outcome]()
CHECK = pytest.StashKey[Check]()
SNAPSHOT = pytest.StashKey[Snapshot]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("brigade", "Bucket Brigade")
    group.addoption("--target", default="lessons", help="lessons (default), solutions, or the directory to check")
    group.addoption("--prior", default="own", choices=("own", "reference"), help="which earlier modules are used")
    group.addoption("--backend", default=None, choices=("gloo", "nccl"), help="default: nccl if there are enough GPUs")
    group.addoption("--share-gpu", action="store_true", help="let NCCL ranks share a GPU, to check correctness only")
    group.addoption("--seed", type=int, default=None, help="repeat the random cases of an earlier run")
    group.addoption("--deadline", type=float, default=None, help="time limit for one run of ranks, in seconds")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "points(n): the points of a graded check")
    config.addinivalue_line("markers", "needs(name): an earlier check, which must pass before `check` runs this one")
    config.addinivalue_line("markers", "parts(heading): the parts that this check and the following checks test")
    if config.getoption("--seed") is None:
        config.option.seed = random.randrange(10**6)
    try:
        config.stash[SNAPSHOT] = Snapshot(config.getoption("--target"))
        if config.getoption("--prior") == "reference":
            resolve_target("solutions")
        if config.getoption("--backend") == "nccl":
            machine.make_nccl_environments(1, share_gpu=False)
    except UserError as error:
        raise pytest.UsageError(str(error)) from None
    if config.getoption("dist", "no") != "no":
        import_needed()  # the processes of `-n` run the tests
    elif not config.getoption("collectonly"):
        prepare()
    if config.getoption("--backend") is None:
        config.option.backend = choose_backend()
    config.option.force_short_summary = True  # in CI, pytest's summary would repeat every message in full


def pytest_report_header(config: pytest.Config) -> str:
    option = config.option
    return f"brigade: target {option.target}, prior {option.prior}, backend {option.backend}, seed {option.seed}"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the graded checks among the tests."""
    checks_by_file = {entry.checks: {check.name: check for check in list_checks(entry)} for entry in MODULES}
    for item in items:
        graded = checks_by_file.get(item.path, {}).get(item.name)
        if graded and isinstance(item, pytest.Function):
            item.stash[CHECK] = Check(**vars(graded), function=item.obj)


@pytest.fixture
def submission() -> None:
    """Declare the argument of every check. `run_check` passes the real `CheckContext` of the module under --target."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a graded check with `run_check`, as every command does."""
    check = pyfuncitem.stash.get(CHECK, None)
    if check is None:
        return None
    option, snapshot = pyfuncitem.config.option, pyfuncitem.config.stash[SNAPSHOT]
    conditions = Conditions(
        seed=option.seed, backend=option.backend, share_gpu=option.share_gpu, deadline_s=option.deadline
    )
    outcome = pyfuncitem.stash[OUTCOME] = run_check(check, snapshot, conditions, option.prior)
    if outcome.exception:
        raise outcome.exception
    if outcome.verdict:
        raise CheckFailed(outcome.verdict)
    return True


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Generator[None, Any, None]:
    """Report the points of a graded check and its feedback, without a traceback."""
    report = (yield).get_result()
    check, outcome = item.stash.get(CHECK, None), item.stash.get(OUTCOME, None)
    if check:
        report.brigade_points = check.points
    if outcome and outcome.verdict and not outcome.exception and call.when == "call":
        report.longrepr = render.format_message(outcome)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the score if graded checks ran."""
    reports = [r for key in ("passed", "failed") for r in terminalreporter.stats.get(key, [])]
    graded = [r for r in reports if hasattr(r, "brigade_points")]
    if graded:
        earned = sum(r.brigade_points for r in graded if r.passed)
        terminalreporter.write_line(f"{earned} of {sum(r.brigade_points for r in graded)} points")
