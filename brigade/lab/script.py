"""Progress bars, error messages and exit statuses of the lab's own commands, `python -m brigade.lab.NAME`.

Only `show_progress` needs more than the standard library.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from brigade.course.modules import HAS_SOLUTIONS, CourseError
from brigade.course.parts import find_unwritten_parts
from brigade.course.submission import Sources
from brigade.runner.ranks import RankFailure


def run_to_status(name: str, run: Callable[[], int]) -> int:
    """Call `run`. Return the exit status that it returns, 2 after an error, or 130 after Ctrl-C.

    After an error, print one line that begins with `name`.
    """
    try:
        return run()
    except (CourseError, RankFailure, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        return 130


def explain_failure(failure: RankFailure, number: int, sources: Sources | None = None) -> str:
    """Return a message about a failed run: which part is not written yet, or what happened on which rank.

    `number` is the number of the module that was run. If `sources` are given, name the first part that they lack.
    """
    part = failure.part
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
