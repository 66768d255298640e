"""brigade skeletons: make the skeletons and the handout from the solutions."""

from __future__ import annotations

import argparse

from brigade.course.cli.console import console, shorten
from brigade.course.table import skeletons, validation
from brigade.course.table.modules import ROOT


def add_skeletons_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade skeletons`."""
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")


def run_skeletons(options: argparse.Namespace) -> int:
    """brigade skeletons [--check]: write all files that are generated from the solutions, or check them."""
    validation.validate_course()
    validation.import_checks()
    if options.check:
        outdated = skeletons.find_outdated()
        for path in outdated:
            console.print(f"{shorten(path)} is out of date: run `brigade skeletons`")
        return 1 if outdated else 0
    for path in skeletons.write():
        console.print(f"{shorten(path)} written; an older version is in {shorten(ROOT / skeletons.REPLACED)}")
    return 0
