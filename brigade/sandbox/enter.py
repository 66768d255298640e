"""Isolate a rank that runs a stranger's code. This needs Linux, and a grader that was started as root.

A rank calls `enter` before it receives the submission. From then on, the process belongs to an unprivileged user, has
limits on memory, processes and file sizes, cannot read hidden paths, and ends with the fork server. The kernel refuses
system calls that leave data for a later process of the user or create namespaces. docs/isolation.md lists what this
protects, and what it does not.

If the ranks are `offline`, because they communicate through the grader's switch, they share nothing: every rank has a
user and process ids of its own, and can change no file outside its own directories. The kernel also refuses sockets,
terminals, futexes between processes, file locks and notifications about files. Other ranks use NCCL, and find each
other through a file in the run's directory.

If namespaces are not allowed (in most containers), hidden paths are not masked. Instead, the grader has removed the
permissions on them (`close_off`), and the network and the disk are open. If control groups (of version 2) are writable,
all processes of a grading run share one limit on memory and an equal share of the processors.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import resource
import signal
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from brigade.course.modules import ROOT
from brigade.sandbox import users

PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW = 1, 4
CLONE_NEWNS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x20000000, 0x40000000
MS_BIND, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1000, 0x4000, 0x40000, 0x2, 0x4, 0x8
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
LIBC = ctypes.CDLL(None, use_errno=True)
SECRETS = ("tests", "solutions", ".git", "out")  # of the course
TERMINALS = "/dev/pts"  # their numbers are messages between ranks
NICENESS = 5  # of ranks, so that the grader and other processes have priority
ORDINARY_SHARES = 4  # a grading run gets the processor time of this many ordinary processes

MOUNT_SETATTR, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, 0x8000, 0x1  # the call has this number on all machines
# The commands of fcntl for leases and notifications, and for locks.
SHARING_COMMANDS = (1024, 1025, 1026, 5, 6, 7, 36, 37, 38)
FUTEX_PRIVATE_FLAG = 128
CLONE_NEW_ANY = 0x7E020000  # the flags of clone that create a namespace

AUDIT = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # the machines of the following numbers, in audit.h
RULED = {"seccomp": (317, 277), "clone": (56, 220), "clone3": (435, 435), "futex": (202, 98), "fcntl": (72, 25)}
REFUSED = {
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180), "unshare": (272, 97), "setns": (308, 268), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
}  # fmt: skip
REFUSED_OFFLINE = {
    "socket": (41, 198), "socketpair": (53, 199), "io_uring_setup": (425, 425), "flock": (73, 32),
    "futex_waitv": (449, 449), "futex_wake": (454, 454), "futex_wait": (455, 455), "futex_requeue": (456, 456),
    "inotify_init": (253, -1), "inotify_init1": (294, 26), "fanotify_init": (300, 262),
}  # fmt: skip

MOST_MEMORY = 3 << 30  # bytes of a process of an offline rank, in addition to what torch has mapped
MOST_PROCESSES = 400  # of a user, threads included
MOST_FILE = 64 << 20  # bytes of a file
PRIVATE_LIMITS = f"size={64 << 20},nr_inodes=10000"  # of each private directory, which is in memory
MOST_SENT = 4 << 20  # bytes from each rank; the Python objects in the grader take up to 20 times as much


@dataclass(frozen=True)
class Sandbox:
    """The settings of the sandbox of a run's ranks."""

    uid: int
    reservation: int  # a descriptor from `reserve_user`, which the fork server inherits
    offline: bool = True  # whether the ranks share nothing and communicate through the grader's switch
    hidden: list[str] = field(default_factory=list)
    together: int = 4 << 30  # bytes of resident memory of all processes, if there are control groups


