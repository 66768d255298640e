"""brigade similarity: compare the submissions of a class with each other and with the course's answers."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from brigade.course.modules import MODULES, resolve_results_file
from brigade.grade import classroom, formats, roster, similarity, similarity_report

PRINTED = 10  # pairs shown in the terminal


def add_similarity_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade similarity`."""
    directory = "a directory that contains one directory or archive per student"
    parser.add_argument("directory", metavar="DIR", help=directory)
    parser.add_argument("--roster", metavar="FILE.csv", help="a list of the students, to show their names")
    parser.add_argument("--out", required=True, metavar="FILE.html", help="the HTML file for the report")


def run_similarity(options: argparse.Namespace) -> int:
    """Write the report on similar pairs, and print the first pairs. Return the exit status 0."""
    out = resolve_results_file(options.out)
    rosters = [Path(options.roster).resolve()] if options.roster else []
    everyone = classroom.list_students(Path(options.directory).resolve(), out, *rosters)
    people = [person for path in rosters for person in roster.read_roster(path)[0]]
    everyone = classroom.name_students(everyone, people)
    texts = classroom.read_class(everyone, MODULES)
    pairs = similarity.find_pairs(texts)
    formats.write(out, similarity_report.format_report(pairs, texts))
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(f"{len(everyone)} submissions, {len(pairs)} similar pairs: {out}")
    for pair in pairs[:PRINTED]:
        console.print(f"  {pair.share:4.0%} of module {pair.module}: {' and '.join(pair.names)}")
    return 0
