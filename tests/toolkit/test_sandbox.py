"""The protections of `brigade.sandbox`, each by itself. `test_hostile.py` tests them with submissions, as root."""

from __future__ import annotations

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from brigade.cli import main as cli
from brigade.course.modules import ROOT, CourseError, resolve_results_file
from brigade.grade import isolation
from brigade.runner import ranks
from brigade.sandbox import enter, users

linux = pytest.mark.skipif(sys.platform != "linux", reason="a lock of Linux")
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
    enter.prctl(enter.PR_SET_NO_NEW_PRIVS, 1)
    assert enter.filter_system_calls(offline)
    return ctypes.CDLL(None, use_errno=True)


def find_refusal(libc: ctypes.CDLL, number: int, *arguments: int) -> int:
    """Return the error with which the kernel refuses the call, or 0 if the kernel does not refuse it."""
    result = libc.syscall(ctypes.c_long(number), *map(ctypes.c_long, arguments))
    return ctypes.get_errno() if result == -1 else 0


@pytest.fixture(scope="module")
def machine() -> tuple:
    """Return the row of this machine in MACHINES. Skip the test if no filter can be set."""
    found = enter.MACHINES.get(os.uname().machine)
    if sys.platform != "linux" or found is None or not run_in_child(lambda: bool(load_filtered_libc())):
        pytest.skip("no filter of system calls here")
    return found


def test_each_of_the_calls_is_refused(machine):
    def work() -> bool:
        libc = load_filtered_libc(offline=True)
        futex, fcntl, *refused = machine[4], machine[5], *machine[6], *machine[7]
        errors = [find_refusal(libc, number, 0, 0, 0, 0, 0) for number in refused]
        errors += [find_refusal(libc, fcntl, 0, command, 0) for command in enter.SHARING_COMMANDS]
        wake, get_flags = 1, 3
        return (
            set(errors) == {EPERM}
            and find_refusal(libc, futex, 0, wake, 0) == EINVAL
            and find_refusal(libc, fcntl, 1, get_flags, 0) == 0
        )

    assert run_in_child(work)


def test_no_flag_makes_a_namespace(machine):
    _, _, clone, clone3, *_ = machine
    flags = [0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000]

    def work() -> bool:
        libc = load_filtered_libc()
        errors = [find_refusal(libc, clone, flag | signal.SIGCHLD, 0, 0, 0, 0) for flag in flags]
        return errors == [EPERM] * len(flags) and find_refusal(libc, clone3, 0, 0) == ENOSYS

    assert run_in_child(work)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="x86_64 has a second table of system calls")
def test_the_second_table_of_calls_is_refused(machine):
    def work() -> bool:
        libc = load_filtered_libc()
        return find_refusal(libc, 0x4000_0000 | 39) == EPERM and find_refusal(libc, 39) == 0  # getpid

    assert run_in_child(work)


def test_what_a_program_needs_still_works(machine):
    """Threads, forks, other programs, and torch with all of them still work."""

    def work() -> bool:
        load_filtered_libc(offline=True)
        import threading

        import torch

        heard: list[float] = []
        ones = torch.ones(100)
        thread = threading.Thread(target=lambda: heard.append(float(torch.ones(100, 100).matmul(ones).sum())))
        thread.start()
        thread.join()
        shell = subprocess.run(["/bin/sh", "-c", "exit 7"])
        return heard == [10_000.0] and run_in_child(lambda: True) and shell.returncode == 7

    assert run_in_child(work)


def test_the_filter_survives_a_program(machine):
    """All programs that a filtered process starts are filtered too."""
    script = "import ctypes; raise SystemExit(0 if ctypes.CDLL(None).unshare(0x10000000) else 1)"

    def work() -> bool:
        load_filtered_libc()
        return subprocess.run([sys.executable, "-c", script]).returncode == 0

    assert run_in_child(work)


