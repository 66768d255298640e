"""What a rank may do when a grader started as root runs a stranger's code in it. Linux only.

`confine` is called in the rank, before it has seen any of the submission. From then on the process belongs to an
unprivileged user, has limits on memory, processes and file sizes, dies with the fork server, and cannot read what is
hidden from it: the course's own files (tests, solutions, history), and the directories that the grader names.

Where mount namespaces are allowed, what is hidden is covered, and the temporary directories are the rank's own,
small and gone with it. Where they are not (most containers), the grader has taken the permissions away (`close_off`).
This is not a sandbox: the network is open, other files that anybody may read can be read, and the kernel is shared.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from brigade.course import ROOT, CourseError

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
CLONE_NEWNS = 0x00020000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV = 0x1000, 0x4000, 0x40000, 0x2, 0x4
FIRST_UID = 64_100  # of the users that ranks run as; no account needs to exist
USERS = 64  # graders at a time on one machine
PRIVATE_DIRECTORIES = ("/tmp", "/var/tmp", "/dev/shm")
SECRETS = ("tests", "solutions", ".git")  # of the course


@dataclass(frozen=True)
class Jail:
    """The limits of the ranks of one run. Sizes are in bytes; `memory` and `file` count for each process."""

    uid: int
    hidden: list[str] = field(default_factory=list)
    memory: int = 3 << 30  # beside what torch has mapped already
    processes: int = 400  # of this user, threads included
    file: int = 64 << 20
    disk: int = 256 << 20  # of each private temporary directory


def confine(jail: dict, directory: str, server: int) -> None:
    """Makes this process the user's, with its limits, in `directory`. Raises OSError where that is impossible."""
    mounted = unshare_mounts()
    os.chown(directory, jail["uid"], jail["uid"])
    if mounted:
        cover(jail["hidden"], directory, jail["disk"])
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for which, most in (
        (resource.RLIMIT_AS, mapped + jail["memory"]),
        (resource.RLIMIT_NPROC, jail["processes"]),
        (resource.RLIMIT_FSIZE, jail["file"]),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (most, most))
    os.setgroups([])
    os.setgid(jail["uid"])
    os.setuid(jail["uid"])
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # giving up root has cleared it
    if os.getppid() != server:
        os._exit(1)
    os.umask(0o077)
    os.environ.update(HOME=directory, TMPDIR=directory)


@contextlib.contextmanager
def free_user() -> Iterator[int]:
    """The id of a user that no other grader on this machine has its ranks run as."""
    locks = Path("/run/brigade")
    locks.mkdir(mode=0o700, exist_ok=True)
    for uid in range(FIRST_UID, FIRST_UID + USERS):
        with open(locks / str(uid), "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                continue
            yield uid
            return
    raise CourseError(f"{USERS} gradings run on this machine already")


def kill_user(uid: int) -> None:
    """Kills every process of the user. For the fork server: only a process of the user's own kills all at once."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(uid)
            os.setuid(uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def remove_files(uid: int) -> None:
    """Removes what the user has left in the temporary directories that all users share."""
    for place in PRIVATE_DIRECTORIES:
        for entry in os.scandir(place) if os.path.isdir(place) else ():
            if entry.stat(follow_symlinks=False).st_uid != uid:
                continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                with contextlib.suppress(OSError):
                    os.unlink(entry.path)


def look_around() -> dict:
    """What a confined rank is and can read: for a trial before any submission runs."""
    return {"uid": os.getuid(), "secrets": [name for name in SECRETS if os.access(ROOT / name, os.R_OK)]}


def close_off(paths: Iterable[Path]) -> None:
    """Takes away everybody else's permission to enter or read these."""
    for path in paths:
        if path.exists():
            path.chmod(stat.S_IMODE(path.stat().st_mode) & 0o700)


def unshare_mounts() -> bool:
    """Whether this process has mounts of its own now; False where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) != 0:
        return False
    return libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0


def cover(hidden: Iterable[str], directory: str, disk: int) -> None:
    """Covers the course, what is hidden and the temporary directories; what a rank needs below them is put back."""
    needed = {path for path in (sys.prefix, sys.base_prefix, directory, *sys.path) if os.path.isdir(path)}
    needed |= set(map(os.path.realpath, needed))
    covers = {str(ROOT), *map(os.path.realpath, hidden), *map(os.path.realpath, PRIVATE_DIRECTORIES)}
    covers |= {ancestor for path in needed for ancestor in closed_ancestors(path)}
    covers = {path for path in covers if os.path.isdir(path)}
    outermost = [path for path in sorted(covers) if not any(below(path, other) for other in covers - {path})]
    for place in outermost:
        kept = sorted(path for path in needed if below(path, place))
        handles = {path: os.open(path, os.O_PATH) for path in kept}
        private = place in map(os.path.realpath, PRIVATE_DIRECTORIES)
        mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},mode={'1777' if private else '755'}")
        for path, handle in handles.items():
            os.makedirs(path, mode=0o755, exist_ok=True)
            mount(f"/proc/self/fd/{handle}", path, "", MS_BIND | MS_REC, "")
            os.close(handle)


def closed_ancestors(path: str) -> list[str]:
    """The outermost directory above `path` that other users may not enter, if there is one."""
    for ancestor in reversed(Path(path).parents):
        if not ancestor.stat().st_mode & stat.S_IXOTH:
            return [str(ancestor)]
    return []


def below(path: str, directory: str) -> bool:
    return path.startswith(directory.rstrip("/") + "/")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)
