"""The graded checks of a module, from its file, which is parsed and not imported, and the parts that students write."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from brigade.course.table.modules import Module, get_module
from brigade.ranks.errors import UserError
from brigade.ranks.runner.failure import RankFailure
from brigade.ranks.syntax import find_syntax_error
from brigade.ranks.texts import SEALED

EXTRA: list[Path] = []  # the files with an instructor's own checks (`--extra`)
MODULE = re.compile(r"^MODULE = (\d+)$", re.MULTILINE)  # in such a file: the module to which its checks belong
PART = re.compile(r"module (\d+), part \((\w)\)")
UNWRITTEN = re.compile(rf'raise NotImplementedError\("{PART.pattern}"\)')


@dataclass(frozen=True)
class Part:
    """A part of a module. `str(part)` is the message of the exception that the skeleton raises instead of it."""

    module: int
    letter: str

    def __str__(self) -> str:
        return f"module {self.module}, part ({self.letter})"


def find_part(failure: RankFailure) -> Part | None:
    """Return the part of a skeleton that raised the exception with which a run failed, or None."""
    match = PART.search(failure.message) if failure.error == "NotImplementedError" else None
    return Part(int(match[1]), match[2]) if match else None


def find_unwritten_parts(text: str) -> list[Part]:
    """Return the parts of a module's text that are not written yet, in the order in which students write them."""
    return [Part(int(module), letter) for module, letter in sorted(UNWRITTEN.findall(text))]


@dataclass(frozen=True)
class GradedCheck:
    """One graded check. Students read `title`, the first line of the check's docstring.

    `parts` is the heading above the check. It names the parts that the check needs, such as "Parts (b) to (d): shards".
    If the checks of the module have no headings, `parts` is "". `place` is the check's position in its module, from 1.
    `needs` is the name of an earlier check of the module: while that one fails, this one tells a student nothing new.
    `file` is the file of an instructor's own check, otherwise "".
    """

    module: int
    name: str
    title: str
    points: int
    parts: str = ""
    place: int = 1
    needs: str = ""
    file: str = ""

    @property
    def number(self) -> str:
        """The number by which messages name the check, such as "4.2"."""
        return f"{self.module}.{self.place}"


def find_last_part(text: str) -> str:
    """Return the last part that a text names: "d" of "Parts (b) to (d): shards". Return "" if it names none."""
    return (re.findall(r"\((\w)\)", text) or [""])[-1]


def list_checks(entry: Module) -> list[GradedCheck]:
    """Return the graded checks of a module, in order. An instructor's own are the last ones."""
    checks = list(parse_checks(entry.number, entry.checks.read_text()))
    for path in EXTRA:
        text = path.read_text()
        match = MODULE.search(text)
        for check in parse_checks(entry.number, text) if match and match[1] == str(entry.number) else ():
            checks.append(replace(check, place=len(checks) + 1, file=str(path)))
    return checks


def count_points(entries: Iterable[Module]) -> int:
    """Return the points of all checks of these modules."""
    return sum(check.points for entry in entries for check in list_checks(entry))


def set_extra(paths: Iterable[str | Path]) -> None:
    """Add the checks in these files to those of the course, instead of those in other files.

    Raise UserError, and change nothing, if a file is not Python, or its checks lack something.
    """
    files = [Path(path).resolve() for path in paths]
    names: set[str] = set()
    for file in files:
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{file} cannot be read: {error}") from None
        if message := find_syntax_error(file.name, text):
            raise UserError(message)
        number = MODULE.search(text)
        if not number:
            raise UserError(f"{file}: write a line such as MODULE = 3, the module to which the checks belong")
        names |= {
            check.name for check in parse_checks(get_module(number[1]).number, get_module(number[1]).checks.read_text())
        }
        functions = list_check_functions(ast.parse(text))
        for function in functions:
            name = function.name
            if not isinstance(read_mark(function, "points"), int) or not ast.get_docstring(function):
                raise UserError(f"{file}: {name} needs @pytest.mark.points(2), and a docstring, which students read")
            if name in names:
                raise UserError(f"{file}, line {function.lineno}: there is another check {name}; rename this one")
            names.add(name)
        if not functions:
            raise UserError(f"{file} contains no check: no function begins with test_")
    SEALED.difference_update(EXTRA)
    SEALED.update(files)
    EXTRA[:] = files


@functools.lru_cache(maxsize=64)  # a grading run asks for the same checks again and again
def parse_checks(number: int, text: str) -> tuple[GradedCheck, ...]:
    """Return the graded checks in the text of the file of module `number`, in order."""
    checks, parts = [], ""
    nodes = list_check_functions(ast.parse(text))
    for place, node in enumerate(nodes, 1):
        parts = read_mark(node, "parts") or parts  # a heading applies until the next one
        title = (ast.get_docstring(node) or node.name).splitlines()[0]
        points, needs = read_mark(node, "points") or 0, read_mark(node, "needs") or ""
        checks.append(GradedCheck(number, node.name, title, points, parts, place, needs))
    return tuple(checks)


def list_check_functions(tree: ast.Module) -> list[ast.FunctionDef]:
    """Return the functions of a file that are graded checks, in order."""
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def read_mark(check: ast.FunctionDef, name: str) -> Any:
    """Return the argument of the decorator `pytest.mark.NAME`, or None if there is none."""
    calls = [mark for mark in check.decorator_list if isinstance(mark, ast.Call)]
    values = [mark.args for mark in calls if ast.unparse(mark.func) == f"pytest.mark.{name}"]
    return getattr(values[0][0], "value", None) if len(values) == 1 and values[0] else None
