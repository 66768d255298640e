"""Write the files of a new module: python -m tools.module 18 lockstep

This adds a row to the table of modules and copies `tools/template`, which is a small module that works: a wrapper with
one part, one check with its mutants, a reading, hints and a notebook. Replace everything that is marked TODO.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys

from brigade.course.table.modules import MODULES, ROOT

TEMPLATE = ROOT / "tools" / "template"
TABLE = ROOT / "brigade" / "course" / "table" / "modules.py"
ROW = """    Module(99, "m99_scratch", "TODO: a title", 2, 60, 3, ("ScratchDDP",),
           "TODO: what a step launches, and when", ADVANCED, wrapper="ScratchDDP"),
"""


def rename(text: str, number: int, name: str) -> str:
    """Return a text of the template for the module with this number and name."""
    wrapper = "".join(word.capitalize() for word in name.split("_"))
    text = text.replace("99_scratch", f"{number:02}_{name}").replace("Scratch", wrapper)
    return text.replace("99", str(number)).replace("scratch", name)


def make_files(number: int, name: str) -> dict[str, str]:
    """Return the texts of a new module's files by path."""
    paths = [path for path in sorted(TEMPLATE.rglob("*.*")) if path.is_file() and path.suffix != ".pyc"]
    return {
        rename(path.relative_to(TEMPLATE).as_posix(), number, name): rename(path.read_text(), number, name)
        for path in paths
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("number", type=int, help="a number that no module has")
    parser.add_argument("name", help="the name of the module's file, in small letters, such as lockstep")
    options = parser.parse_args()
    number, name = options.number, options.name
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or number in [entry.number for entry in MODULES]:
        parser.error("give a number that no module has, and a name of small letters, such as 18 lockstep")
    files = make_files(number, name)
    if existing := [path for path in files if (ROOT / path).exists()]:
        parser.error(f"{existing[0]} already exists")
    table = TABLE.read_text()
    next_number = min((entry.number for entry in MODULES if entry.number > number), default=None)
    place = table.index(f"    Module({next_number}," if next_number else ")  # fmt: skip\n")
    TABLE.write_text(table[:place] + rename(ROW, number, name) + table[place:])
    for path, text in files.items():
        (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / path).write_text(text)
    command = [sys.executable, "-m", "brigade", "skeletons"]  # a new process, which reads the new table
    return subprocess.run(command, cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
