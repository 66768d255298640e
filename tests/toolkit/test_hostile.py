"""Submissions that attack the grader lose only their own points, and leave nothing behind."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import functools
import importlib
import inspect
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import hostile
import psutil
import pytest
import torch
from in_ranks import basics as functions

from brigade.checks.context import CheckContext
from brigade.checks.reference import Case
from brigade.course.modules import ROOT, CourseError, get_module
from brigade.course.submission import read
from brigade.grade import formats, grading, incoming
from brigade.grade.outcome import Grading, make_empty_grading
from brigade.ipc.temporary import remove
from brigade.runner import monitor, ranks, server
from brigade.sandbox import enter, users
from helpers import training

# These take several seconds each, and run with --everything.
LONG = {
    "1500 directories in each other", "FSDP and replicate", "ZeroRedundancyOptimizer", "a frame of a gigabyte",
    "events that grow a hundred times in memory", "frames without end",
    "result: a million values", "result: many empty lists",
}  # fmt: skip
CASES = [
    pytest.param(case, id=case.name.replace(" ", "-"), marks=[pytest.mark.extended] * (case.name in LONG))
    for case in hostile.list_cases()
]
PROOF = Path("/tmp/was-here")  # what attacks write when they run where they should not
CAP_SYS_ADMIN, PR_CAPBSET_DROP = 21, 24

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux"),
    pytest.mark.skipif(os.geteuid() != 0, reason="isolation needs root, and these are not run without it"),
]


@pytest.fixture(scope="module", autouse=True)
def user() -> Iterator[int]:
    """Yield the id of the user that runs the ranks in this file, with a separate fork server."""
    os.environ["COURSE_SECRET"] = "the grader's own secret"
    ranks.SERVER.close()
    try:
        with users.reserve_user() as (uid, reservation):
            users.close_off(ROOT / name for name in enter.SECRETS)
            ranks.SERVER.sandbox = enter.Sandbox(uid, reservation)
            [found] = ranks.run_ranks(enter.probe, world_size=1)
            assert found["uid"] == uid and found["secrets"] == [] and found["is_filtered"]
            yield uid
            ranks.SERVER.close()  # it is in the user's control groups
    finally:
        del os.environ["COURSE_SECRET"]
        ranks.SERVER.sandbox = None
        ranks.SERVER.close()  # it has no network, and little of our environment


def test_isolated_ranks_receive_and_can_import_only_scenarios():
    """They cannot read the course's files, so the fork server must have imported everything else that scenarios use."""
    for path in [ROOT / "tests/helpers/training.py", *sorted((ROOT / "tests").glob("m*/scenario*.py"))]:
        name = f"{path.parent.name}.{path.stem}"
        members = vars(importlib.import_module(name)).values()
        own = (value for value in members if inspect.isfunction(value) and value.__module__ == name)
        function = next(value for value in own if not hasattr(value, "__wrapped__"))
        name, packages = ranks.find_sources(function)
        files = {Path(file).name for texts in packages.values() for file, _ in texts.values()}
        assert path.name in files and files <= {"scenario.py", "scenario_sharded.py", "training.py"}
        ranks.run_ranks(functions.import_all, [name], packages=packages, world_size=1)


@pytest.fixture(scope="module")
def usual_s(user: int) -> float:
    """Return the usual duration of a run of two ranks in seconds, before any submission has run."""
    return time_runs()


