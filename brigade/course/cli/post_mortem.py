"""brigade post-mortem: name the rank that broke a job, with module 13's program. Nothing imports torch."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from brigade.course.cli.options import add
from brigade.course.table.modules import ROOT, TARGETS, get_module
from brigade.course.table.submission import find, read_source, resolve_target
from brigade.ranks.errors import UserError

PACKAGED = ROOT / "brigade" / "course" / "post_mortem.py"  # `make package` puts the reference here


def add_post_mortem_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `brigade post-mortem`."""
    parser.add_argument("paths", nargs="+", metavar="PATH", help="a folder with the dumps of a job, or the dumps")
    add(parser, "--html FILE", "also write a page with a picture of the last calls")
    targets = TARGETS.replace("default: lessons", "default: the reference, or lessons without one")
    add(parser, "--target DIR", targets)


def run_post_mortem(options: argparse.Namespace) -> int:
    """brigade post-mortem PATH...: run the program in a process of its own, and return its status: 0, 1 or 2."""
    program = find_program(options.target)
    page = ["--html", options.html] if options.html else []
    return subprocess.call([sys.executable, str(program), *page, "--", *options.paths])


def find_program(target: str | None) -> Path:
    """Return the file that runs: the target's, the reference, or the student's in an edition without solutions."""
    entry = get_module(13)
    if target is None:
        reference = find(ROOT / "solutions", entry) or (PACKAGED if PACKAGED.is_file() else None)
        if reference:
            return reference
    folder = resolve_target(target or "lessons")
    program = find(folder, entry)
    if not program:
        raise UserError(f"{folder} has no {entry.path}")
    if "raise NotImplementedError" in read_source(program, folder):
        raise UserError(f"{program} has parts that nobody has written yet: `brigade check 13` shows them")
    return program
