"""Check that the course is consistent before a handout, student edition or autograder is made from it."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

from brigade.course import listing, skeletons
from brigade.course.modules import MODULES, ROOT, CourseError, Module

IMPORT_S = 120.0  # limit for importing all checks and torch

# A program for a separate process, because this one may have imported the checks of another directory.
IMPORTER = """
import importlib, json, sys
sys.path[:1] = sys.argv[1:3]
sys.path.append(sys.argv[3])
from brigade.rank import dynamo_stub
dynamo_stub.import_torch()
found = {}
for name in sys.argv[4:]:
    try:
        found[name] = sorted(key for key in vars(importlib.import_module(name)) if key.startswith("test_"))
    except Exception as error:
        found[name] = f"{type(error).__name__}: {error}"
print("\\n" + json.dumps(found))
"""


def validate_course(root: Path = ROOT) -> None:
    """Compare the table of modules with the files of the course in `root`.

    Raise CourseError if there are faults. Its message names all of them.
    """
    faults = find_table_faults() + [fault for entry in MODULES for fault in find_module_faults(entry, root)]
    if faults:
        raise CourseError("\n  ".join(["the course is inconsistent:", *faults]))


def import_checks(root: Path = ROOT) -> None:
    """Import the checks of all modules in `root` as a grader does.

    Raise CourseError if there are faults. Its message names all of them.
    """
    names = [entry.checks.stem for entry in MODULES]
    command = [sys.executable, "-B", "-c", IMPORTER, str(root / "tests"), str(root), str(ROOT), *names]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=IMPORT_S)
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise CourseError(f"importing the checks took longer than {IMPORT_S:.0f} s") from None
    except (ValueError, IndexError):
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise CourseError(f"the checks cannot be imported: {last}") from None
    faults = []
    for entry in MODULES:
        names_in_file = sorted(check.name for check in listing.list_checks(entry, root))
        found_there = found[entry.checks.stem]
        if isinstance(found_there, str):
            faults.append(f"tests/{entry.checks.name} cannot be imported: {found_there}")
        elif found_there != names_in_file:
            strange = ", ".join(sorted({*found_there} ^ {*names_in_file}))
            faults.append(f"tests/{entry.checks.name}: {strange} is not defined there as a function")
    if faults:
        raise CourseError("\n  ".join(["some checks are broken:", *faults]))


def find_table_faults() -> list[str]:
    """Return messages about errors in the table itself."""
    faults = []
    for before, entry in zip((None, *MODULES), MODULES):
        if not re.fullmatch(rf"m{entry.number:02}_[a-z]\w*", entry.package):
            name = f"m{entry.number:02}_"
            faults.append(f"brigade/course/modules.py: the package of module {entry.number} must begin with {name}")
        if before and entry.number <= before.number:
            numbers = f"module {entry.number} comes after module {before.number}"
            faults.append(f"brigade/course/modules.py: {numbers}, but numbers must increase")
        if entry.points <= 0 or not entry.public:
            faults.append(f"brigade/course/modules.py: module {entry.number} needs points and public names")
    names = [name for entry in MODULES for name in (*entry.public, *(path.name for path in entry.paths))]
    faults += [
        f"brigade/course/modules.py: two modules define {name}" for name in sorted(set(names)) if names.count(name) > 1
    ]
    return faults


def find_module_faults(entry: Module, root: Path) -> list[str]:
    """Return messages about differences between a module's files and its row in the table."""
    solution, checks = Path("solutions", entry.path), Path("tests", entry.checks.name)
    if missing := find_missing_files(entry, root):
        return [f"{path} is missing" for path in missing]
    faults = []
    for path, examine in ((solution, find_solution_faults), (checks, find_check_faults)):
        try:
            faults += [f"{path}: {fault}" for fault in examine(entry, ast.parse((root / path).read_text()))]
        except SyntaxError as error:
            faults.append(f"{path}, line {error.lineno}: {error.msg}")
    try:
        skeletons.make_skeletons(entry)
    except CourseError as error:
        faults.append(f"solutions/{error}")
    return faults


def find_missing_files(entry: Module, root: Path = ROOT) -> list[Path]:
    """Return the missing files of a module in `root` that its skeleton, handout or grading needs."""
    lesson = Path("lessons", entry.package)
    needed = (
        lesson / "README.md",
        lesson / "hints.md",
        *(Path("solutions", path) for path in entry.paths),
        Path("tests", entry.checks.name),
    )
    return [path for path in needed if not (root / path).is_file()]


def find_solution_faults(entry: Module, tree: ast.Module) -> list[str]:
    """Return messages about public names that the solution's main file does not define or import."""
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    defined |= {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    return [
        f"it does not define {name}, which brigade/course/modules.py names"
        for name in entry.public
        if name not in defined
    ]


def find_check_faults(entry: Module, tree: ast.Module) -> list[str]:
    """Return messages about checks that the grader or the handout cannot use."""
    checks = listing.list_check_functions(tree)
    names = [check.name for check in checks]
    faults = [f"it defines {name} {names.count(name)} times" for name in sorted(set(names)) if names.count(name) > 1]
    total = 0
    for check in checks:
        marks = [mark for mark in check.decorator_list if ast.unparse(mark).startswith("pytest.mark.points")]
        values = [getattr(mark.args[0], "value", None) for mark in marks if isinstance(mark, ast.Call) and mark.args]
        if len(marks) != 1 or len(values) != 1 or type(values[0]) is not int or values[0] <= 0:
            faults.append(f"{check.name} needs one mark such as @pytest.mark.points(2)")
        else:
            total += values[0]
        if not (ast.get_docstring(check) or "").strip():
            faults.append(f"{check.name} needs a docstring; students read its first line")
        if ast.unparse(check.args) != "submission":
            faults.append(f"{check.name} must take the argument `submission` and no other")
    if not faults and total != entry.points:
        table = f"brigade/course/modules.py says {entry.points}"
        faults.append(f"its checks have {total} points, but {table}: change one of them")
    return faults
