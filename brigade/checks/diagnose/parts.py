"""Find the part of a module to which a line of the submission belongs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from brigade.course.modules import MODULES, CourseError
from brigade.course.skeletons import make_skeletons
from brigade.course.submission import is_sealed, select_files

if TYPE_CHECKING:
    from brigade.course.submission import Sources
    from brigade.runner.ranks import RankFailure

TODO = re.compile(r"^ *# TODO: part \((\w)\)\n", re.MULTILINE)


def describe_part(failure: RankFailure, sources: Sources) -> str:
    """Return a note that names the part of the module in which an exception was raised; "" for code outside a part.

    The innermost frame may be in a helper function that the student added. In that case, use the nearest caller that
    is in a part.
    """
    for file, line, _, _ in reversed(failure.frames):
        for entry in MODULES:
            own = [(path, text) for path, text in select_files(entry, sources).values() if Path(path).name == file]
            if not own or is_sealed(own[0][0]):
                continue
            function = find_function(own[0][1], line)
            try:
                skeletons = make_skeletons(entry).values()
            except (CourseError, OSError):
                continue
            parts = [part for skeleton in skeletons for part in list_parts(skeleton, function)]
            if parts:
                names = " and ".join(f"part ({part})" for part in parts)
                hint = f"For a hint, run `brigade hint {entry.number} {parts[0]}`."
                return f"The line is in {function}, module {entry.number}, {names}. {hint}"
    return ""


def list_parts(skeleton: str, function: str) -> list[str]:
    """Return the letters of the parts in a function of a skeleton."""
    todos = [(match[1], skeleton.count("\n", 0, match.start()) + 1) for match in TODO.finditer(skeleton)]
    return [part for part, line in todos if find_function(skeleton, line) == function]


def find_function(text: str, line: int) -> str:
    """Return the outermost function or method that contains a line, such as "Bucket.launch"; "" if there is none."""
    functions = walk_functions(parse(text))
    return next((name for name, node in functions if node.lineno <= line <= node.end_lineno), "")


def parse(text: str) -> ast.Module:
    """Return the syntax tree of a student's text, or an empty tree if the text is not Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def walk_functions(tree: ast.Module | ast.ClassDef, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield the functions of a module and the methods of its classes, with their names."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from walk_functions(node, f"{prefix}{node.name}.")
