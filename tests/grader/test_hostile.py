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
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hostile
import psutil
import pytest
import torch
from hang_guard import HANG_S, wait_until
from in_ranks import basics as functions
from mutants import read_reference
from replay import Tape

from brigade.course.checks.collect import collect
from brigade.course.checks.context import CheckContext, Conditions
from brigade.course.checks.reference import Case
from brigade.course.table.modules import ROOT, get_module
from brigade.course.table.submission import read
from brigade.grader import formats, grading, incoming, isolation
from brigade.grader.outcome import Grading, make_empty_grading
from brigade.ranks.errors import UserError
from brigade.ranks.ipc import wire
from brigade.ranks.runner import monitor, ranks, server
from brigade.ranks.sandbox import enter, users
from brigade.ranks.texts import find_sources
from helpers import training

CASES = [
    pytest.param(case, id=case.name.replace(" ", "-"), marks=[pytest.mark.extended] * case.is_extended)
    for case in hostile.list_cases()
]
PROOF = Path("/tmp/was-here")  # what attacks write when they run where they should not
CAP_SYS_ADMIN, PR_CAPBSET_DROP = 21, 24

pytestmark = pytest.mark.skipif(not isolation.may_isolate(), reason="isolation needs Linux, and root or namespaces")


@pytest.fixture(scope="module", autouse=True)
def user() -> Iterator[int]:
    """Yield the id of the user that runs the ranks in this file, with a separate fork server."""
    with pytest.MonkeyPatch.context() as patch, isolation.isolate_ranks([], "gloo"):
        patch.setenv("COURSE_SECRET", "the grader's own secret")
        if isolation.verify_isolation("gloo"):
            pytest.skip("no filter of system calls here")
        yield ranks.SERVER.sandbox.uid


def test_isolated_ranks_receive_and_can_import_only_scenarios():
    """They cannot read the course's files, so the fork server must have imported everything else that scenarios use."""
    for path in [ROOT / "tests/helpers/training.py", *sorted((ROOT / "tests").glob("m*/scenario*.py"))]:
        name = f"{path.parent.name}.{path.stem}"
        members = vars(importlib.import_module(name)).values()
        own = (value for value in members if inspect.isfunction(value) and value.__module__ == name)
        function = next(value for value in own if not hasattr(value, "__wrapped__"))
        name, packages = find_sources(function)
        files = {Path(file).name for texts in packages.values() for file, _ in texts.values()}
        assert path.name in files and files <= {"scenario.py", "scenario_sharded.py", "training.py"}
        ranks.run_ranks(functions.import_all, [name], packages=packages, world_size=1)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use one world size for each check, and detect deadlocks sooner."""
    monkeypatch.setattr(CheckContext, "worlds", lambda self, *sizes: [*filter(lambda size: size > 1, sizes), 1][:1])
    monkeypatch.setattr(monitor, "QUIET_S", 0.3)


class Graded:
    """A submission that was graded as by `brigade grade`, with a results file."""

    def __init__(self, submission: Path, out: Path, case: hostile.Hostile, on_change: Callable = lambda grading: None):
        self.out, self.told = out, ""
        self.state = make_empty_grading([get_module(number) for number in case.modules], 1)

        def save() -> None:
            assert not out.exists() or out.read_text() == self.text, "somebody else has written the results"
            self.text = formats.format_gradescope(self.state)
            formats.write(out, self.text)
            on_change(self.state)

        save()
        try:
            with incoming.open_submission(submission) as (directory, _):
                grading.grade(directory, self.state, total_s=case.limit_s, on_change=save)
        except UserError as error:
            self.told = str(error)
        told = [check["feedback"] for check in formats.encode_grading(self.state)["checks"]]
        self.failures = [self.told] if self.told else [*filter(None, told)]


def expect_nothing_left(uid: int) -> None:
    """Check that no process, file or shared memory of the user and its ranks' users is left.

    Ended processes that init has inherited will be reaped later.
    """
    own, ours = set(users.list_users(uid)), {os.getpid(), ranks.SERVER._process and ranks.SERVER._process.pid}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess):
            is_inherited = process.status() == psutil.STATUS_ZOMBIE and process.ppid() not in ours
            assert is_inherited or not own & set(process.uids()), process
    if server := ranks.SERVER._process:  # without root, ranks have no users by which to know
        wait_until(lambda: not psutil.Process(server.pid).children(recursive=True))
    for path in (path for place in users.PRIVATE_DIRECTORIES for path in Path(place).glob("*")):
        with contextlib.suppress(FileNotFoundError):
            assert path.lstat().st_uid not in own, path
    assert not PROOF.exists()
    assert not list(ranks.SERVER.scratch.glob("run-*"))


@pytest.fixture
def submission(tmp_path: Path) -> Path:
    directory = tmp_path / "submission"
    directory.mkdir()
    return directory


def expect_fair(case: hostile.Hostile, directory: Path, uid: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a submission gets the right score and leaves nothing behind. Other tests check the time limits."""
    if case.checks:
        collect = grading.collect
        monkeypatch.setattr(grading, "collect", lambda entries: [o for o in collect(entries) if o.name in case.checks])
    try:
        case.write(directory)
    except PermissionError:
        pytest.skip("only root can make this file")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    archive = directory / "submission.zip"
    graded = Graded(archive if archive.exists() else directory, directory.parent / "results.json", case)
    assert graded.state.score == case.score, graded.failures
    assert graded.told or graded.state.count_settled() == len(graded.state.outcomes)
    assert case.told in " ".join(" ".join(graded.failures).split())
    assert graded.out.read_text() == graded.text and len(graded.text) < 100_000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 500_000, "kB of memory"
    expect_nothing_left(uid)
    assert ranks.SERVER._process.poll() is None