def time_runs() -> float:
    seconds = []
    for _ in range(5):
        start = time.monotonic()
        assert list(ranks.run_ranks(functions.reduce_once)) == [3.0, 3.0]
        seconds.append(time.monotonic() - start)
    return median(seconds)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one world size for each check, and detect deadlocks sooner."""
    monkeypatch.setattr(CheckContext, "worlds", lambda self, *sizes: [2] if len(sizes) > 1 else list(sizes))
    monkeypatch.setattr(monitor, "QUIET_S", 0.3)


class Graded:
    """A submission that was graded as by `brigade grade`, with a results file."""

    def __init__(self, submission: Path, out: Path, case: hostile.Hostile, on_change: Callable = lambda grading: None):
        self.out = out
        self.started = time.monotonic()
        entries = [get_module(number) for number in case.modules]
        self.state = make_empty_grading(entries, 1)

        def save(state: Grading) -> None:
            assert not out.exists() or out.read_text() == self.text, "somebody else has written the results"
            self.state, self.text = state, formats.format_gradescope(state)
            formats.write(out, self.text)
            on_change(state)

        save(self.state)
        self.told = ""
        try:
            with incoming.open_submission(submission) as found:
                grading.grade(found.directory, entries, seed=1, total_s=case.limit_s, on_change=save)
        except CourseError as error:
            self.told = str(error)
        self.seconds = time.monotonic() - self.started

    def failures(self) -> list[str]:
        return [self.told] if self.told else [*filter(None, formats.list_feedback(self.state).values())]


def list_processes(uid: int) -> list[psutil.Process]:
    """Return the user's processes, except ended processes that init has inherited and will reap later."""
    ours = {os.getpid(), ranks.SERVER._process.pid if ranks.SERVER._process else None}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            inherited = process.status() == psutil.STATUS_ZOMBIE and process.ppid() not in ours
            if uid in process.uids() and not inherited:
                found.append(process)
    return found


def list_files(uid: int) -> list[str]:
    found = []
    for place in users.PRIVATE_DIRECTORIES:
        for entry in os.scandir(place) if os.path.isdir(place) else ():
            with contextlib.suppress(FileNotFoundError):
                if entry.stat(follow_symlinks=False).st_uid == uid:
                    found.append(entry.path)
    return found


def expect_nothing_left(uid: int) -> None:
    """Check that the user has no process, file or shared memory, and that the fork server runs."""
    assert list_processes(uid) == []
    assert list_files(uid) == []
    assert not PROOF.exists()
    assert not list(ranks.SERVER.scratch.glob("run-*"))
    segments = Path("/proc/sysvipc/shm").read_text().splitlines()[1:]
    assert not [line for line in segments if str(uid) in line.split()[7:11]]
    assert ranks.SERVER._process.poll() is None


def write_submission(directory: Path) -> Path:
    archive = directory / "submission.zip"
    return archive if archive.exists() else directory


