"""The entry point that all measuring scripts of the readings share.

    def main(run):
        print(run(step, 3)[0])  # what rank 0 returned

    if __name__ == "__main__":
        run_experiment(main, module=3)

Run such a script as `python lessons/m03_overlapped_ddp/order.py`, optionally followed by another directory of modules.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from typing import Any

from brigade.course.modules import CourseError
from brigade.course.submission import read
from brigade.runner.ranks import RankFailure, RankResults, run_ranks


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
        main(functools.partial(run_ranks, packages={"submission": read(target, module).sources}))
    except CourseError as error:
        sys.exit(f"{error}")
    except RankFailure as failure:
        from brigade.lab.script import explain_failure

        sys.exit(explain_failure(failure, 0))
    except KeyboardInterrupt:
        sys.exit(130)
