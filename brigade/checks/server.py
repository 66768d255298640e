"""Starting the server of ranks for checks: it imports what the scenarios of every check use, and ranks need not."""

from __future__ import annotations

from brigade.runner import ranks


def start_server() -> None:
    """Start the server, unless it runs; it imports torch while this process goes on.

    Ranks that are isolated cannot read the course's files, so they have only what the server has imported.
    """
    ranks.SERVER.preload.add("brigade.checks.reference")
    ranks.SERVER.start()
