"""What the measuring scripts of the readings and the commands of the lab share.

    def main(run):
        print(run(step, 3)[0])  # what rank 0 returned

    if __name__ == "__main__":
        run_experiment(main, module=3)

Run such a script as `python lessons/m03_overlapped_ddp/measure/order.py`, optionally followed by another directory of
modules. Only `show_progress` needs more than the standard library.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from brigade.course.table.listing import find_part, find_unwritten_parts
from brigade.course.table.modules import HAS_SOLUTIONS
from brigade.course.table.submission import read
from brigade.ranks.errors import UserError
from brigade.ranks.runner.ranks import RankFailure, RankResults, run_ranks
from brigade.ranks.texts import Sources


def run_experiment(main: Callable[[Callable[..., RankResults]], Any], module: int) -> None:
    """Call `main(run)`, where `run` is `run_ranks` with the modules that the user has chosen, up to number `module`.

    Exit with status 1 and one sentence if the directory is missing, or if a module is missing, not written yet, or
    fails.
    """
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument(
        "target", nargs="?", default="lessons", metavar="DIR", help="where the modules are (default: lessons)"
    )
    target = parser.parse_args().target
    try:
        main(functools.partial(run_ranks, packages={"submission": read(target, module)}))
    except UserError as error:
        sys.exit(f"{error}")
    except RankFailure as failure:
        sys.exit(explain_failure(failure, 0))
    except KeyboardInterrupt:
        sys.exit(130)


def explain_failure(failure: RankFailure, number: int, sources: Sources | None = None) -> str:
    """Return a message about a failed run: which part is not written yet, or what happened on which rank.

    `number` is the number of the module that was run. If `sources` are given, name the first part that they lack.
    """
    part = find_part(failure)
    if not part:
        return str(failure)
    unwritten = [other for _, text in (sources or {}).values() for other in find_unwritten_parts(text)]
    part = next((other for other in unwritten if other.module == part.module), part)
    advice = f"`brigade check {part.module}` shows what to do"
    if part.module < number and HAS_SOLUTIONS:
        advice += ", and --prior reference uses the reference's modules"
    return f"{part} is not written yet: {advice}"


@contextlib.contextmanager
def show_progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a progress bar and the remaining time on standard error, if it is a terminal, while the block runs.

    Yield a function that advances the bar by one.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    # Refresh rarely, because the bar runs while steps are timed.
    with Progress(
        *columns, console=console, refresh_per_second=2, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
