"""No test reads a clock or limits a time, except through hang_guard.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from brigade.course.table.modules import ROOT

CLOCKS = {"time", "monotonic", "perf_counter", "process_time", "thread_time", "sleep", "alarm", "setitimer"}
CLOCKS |= {f"{name}_ns" for name in CLOCKS}

# The functions that may read a clock or pause, with the reason.
ALLOWED = {
    "support/hang_guard.py": {"run", "wait_until"},
    "conftest.py": {"site"},  # builds the site, which only a hang guard could limit
    "support/in_ranks/basics.py": {"start_daemon"},  # a command that ends at once
    "support/in_ranks/errors.py": {"run_rank"},  # ends a rank that hangs
    "m13_post_mortem/record.py": {"record"},  # a maintainer's program
    "support/given_clock.py": {"__init__"},  # real pauses under a given clock
    "support/in_ranks/link.py": {
        "timed",  # a collective takes at least the time of the link, on any machine
        "pause",
        "wait_for_the_link",
        "train_with_a_late_rank",  # a late rank; what follows from it is computed from the recorded events
    },
    "course/test_large_answers.py": {"time_cpu"},  # processor time, which no load changes much
    "course/test_submission.py": {"__del__"},  # a thread gives way to another
    "ranks/test_deadline.py": {"test_they_get_it_until_they_have_run_enough_or_for_five_times_the_deadline"},
}
# Not looked at: tests/hostile, whose programs have to hang.


def find_clocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield (function, fault) for each use of a clock, and for each limit that is a number."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = node.name
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id in ("time", "signal") and node.attr in CLOCKS:
                yield function, f"line {node.lineno}: {node.value.id}.{node.attr}"
            if (node.value.id, node.attr) in {("subprocess", "run"), ("subprocess", "check_output")}:
                yield function, f"line {node.lineno}: {node.value.id}.{node.attr} instead of hang_guard.run"
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            yield function, f"line {node.lineno}: from time import"
        is_limit = isinstance(node, ast.keyword) and node.arg in ("timeout", "within_s")
        if is_limit and isinstance(node.value, ast.Constant) and isinstance(node.value.value, (int, float)):
            yield function, f"line {node.value.lineno}: {node.arg}={node.value.value}"
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            names = [side.id if isinstance(side, ast.Name) else getattr(side, "attr", "") for side in sides]
            has_limit = any(isinstance(side, ast.Constant) and isinstance(side.value, (int, float)) for side in sides)
            ordered = any(isinstance(op, (ast.Lt, ast.LtE, ast.Gt, ast.GtE)) for op in node.ops)
            if has_limit and ordered and any(name == "seconds" or name.endswith("_s") for name in names):
                yield function, f"line {node.lineno}: a number of seconds is compared with a limit"
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(ast.parse(text), "")


FILES = sorted(path for path in (ROOT / "tests").rglob("*.py") if "hostile/" not in path.as_posix())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(ROOT / "tests").as_posix())
def test_no_verdict_depends_on_a_clock(path: Path) -> None:
    allowed = ALLOWED.get(path.relative_to(ROOT / "tests").as_posix(), set())
    faults = [fault for function, fault in find_clocks(path.read_text()) if function not in allowed]
    assert not faults, f"use hang_guard.py, given_clock.py or in_ranks/gate.py: {faults}"


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - began < 5",
        "time.sleep(0.1)",
        "from time import perf_counter",
        "signal.alarm(60)",
        "process.wait(timeout=20)",
        "subprocess.run(command, cwd=ROOT)",
        "assert graded.seconds < 6",
        "assert 1 <= took_s",
        "expect_nothing_left(temporary, within_s=1)",
    ],
)
def test_a_clock_is_found(line: str) -> None:
    assert list(find_clocks(f"def test():\n    {line}\n"))


def test_what_reads_no_clock_is_not_reported() -> None:
    lines = ["hang_guard.run(command)", "assert one.step_s == 7", "clock.now = 2.5", "assert count < 3"]
    assert not list(find_clocks("\n".join(lines)))
