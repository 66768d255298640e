"""Check that the course is consistent before a handout, student edition or autograder is made from it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from brigade.course.table import listing, skeletons
from brigade.course.table.modules import MODULES, ROOT, Module
from brigade.ranks.errors import UserError

TABLE = "brigade/course/table/modules.py"

# A program for a separate process, because this one may have imported the checks of another directory.
IMPORTER = """
from brigade.course.checks import collect, run
from brigade.course.table.modules import MODULES
run.import_needed()
for entry in MODULES:
    print(entry.checks.name, flush=True)
    collect.collect([entry])
"""


def validate_course(root: Path = ROOT) -> None:
    """Compare the table of modules with the files of the course in `root`.

    Raise UserError if there are faults. Its message names all of them.
    """
    faults = [fault for entry in MODULES for fault in find_module_faults(entry, root)]
    if faults:
        raise UserError("\n  ".join(["the course is inconsistent:", *faults]))


def import_checks(root: Path = ROOT) -> None:
    """Import the checks of all modules in `root` as a grader does, but start no ranks.

    Raise UserError if that fails.
    """
    done = subprocess.run([sys.executable, "-B", "-c", IMPORTER], cwd=root, capture_output=True, text=True)
    if done.returncode:
        [*_, file], [*_, reason] = (text.splitlines() or [""] for text in (done.stdout, done.stderr))
        raise UserError(f"tests/{file} cannot be imported: {reason}")


def find_module_faults(entry: Module, root: Path) -> Iterator[str]:
    """Yield messages about differences between a module's files and its row in the table."""
    needed = [Path("lessons", entry.package, name) for name in ("README.md", "hints.md")]
    needed += [*(Path("solutions", path) for path in entry.paths), Path("tests", entry.checks.name)]
    if missing := [path for path in needed if not (root / path).is_file()]:
        yield from (f"{path} is missing" for path in missing)
        return
    checks = Path("tests", entry.checks.name)
    try:
        yield from (f"{checks}: {fault}" for fault in find_check_faults(entry, ast.parse((root / checks).read_text())))
    except SyntaxError as error:
        yield f"{checks}, line {error.lineno}: {error.msg}"
    try:
        skeletons.make_skeletons(entry)
    except UserError as error:
        yield f"solutions/{error}"


def find_check_faults(entry: Module, tree: ast.Module) -> list[str]:
    """Return messages about checks that the grader or the handout cannot use."""
    checks = listing.list_check_functions(tree)
    names = Counter(check.name for check in checks)
    faults = [f"it defines {name} {count} times" for name, count in names.items() if count > 1]
    for check in checks:
        points = listing.read_mark(check, "points")
        if type(points) is not int or points <= 0:
            faults.append(f"{check.name} needs one mark such as @pytest.mark.points(2)")
        if not (ast.get_docstring(check) or "").strip():
            faults.append(f"{check.name} needs a docstring; students read its first line")
        if ast.unparse(check.args) != "submission":
            faults.append(f"{check.name} must take the argument `submission` and no other")
    total = sum(listing.read_mark(check, "points") or 0 for check in checks) if not faults else entry.points
    if total != entry.points:
        faults.append(f"its checks have {total} points, but {TABLE} says {entry.points}: change one of them")
    return faults
