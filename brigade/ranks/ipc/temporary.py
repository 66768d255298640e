"""Temporary directories that a later process removes if their own process is killed.

Each directory is locked while it is in use. The kernel releases a lock when every process that holds its descriptor has
ended, even if they were killed. The next process that calls `sweep` removes directories without a lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

PREFIX = "brigade-locked-"  # of the directories' names


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """Make a temporary directory, and remove it after the block."""
    directory, lock = make_locked_directory()
    try:
        yield directory
    finally:
        remove(directory)
        os.close(lock)


def make_locked_directory() -> tuple[Path, int]:
    """Make a temporary directory. Return it and the descriptor that holds its lock."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # the `sweep` of another process removed it before it was locked
            lock = lock_directory(directory, fcntl.LOCK_EX)
            if directory.exists():
                return directory, lock
            os.close(lock)


def lock_directory(directory: Path, how: int) -> int:
    """Lock a directory with `fcntl.flock`, and return the descriptor that holds the lock."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, how)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def sweep() -> None:
    """Remove the temporary directories that killed processes left behind."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another process uses the directory, or it belongs to another user
            lock = lock_directory(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(directory)
            os.close(lock)


def remove(path: str | Path) -> None:
    """Remove a file or a directory of any depth, without following links."""
    if os.path.isdir(path) and not os.path.islink(path):
        with contextlib.suppress(RecursionError):
            shutil.rmtree(path, ignore_errors=True)
    if os.path.lexists(path):
        subprocess.run(["rm", "-rf", "--", path], stderr=subprocess.DEVNULL)
