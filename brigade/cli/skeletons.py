"""brigade skeletons: make the skeletons and the handout from the solutions."""

from __future__ import annotations

import argparse

from brigade.cli.console import console, shorten
from brigade.course import skeletons, validation
from brigade.course.modules import MODULES, ROOT


def add_skeletons_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade skeletons`."""
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")


def run_skeletons(options: argparse.Namespace) -> int:
    """brigade skeletons [--check]: write all files that are generated from the solutions, or check them."""
    if not options.check:
        write_first_skeletons()
    validation.validate_course()
    validation.import_checks()
    if options.check:
        outdated = skeletons.find_outdated()
        for path in outdated:
            console.print(f"{shorten(path)} is out of date: run `brigade skeletons`")
        return 1 if outdated else 0
    existing = {path for entry in MODULES for name in entry.paths if (path := ROOT / "lessons" / name).exists()}
    for path in skeletons.write():
        console.print(f"{shorten(path)} written")
        if path in existing:
            console.print(f"  the old version is in {shorten(ROOT / skeletons.REPLACED / path.parent.name)}")
    return 0


def write_first_skeletons() -> None:
    """Write the skeletons of new modules that still lack a reading, hints or checks. Authors need skeletons first."""
    for entry in MODULES:
        is_new = not (ROOT / "lessons" / entry.path).exists() and (ROOT / "solutions" / entry.path).exists()
        if is_new and validation.find_missing_files(entry):
            console.print(f"{shorten(skeletons.write_skeletons(entry))} written")
