"""Start the rank server for checks. The server imports the modules that all scenarios use, so ranks start faster."""

from __future__ import annotations

from brigade.runner import ranks


def start_server() -> None:
    """Start the server unless it is running. It imports torch while this process continues.

    Isolated ranks cannot read the course's files, so they can use only modules that the server has imported.
    """
    ranks.SERVER.preload |= {"brigade.checks.edge_case_models", "brigade.checks.tiny_lm"}
    ranks.SERVER.start()