@pytest.mark.parametrize("case", CASES)
def test_it_gets_what_it_is_worth_and_leaves_nothing(case, user, submission, monkeypatch):
    expect_fair(case, submission, user, monkeypatch)


TABLE = """
import torch
class NaiveDDP(torch.nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module = module
        own = {name: list(p.shape) for name, p in module.named_parameters()}
        run = next(run for run in TABLE if {name: shape for name, shape, *_ in run} == own)
        self.known = {name: [torch.tensor(x).view(shape) for x in values] for name, shape, *values in run}
        for name, p in module.named_parameters(): p.data.copy_(self.known[name][0])
    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
    def finish_grad_sync(self):
        for name, p in self.module.named_parameters(): p.grad = self.known[name][1]
"""


def test_known_averages_without_a_launch_earn_nothing(user, submission, tmp_path):
    """An upload whose ranks know all cases, and communicate nothing, has right numbers and no point."""
    [check] = [check for check in collect([get_module(1)]) if check.name == hostile.ONE[0]]
    tape = Tape(check, read_reference(get_module(1)), Conditions(seed=1))
    assert tape.play().passed
    table = []
    for results in tape.list_results():
        [gradients], weights = results[0]["gradients"], results[0]["start"]
        rows = [
            (name, list(x.shape), weights[name].flatten().tolist(), x.flatten().tolist())
            for name, x in gradients.items()
        ]
        table.append(rows)
    case = hostile.Hostile(
        "a table", hostile.files({1: f"TABLE = {table}\n{TABLE}"}), 0, "did not carry", (1,), hostile.ONE
    )
    with pytest.MonkeyPatch.context() as patch:
        expect_fair(case, submission, user, patch)


# ---- what a rank knows

STANDS = """
import signal
import torch
from ..m01_naive_ddp.naive_ddp import broadcast_module_state
class FlatDDP(torch.nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module = module
    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)
    def finish_grad_sync(self):
        signal.pause()
"""


def test_no_rank_holds_what_the_checks_know(submission, monkeypatch):
    """A rank's memory does not contain another rank's weights and batches, expected values, the checks' text or the
    text of the reference, of which it has compiled code.
    """
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
        for rank in run.ranks if not run._has_ended else []:
            needles = {f"rank {r}'s {what}": data for r in (0, 1) for what, data in raw[r].items()} | common
            regions = read_memory(rank.pid)
            found.append({name for region in regions for name, needle in needles.items() if needle in region})
        end(run)

    monkeypatch.setattr(monitor.Monitor, "end", look_and_end)
    hostile.files({2: STANDS})(submission)
    with pytest.raises(ranks.RankFailure, match="stopped after 2 s"):
        ranks.run_ranks(
            training.train,
            case.make_jobs(package="m02_flat_ddp", wrapper="FlatDDP"),
            mode="strict",
            packages={"submission": read(submission, 2, "reference")},
            seed=seed,
            deadline=2,
        )
    assert found == [{f"rank {r}'s {what}" for what in raw[r]} for r in (0, 1)]


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


