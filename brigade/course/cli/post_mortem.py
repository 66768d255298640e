"""brigade post-mortem: name the rank that broke a job, with module 13's program. Nothing imports torch."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

from brigade.course.cli.options import add
from brigade.course.table.modules import ROOT, TARGETS, get_module
from brigade.course.table.submission import find, list_texts, read_module, resolve_target
from brigade.ranks.errors import UserError
from brigade.ranks.ipc.temporary import temporary_directory

PACKAGED = ROOT / "brigade" / "course" / "post_mortem.py"  # `make package` puts the reference's program here
ABOVE = "# Module 13 of Bucket Brigade as one file. It needs only Python: python post_mortem.py dump_*.json\n"
IMPORTS = re.compile(r"^from (?:\.\w+|__future__) import (?:\([^)]*\)|.*)\n", re.MULTILINE)  # of the module's files


def add_post_mortem_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `brigade post-mortem`."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a folder with the dumps of a job, or the dumps")
    add(parser, "--html FILE", "also write a page with a picture of the last calls")
    targets = TARGETS.replace("default: lessons", "default: the reference, or lessons without one")
    add(parser, "--target DIR", targets)


def run_post_mortem(options: argparse.Namespace) -> int:
    """brigade post-mortem PATH...: run the program in a process of its own, and return its status: 0, 1 or 2."""
    text = make_program(options.target)
    page = ["--html", options.html] if options.html else []
    with temporary_directory() as folder:
        program = folder / "post_mortem.py"
        program.write_text(text)
        return subprocess.call([sys.executable, str(program), *page, "--", *options.paths])


def make_program(target: str | None = None) -> str:
    """Return the files of module 13 as one: the target's, the reference's, or the student's if there is no reference.

    Raise UserError if a file is missing or not Python, or if parts are not written yet.
    """
    entry = get_module(13)
    if not target and not find(ROOT / "solutions", entry) and PACKAGED.is_file():
        return PACKAGED.read_text()
    target = target or ("solutions" if find(ROOT / "solutions", entry) else "lessons")
    main, *given = list_texts(read_module(resolve_target(target), entry))
    if "raise NotImplementedError" in main:
        raise UserError(f"{target} has parts of module 13 that are not written yet: `brigade check 13` shows them")
    return f"{ABOVE}from __future__ import annotations\n{''.join(IMPORTS.sub('', text) for text in [*given, main])}"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(make_program())
