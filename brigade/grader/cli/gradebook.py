"""brigade gradebook: merge the gradebooks of a term, and export them for a platform."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from brigade.course.cli.options import add, resolve_results_file
from brigade.course.table import listing
from brigade.course.table.modules import CourseError
from brigade.grader import formats, gradebook, marking, merging


def add_gradebook_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the actions of `brigade gradebook` and their options."""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    merge = actions.add_parser(
        "merge",
        help="merge gradebooks into one",
        description="Merge gradebooks into one, with one row per student and the points of all modules.",
        epilog="Example: brigade gradebook merge week2.csv week2-late.csv --keep best --late week2-late.csv=20 "
        "--out grades.csv",
    )
    merge.add_argument("gradebooks", nargs="+", metavar="FILE.csv", help="gradebooks, the earliest first")
    keep = "which points to keep if several rows of a student have points for a module"
    add(merge, "--keep", keep, required=True, choices=("best", "last"))
    late = "take this percentage off the points in a gradebook; you can repeat this option"
    add(merge, "--late FILE.csv=PERCENT", late, action="append", default=[])
    merge.set_defaults(action=merge_gradebooks)
    export = actions.add_parser(
        "export",
        help="write a gradebook for Canvas or Moodle",
        description="Write the points of each module in the format that Canvas or Moodle imports. The gradebook needs "
        "the columns of a roster: grade the class with --roster.",
        epilog="Example: brigade gradebook export grades.csv --to canvas --out canvas.csv",
    )
    export.add_argument("gradebook", metavar="FILE.csv", help="a gradebook, merged or not")
    add(export, "--to", "the platform", required=True, choices=tuple(merging.PLATFORMS))
    add(export, "--keep", f"{keep} (default: best)", default="best", choices=("best", "last"))
    export.set_defaults(action=export_gradebook)
    for action in (merge, export):
        add(action, "--out FILE.csv", "the file to write", required=True)
        extra = "files with checks of yours with which the class was graded, for the maximum of points"
        add(action, "--extra FILE.py", extra, nargs="+", default=[])
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
    """Merge the gradebooks into `out`. Raise CourseError if a file is not a gradebook, or if --late is malformed."""
    penalties = dict(parse_penalty(text, options.gradebooks) for text in options.late)
    tables, lines = {}, []
    for name in options.gradebooks:
        tables[name], told = merging.read_gradebook(Path(name))
        lines += [f"{name}: {line}" for line in [*told, *merging.list_duplicates(tables[name])]]
    table, told = merging.merge(tables, options.keep, penalties)
    formats.write(out, gradebook.format_table(table))
    console.print(f"{count(len(table), 'student')} from {count(len(tables), 'gradebook')}: {out}")
    print_lines(console, [*lines, *told], options.keep)


def count(number: int, noun: str) -> str:
    """Return text such as "1 student" or "2 students"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def print_lines(console: Console, lines: Sequence[str], keep: str) -> None:
    """Print by which rule points were chosen, and the lines about what to know."""
    console.print(f"  one row for each student, with the {keep} points for each module (--keep {keep})")
    for line in lines:
        console.print(f"  {line}")


def parse_penalty(text: str, names: list[str]) -> tuple[str, float]:
    """Return the gradebook and the percentage in text such as "week2-late.csv=20". Raise CourseError for other text."""
    name, _, percent = text.rpartition("=")
    value = gradebook.parse_points(percent)
    if name not in names or value is None or value > 100:
        raise CourseError(
            f"--late {text}: write it as FILE.csv=PERCENT, with one of the gradebooks to merge and at most 100 percent"
        )
    return name, value


def export_gradebook(options: argparse.Namespace, out: Path, console: Console) -> None:
    """Export the gradebook to `out`, and list what the instructor should know."""
    table, lines = merging.read_gradebook(Path(options.gradebook))
    text, number, told = merging.export(table, options.to, options.keep)
    formats.write(out, text)
    console.print(f"{count(number, 'student')} for {options.to.capitalize()}: {out}")
    print_lines(console, [*lines, *told], options.keep)