def enter(settings: dict, directory: str, server: int, rank: int) -> str:
    """Move this process into the sandbox, with the working files in `directory`. Raise OSError if that is impossible.

    `settings` are the fields of a `Sandbox`, and `server` is the process id of the fork server. An offline rank gets a
    directory and a user of its own. Return its directory.
    """
    os.nice(max(0, NICENESS - os.nice(0)))
    uid = settings["uid"]
    if settings["offline"]:
        uid = users.list_users(uid)[rank % users.RANKS]
        directory = os.path.join(directory, str(rank))
        os.makedirs(directory, 0o700, exist_ok=True)
    os.chown(directory, uid, uid)
    if unshare_mounts():
        mask_paths(settings, directory, uid)
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the kernel kills ranks first
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for which, most in (
        # CUDA reserves more address space than any limit would allow.
        (resource.RLIMIT_AS, mapped + MOST_MEMORY if settings["offline"] else resource.RLIM_INFINITY),
        (resource.RLIMIT_NPROC, MOST_PROCESSES),
        (resource.RLIMIT_FSIZE, MOST_FILE),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(which, (most, most))
    os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    filter_system_calls(settings["offline"])
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # set it again, because setuid has cleared it
    if os.getppid() not in (server, 0):
        os._exit(1)
    os.umask(0o077)
    os.environ.update(HOME=directory, TMPDIR=directory, TORCHINDUCTOR_CACHE_DIR=os.path.join(directory, "inductor"))
    return directory


def get_call_numbers(calls: dict[str, tuple[int, int]]) -> list[int]:
    """Return the numbers of system calls on this machine."""
    column = list(AUDIT).index(os.uname().machine)
    return [numbers[column] for numbers in calls.values() if numbers[column] >= 0]


def filter_system_calls(offline: bool = False) -> bool:
    """Make the kernel refuse some system calls to this process and its children. Return whether this succeeded.

    The filter recognises calls that create a namespace by their flags. The flags of clone3 are in memory, which a
    filter cannot read. The filter therefore answers clone3 as a kernel without this call would. The C library then uses
    clone.
    """
    if os.uname().machine not in AUDIT:
        return False
    seccomp, clone, clone3, futex, fcntl_call = get_call_numbers(RULED)
    load, equal, at_least, any_bit, answer = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of the Berkeley Packet Filter
    allow, permission, invalid, missing = 0x7FFF0000, *(0x50000 | n for n in (errno.EPERM, errno.EINVAL, errno.ENOSYS))
    number, architecture, first, second = 0, 4, 16, 24  # offsets in the kernel's description of a call
    # (operation, instructions to skip if true, instructions to skip if false, operand)
    program = [(load, 0, 0, architecture), (equal, 1, 0, AUDIT[os.uname().machine]), (answer, 0, 0, permission)]
    program += [(load, 0, 0, number)]
    program += [(at_least, 0, 1, 0x4000_0000), (answer, 0, 0, permission)]  # x86_64's second table of calls
    for call in get_call_numbers(REFUSED | (REFUSED_OFFLINE if offline else {})):
        program += [(equal, 0, 1, call), (answer, 0, 0, permission)]
    program += [(equal, 0, 1, clone3), (answer, 0, 0, missing)]
    rules = [(clone, [(load, 0, 0, first), (any_bit, 0, 1, CLONE_NEW_ANY), (answer, 0, 0, permission)])]
    if offline:  # a C library that gets EINVAL for a futex asks again
        commands = [step for n in SHARING_COMMANDS for step in ((equal, 0, 1, n), (answer, 0, 0, permission))]
        rules.append((fcntl_call, [(load, 0, 0, second), *commands]))
        private = (any_bit, 1, 0, FUTEX_PRIVATE_FLAG)
        rules.append((futex, [(load, 0, 0, second), private, (answer, 0, 0, invalid)]))
    for call, steps in rules:
        program += [(equal, 0, len(steps) + 1, call), *steps, (answer, 0, 0, allow)]
    program += [(answer, 0, 0, allow)]
    code = b"".join(struct.pack("HBBI", *instruction) for instruction in program)
    instructions = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("HxxxxxxP", len(program), ctypes.addressof(instructions))
    # Without the flag, kernels before 5.16 slow a filtered process down.
    return LIBC.syscall(seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, description) == 0


def join_group(settings: dict) -> None:
    """Move this process into the control group of the sandbox's user, if there is one."""
    limits = {"memory.max": settings["together"], "memory.swap.max": 0, "cpu.weight": 100 * ORDINARY_SHARES}
    if group := users.find_control_group(settings["uid"]):
        with contextlib.suppress(OSError):
            group.mkdir(exist_ok=True)
            for name, value in (limits | {"cgroup.procs": os.getpid()}).items():
                if (group / name).exists():
                    (group / name).write_text(str(value))


def probe() -> dict:
    """Return the abilities of a rank in the sandbox, for a test before any submission runs."""
    python = {os.path.dirname(os.__file__), *(path for path in sys.path if path.endswith("site-packages"))}
    return {
        "uid": os.getuid(),
        "secrets": [name for name in SECRETS if has_readable(name)],
        "is_filtered": "Seccomp:\t2" in Path("/proc/self/status").read_text().splitlines(),
        "is_grouped": "/brigade-" in Path("/proc/self/cgroup").read_text(),
        "unreachable": sorted(path for path in python if not os.access(path, os.R_OK | os.X_OK)),
    }


def has_readable(name: str) -> bool:
    """Return whether a directory of the course can be read and contains more than the Python that runs here."""
    with contextlib.suppress(OSError):
        return any(not is_below(sys.executable, entry.path) for entry in os.scandir(ROOT / name))
    return False


def unshare_mounts() -> bool:
    """Give this process its own mounts. Return False if this is refused."""
    return LIBC.unshare(CLONE_NEWNS) == 0 and LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0


@functools.cache
def has_private_mounts() -> bool:
    """Return whether a process of this user may have its own mounts. A child process tries it."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if unshare_mounts() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@contextlib.contextmanager
def separate_processes() -> Iterator[None]:
    """Give each child that is forked in the block its own process ids, if that is allowed.

    The child is process 1. Its parent has the number 0, and all processes that it starts end with it.
    """
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    is_allowed = LIBC.unshare(CLONE_NEWPID) == 0
    try:
        yield
    finally:
        if is_allowed:
            LIBC.setns(own, CLONE_NEWPID)
        os.close(own)


def leave_network() -> None:
    """Give this process and its children a network with only a loopback interface, if that is allowed."""
    if LIBC.unshare(CLONE_NEWNET) == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))


def mask_paths(settings: dict, directory: str, uid: int) -> None:
    """Mask the course, the hidden paths and the temporary directories.

    Then mount again the directories inside them that a rank needs. The directory of an offline rank becomes private,
    too. Only the user's processes remain visible.
    """
    if settings["offline"]:  # not even permissions or times of files change; kernels before 5.12 cannot do this
        attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
        LIBC.syscall(MOUNT_SETATTR, -1, b"/", AT_RECURSIVE, attributes, len(attributes))
    needed = {path for path in (sys.prefix, sys.base_prefix, directory, *sys.path) if os.path.isdir(path)}
    needed |= set(map(os.path.realpath, needed))
    privates = {os.path.realpath(path) for path in users.PRIVATE_DIRECTORIES}
    if not settings["offline"]:  # NCCL uses fast transports only between ranks that have the same /dev/shm
        privates.discard(os.path.realpath("/dev/shm"))
    covers = {str(ROOT), TERMINALS, *map(os.path.realpath, settings["hidden"]), *privates}
    covers |= {ancestor for path in needed for ancestor in list_closed_ancestors(path)}
    covers = {path for path in covers if os.path.isdir(path)}
    outermost = [path for path in sorted(covers) if not any(is_below(path, other) for other in covers - {path})]
    for place in outermost:
        kept = sorted(path for path in needed if is_below(path, place))
        handles = {path: os.open(path, os.O_PATH) for path in kept}
        private = place in privates
        mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, f"{PRIVATE_LIMITS},mode={'1777' if private else '755'}")
        for path, handle in handles.items():
            os.makedirs(path, mode=0o755, exist_ok=True)
            mount(f"/proc/self/fd/{handle}", path, "", MS_BIND | MS_REC, "")
            os.close(handle)
    if settings["offline"]:
        mount("tmpfs", directory, "tmpfs", MS_NOSUID | MS_NODEV, f"{PRIVATE_LIMITS},mode=700,uid={uid},gid={uid}")
    with contextlib.suppress(OSError):
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2")


def list_closed_ancestors(path: str) -> list[str]:
    """Return the directories above `path` that other users cannot enter, the outermost first."""
    return [str(ancestor) for ancestor in reversed(Path(path).parents) if not ancestor.stat().st_mode & stat.S_IXOTH]


def is_below(path: str, directory: str) -> bool:
    """Return whether `path` is inside `directory`."""
    return path.startswith(directory.rstrip("/") + "/")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """Call mount(2). Raise OSError if it fails."""
    if LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), target)


def prctl(option: int, value: int) -> None:
    """Call prctl(2)."""
    LIBC.prctl(option, value, 0, 0, 0)
