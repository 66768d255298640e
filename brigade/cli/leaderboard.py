"""brigade leaderboard: rank the entries of a class."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from brigade.cli.console import console
from brigade.course.modules import resolve_results_file


def add_leaderboard_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade leaderboard`."""
    parser.add_argument("directory", metavar="DIR", help="a directory with files from `brigade bench --entry`")
    parser.add_argument("--out", metavar="FILE.md", help="also write the table to this Markdown file")


def run_leaderboard(options: argparse.Namespace) -> int:
    """brigade leaderboard DIR: show the table, and a sentence about each entry that has a problem."""
    from brigade.lab import leaderboard

    page = resolve_results_file(options.out)
    entries, problems = leaderboard.read_entries(Path(options.directory))
    console.print(leaderboard.make_table(entries))
    for sentence in problems:
        console.print(sentence, markup=False)
    if page:
        page.write_text(leaderboard.make_page(entries, time.strftime("%Y-%m-%d")))
        console.print(f"{options.out} written", markup=False)
    return 0