@pytest.mark.parametrize("name", sorted(enter.MACHINES))
def test_the_numbers_are_the_kernels(name):
    """The kernel's headers give the same numbers, if they are installed."""
    places = {"x86_64": ["/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"]}
    headers = [Path(path) for path in places.get(name, ["/usr/include/asm-generic/unistd.h"]) if os.path.exists(path)]
    if not headers:
        pytest.skip("no headers of the kernel here")
    text = headers[0].read_text()
    numbers = {word: int(n) for word, n in re.findall(r"^#define __NR(?:3264)?_(\w+) (\d+)$", text, re.M)}
    # The order of `MACHINES`' comment.
    refused = [
        "add_key", "request_key", "keyctl",
        "shmget", "shmat", "shmctl", "msgget", "msgsnd", "msgrcv", "msgctl", "semget", "semop", "semtimedop", "semctl",
        "mq_open", "unshare", "setns", "ptrace", "process_vm_readv", "process_vm_writev",
    ]  # fmt: skip
    offline = [
        "socket", "socketpair", "io_uring_setup", "flock", "futex_waitv", "futex_wake", "futex_wait", "futex_requeue",
        "inotify_init1", "fanotify_init", "inotify_init",
    ]  # fmt: skip
    _, *single, refused_calls, offline_calls = enter.MACHINES[name]
    assert refused_calls == tuple(numbers[word] for word in refused)
    assert [numbers.get(word, call) for word, call in zip(offline, offline_calls)] == list(
        offline_calls
    )  # some are new
    assert single == [numbers[word] for word in ("seccomp", "clone", "clone3", "futex", "fcntl")]


def test_an_unknown_machine_has_no_filter(monkeypatch):
    monkeypatch.setattr(enter, "MACHINES", {})
    assert not enter.filter_system_calls()


# ---- control groups


class Kernel:
    """A directory with files like the kernel's files for control groups."""

    def __init__(self, top: Path, monkeypatch: pytest.MonkeyPatch, own: str):
        self.top = top
        monkeypatch.setattr(users, "CONTROL_GROUPS", top)
        read = Path.read_text
        monkeypatch.setattr(
            Path, "read_text", lambda path, *a, **k: own if str(path) == "/proc/self/cgroup" else read(path, *a, **k)
        )

    def add(self, path: str, *names: str, **contents: str) -> Path:
        group = self.top / path
        group.mkdir(parents=True, exist_ok=True)
        for name in names:
            (group / name).write_text("")
        for name, text in contents.items():
            (group / f"cgroup.{name}").write_text(text)
        return group


JAIL = {"uid": 64163, "together": 5 << 20}


def test_in_version_2_the_group_is_in_the_nearest_that_divides_memory(tmp_path, monkeypatch):
    kernel = Kernel(tmp_path, monkeypatch, "0::/user.slice/session-3.scope\n")
    kernel.add("", subtree_control="cpu memory pids\n")
    kernel.add("user.slice", subtree_control="memory pids\n")
    kernel.add("user.slice/session-3.scope", subtree_control="\n")
    group = tmp_path / "user.slice" / "brigade-64163"
    assert users.find_control_groups(64163) == [group]
    kernel.add("user.slice/brigade-64163", "memory.max", "memory.swap.max", "cgroup.procs")
    assert enter.join_groups(JAIL)
    found = {name: (group / name).read_text() for name in ("memory.max", "memory.swap.max", "cgroup.procs")}
    assert found == {"memory.max": str(5 << 20), "memory.swap.max": "0", "cgroup.procs": str(os.getpid())}


def test_in_version_1_the_groups_are_below_ours(tmp_path, monkeypatch):
    own = "8:pids:/\n4:memory:/slice\n2:cpu,cpuacct:/\n0::/\n"
    kernel = Kernel(tmp_path, monkeypatch, own)
    kernel.add("memory/slice")
    kernel.add("cpu")
    groups = [tmp_path / "memory" / "slice" / "brigade-64163", tmp_path / "cpu" / "brigade-64163"]
    assert users.find_control_groups(64163) == groups
    kernel.add("memory/slice/brigade-64163", "memory.limit_in_bytes", "cgroup.procs")
    kernel.add("cpu/brigade-64163", "cgroup.procs")
    assert enter.join_groups(JAIL)
    assert (groups[0] / "memory.limit_in_bytes").read_text() == str(5 << 20)
    assert [(group / "cgroup.procs").read_text() for group in groups] == [str(os.getpid())] * 2


