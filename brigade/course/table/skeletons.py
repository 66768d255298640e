"""Generate the skeletons from the solutions, `answers.md` without answers, and the numbers in documents.

In a solution, comments mark the code that the student writes, as in nbgrader:

    ### BEGIN SOLUTION part (b)
    ...
    ### END SOLUTION

The skeleton has a TODO and `raise NotImplementedError("module 3, part (b)")` instead. The comment above the marker,
which says what the part has to do, stays in the skeleton. Letters give the order in which students write the parts.

If students repair a part instead of writing it, `given.py` beside the solution contains a block with the same markers.
The skeleton contains the code of this block below its `raise`.
"""

from __future__ import annotations

import ast
import functools
import re
import time
from pathlib import Path

from brigade.course.table import handout, written
from brigade.course.table.listing import Part, find_unwritten_parts
from brigade.course.table.modules import HAS_SOLUTIONS, MODULES, ROOT, Module
from brigade.ranks.errors import UserError

STORED_SKELETONS = "skeletons"  # their directory in the student edition, which has no solutions
REPLACED = Path("out") / "replaced"  # `write` moves the files that it replaces here
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
BLOCK = re.compile(rf"^( *){BEGIN} (part \(\w\))\n((?:(?! *{BEGIN}).*\n)*?) *{END}\n", re.MULTILINE)
GIVEN = "given.py"
REPAIR = "  # delete this line, then repair the code below"


def make_skeletons(entry: Module) -> dict[Path, str]:
    """Return the skeletons of all files of a module by their paths, relative to `lessons`.

    Raise UserError if the markers in a solution do not form pairs.
    """
    source = ROOT / ("solutions" if HAS_SOLUTIONS else STORED_SKELETONS)
    texts = {path: (source / path).read_text() for path in entry.paths}
    for path, solution in texts.items() if HAS_SOLUTIONS else ():
        texts[path] = text = BLOCK.sub(lambda block: make_todo(entry, block), solution)
        if "SOLUTION" in text or (text == solution and path == entry.path):
            raise UserError(f"{path}: {BEGIN} and {END} do not form pairs")
    return texts


def make_todo(entry: Module, block: re.Match[str]) -> str:
    """Return the text that replaces a match of BLOCK in the skeleton of a module."""
    indent, part, _ = block.groups()
    given = read_given(entry).get(part, "")
    todo = f'{indent}# TODO: {part}\n{indent}raise NotImplementedError("module {entry.number}, {part}")'
    return f"{todo}{REPAIR if given else ''}\n{given}"


@functools.cache  # one run after another may fail in the same function
def find_part_in(file: str, function: str) -> Part | None:
    """Return the only part that students write in this function of a module's file, or None for another function."""
    entries = [entry for entry in MODULES if file in (path.name for path in entry.paths)]
    texts = [text for entry in entries for path, text in make_skeletons(entry).items() if path.name == file]
    functions = [
        (node.name, ast.get_source_segment(text, node) or "")
        for text in texts
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    ]
    parts = {part for name, text in functions if name == function for part in find_unwritten_parts(text)}
    return parts.pop() if len(parts) == 1 else None


def read_given(entry: Module) -> dict[str, str]:
    """Return the code that students repair, by part, or {} if they write all parts themselves."""
    path = ROOT / "solutions" / entry.package / GIVEN
    return {part: code for _, part, code in BLOCK.findall(path.read_text())} if path.is_file() else {}


def get_answers_path(entry: Module) -> Path:
    """Return the path of the file with written answers, relative to `lessons` or a submission."""
    return Path(entry.package) / written.ANSWERS


def find_outdated() -> dict[Path, str]:
    """Return the new texts of the skeletons, templates and documents that are not up to date."""
    texts = {ROOT / "lessons" / path: text for entry in MODULES for path, text in make_skeletons(entry).items()}
    texts |= {ROOT / name: handout.fill_in((ROOT / name).read_text()) for name in handout.DOCUMENTS}
    readings = {entry: ROOT / "lessons" / entry.package / "README.md" for entry in MODULES}
    texts |= {path: handout.fill_in_header(one, path.read_text()) for one, path in readings.items() if path.is_file()}
    texts |= {ROOT / "lessons" / get_answers_path(entry): written.make_template(entry) for entry in MODULES}
    return {path: text for path, text in texts.items() if not path.is_file() or path.read_bytes() != text.encode()}


def write() -> list[Path]:
    """Write all skeletons, templates and documents. Return the files that changed; the old ones are in REPLACED."""
    outdated = find_outdated()
    for path, text in outdated.items():
        replace_file(path, text, ROOT / REPLACED)
    return list(outdated)


def reset(entry: Module) -> list[Path]:
    """Restore a module's skeletons in `lessons`. Return the paths of the backups beside them."""
    folder = ROOT / "lessons" / entry.package
    moved = [replace_file(ROOT / "lessons" / path, text, folder) for path, text in make_skeletons(entry).items()]
    return [path for path in moved if path]


def replace_file(path: Path, text: str, backups: Path) -> Path | None:
    """Write a file. If the existing file differs, move it to `backups` and return its new path, otherwise None."""
    backup = None
    if path.exists() and path.read_bytes() != text.encode():
        backups.mkdir(parents=True, exist_ok=True)
        backup = backups / f"{path.stem}.{time.strftime('%Y%m%d-%H%M%S')}.bak"
        while backup.exists():
            backup = backup.with_name(backup.stem + "x.bak")
        path.rename(backup)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return backup
