"""The protections of the sandbox, each by itself. `test_hostile.py` tests them with submissions, as root."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Callable

import hang_guard
import psutil
import pytest

from brigade.course.cli import main as cli
from brigade.course.cli.options import resolve_results_file
from brigade.course.table.modules import ROOT
from brigade.grader import isolation
from brigade.ranks.errors import UserError
from brigade.ranks.runner import ranks
from brigade.ranks.sandbox import enter, users

EPERM, EINVAL, ENOSYS = 1, 22, 38


# ---- system calls


def run_in_child(work: Callable[[], bool]) -> bool:
    """Return whether `work` returned True in its own process."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if work() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def load_filtered_libc(offline: bool = False) -> ctypes.CDLL:
    enter.LIBC.prctl(enter.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    assert enter.filter_system_calls(offline)
    return ctypes.CDLL(None, use_errno=True)


def get_number(call: str | int) -> int:
    """Return the number of a system call on this machine. It is negative if the machine does not have the call."""
    return call if isinstance(call, int) else ctypes.CDLL("libseccomp.so.2").seccomp_syscall_resolve_name(call.encode())


def find_refusal(libc: ctypes.CDLL, number: int, *arguments: int) -> int:
    """Return the error with which the kernel refuses the call, or 0 if the kernel does not refuse it."""
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return ctypes.get_errno() if result == -1 else 0


@pytest.fixture(autouse=True, scope="module")
def filters() -> None:
    if sys.platform != "linux" or not run_in_child(lambda: bool(load_filtered_libc())):
        pytest.skip("no filter of system calls here")


# Calls with which ranks could reach each other or keep data. Every libseccomp knows those with names.
SHARING = ["socket", "socketpair", "accept4", "bind", "connect", "io_setup", "flock", "inotify_init", "inotify_init1"]
SHARING += ["fanotify_init", "fadvise64", "readahead", "preadv2", "pwritev2", "mincore", "memfd_create", "vmsplice"]
SHARING += ["splice", "tee", "userfaultfd", "bpf", "mount", "perf_event_open", "kcmp", "name_to_handle_at", "setxattr"]
SHARING += ["syslog", "sethostname", "get_mempolicy", "mbind", "sendmsg"]
NEW = (425, 438, 447, 449, 451, 454)  # io_uring_setup, pidfd_getfd, memfd_secret, futex_waitv, cachestat, futex_wake
SHARING_COMMANDS = (1024, 1025, 1026, 5, 6, 7, 36, 37, 38, 1031)  # of fcntl: leases, notifications, locks, pipes


def test_each_of_the_calls_is_refused():
    def work() -> bool:
        libc = load_filtered_libc(offline=True)
        futex, fcntl = map(get_number, ("futex", "fcntl"))
        refused = [*map(get_number, [*enter.REFUSED, *SHARING])]
        errors = [find_refusal(libc, number, 0, 0, 0, 0, 0) for number in refused if 0 <= number < min(enter.NEWER)]
        for command in SHARING_COMMANDS:  # the kernel looks at 32 bits of the command
            errors += [find_refusal(libc, fcntl, 0, command | high, 0) for high in (0, 1 << 32)]
        newer = [find_refusal(libc, number, 0, 0, 0, 0, 0) for number in NEW]
        wake, get_flags = 1, 3
        return (
            set(errors) == {EPERM}
            and set(newer) == {ENOSYS}
            and find_refusal(libc, futex, 0, wake, 0) == EINVAL
            and find_refusal(libc, fcntl, 1, get_flags, 0) == 0
        )

    assert run_in_child(work)


def test_each_of_the_calls_is_refused_to_other_ranks():
    def work() -> bool:
        libc = load_filtered_libc()
        refused = [number for number in map(get_number, enter.REFUSED) if number >= 0]
        return {find_refusal(libc, number, 0, 0, 0, 0, 0) for number in refused} == {EPERM}

    assert run_in_child(work)


def test_no_flag_makes_a_namespace():
    flags = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]

    def work() -> bool:
        libc = load_filtered_libc()
        errors = [find_refusal(libc, get_number("clone"), flag | signal.SIGCHLD, 0, 0, 0, 0) for flag in flags]
        return errors == [EPERM] * len(flags) and find_refusal(libc, enter.CLONE3, 0, 0) == ENOSYS

    assert run_in_child(work)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86_64 has a second table of system calls")
def test_the_second_table_of_calls_is_refused():
    def work() -> bool:
        libc = load_filtered_libc()
        return find_refusal(libc, 0x4000_0000 | 39) == EPERM and find_refusal(libc, 39) == 0  # getpid

    assert run_in_child(work)