@pytest.mark.parametrize("own", ["", "0::/\n", "0::/docker/1234\n", "4:memory:/docker/1234\n"])
def test_without_control_groups_nothing_is_written(own, tmp_path, monkeypatch):
    """Control groups may be missing, may not limit memory, or may have paths outside the container."""
    Kernel(tmp_path, monkeypatch, own).add("", subtree_control="\n")
    before = sorted(tmp_path.rglob("*"))
    assert users.find_control_groups(64163) == [] and not enter.join_groups(JAIL)
    users.leave_groups(64163)
    assert sorted(tmp_path.rglob("*")) == before


# ---- results files


def test_a_results_file_is_no_link(tmp_path):
    (tmp_path / "elsewhere").write_text("precious")
    (tmp_path / "link").symlink_to("elsewhere")
    (tmp_path / "dangling").symlink_to("nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(CourseError, match="is a link"):
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
    assert resolve_results_file(str(clone / "a.json"), str(clone)) == own
    for submission in (clone, clone.resolve()):
        with pytest.raises(CourseError, match="results is a link"):
            resolve_results_file(str(submission / "results" / "a.json"), str(clone))


@linux
def test_the_recipe_for_classroom_50_grades_and_follows_no_link(tmp_path):
    """Run the documented program with a `sudo` that changes no user, in a student's repository with a link."""
    text = (ROOT / "docs" / "platforms.md").read_text()
    [recipe] = re.findall(r"^```python\n(\"\"\"Grade the student's checkout.*?)^```", text, re.M | re.S)
    package, checkout, tools, asked = (tmp_path / name for name in ("package", "checkout", "tools", "asked"))
    for directory in (package / ".venv" / "bin", checkout, tools):
        directory.mkdir(parents=True)
    (package / "autograder.py").write_text(recipe)
    (package / "options").write_text("--modules 1-2 --seed 7")
    (package / "setup.sh").write_text("")
    (tmp_path / "precious").write_text("precious")
    result = checkout / "result.json"
    result.symlink_to(tmp_path / "precious")
    preserve = 'while [ "${1#--preserve}" != "$1" ]; do shift; done'
    script(tools / "sudo", f'{preserve}; echo "$*" >> {asked}; exec "$@"')
    script(package / ".venv" / "bin" / "python", 'for last; do :; done; test ! -L "$last" && echo graded > "$last"')
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}"}
    subprocess.run([sys.executable, str(package / "autograder.py")], cwd=checkout, env=environment, check=True)
    assert (tmp_path / "precious").read_text() == "precious"
    assert not result.is_symlink() and result.read_text() == "graded\n"
    setup, grade, hand_over = [shlex.split(line) for line in asked.read_text().splitlines()]
    assert setup == ["bash", str(package / "setup.sh")]
    chosen = cli.parse(grade[grade.index("brigade.cli") + 1 :])
    assert (chosen.submission, chosen.out, chosen.format) == (str(checkout), str(result), "classroom50")
    assert (chosen.modules, chosen.seed) == ("1-2", 7), "the options that the package was built with"
    assert hand_over == ["chown", "--no-dereference", str(os.getuid()), str(result)]


def script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="isolation needs Linux and root")
def test_no_server_outlives_the_reservation_of_its_user():
    """When a server ends, it kills all processes of its user, who may belong to another grader by then."""
    ranks.SERVER.start()
    with isolation.isolate_ranks("submission", None, "gloo"):
        ranks.run_ranks(enter.probe, world_size=1)
        server = psutil.Process(ranks.SERVER._process.pid)
    assert not server.is_running()


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="files of another user need root")
def test_files_in_directories_of_others_are_removed(tmp_path, monkeypatch):
    """Everybody may write to some directories below /tmp. Only the user's own files are removed from them."""
    monkeypatch.setattr(users, "PRIVATE_DIRECTORIES", (str(tmp_path), str(tmp_path / "nowhere")))
    uid, elsewhere = 64_000, tmp_path / "shared" / "deeper"
    (elsewhere / "mine" / "inside").mkdir(parents=True)
    for path in (elsewhere / "file", elsewhere / "of another"):
        path.touch()
    (elsewhere / "link").symlink_to(elsewhere / "of another")
    for path in (elsewhere / "mine", elsewhere / "file", elsewhere / "link"):
        os.chown(path, uid, uid, follow_symlinks=False)
    users.remove_files(uid)
    assert [path.name for path in elsewhere.iterdir()] == ["of another"]
