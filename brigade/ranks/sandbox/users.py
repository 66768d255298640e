"""The users of the sandbox: a grader reserves users, kills their processes, removes files."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from brigade.ranks.errors import UserError
from brigade.ranks.ipc.interrupts import delay_interrupts

FIRST_UID = 64_100  # of the users that run ranks; these users need no accounts
USERS = 64  # the number of graders that can run at a time on one machine
RANKS = 8  # users of one grader; with more ranks, several share one
PRIVATE_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")  # anybody may write to these


@contextlib.contextmanager
def reserve_user() -> Iterator[tuple[int, int | None]]:
    """Reserve a user that no other grader on this machine uses. Yield its id and a descriptor.

    The user stays reserved until all processes have closed the descriptor. Raise UserError if no user is free.
    Only root can run ranks as others. Without root, yield a number for the grader's own user, and None.
    """
    if os.geteuid() != 0:
        yield FIRST_UID, None
        return
    locks = Path("/run/brigade")
    locks.mkdir(mode=0o700, exist_ok=True)
    for uid in range(FIRST_UID, FIRST_UID + USERS):
        with open(locks / str(uid), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            kill_user(uid)  # a grader that was killed may have left processes
            yield uid, lock.fileno()
            return
    raise UserError(f"{USERS} grading runs are already active on this machine")


def list_users(uid: int) -> list[int]:
    """Return the ids of all users that run ranks for the grader with this user: the user itself, and one per rank."""
    return [uid + USERS * i for i in range(0, 2 * RANKS, 2)]


def kill_user(uid: int) -> None:
    """Kill all processes of the user and of its ranks' users, each at once, from a process that they cannot signal.

    This needs root.
    """

    def kill_all() -> bool:
        for user in list_users(uid):
            # We may signal processes of the effective user; the other ids decide who may signal us.
            os.setresuid(uid + USERS, user, 0)
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGKILL)
            os.seteuid(0)
        return True

    run_in_child(kill_all)


def run_in_child(work: Callable[[], bool]) -> bool:
    """Return whether `work` returns True in a child process, which does nothing else."""
    with delay_interrupts(), warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which may hold locks
        pid = os.fork()
        if pid == 0:
            try:
                os._exit(0 if work() else 1)
            finally:
                os._exit(2)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def remove_files(uid: int) -> None:
    """Remove the files of the user and of its ranks' users in the directories that all users share, and below them.

    These users have no group. So they can only have written to directories that everybody may write to, and entered
    those that everybody may enter. Everything else below a large temporary directory is not read.
    """
    entered = ["-type", "d", "(", "!", "-perm", "-o=x", "-prune", "-o", "-perm", "-o=w", "-print0", ")"]
    found = _find(PRIVATE_DIRECTORIES, *entered)
    if directories := [os.fsdecode(path) for path in found.split(b"\0") if path]:
        users = [word for user in list_users(uid) for word in ("-o", "-user", str(user))][1:]
        remove = ["-exec", "rm", "-rf", "--", "{}", "+"]
        _find(directories, "-mindepth", "1", "-maxdepth", "1", "(", *users, ")", *remove)


def _find(directories: Sequence[str], *expression: str) -> bytes:
    """Return the output of `find`. Some directories do not exist, and other processes remove files meanwhile."""
    command = ["find", *directories, "-xdev", *expression]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL).stdout