def test_what_a_program_needs_still_works():
    """Threads, forks and other programs still work, and the programs are filtered too."""
    script = "import ctypes; raise SystemExit(0 if ctypes.CDLL(None).unshare(0x10000000) else 1)"

    def work() -> bool:
        load_filtered_libc(offline=True)
        heard: list[int] = []
        thread = threading.Thread(target=lambda: heard.append(1))
        thread.start()
        thread.join()
        program = hang_guard.run([sys.executable, "-c", script])
        return heard == [1] and run_in_child(lambda: True) and program.returncode == 0

    assert run_in_child(work)


# ---- results files


def test_a_results_file_is_no_link(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(UserError, match=r"\blink\b"):
            resolve_results_file(str(tmp_path / name))
    assert resolve_results_file(str(tmp_path / "elsewhere")) == tmp_path.resolve() / "elsewhere"


def test_links_on_the_way_are_refused_inside_the_submission_only(tmp_path):
    """An instructor's own directories may be links, but directories in a submission may not."""
    (tmp_path / "instructor").mkdir()
    (tmp_path / "shortcut").symlink_to("instructor")
    (tmp_path / "instructor" / "clone").mkdir()
    (tmp_path / "instructor" / "clone" / "results").symlink_to(tmp_path)
    clone = tmp_path / "shortcut" / "clone"
    own = (tmp_path / "instructor" / "clone" / "a.json").resolve()
    assert resolve_results_file(str(clone / "a.json"), [str(clone)]) == own
    for submission in (clone, clone.resolve()):
        with pytest.raises(UserError, match=r"/results\b.*\blink\b"):
            resolve_results_file(str(submission / "results" / "a.json"), [str(clone)])


def test_the_recipe_for_classroom_50_grades_and_follows_no_link(tmp_path):
    """Run the documented program with a `sudo` that changes no user, in a student's repository with a link."""
    text = (ROOT / "docs" / "platforms.md").read_text()
    [recipe] = re.findall(r"^```python\n(\"\"\"Grade the student's checkout.*?)^```", text, re.M | re.S)
    files = {
        "autograder.py": recipe,
        "options": "--modules 1-2 --seed 7",
        "setup.sh": "",
        ".venv/bin/python": '#!/bin/sh\nfor last; do :; done; test ! -L "$last" && echo graded > "$last"\n',
        "sudo": '#!/bin/sh\nwhile [ "${1#--preserve}" != "$1" ]; do shift; done\n'
        f"(printf '%s\\t' \"$@\"; echo) >> {shlex.quote(str(tmp_path))}/asked\n"
        'exec "$@"\n',
        "checkout/precious": "precious",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
        (tmp_path / name).chmod(0o755)
    result = tmp_path / "checkout" / "result.json"
    result.symlink_to("precious")
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = [sys.executable, str(tmp_path / "autograder.py")]
    hang_guard.run(command, cwd=tmp_path / "checkout", env=environment, check=True)
    assert (tmp_path / "checkout" / "precious").read_text() == "precious"
    assert not result.is_symlink() and result.read_text() == "graded\n"
    setup, grade, hand_over = [line.split("\t")[:-1] for line in (tmp_path / "asked").read_text().splitlines()]
    chosen = cli.parse(grade[grade.index("brigade") + 1 :])
    assert (chosen.submission, chosen.out, chosen.format) == ([str(tmp_path / "checkout")], str(result), "classroom50")
    assert (chosen.modules, chosen.seed) == ("1-2", 7), "the options that the package was built with"
    assert setup[-1] == str(tmp_path / "setup.sh")
    assert hand_over == ["chown", "--no-dereference", str(os.getuid()), str(result)]


@pytest.mark.skipif(not isolation.may_isolate(), reason="isolation needs Linux, and root or namespaces")
@pytest.mark.parametrize("umask", (0o022, 0o077))
def test_no_server_outlives_the_reservation_of_its_user(umask):
    """When a server ends, it kills all processes of its user, who may belong to another grader by then.

    With any umask of the grader, the user can read Python's packages.
    """
    ranks.SERVER.close()
    usual = os.umask(umask)
    try:
        with isolation.isolate_ranks(["submission"], "gloo"):
            [found] = ranks.run_ranks(enter.probe, [], world_size=1)
            server = psutil.Process(ranks.SERVER._process.pid)
    finally:
        os.umask(usual)
    assert not server.is_running()
    assert found["uid"] != 0 and found["unreachable"] == []


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="without root, ranks share no directories")
@pytest.mark.parametrize(("backend", "is_private"), [("gloo", True), ("gloo", False), ("nccl", True)])
def test_directories_that_users_share_are_searched_only_if_ranks_see_them(backend, is_private, monkeypatch):
    searched = []
    monkeypatch.setattr(enter, "has_own_space", lambda: is_private)
    monkeypatch.setattr(users, "_find", lambda *_: searched.append(backend) or b"")
    with isolation.isolate_ranks([], backend):
        assert searched == [backend] * (backend == "nccl" or not is_private)


@pytest.mark.parametrize("path", ("/opt/python/lib", f"{sys.prefix}/lib/site-packages"))
def test_packages_that_the_user_cannot_read_are_named_with_the_remedy(path, monkeypatch):
    found = {"uid": 64_100, "secrets": [], "unreachable": [path], "is_filtered": True}
    monkeypatch.setattr(isolation, "close_off", lambda paths: None)
    monkeypatch.setattr(ranks, "run_ranks", lambda *arguments, **options: [found])
    opened = path if path.startswith("/opt") else shlex.quote(sys.prefix)
    with pytest.raises(UserError, match=re.escape(f" {path}: run `chmod -R go+rX {opened}`")):
        isolation.verify_isolation("gloo")


def test_devices_that_the_user_cannot_open_are_named_with_the_remedy(tmp_path, monkeypatch):
    """Some machines let only a group use GPUs."""
    found = {"uid": 64_100, "secrets": [], "unreachable": [], "is_filtered": True}
    monkeypatch.setattr(isolation, "close_off", lambda paths: None)
    monkeypatch.setattr(ranks, "run_ranks", lambda *arguments, **options: [found])
    monkeypatch.setattr(isolation, "DEVICES", tmp_path)
    modes = {"nvidia0": 0o660, "nvidia1": 0o666, "nvidiactl": 0o664, "nvidia-modeset": 0o600}
    for name, mode in modes.items():
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    closed = shlex.join([f"{tmp_path}/nvidia0", f"{tmp_path}/nvidiactl"])
    with pytest.raises(UserError, match=re.escape(f" {tmp_path}/nvidia0: run `chmod o+rw {closed}`")):
        isolation.verify_isolation("nccl")
    assert isolation.verify_isolation("gloo") == []
    for name in modes:
        (tmp_path / name).chmod(0o666)
    assert isolation.verify_isolation("nccl") == []


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="files of another user need root")
def test_files_in_directories_of_others_are_removed(tmp_path, monkeypatch):
    """Everybody may write to some directories below /tmp. Only the user's own files are removed from them."""
    monkeypatch.setattr(users, "PRIVATE_DIRECTORIES", (str(tmp_path), str(tmp_path / "nowhere")))
    tmp_path.chmod(0o755)
    uid, elsewhere = 64_000, tmp_path / "not writable" / "shared"
    (elsewhere / "mine" / "inside").mkdir(parents=True)
    elsewhere.parent.chmod(0o711)
    elsewhere.chmod(0o1777)
    for path in (elsewhere / "file", elsewhere / "of another"):
        path.touch()
    (elsewhere / "link").symlink_to(elsewhere / "of another")
    for path in (elsewhere / "mine", elsewhere / "file", elsewhere / "link"):
        os.chown(path, uid, uid, follow_symlinks=False)
    users.remove_files(uid)
    assert [path.name for path in elsewhere.iterdir()] == ["of another"]


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="files of another user need root")
@pytest.mark.parametrize("mode", [0o755, 0o700, 0o703], ids=oct)
def test_directories_to_which_a_user_cannot_have_written_are_not_read(tmp_path, monkeypatch, mode):
    """A temporary directory can contain a million files, and a run of ranks must not wait until all are read."""
    monkeypatch.setattr(users, "PRIVATE_DIRECTORIES", (str(tmp_path),))
    tmp_path.chmod(0o755)
    closed, uid = tmp_path / "closed", 64_000
    closed.mkdir()
    (closed / "file").touch()
    os.chown(closed / "file", uid, uid)  # only root can have done this
    closed.chmod(mode)
    users.remove_files(uid)
    assert [path.name for path in closed.iterdir()] == ["file"] * (mode != 0o703)


LOST_IN_A_FORK = """
import os, signal
from brigade.ranks.sandbox import users
signal.signal(signal.SIGTERM, signal.default_int_handler)
os.register_at_fork(after_in_parent=lambda: signal.raise_signal(signal.SIGTERM))
try:
    users.kill_user(users.FIRST_UID)
except KeyboardInterrupt:
    print("interrupted")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")
def test_an_interrupt_during_a_fork_is_not_lost():
    """Python ignores exceptions in the functions that it calls after a fork, and so a grader went on to the end."""
    done = hang_guard.run([sys.executable, "-c", LOST_IN_A_FORK], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "interrupted\n" and "ignored" not in done.stderr