@pytest.fixture
def submission(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "submission"
    directory.mkdir()
    yield directory
    remove(directory)  # some are too deep for pytest to remove


def expect_fair(case: hostile.Hostile, directory: Path, uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a submission gets the right score in time and leaves nothing behind."""
    if case.checks:
        collect = grading.collect
        monkeypatch.setattr(grading, "collect", lambda entries: [o for o in collect(entries) if o.name in case.checks])
    case.make(directory)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    graded = Graded(write_submission(directory), directory.parent / "results.json", case)
    assert graded.state.score == case.score, graded.failures()
    assert graded.told or graded.state.count_unfinished() == 0
    assert graded.seconds < case.limit_s + 5
    if case.told:
        assert case.told in " ".join(" ".join(graded.failures()).split())
    results = json.loads(graded.out.read_text())
    assert results["score"] == case.score and len(graded.text) < 100_000
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{graded.seconds:.1f} s, {grown / 1000:.0f} MB")
    assert grown < 500_000, "kB of memory"
    expect_nothing_left(uid)
    assert graded.out.read_text() == graded.text


def test_the_long_cases_exist():
    assert {case.name for case in hostile.list_cases()} >= LONG


@pytest.mark.parametrize("case", CASES)
def test_it_gets_what_it_is_worth_and_leaves_nothing(case, user, usual_s, submission, monkeypatch):
    expect_fair(case, submission, user, monkeypatch)


# ---- what a rank knows

STANDS = """
import time
import torch
class NaiveDDP(torch.nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module = module
    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
    def finish_grad_sync(self):
        time.sleep(60)
"""


def test_no_rank_holds_what_the_checks_know(monkeypatch):
    """A rank's memory contains neither another rank's weights and batches, nor expected values, nor the checks."""
    case = Case(random.Random(5), "Plain", 2)
    [seed] = random.Random(6).sample(range(2**30, 2**31), 1)
    raw = [
        {"weights": get_bytes(case.states[r]["layers.0.weight"]), "batch": get_bytes(case.batches[r][0][0]["x"])}
        for r in (0, 1)
    ]
    common = {
        "expected": get_bytes(case.gradients()["layers.0.weight"]),
        "checks": hostile.quote("tests/test_m01_naive_ddp.py", "expect_gradients(results, case").encode(),
        "solution": hostile.quote("solutions/m01_naive_ddp/naive_ddp.py", "dist.all_reduce(parameter.grad, ").encode(),
        "results": b"results.json",
        "secret": b"the grader's own secret",
    }
    found: list[set[str]] = []
    end = monitor.Monitor.end

    def look_and_end(run: monitor.Monitor) -> None:
        for rank in run.ranks:
            needles = {f"rank {r}'s {what}": data for r in (0, 1) for what, data in raw[r].items()} | common
            regions = read_memory(rank.pid)
            found.append({name for region in regions for name, needle in needles.items() if needle in region})
        end(run)

    monkeypatch.setattr(monitor.Monitor, "end", look_and_end)
    sources = {"m01_naive_ddp.naive_ddp": ("naive_ddp.py", STANDS)}
    with pytest.raises(ranks.RankFailure, match="stopped after 2 s"):
        ranks.run_ranks(
            training.train,
            case.make_jobs(package="m01_naive_ddp", wrapper="NaiveDDP"),
            mode="strict",
            packages={"submission": sources},
            seed=seed,
            deadline=2,
        )
    assert found == [{f"rank {r}'s {what}" for what in raw[r]} for r in (0, 1)]


# Draws the case of a check from a seed, and computes the gradients of all ranks without communication.
GUESSES = """
import random, sys, types
reference = types.ModuleType("reference")
exec({text!r}, reference.__dict__)
class NaiveDDP(NaiveDDP):
    def finish_grad_sync(self):
        check_seed = random.Random("{seed}/test_gradients_are_averaged").randrange(2**63)
        gradients = reference.Case(random.Random(check_seed), "Plain", 2).gradients()
        for name, parameter in self.module.named_parameters():
            dist.all_reduce(torch.zeros_like(parameter.grad), group=self.process_group)
            parameter.grad.copy_(gradients[name])
"""


def test_only_a_known_seed_gives_numbers_without_communication(submission, monkeypatch):
    """So the seed of a class and of a Gradescope package is secret. Other seeds give the points that are deserved."""
    text = (
        (ROOT / "brigade/checks/reference.py")
        .read_text()
        .replace("from brigade.runner.ranks import", "PerRank = list #")
    )
    case = hostile.Hostile("guesses", hostile.reference(GUESSES.format(text=text, seed=1)), 0, checks=hostile.ONE)
    case.make(submission)
    collect = grading.collect
    monkeypatch.setattr(
        grading, "collect", lambda entries: [check for check in collect(entries) if check.name in hostile.ONE]
    )
    scores = [grading.grade(submission, [get_module(1)], seed=seed, prior="own").score for seed in (1, 2, 3)]
    assert scores == [2, 0, 0]


def get_bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())


def read_memory(pid: int) -> Iterator[bytes]:
    """Return the resident part of the memory that a process can write to."""
    regions = re.findall(
        r"^([0-9a-f]+)-([0-9a-f]+) rw.*?^Rss: +(\d+) kB", Path(f"/proc/{pid}/smaps").read_text(), re.M | re.S
    )
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for start, end, resident in regions:
            if int(resident):
                memory.seek(int(start, 16))
                with contextlib.suppress(OSError):
                    yield memory.read(int(end, 16) - int(start, 16))


def test_a_frame_in_the_reference_shows_where_and_not_what(user, submission):
    """The report shows the text of the student's line, but only the number of the reference's line."""
    entry = get_module(2)
    text = (ROOT / "solutions" / entry.path).read_text()
    call = "broadcast_module_state(module, process_group)"
    assert text.count(call) == 1
    hostile.files({2: text.replace(call, "broadcast_module_state(None)")})(submission)
    sources = read(submission, 2, "reference").sources
    case = Case(random.Random(5), "Plain", 2)
    with pytest.raises(ranks.RankFailure, match="AttributeError") as caught:
        ranks.run_ranks(
            training.train, case.make_jobs(package=entry.package, wrapper="FlatDDP"), packages={"submission": sources}
        )
    student, reference = caught.value.lines
    assert re.fullmatch(r"  flat_ddp.py, line \d+, in __init__: broadcast_module_state\(None\)", student)
    assert re.fullmatch(r"  naive_ddp.py, line \d+, in broadcast_module_state", reference)


def test_a_frame_in_a_scenario_shows_its_line(user):
    """Ranks do not have the text of scenarios either, so the grader adds the line."""
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run_ranks(functions.fail, 0, "no")
    assert caught.value.lines[-1].endswith(": raise ValueError(message)"), caught.value.lines


# ---- many processes, and another grading run


EATS = """
import mmap, os, signal, time
import torch.distributed as dist
eats, children = dist.get_rank() == 0, []
for _ in range(6 if eats else 0):
    if not (child := os.fork()):
        block = mmap.mmap(-1, 300 << 20)
        for place in range(0, len(block), 4096): block[place] = 1
        time.sleep(3)
        os._exit(0)
    children.append(child)
ended = [os.waitpid(child, 0)[1] for child in children]
if eats and signal.SIGKILL not in ended: raise SystemExit(f"there is no limit: {ended}")
"""


def test_all_processes_of_a_grading_share_one_limit_on_memory(user, submission, monkeypatch):
    """Each process stays within its own limit. If all together exceed their run's limit, the kernel ends some."""
    [found] = ranks.run_ranks(enter.probe, world_size=1)
    if not found["is_grouped"]:
        pytest.skip("no control groups can be made here")
    monkeypatch.setattr(ranks.SERVER, "sandbox", dataclasses.replace(ranks.SERVER.sandbox, together=1 << 30))
    case = hostile.Hostile("eats", hostile.reference(EATS), 2, checks=hostile.ONE)
    expect_fair(case, submission, user, monkeypatch)


# ---- results files


@pytest.mark.parametrize("linked", ["result.json", "results"])
def test_a_link_in_the_checkout_is_no_results_file(linked, submission, tmp_path):
    """The grader does not write results through the link, and does not change its target."""
    RIGHT.make(submission)
    precious = tmp_path / "precious"
    precious.mkdir(mode=0o700)
    (precious / "result.json").write_text("precious")
    (submission / linked).symlink_to(precious / "result.json" if linked == "result.json" else precious)
    out = submission / linked / "result.json" if linked == "results" else submission / linked
    before = (precious / "result.json").stat()
    command = [sys.executable, "-m", "brigade.cli", "grade", "--submission", str(submission), "--out", str(out)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 2 and "is a link; results cannot be written" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    after = (precious / "result.json").stat()
    assert (after.st_uid, after.st_mode, after.st_mtime_ns) == (before.st_uid, before.st_mode, before.st_mtime_ns)
    assert (precious / "result.json").read_text() == "precious"


# ---- the grader survives


RIGHT = hostile.Hostile("the reference", hostile.reference(""), 8, checks=hostile.ALL)
AT_WORK = 2  # checks that have finished when it happens


def finished(state: Grading) -> int:
    return sum(outcome.is_settled for outcome in state.outcomes)


def test_a_fork_server_that_is_killed_is_started_again(user, submission, tmp_path):
    """The interrupted check runs again, because the submission did not kill the server."""
    RIGHT.make(submission)
    servers = []

    def kill_once(state: Grading) -> None:
        if finished(state) == AT_WORK and not servers:
            servers.append(ranks.SERVER._process.pid)
            threading.Timer(0.05, os.kill, (servers[0], signal.SIGKILL)).start()

    graded = Graded(submission, tmp_path / "results.json", RIGHT, kill_once)
    assert graded.state.score == 8, graded.failures()
    assert ranks.SERVER._process.pid != servers[0]
    expect_nothing_left(user)


def test_a_rank_that_is_killed_from_outside_costs_one_check(user, submission, tmp_path):
    RIGHT.make(submission)
    with contextlib.ExitStack() as killer:

        def kill_in_one_check(state: Grading) -> None:
            if finished(state) == AT_WORK:
                killer.enter_context(kill_processes(user))
            else:
                killer.close()

        graded = Graded(submission, tmp_path / "results.json", RIGHT, kill_in_one_check)
    [failed] = [outcome for outcome in graded.state.outcomes if not outcome.passed]
    assert failed is graded.state.outcomes[AT_WORK] and "killed by SIGKILL" in failed.verdict.got
    expect_nothing_left(user)


@contextlib.contextmanager
def kill_processes(uid: int) -> Iterator[None]:
    """During the block, kill all processes of the user as soon as they start, as `users.kill_user` does once."""
    program = f"""if True:
        import os, signal, time
        os.setresuid({uid + users.USERS}, {uid}, {uid + users.USERS})
        print("ready", flush=True)
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
            except ProcessLookupError:
                time.sleep(0.001)"""
    with subprocess.Popen([sys.executable, "-S", "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            yield
        finally:
            process.kill()


def test_a_full_disk_is_waited_for(user, submission, tmp_path):
    """If results cannot be written, the file keeps the earlier results until a later check succeeds in writing."""
    RIGHT.make(submission)

    def no_space(state: Grading) -> None:
        if 0 < finished(state) < 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    graded = Graded(submission, tmp_path / "results.json", RIGHT, no_space)
    assert graded.state.score == 8 == json.loads(graded.out.read_text())["score"]


def test_a_grader_that_is_killed_takes_the_submission_along(submission, tmp_path):
    """The results state that the grading run did not finish, and all processes that its ranks started end.

    Until then, the user stays reserved. Otherwise, the end of the fork server would kill another grader's ranks.
    """
    hostile.reference("open('left', 'w')\nos.fork()\nos.setsid() if os.fork() else 0\nwhile True: pass")(submission)
    out, others = tmp_path / "results.json", {process.uids().real for process in psutil.process_iter()}
    arguments = ["grade", "--submission", str(submission), "--out", str(out), "--modules", "1"]
    process = subprocess.Popen([sys.executable, "-m", "brigade.cli", *arguments], cwd=ROOT)
    try:
        used: set[int] = set()
        while not used:
            assert process.poll() is None
            time.sleep(0.02)
            with contextlib.suppress(psutil.NoSuchProcess):
                found = {p.uids().real for p in psutil.Process(process.pid).children(recursive=True)} - others
                used = found & set(range(users.FIRST_UID, users.FIRST_UID + users.USERS))
        time.sleep(0.3)
        [server] = psutil.Process(process.pid).children()
        server.suspend()
    finally:
        process.kill()
        process.wait()
    for uid in used:
        with open(f"/run/brigade/{uid}", "w") as lock, pytest.raises(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    server.resume()
    results = json.loads(out.read_text())
    assert results["score"] == 0 and "did not finish" in results["output"]
    assert sum(test.get("max_score", 0) for test in results["tests"]) == 8
    for uid in used:
        with open(f"/run/brigade/{uid}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # wait for the server, and for another grader that has taken the user
            assert not list_processes(uid) and not list_files(uid)


def test_afterwards_the_reference_gets_everything_as_fast_as_ever(user, usual_s, submission, tmp_path):
    RIGHT.make(submission)
    graded = Graded(submission, tmp_path / "results.json", RIGHT)
    assert graded.state.score == 8, graded.failures()
    assert time_runs() < 2 * usual_s + 0.2


# ---- without namespaces


@pytest.fixture(scope="module")
def bare(user: int) -> Iterator[None]:
    """Use a fork server that is root but cannot mount or leave the network, as in most containers."""

    def give_up() -> None:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.subprocess, "Popen", functools.partial(subprocess.Popen, preexec_fn=give_up))
        ranks.SERVER.close()
        ranks.SERVER.start()
    assert list(ranks.run_ranks(functions.mounts, world_size=1)) == [Path("/proc/self/mounts").read_text()]
    [found] = ranks.run_ranks(enter.probe, world_size=1)
    assert found["uid"] == user and found["secrets"] == []
    yield
    ranks.SERVER.close()


STOPS = "processes that stop the process that ends them"  # without namespaces, they can stop their rank
WITHOUT_NAMESPACES = (
    "reads the course's files",
    "writes results wherever it may, and is right",
    pytest.param("a directory 1500 deep", marks=pytest.mark.extended),
    "a daemon that waits for the end, and then writes results",
    STOPS,
    "files, links and pipes everywhere, and directories that nobody may enter",
)


@pytest.mark.parametrize("name", WITHOUT_NAMESPACES)
def test_without_namespaces_too(name, bare, user, submission, monkeypatch):
    [case] = [case for case in hostile.list_cases() if case.name == name]
    if name == STOPS:
        case = dataclasses.replace(case, score=0, told="stopped after 1 s", limit_s=1)
    expect_fair(case, submission, user, monkeypatch)
