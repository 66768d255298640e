"""List the graded checks of a module. Their file is parsed, not imported."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from brigade.course.modules import ROOT, Module


@dataclass(frozen=True)
class GradedCheck:
    """One graded check. Students read `title`, the first line of its docstring."""

    module: int
    name: str
    title: str
    points: int


def list_checks(entry: Module, root: Path = ROOT) -> list[GradedCheck]:
    """Return the graded checks of a module of the course in `root`, in order."""
    tree = ast.parse((root / "tests" / entry.checks.name).read_text())
    return [
        GradedCheck(entry.number, node.name, (ast.get_docstring(node) or node.name).splitlines()[0], read_points(node))
        for node in list_check_functions(tree)
    ]


def list_check_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of a file that are graded checks, in order."""
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def read_points(check: ast.FunctionDef) -> int:
    """Return the points in the decorator `pytest.mark.points`, or 0 without one."""
    calls = [mark for mark in check.decorator_list if isinstance(mark, ast.Call)]
    return next((mark.args[0].value for mark in calls if ast.unparse(mark.func) == "pytest.mark.points"), 0)
