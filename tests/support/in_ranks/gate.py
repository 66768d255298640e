"""A gate at which ranks wait for the test, so that a test can decide when they go on."""

from __future__ import annotations

import os
from pathlib import Path


class Gate:
    """The test's side: a named pipe. Each rank that passes takes one byte out of it."""

    def __init__(self, directory: Path):
        self.path = str(directory / "gate")
        os.mkfifo(self.path)
        self._pipe = os.open(self.path, os.O_RDWR)  # does not wait for a reader

    def let_pass(self, count: int = 1) -> None:
        """Let this many ranks pass, now or when they arrive."""
        os.write(self._pipe, bytes(count))

    def close(self) -> None:
        os.close(self._pipe)


def wait_at(path: str) -> None:
    """Wait in a rank until the test lets it pass."""
    with open(path, "rb", buffering=0) as pipe:
        pipe.read(1)
