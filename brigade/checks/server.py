"""Start the rank server for checks. It imports what all scenarios use, so that ranks do not have to."""

from __future__ import annotations

from brigade.runner import ranks


def start_server() -> None:
    """Start the server unless it is running. It imports torch while this process continues.

    Isolated ranks cannot read the course's files, so they have only what the server has imported.
    """
    ranks.SERVER.preload.add("brigade.checks.reference")
    ranks.SERVER.start()
