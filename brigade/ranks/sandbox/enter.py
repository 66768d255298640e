"""Isolate a rank that runs a stranger's code. This needs Linux.

A rank calls `enter` before it receives the submission. docs/security.md lists what this protects, and what it does
not.

If the grader is root, ranks have users of their own. If it is an ordinary user, the fork server has moved into a user
namespace (`become`), where it may do the rest of what root may do. Its ranks still belong to the grader's user. So they
must have their own mounts and process ids, and their mounts hide everything except SYSTEM and Python.

If the ranks are `offline`, because they communicate through the grader's witness, they share nothing: every rank has a
user and process ids of its own, and can change no file outside its own directories. It sees no counters of the kernel
except PROCESS_FILES, because most of them depend on other processes, even some of those about itself.
The kernel also refuses all system calls that are not in a list (ALLOWED), such as those for sockets, file locks,
notifications about files, and calls that tell which pages of a file are in memory, or drop them. Other ranks use NCCL,
and find each other through a file in the run's directory.

If root may not make namespaces (in most containers), hidden paths are not masked. Instead, the grader has removed the
permissions on them (`grade/isolation.py`), and the network and the disk are open.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import resource
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from brigade.ranks.sandbox import users

PR_SET_PDEATHSIG, PR_GET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 21, 38
SECCOMP_MODE_FILTER = 2
CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
CAPABILITY_VERSION = 0x20080522
MS_BIND, MS_MOVE, MS_REC, MS_PRIVATE, MS_NOSUID, MS_NODEV, MS_NOEXEC = 0x1000, 0x2000, 0x4000, 0x40000, 0x2, 0x4, 0x8
SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
LIBC = ctypes.CDLL(None, use_errno=True)
SYSTEM = {"/bin", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/nix", "/proc", "/sbin", "/usr"}
TERMINALS = "/dev/pts"  # their numbers are messages between ranks
PROCESS_FILES = ("stat", "statm", "status")  # of /proc: the times, the memory and the identity of one process
NICENESS = 5  # of ranks, so that the grader and other processes have priority

# System calls that the kernel refuses to ranks that are not offline.
REFUSED = ["add_key", "request_key", "keyctl", "shmget", "msgget", "semget", "mq_open", "unshare", "setns", "ptrace"]
REFUSED += ["process_vm_readv", "process_vm_writev"]
# Offline ranks may only use these calls, apart from clone, futex and fcntl. No call that is missing here is needed by
# Python, torch or the C library for memory, threads, files, processes, signals, time or the channel that a rank has.
ALLOWED = """
    access alarm arch_prctl brk chdir chmod clock_getres clock_gettime clock_nanosleep close close_range
    copy_file_range dup dup2 dup3 epoll_create epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2 execve
    exit exit_group faccessat faccessat2 fallocate fchdir fchmod fchmodat fdatasync fgetxattr flistxattr fork
    fstat fstatfs fsync ftruncate get_robust_list getcpu getcwd getdents getdents64 getegid geteuid getgid
    getgroups getitimer getpgid getpgrp getpid getppid getpriority getrandom getresgid getresuid getrlimit
    getrusage getsid getsockname getsockopt gettid gettimeofday getuid getxattr ioctl kill lgetxattr link linkat
    listxattr llistxattr lseek lstat madvise mkdir mkdirat mmap mprotect mremap msync munmap nanosleep
    newfstatat open openat pause pipe pipe2 poll ppoll prctl pread64 preadv prlimit64 pselect6 pwrite64 pwritev
    read readlink readlinkat readv recvfrom rename renameat renameat2 restart_syscall rmdir rseq rt_sigaction
    rt_sigpending rt_sigprocmask rt_sigreturn rt_sigsuspend rt_sigtimedwait sched_get_priority_max
    sched_get_priority_min sched_getaffinity sched_getattr sched_getparam sched_getscheduler sched_setaffinity
    sched_setscheduler sched_yield select sendfile sendto set_robust_list set_tid_address setitimer setpgid
    setpriority setrlimit setsid sigaltstack stat statfs statx symlink symlinkat tgkill time times tkill
    truncate umask uname unlink unlinkat utimensat vfork wait4 waitid write writev
