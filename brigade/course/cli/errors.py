"""Turn the errors of a command into one line and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable

from brigade.ranks.errors import UserError
from brigade.ranks.runner.failure import RankFailure

SETUP = "Run `make setup` once, then `source .venv/bin/activate` in each new terminal."


def run_safely(command: Callable[[], int], name: str = "brigade") -> int:
    """Run a command. Return its exit status, 2 if it cannot run, or 130 if it was stopped. A message has its name."""
    try:
        return command()
    except (UserError, RankFailure) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"{name}: {sys.executable} has no torch. {SETUP}", file=sys.stderr)
        return 2
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error  # such as a library of torch
        print(f"{name}: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\n{name}: stopped", file=sys.stderr)
        return 130
