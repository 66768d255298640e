"""The command line: the table of commands, and the function that runs one of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

from brigade.course.cli.errors import run_safely
from brigade.course.table.modules import HAS_SOLUTIONS, CourseError
from brigade.ranks.runner import machine, ranks

OTHERS_FIRST_S = 5.0


@dataclass(frozen=True)
class Command:
    """A command. Its file in this folder has `run_NAME(options)` and `add_NAME_arguments(parser)`.

    The file is imported only when the command is used, so that each command imports only what it needs.
    """

    name: str
    file: str
    summary: str
    example: str
    needs_solutions: bool = False


COMMANDS = (
    Command("init", "edition", "Write the course to a new directory.", "brigade init my-course"),
    Command("update", "edition", "Renew a course, and keep your work.", "brigade update my-course"),
    Command("check", "check", "Run the checks of one module or of all modules.", "brigade check 3 --watch"),
    Command("next", "check", "Show what to do next.", "brigade next"),
    Command("hint", "study", "Show the next hint for a part of a module.", "brigade hint 3"),
    Command("reset", "study", "Restore a module's skeleton, and keep your version beside it.", "brigade reset 3"),
    Command("submit", "study", "Create the zip file that you hand in, in the current directory.", "brigade submit"),
    Command("grade", "grade", "Grade one submission, or a directory of submissions.",
            "brigade grade --submission DIR --out results.json", needs_solutions=True),
    Command("gradebook", "gradebook", "Merge gradebooks, or take marks for written answers into one.",
            "brigade gradebook merge week1.csv week2.csv --keep best --out grades.csv", needs_solutions=True),
    Command("term", "term", "Run the assignments of a term from one file.", "brigade term check", needs_solutions=True),
    Command("mark", "term", "Make a page on which a person marks written answers.", "brigade mark week1",
            needs_solutions=True),
    Command("oral", "oral", "Write a sheet for an oral exam from a student's own code.",
            "brigade oral ada.zip --seed 17", needs_solutions=True),
    Command("skeletons", "skeletons", "Generate the skeletons and the handout.", "brigade skeletons --check",
            needs_solutions=True),
    Command("bench", "lab", "Compare all core modules with torch in one run.", "brigade bench --comm-ratio 0.8"),
    Command("trace", "lab", "Draw one training step of a module as a timeline.", "brigade trace 4"),
    Command("post-mortem", "post_mortem", "Name the rank that broke a job, from the flight recorders of its ranks.",
            "brigade post-mortem dumps"),
    Command("break", "mistake", "Put a known mistake into a copy of a module that passes.", "brigade break 3"),
    Command("score", "score", "Score a module that passes, on three fixed problems.", "brigade score 8"),
    Command("plan", "plan", "Predict step time, launches and memory.", "brigade plan --model gpt3-175b --dp 1024"),
)  # fmt: skip


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command's options, with its function as `run`. Exit as argparse does if the arguments are wrong."""
    top = argparse.ArgumentParser(
        prog="brigade",
        description="Bucket Brigade: data-parallel training, built step by step.",
        epilog="Example: brigade check 3",
    )

    def show_help(options: argparse.Namespace) -> int:
        top.print_help()
        return 2

    top.set_defaults(run=show_help)
    commands = top.add_subparsers(metavar="COMMAND")
    for command in COMMANDS:
        if command.needs_solutions and not HAS_SOLUTIONS:
            continue
        added = commands.add_parser(
            command.name, help=command.summary, description=command.summary, epilog=f"Example: {command.example}"
        )
        if command.name in arguments[:1]:
            file = import_module(f"brigade.course.cli.{command.file}")
            name = command.name.replace("-", "_")
            getattr(file, f"add_{name}_arguments")(added)
            added.set_defaults(run=getattr(file, f"run_{name}"))
    return top.parse_args(arguments)


def is_other_rank() -> bool:
    """Return whether torchrun has started this process as a rank other than 0."""
    return machine.is_torchrun() and os.environ["RANK"] != "0"


def parse_silently(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options as `parse` does, but do not say what is wrong, because rank 0 does."""
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
            return parse(arguments)
    except (CourseError, SystemExit):
        time.sleep(OTHERS_FIRST_S)  # torchrun ends rank 0 as soon as another rank has ended
        raise SystemExit(2) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit status: 0 for success, 1 for failure, 2 if it cannot run, 130 if stopped."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not HAS_SOLUTIONS and any(command.needs_solutions for command in COMMANDS if command.name in arguments[:1]):
        print(f"brigade: this edition has no solutions, which `brigade {arguments[0]}` needs", file=sys.stderr)
        return 2

    def run() -> int:
        options = parse_silently(arguments) if is_other_rank() else parse(arguments)
        return options.run(options)

    return run_safely(run)


def program() -> None:
    """Run `main` as the command `brigade`, then exit without unloading torch, which would take a second."""
    status = main()
    ranks.SERVER.close()
    with contextlib.suppress(OSError):  # the reader has closed the pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
