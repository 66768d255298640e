"""Compare the size of the code with its budget, and say which files grew since the budget was set: python -m tools.size

A number here may fall, and should. Raise it only together with what it buys.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

from brigade.course.table.modules import ROOT

LINES = {"brigade": 22_380, "tests": 43_807}  # of Python
MOST_IN_A_FILE, MOST_IN_A_FUNCTION = 480, 67  # lines, in brigade
SHOWN = 10


def find_excesses() -> list[str]:
    """Return a sentence for each budget that is exceeded."""
    found = []
    for folder, budget in LINES.items():
        texts = [path.read_text() for path in (ROOT / folder).rglob("*.py")]
        if (own := count_lines(*texts)) > budget:
            found.append(f"{folder} has {own} lines of Python; its budget is {budget}")
    for path in sorted((ROOT / "brigade").rglob("*.py")):
        found += find_long_parts(path.relative_to(ROOT), path.read_text())
    return found


def find_long_parts(path: Path, text: str) -> list[str]:
    """Return a sentence if the file is too long, and one for each function that is."""
    found = []
    if (lines := count_lines(text)) > MOST_IN_A_FILE:
        found.append(f"{path} has {lines} lines; a file has at most {MOST_IN_A_FILE}")
    for node in ast.walk(ast.parse(text)):
        lines = (node.end_lineno or 0) - node.lineno + 1 if isinstance(node, ast.FunctionDef) else 0
        if isinstance(node, ast.FunctionDef) and lines > MOST_IN_A_FUNCTION:
            found.append(f"{path}: {node.name} has {lines} lines; a function has at most {MOST_IN_A_FUNCTION}")
    return found


def count_lines(*texts: str) -> int:
    return sum(text.count("\n") for text in texts)


def list_grown() -> list[str]:
    """Return the files that grew most since the budget was set, or nothing outside a clone with its history."""
    if not (base := run_git("log", "-1", "--format=%H", "--", __file__)):
        return []
    rows = [line.split("\t") for line in run_git("diff", "--numstat", *base, "--", *LINES) if line.endswith(".py")]
    grown = sorted(((int(more) - int(less), name) for more, less, name in rows), reverse=True)
    return [f"  +{lines} {name}" for lines, name in grown[:SHOWN] if lines > 0]


def run_git(*words: str) -> list[str]:
    """Return the lines that a command of git prints, or none if it fails."""
    return subprocess.run(["git", "-C", ROOT, *words], capture_output=True, text=True).stdout.splitlines()


def main() -> int:
    """Print what exceeds a budget. Return 1 if anything does, else 0."""
    excesses = find_excesses()
    grown = list_grown() if excesses else []
    for line in [*excesses, *(["these files grew most since the budget was set:", *grown] if grown else [])]:
        print(line, file=sys.stderr)
    return 1 if excesses else 0


if __name__ == "__main__":
    sys.exit(main())
