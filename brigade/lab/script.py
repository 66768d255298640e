"""How the lab's own commands, `python -m brigade.lab.NAME`, end. It needs the standard library only."""

from __future__ import annotations

import sys
from collections.abc import Callable

from brigade.course.modules import CourseError
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
