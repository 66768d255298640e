"""brigade gradebook: merge the gradebooks of a term, and take marks into one."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from brigade.course.cli.options import add, resolve_results_file
from brigade.course.table import listing
from brigade.grader import formats, gradebook, marking, merging


def add_gradebook_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `brigade gradebook` and their options."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    merge = actions.add_parser(
        "merge",
        help="merge gradebooks into one",
        description="Merge gradebooks into one, with one row per student and the points of all modules.",
        epilog="Example: brigade gradebook merge week1-final.csv week2-final.csv --keep best --out grades.csv",
    )
    merge.add_argument("gradebooks", nargs="+", metavar="FILE.csv", help="gradebooks, the earliest first")
    keep = "which points to keep if several rows of a student have points for a module"
    add(merge, "--keep", keep, required=True, choices=("best", "last"))
    merge.set_defaults(action=merge_gradebooks)
    add(merge, "--out FILE.csv", "the file to write", required=True)
    extra = "files with checks of yours with which the class was graded, for the maximum of points"
    add(merge, "--extra FILE.py", extra, nargs="+", default=[])
    marks = actions.add_parser(
        "marks",
        help="take the points for written answers from the pages of `brigade mark`",
        description="Write the points and comments that pages of `brigade mark` saved into a gradebook.",
        epilog="Example: brigade gradebook marks week1.csv week1-marks-1.json",
    )
    marks.add_argument("gradebook", metavar="FILE.csv", help="the gradebook of the assignment")
    marks.add_argument("marks", metavar="MARKS.json", nargs="+", help="the files that the pages saved")
    marks.set_defaults(action=take_marks, out=None, extra=[])


def run_gradebook(options: argparse.Namespace) -> int:
    """Run the chosen action. Return the exit status 0."""
    out = resolve_results_file(options.out)
    listing.set_extra(options.extra)
    console = Console(highlight=False, soft_wrap=True, markup=False)
    options.action(options, out, console)
    return 0


def take_marks(options: argparse.Namespace, _: None, console: Console) -> None:
    """Write marks into the gradebook, and list what the instructor should know."""
    lines = marking.write_marks(Path(options.gradebook), [Path(path) for path in options.marks])
    console.print(f"written answers: {options.gradebook}")
    for line in lines:
        console.print(f"  {line}")


def merge_gradebooks(options: argparse.Namespace, out: Path, console: Console) -> None:
    """Merge the gradebooks into `out`. Raise UserError if a file is not a gradebook."""
    tables, lines = {}, []
    for name in options.gradebooks:
        tables[name], told = gradebook.read_gradebook(Path(name))
        lines += [f"{name}: {line}" for line in [*told, *merging.list_duplicates(tables[name])]]
    table, told = merging.merge(tables, options.keep)
    formats.write(out, gradebook.format_rows(table, is_merged=True))
    console.print(f"{count(len(table), 'student')} from {count(len(tables), 'gradebook')}: {out}")
    console.print(f"  one row for each student, with the {options.keep} points for each module (--keep {options.keep})")
    for line in [*lines, *told]:
        console.print(f"  {line}")


def count(number: int, noun: str) -> str:
    """Return text such as "1 student" or "2 students"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
