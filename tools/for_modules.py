"""The command line of the programs that work on one module, or on all: python -m tools.figures 3"""

from __future__ import annotations

import argparse
from collections.abc import Callable

from brigade.course.cli.errors import run_safely


def run_for_modules(name: str, description: str | None, work: Callable[[str | None], int]) -> int:
    """Call `work` with the number that the user has given, or with None for all modules. Return the exit status.

    `name` is the program's, and `description` is for --help.
    """
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m tools.{name}", description=description, formatter_class=form)
    parser.add_argument("number", nargs="?", metavar="N", help="the module's number (default: all modules)")
    number = parser.parse_args().number
    return run_safely(lambda: work(number), name)
