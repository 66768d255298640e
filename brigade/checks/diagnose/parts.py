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

TASK = re.compile(r"((?:^ *#(?! TODO).*\n)*)^ *# TODO: part \((\w)\)\n", re.MULTILINE)


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
            parts = [task for skeleton in skeletons for task in find_tasks(skeleton).get(function, [])]
            if parts:
                tasks = "; ".join(f"part ({letter}){f': {task}' if task else ''}" for letter, task in parts)
                hint = f"For a hint, run `brigade hint {entry.number} {parts[0][0]}`."
                return f"The line is in {function}, module {entry.number}, {tasks.rstrip('.')}. {hint}"
    return ""


def find_tasks(skeleton: str) -> dict[str, list[tuple[str, str]]]:
    """Return the parts of each function of a skeleton, with their tasks.

    A task is the comment above the part or, if there is none, the first line of the function's docstring.
    """
    functions = dict(walk_functions(ast.parse(skeleton)))
    tasks: dict[str, list[tuple[str, str]]] = {}
    for match in TASK.finditer(skeleton):
        line = skeleton.count("\n", 0, match.start(2)) + 1
        task = " ".join(text.strip().removeprefix("#").strip() for text in match[1].splitlines())
        name = find_function(skeleton, line)
        docstring = ast.get_docstring(functions[name]) or ""
        tasks.setdefault(name, []).append((match[2], task or docstring.partition("\n")[0]))
    return tasks


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
