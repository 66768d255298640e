"""The command line: the commands of all houses, and the function that runs one of them."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Sequence

from brigade.course.cli.commands import load_tables
from brigade.course.cli.errors import run_safely
from brigade.ranks.errors import UserError
from brigade.ranks.runner import machine, ranks

OTHERS_FIRST_S = 5.0


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
    for command in [command for table in load_tables() for command in table.COMMANDS]:
        added = commands.add_parser(
            command.name, help=command.summary, description=command.summary, epilog=f"Example: {command.example}"
        )
        if command.name in arguments[:1]:
            file, name = command.load(), command.name.replace("-", "_")
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
    except (UserError, SystemExit):
        time.sleep(OTHERS_FIRST_S)  # torchrun ends rank 0 as soon as another rank has ended
        raise SystemExit(2) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return its exit status: 0 for success, 1 for failure, 2 if it cannot run, 130 if stopped."""
    arguments = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        options = parse_silently(arguments) if is_other_rank() else parse(arguments)
        return options.run(options)

    return run_safely(run)


def program(command: Callable[[], int] = main) -> None:
    """Run `main` as the command `brigade`, or another one, then exit without unloading torch, which takes a second."""
    status = command()
    ranks.SERVER.close()
    with contextlib.suppress(OSError):  # the reader has closed the pipe
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)