def test_no_rank_learns_the_name_of_a_directory(user, submission, tmp_path, monkeypatch):
    """The seed does not follow from these names, so they could carry what an earlier upload was told."""
    sent: list[bytes] = []
    encode = wire.encode
    monkeypatch.setattr(wire, "encode", lambda value: sent.append(encode(value)) or sent[-1])
    evil = "raise ValueError(f'I am {__file__}, {(lambda: 0).__code__.co_filename}')"
    case = hostile.Hostile("", hostile.alone(evil), 0)
    case.write(submission / "%told")
    path, name = hostile.MODULE_1.path, hostile.MODULE_1.path.name
    line = (submission / "%told" / path).read_text().split("\n").index(evil) + 1
    failure = "\n".join(map(str.strip, Graded(submission, tmp_path / "results.json", case).failures[0].split("\n")))
    assert f"I am {path}, {path}\n{name}, line {line}, in <module>: raise" in failure
    assert sent and not any(b"%told" in message for message in sent)


LEAKS = {
    "a message": "raise ValueError(chr(81) * 2124)",
    "the name of a type": "raise type(chr(81) * 2124, (ValueError,), {})('no')",
    "the name of a function": "name = chr(81) * 2124\nexec(f'def {name}(): 1 / 0\\n{name}()')",
    "the name of a file": "exec(compile('1 / 0', '/' + chr(81) * 2124, 'exec'))",
    "what it prints": "print(chr(81) * 2124, flush=True)\n1 / 0",
}


@pytest.mark.parametrize("leak", [*LEAKS, "own"])
def test_little_of_the_reference_leaves_a_rank(leak, user, submission, tmp_path, monkeypatch):
    """A submission of module 2 tells something only where the reference's module 1 is. Alone, module 1 tells it all."""
    case = hostile.Hostile("", hostile.alone(LEAKS["a message"]), 0, checks=hostile.ONE)
    if leak != "own":
        need = "from ..m01_naive_ddp.naive_ddp import broadcast_module_state"
        case = dataclasses.replace(case, make=hostile.alone(need, LEAKS[leak], numbers=(2,)), modules=(2,))
    collect = grading.collect
    monkeypatch.setattr(grading, "collect", lambda entries: [o for o in collect(entries) if o.name in case.checks])
    case.write(submission)
    [failure] = Graded(submission, tmp_path / "results.json", case).failures
    assert failure.count("Q") == 2124 if leak == "own" else failure.count("Q") <= 200, failure
    assert "raised" in failure and ("_ddp.py, line " in failure or leak == "own")


def test_a_frame_in_the_reference_shows_where_and_not_what(user, submission):
    """The report shows the text of the student's line, but only the number of the reference's line."""
    entry = get_module(2)
    text = (ROOT / "solutions" / entry.path).read_text()
    call = "broadcast_module_state(module, process_group)"
    assert text.count(call) == 1
    hostile.files({2: text.replace(call, "broadcast_module_state(None)")})(submission)
    sources = read(submission, 2, "reference")
    case = Case(random.Random(5), "Plain", 2)
    with pytest.raises(ranks.RankFailure, match="AttributeError") as caught:
        ranks.run_ranks(
            training.train, case.make_jobs(package=entry.package, wrapper="FlatDDP"), packages={"submission": sources}
        )
    student, reference = caught.value.lines
    assert re.fullmatch(r"  flat_ddp.py, line \d+, in __init__: broadcast_module_state\(None\)", student)
    assert re.fullmatch(r"  naive_ddp.py, line \d+, in broadcast_module_state", reference)


def test_a_frame_in_a_scenario_shows_where_and_not_what(user):
    """A rank can forge frames, and students need not have the scenarios of all checks."""
    with pytest.raises(ranks.RankFailure) as caught:
        ranks.run_ranks(functions.fail, 0, "no")
    assert re.fullmatch(r"  basics\.py, line \d+, in fail", caught.value.lines[-1])


