"""Turn the errors of a command into one line and an exit status."""

from __future__ import annotations

import sys
from collections.abc import Callable

from brigade.ranks.errors import UserError

SETUP = "Run `make setup` once, then `source .venv/bin/activate` in each new terminal."


def run_safely(command: Callable[[], int]) -> int:
    """Run a command. Return its exit status, 2 if it cannot run, or 130 if it was stopped."""
    try:
        return command()
    except UserError as error:
        print(f"brigade: {error}", file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        print(f"brigade: {sys.executable} has no torch. {SETUP}", file=sys.stderr)
        return 2
    except OSError as error:
        reason = f"{error.filename}: {error.strerror}" if error.filename else error  # such as a library of torch
        print(f"brigade: {reason}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nbrigade: stopped", file=sys.stderr)
        return 130
