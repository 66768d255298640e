"""Skeletons are made from the solutions, and documents that list modules from the table: they cannot drift apart.

A solution marks what the student writes, in the convention of nbgrader:

    ### BEGIN SOLUTION part (b)
    ...
    ### END SOLUTION

In the skeleton a TODO and `raise NotImplementedError("module 3, part (b)")` stand there instead. The comment above the
marker says, in both, what the part has to do.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

from brigade.course import handout
from brigade.course.modules import HAS_SOLUTIONS, MODULES, ROOT, CourseError, Module

KEPT = "skeletons"  # where the student edition, which has no solutions, keeps them
REPLACED = Path("out") / "replaced"  # where `write` moves what was in a skeleton's place
BEGIN, END = "### BEGIN SOLUTION", "### END SOLUTION"
BLOCK = re.compile(rf"^( *){BEGIN} (part \(\w\))\n(?:(?! *{BEGIN}).*\n)*? *{END}\n", re.MULTILINE)


def skeleton(entry: Module) -> str:
    """The text of a module's skeleton. Raises CourseError where the solution's marks do not pair up."""
    if not HAS_SOLUTIONS:
        return (ROOT / KEPT / entry.path).read_text()
    solution = (ROOT / "solutions" / entry.path).read_text()

    def unwritten(block: re.Match[str]) -> str:
        indent, part = block.groups()
        return f'{indent}# TODO: {part}\n{indent}raise NotImplementedError("module {entry.number}, {part}")\n'

    text = BLOCK.sub(unwritten, solution)
    if "SOLUTION" in text or text == solution:
        raise CourseError(f"{entry.path}: {BEGIN} and {END} do not pair up")
    return text


def outdated() -> list[Path]:
    """The skeletons and documents that are not what they are made of."""
    files = {ROOT / "lessons" / entry.path: skeleton(entry) for entry in MODULES} | handout.documents(ROOT)
    return [path for path, text in files.items() if not path.is_file() or path.read_bytes() != text.encode()]


def write() -> list[Path]:
    """Write all of them; return the files that changed. What was in a skeleton's place is moved to REPLACED."""
    changed = outdated()
    for entry in MODULES:
        if ROOT / "lessons" / entry.path in changed:
            write_skeleton(entry)
    for path, text in handout.documents(ROOT).items():
        path.write_text(text)
    return changed


def write_skeleton(entry: Module) -> Path:
    """Write one skeleton and return its path. What was in its place is moved to REPLACED."""
    replace(entry, ROOT / REPLACED / entry.package)
    return ROOT / "lessons" / entry.path


def reset(entry: Module) -> Path | None:
    """Put the skeleton into `lessons`. Keep what was there beside it; return where, None if nothing was lost."""
    return replace(entry, (ROOT / "lessons" / entry.path).parent)


def replace(entry: Module, backups: Path) -> Path | None:
    """Put the skeleton into `lessons`. Move what was there into `backups`; return where, None if nothing was lost."""
    path, text = ROOT / "lessons" / entry.path, skeleton(entry)
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