"""
# A C library that gets ENOSYS from a call that is newer than Linux 5.0 uses older ones.
NEWER = range(424, 600)
COMMANDS = (0, 1, 2, 3, 4, 1030, 1032)  # of fcntl: copies of descriptors, flags, the size of a pipe
MOUNT_SETATTR, CLONE3 = 442, 435
AT_RECURSIVE, MOUNT_ATTR_RDONLY = 0x8000, 0x1
CLONE_NEW_ANY = 0x7E020000  # the flags of clone that create a namespace
FUTEX_PRIVATE_FLAG = 128
SCMP_ACT_ALLOW, SCMP_ACT_ERRNO, SCMP_CMP_MASKED_EQ = 0x7FFF0000, 0x50000, 7
SCMP_FLTATR_ACT_BADARCH = 2
SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_SPEC_ALLOW, BPF_INSTRUCTION = 1, 4, 8  # the last in bytes

MOST_MEMORY = 3 << 30  # bytes of a process of an offline rank, in addition to what torch has mapped
MOST_PROCESSES = 400  # of a user, threads included
MOST_FILE = 64 << 20  # bytes of a file
PRIVATE_SIZE = 64 << 20  # bytes of each private directory, which is in memory
# If a run limits the memory of its ranks, they cannot keep much of it elsewhere: in files, pipes or other processes.
SCARCE_FILE, SCARCE_DESCRIPTORS, SCARCE_PROCESSES = 1 << 20, 64, 1
MMAP_THRESHOLD = 1 << 17  # bytes; larger blocks leave no gaps in memory when they are freed
M_MMAP_THRESHOLD = -3


@dataclass(frozen=True)
class Sandbox:
    """The settings of the sandbox of a run's ranks."""

    uid: int
    reservation: int | None  # a descriptor from `reserve_user`, which the fork server inherits, or None without root
    offline: bool = True  # whether the ranks share nothing and communicate through the grader's witness
    hidden: list[str] = field(default_factory=list)


def enter(settings: dict, directory: str, place: int) -> str:
    """Move this process into the sandbox, with the working files in `directory`. Raise OSError if that is impossible.

    `settings` are the fields of a `Sandbox` and the "memory" of a run's ranks (`RunOptions`). An offline rank gets a
    directory and, from root, a user of its own. Return its directory.
    """
    os.nice(max(0, NICENESS - os.nice(0)))
    uid, is_root = settings["uid"], settings["reservation"] is not None
    if settings["offline"]:
        uid = users.list_users(uid)[place % users.RANKS] if is_root else uid
        directory = os.path.join(directory, str(place))
        os.makedirs(directory, 0o700, exist_ok=True)
    os.chown(directory, uid, uid)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")  # if memory runs out, the kernel kills ranks first
    if has_mounts := unshare_mounts():
        mask_paths(settings, directory, uid)
    if not is_root and not (has_mounts and os.getpid() == 1):
        raise OSError("a rank needs its own mounts and process ids")
    has_little = is_scarce(settings)
    memory = settings["memory"] if has_little else MOST_MEMORY
    limits = {
        # CUDA reserves more address space than any limit would allow.
        resource.RLIMIT_AS: mapped + memory if settings["offline"] else resource.RLIM_INFINITY,
        resource.RLIMIT_NPROC: SCARCE_PROCESSES if has_little else MOST_PROCESSES,
        resource.RLIMIT_FSIZE: SCARCE_FILE if has_little else MOST_FILE,
        resource.RLIMIT_CORE: 0,
    }
    if has_little:
        limits[resource.RLIMIT_NOFILE] = SCARCE_DESCRIPTORS
        LIBC.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(which, (most, most))
    if is_root:
        os.setgroups([])
    os.setgid(uid)
    os.setuid(uid)
    require(LIBC.capset(struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24)), "capset")  # none
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filter_system_calls(settings["offline"])
    os.umask(0o077)
    os.environ.update(HOME=directory, TMPDIR=directory, TORCHINDUCTOR_CACHE_DIR=os.path.join(directory, "inductor"))
    return directory


