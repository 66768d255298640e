"""What the lab's own commands, `python -m brigade.lab.NAME`, share: how they show progress, fail and end.

Only `show_progress` needs more than the standard library.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from brigade.course.modules import HAS_SOLUTIONS, CourseError
from brigade.runner.ranks import RankFailure


def ended(name: str, run: Callable[[], int]) -> int:
    """What `run` returns, an exit status; with one line 2 where it cannot be done, and 130 after Ctrl-C."""
    try:
        return run()
    except (CourseError, RankFailure, OSError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        return 130


def explain_failure(failure: RankFailure, number: int) -> str:
    """Return what a failed run tells its user: what is not written yet, or what happened on which rank."""
    part = failure.part
    if not part:
        return str(failure)
    advice = f"`brigade check {part.module}` says what to do"
    if part.module < number and HAS_SOLUTIONS:
        advice += ", and --prior reference uses ours"
    return f"{part} is not written yet: {advice}"


@contextlib.contextmanager
def show_progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Show a bar on a terminal's standard error while the block runs; yield a function that advances it by one."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Seldom: it runs beside what is being timed.
    with Progress(
        *columns, console=console, refresh_per_second=2, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)