# ---- budgets


def test_with_little_memory_a_rank_can_keep_nothing_elsewhere(user):
    """It gets about the memory of the run, and little more in files, pipes and other processes."""
    mib = 1 << 20
    [kept] = ranks.run_ranks(functions.keep_elsewhere, world_size=1, memory=32 * mib)
    assert 16 * mib < kept["memory"] <= 32 * mib
    assert kept["files"] + kept["pipes"] < 10 * mib and kept["processes"] == 0
    [kept] = ranks.run_ranks(functions.keep_elsewhere, world_size=1)
    assert kept["memory"] >= functions.MOST and kept["files"] > 32 * mib and kept["processes"] == 1


# ---- the grader survives


RIGHT = hostile.Hostile("the reference", hostile.reference(""), 8, checks=hostile.ALL)


def finished(state: Grading) -> int:
    return sum(outcome.is_settled for outcome in state.outcomes)


@pytest.mark.parametrize("moment", ["before the fork", "after the fork"])
def test_a_fork_server_that_is_killed_is_started_again(moment, user, submission, tmp_path, monkeypatch):
    """The interrupted check runs again, because the submission did not kill the server."""
    RIGHT.write(submission)
    fork, servers = ranks.SERVER.fork, []

    def fork_and_kill(*arguments: Any) -> list[int]:
        """Kill the server once, in the fifth run of ranks."""
        servers.append(ranks.SERVER._process)
        pids = fork(*arguments) if len(servers) != 5 or moment == "after the fork" else []
        if len(servers) == 5:
            servers[-1].kill()
            servers[-1].wait()
        return pids or fork(*arguments)

    monkeypatch.setattr(ranks.SERVER, "fork", fork_and_kill)
    graded = Graded(submission, tmp_path / "results.json", RIGHT)
    assert graded.state.score == 8, graded.failures
    assert servers[4] is servers[0] is not servers[-1]
    expect_nothing_left(user)


def test_a_full_disk_is_waited_for(user, submission, tmp_path):
    """If results cannot be written, the file keeps the earlier results until a later check succeeds in writing."""
    RIGHT.write(submission)

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
    out = tmp_path / "results.json"
    arguments = ["grade", "--submission", str(submission), "--out", str(out), "--modules", "1"]
    process = subprocess.Popen([sys.executable, "-m", "brigade", *arguments], cwd=ROOT)
    try:
        used: set[int] = set()
        started: set[psutil.Process] = set()

        def has_ranks() -> bool:
            assert process.poll() is None
            with contextlib.suppress(psutil.NoSuchProcess):
                started.update(children := psutil.Process(process.pid).children(recursive=True))
                found = {child.uids().real for child in children}
                used.update(found & set(range(users.FIRST_UID, users.FIRST_UID + users.USERS)))
            return bool(used) or (os.geteuid() != 0 and len(started) > 1)

        wait_until(has_ranks)
        [server] = [one for one in psutil.Process(process.pid).children() if "fork_server" in one.cmdline()[-1]]
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
    assert psutil.wait_procs(started, HANG_S)[1] == []
    for uid in used:
        with open(f"/run/brigade/{uid}", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # wait for the server, and for another grader that has taken the user
            expect_nothing_left(uid)


# ---- without namespaces


@pytest.fixture(scope="module")
def bare(user: int) -> Iterator[None]:
    """Use a fork server that is root but cannot mount or leave the network, as in most containers."""
    if os.geteuid() != 0:
        pytest.skip("without root and namespaces, nothing isolates ranks")

    def give_up() -> None:
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_SYS_ADMIN, 0, 0, 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server.subprocess, "Popen", functools.partial(subprocess.Popen, preexec_fn=give_up))
        ranks.SERVER.close()
        ranks.SERVER.start()
    assert list(ranks.run_ranks(functions.mounts, world_size=1)) == [Path("/proc/self/mounts").read_text()]
    [found] = ranks.run_ranks(enter.probe, [*map(str, isolation.SECRETS)], world_size=1)
    assert found["uid"] == user and found["secrets"] == []
    yield
    ranks.SERVER.close()


STOPS = "processes that stop the process that ends them"  # without namespaces, they can stop their rank
WITHOUT_NAMESPACES = (
    "reads the course's files",
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