def is_scarce(settings: dict) -> bool:
    """Return whether the run limits the memory of its ranks, which only offline ranks allow."""
    return settings["offline"] and settings["memory"] is not None


def load_seccomp() -> ctypes.CDLL | None:
    """Return the library that makes filters for system calls, or None if it is missing."""
    with contextlib.suppress(OSError):
        return ctypes.CDLL("libseccomp.so.2")
    return None


def filter_system_calls(offline: bool = False) -> bool:
    """Make the kernel refuse system calls to this process and its children. Return whether this succeeded."""
    if not (library := load_seccomp()):
        return False
    program = make_filter(offline)
    code = ctypes.create_string_buffer(program, len(program))
    where = struct.pack("HP", len(program) // BPF_INSTRUCTION, ctypes.addressof(code))
    number = library.seccomp_syscall_resolve_name(b"seccomp")
    # Kernels from 4.17 to 5.15 need the flag, or they slow a filtered process down.
    flags = (SECCOMP_FILTER_FLAG_SPEC_ALLOW, 0)
    return any(LIBC.syscall(number, SECCOMP_SET_MODE_FILTER, flag, where) == 0 for flag in flags)


@functools.cache  # by the fork server, before it forks ranks: this takes several milliseconds
def make_filter(offline: bool) -> bytes:
    """Return a program with which the kernel refuses system calls, or nothing if libseccomp is missing.

    A process that is `offline` may only use the calls of ALLOWED, and others may use all but REFUSED.

    The filter recognises calls that create a namespace by their flags. The flags of clone3 are in memory, which a
    filter cannot read. The filter therefore answers clone3 as a kernel without this call would. The C library then uses
    clone.
    """
    if not (library := load_seccomp()):
        return b""
    refuse = SCMP_ACT_ERRNO | errno.EPERM
    library.seccomp_init.restype = ctypes.c_void_p
    rules = ctypes.c_void_p(library.seccomp_init(refuse if offline else SCMP_ACT_ALLOW))

    def resolve(call: str) -> int:
        return library.seccomp_syscall_resolve_name(call.encode())  # negative if this machine does not have the call

    def add(action: int, number: int, *condition: int) -> None:
        """Add a rule for a call, or only for those in which (argument `condition[0]`) & `condition[1]` is the last."""
        array = struct.pack("IIQQ", condition[0], SCMP_CMP_MASKED_EQ, *condition[1:]) if condition else b""
        if number >= 0 and library.seccomp_rule_add_array(rules, action, number, len(array) > 0, array):
            raise OSError(f"libseccomp cannot filter system call {number}")

    library.seccomp_attr_set(rules, SCMP_FLTATR_ACT_BADARCH, refuse)  # other tables of calls
    clone, fcntl, futex = map(resolve, ("clone", "fcntl", "futex"))
    if offline:
        allowed = {*map(resolve, ALLOWED.split())}
        for number in allowed:
            add(SCMP_ACT_ALLOW, number)
        for number in {*NEWER} - allowed:
            add(SCMP_ACT_ERRNO | errno.ENOSYS, number)
        add(SCMP_ACT_ALLOW, clone, 0, CLONE_NEW_ANY, 0)
        for command in COMMANDS:
            add(SCMP_ACT_ALLOW, fcntl, 1, 0xFFFFFFFF, command)
        add(SCMP_ACT_ALLOW, futex, 1, FUTEX_PRIVATE_FLAG, FUTEX_PRIVATE_FLAG)
        add(SCMP_ACT_ERRNO | errno.EINVAL, futex, 1, FUTEX_PRIVATE_FLAG, 0)  # a C library that gets it asks again
    else:
        for call in REFUSED:
            add(refuse, resolve(call))
        add(SCMP_ACT_ERRNO | errno.ENOSYS, CLONE3)
        for bit in (1 << place for place in range(32) if CLONE_NEW_ANY >> place & 1):
            add(refuse, clone, 0, bit, bit)
    with tempfile.TemporaryFile() as file:
        require(library.seccomp_export_bpf(rules, file.fileno()), "seccomp_export_bpf")
        library.seccomp_release(rules)
        file.seek(0)
        return file.read()


def probe(secrets: list[str]) -> dict:
    """Return the abilities of a rank in the sandbox, for a test before any submission runs.

    `secrets` are directories that it must not read.
    """
    python = {os.path.dirname(os.__file__), *(path for path in sys.path if path.endswith("site-packages"))}
    return {
        "uid": os.getuid(),
        "secrets": [path for path in secrets if has_readable(path)],
        "is_filtered": LIBC.prctl(PR_GET_SECCOMP, 0, 0, 0, 0) == SECCOMP_MODE_FILTER,
        "unreachable": sorted(path for path in python if not os.access(path, os.R_OK | os.X_OK)),
    }


def has_readable(path: str) -> bool:
    """Return whether a directory can be read and contains more than the Python that runs here."""
    with contextlib.suppress(OSError):
        return any(not is_below(sys.executable, entry.path) for entry in os.scandir(path))
    return False


def unshare_mounts() -> bool:
    """Give this process its own mounts. Return False if this is refused."""
    return LIBC.unshare(CLONE_NEWNS) == 0 and LIBC.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0


def become(uid: int) -> None:
    """Move this process, which has one thread, into a user namespace, in which its user and its group are `uid`.

    It may then make the other namespaces. Raise OSError if that is not allowed.
    """
    own = {"uid": os.geteuid(), "gid": os.getegid()}
    require(LIBC.unshare(CLONE_NEWUSER), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    for kind, number in own.items():
        Path(f"/proc/self/{kind}_map").write_text(f"{uid} {number} 1")


@functools.cache
def has_own_space() -> bool:
    """Return whether a process of this user may have its own mounts and process ids."""
    return users.run_in_child(lambda: unshare_mounts() and LIBC.unshare(CLONE_NEWPID) == 0)


@functools.cache
def has_namespaces() -> bool:
    """Return whether the ranks of an ordinary user may have what they need."""

    def make_all() -> bool:
        become(users.FIRST_UID)
        return LIBC.unshare(CLONE_NEWPID | CLONE_NEWNET) == 0 and unshare_mounts() and make_read_only()

    return users.run_in_child(make_all)


def make_read_only() -> bool:
    """Let this process change no file, not even permissions or times. Kernels before 5.12 cannot do this."""
    attributes = struct.pack("QQQQ", MOUNT_ATTR_RDONLY, 0, 0, 0)
    return LIBC.syscall(MOUNT_SETATTR, -1, b"/", AT_RECURSIVE, attributes, len(attributes)) == 0


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


def fork_apart() -> int:
    """Fork like `os.fork`, from a helper that ends. As in `separate_processes`, the child has its own process ids.

    An ordinary user cannot return from `unshare`, so the helper has called it. This process adopts its child.
    """
    read, write = os.pipe()
    if not (helper := os.fork()):
        with contextlib.suppress(OSError):
            if LIBC.unshare(CLONE_NEWPID) == 0:
                if not (pid := os.fork()):
                    os.close(read)
                    os.close(write)
                    return 0
                os.write(write, struct.pack("i", pid))
        os._exit(0)
    os.close(write)
    [pid] = struct.unpack("i", os.read(read, 4))
    os.close(read)
    os.waitpid(helper, 0)
    return pid


def leave_network() -> None:
    """Give this process and its children a network with only a loopback interface, if that is allowed."""
    if LIBC.unshare(CLONE_NEWNET) == 0:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP | IFF_RUNNING))


def mask_paths(settings: dict, directory: str, uid: int) -> None:
    """Mask the hidden paths and the temporary directories.

    Then mount again the directories inside them that a rank needs. The directory of an offline rank becomes private,
    too. Only the user's processes remain visible, and for an offline rank only its own PROCESS_FILES: the kernel tells
    a process which of its pages others have mapped, and how many descriptors of some kinds are open.
    """
    is_root = settings["reservation"] is not None
    if settings["offline"] and not make_read_only() and not is_root:
        raise OSError("a rank must not change files")
    needed = {path for path in (sys.prefix, sys.base_prefix, directory, *sys.path) if os.path.isdir(path)}
    needed |= set(map(os.path.realpath, needed))
    privates = {os.path.realpath(path) for path in users.PRIVATE_DIRECTORIES}
    if not settings["offline"]:  # NCCL uses fast transports only between ranks that have the same /dev/shm
        privates.discard(os.path.realpath("/dev/shm"))
    covers = {TERMINALS, *map(os.path.realpath, settings["hidden"]), *privates}
    if settings["offline"]:  # counters of the kernel, which a rank can change and another can read
        covers.add("/sys")
    above = {parent for path in needed for parent in Path(path).parents}
    covers |= {str(path) for path in above if not path.stat().st_mode & stat.S_IXOTH}  # which the user cannot enter
    if not is_root:
        covers |= {entry.path for entry in os.scandir("/") if entry.is_dir(follow_symlinks=False)} - SYSTEM - needed
    options = f"size={SCARCE_FILE if is_scarce(settings) else PRIVATE_SIZE},nr_inodes=10000"
    os.umask(0o022)  # the rank's user must be able to enter the directories that this function makes
    handles = {path: os.open(path, os.O_PATH) for path in sorted(needed)}
    for place in filter(os.path.isdir, sorted(covers)):  # a directory before those inside it, which it may hide
        how = f"mode=1777,{options}" if place in privates else f"mode=755,{options},size=4096"
        mount("tmpfs", place, "tmpfs", MS_NOSUID | MS_NODEV, how)
        for path in (path for path in handles if is_below(path, place)):
            os.makedirs(path, exist_ok=True)
            mount(f"/proc/self/fd/{handles[path]}", path, "", MS_BIND | MS_REC, "")
    for handle in handles.values():
        os.close(handle)
    if settings["offline"]:
        mask_processes(directory)
        mount("tmpfs", directory, "tmpfs", MS_NOSUID | MS_NODEV, f"{options},mode=700,uid={uid},gid={uid}")
    else:
        with contextlib.suppress(OSError):
            mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, "hidepid=2")


def mask_processes(place: str) -> None:
    """Let /proc contain only PROCESS_FILES of this process, or nothing if it cannot get a /proc with its own number.

    The empty directory `place` is used until that is done.
    """
    flags, own = MS_NOSUID | MS_NODEV | MS_NOEXEC, Path(place, str(os.getpid()))
    mount("tmpfs", place, "tmpfs", flags, "mode=755")
    with contextlib.suppress(OSError):
        mount("proc", "/proc", "proc", flags, "")
        own.mkdir()
        Path(place, "self").symlink_to(own.name)
        for name in PROCESS_FILES:
            (own / name).touch()
            mount(f"/proc/self/{name}", str(own / name), "", MS_BIND, "")
    mount(place, "/proc", "", MS_MOVE, "")


def is_below(path: str, directory: str) -> bool:
    """Return whether `path` is inside `directory`."""
    return path.startswith(directory.rstrip("/") + "/")


def mount(source: str, target: str, kind: str, flags: int, options: str) -> None:
    """Call mount(2). Raise OSError if it fails."""
    require(LIBC.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()), target)


def require(result: int, what: str) -> None:
    """Raise OSError if a function of the C library has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
