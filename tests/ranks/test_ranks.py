"""`run_ranks` returns results, reports failures, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import hang_guard
import psutil
import pytest
from given_clock import give_clock
from hang_guard import HANG_S, wait_until
from in_ranks import basics as functions

import brigade.lab  # noqa: F401 - adds the mode "emulate"
from brigade.course.table.modules import ROOT
from brigade.grader.isolation import load_witness
from brigade.ranks.errors import UserError
from brigade.ranks.ipc import protocol
from brigade.ranks.ipc.temporary import PREFIX, make_locked_directory, sweep
from brigade.ranks.progress import Progress
from brigade.ranks.rank import main
from brigade.ranks.runner import deadline, machine, monitor
from brigade.ranks.runner.failure import make_exception_failure
from brigade.ranks.runner.options import MODES
from brigade.ranks.runner.process import OUTPUT_LIMIT, STACK_LIMIT, RankProcess
from brigade.ranks.runner.ranks import SERVER, PerRank, RankFailure, run_calls, run_ranks
from brigade.ranks.runner.report import describe_exit, describe_rank, locate
from brigade.ranks.runner.server import Server
from brigade.ranks.texts import PACKAGE

linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, or a child subreaper")


def list_descendants() -> set[psutil.Process]:
    """Return the descendants of this process, except the fork servers of the toolkit and of `multiprocessing`."""
    exempt = {SERVER._process.pid if SERVER._process else None, resource_tracker._resource_tracker._pid}
    return {process for process in psutil.Process().children(recursive=True) if process.pid not in exempt}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Check after every test that no new process and no directory of a run is left."""
    before = list_descendants()
    yield
    assert list_descendants() - before == set()
    assert not list(SERVER.scratch.glob("run-*"))


def is_alive(pid: int) -> bool:
    """Return whether the process runs. A process that only waits to be reaped does not run."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def get_failure(function: Callable[..., Any], *args: Any, **options: Any) -> RankFailure:
    with pytest.raises(RankFailure) as caught:
        run_ranks(function, *args, **{"deadline": HANG_S} | options)
    return caught.value


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the monitor wait for all failures and all stacks, however long a busy machine needs for them."""
    monkeypatch.setattr(monitor, "GRACE_S", HANG_S)
    monkeypatch.setattr(monitor, "ANSWER_S", HANG_S)


@pytest.mark.parametrize(
    ("limit", "max_cores"), [("50000 100000", 1), ("6400000 100000", 64), ("max 100000", 1 << 20), (None, 1 << 20)]
)
def test_number_of_cores_respects_the_limit_of_a_container(limit, max_cores, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "CPU_LIMIT_FILE", tmp_path / "cpu.max")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(128)), raising=False)
    if limit:
        (tmp_path / "cpu.max").write_text(limit + "\n")
    assert machine.count_cores() == min(128, max_cores)


# ---- results


def test_calls_run_in_turn_on_the_same_ranks():
    calls = [[number, PerRank(["a", "b"])] for number in range(3)]
    all_results = run_calls(functions.whoami, calls, world_size=2)
    assert [[result["args"] for result in results] for results in all_results] == [
        [[number, "a"], [number, "b"]] for number in range(3)
    ]
    assert len({result["pid"] for results in all_results for result in results}) == 2


def test_each_call_has_its_own_events():
    all_results = run_calls(functions.reduce_often, [[2], [0], [3]], world_size=2)
    for times, results in zip((2, 0, 3), all_results, strict=True):
        for events in results.events:
            assert [event["index"] for event in events if event["kind"] == "launch"] == list(range(times))
            assert [event["index"] for event in events if event["kind"] == "done"] == list(range(times))


def test_a_failed_call_is_reported_with_its_own_events():
    no_rank = -1
    with pytest.raises(RankFailure) as caught:
        run_calls(functions.fail, [[no_rank, "no error"], [1, "the second call"]], world_size=2)
    assert (caught.value.kind, caught.value.rank, caught.value.message) == ("exception", 1, "the second call")
    assert [len([event for event in events if event["kind"] == "launch"]) for events in caught.value.events] == [2, 1]
    assert [list(results) for results in caught.value.completed] == [[None, None]], "those of the first call"


@pytest.mark.parametrize("has_switch", [False, True])
@pytest.mark.parametrize("kind", ["exception", "died", "mismatch"])
def test_a_rank_that_is_slow_in_an_earlier_call_has_not_failed(kind, has_switch, gate, monkeypatch):
    """It passes the gate only after the monitor has heard of the failure, and has stopped to wait for others."""
    find_ending = monitor.Monitor._find_ending

    def let_pass_later(run: monitor.Monitor, *args: Any) -> str | None:
        ending = find_ending(run, *args)
        if run.progress.mismatch or run._failed_at:
            gate.let_pass()
        return ending

    monkeypatch.setattr(monitor.Monitor, "_find_ending", let_pass_later)
    monkeypatch.setattr(monitor, "GRACE_S", -1.0)
    monkeypatch.setattr(SERVER, "load_witness", load_witness if has_switch else None)
    with pytest.raises(RankFailure) as caught:
        run_calls(functions.fail_ahead, [[gate.path, call, kind] for call in range(2)], world_size=3, deadline=HANG_S)
    assert caught.value.kind == kind and [list(results) for results in caught.value.completed] == [[None] * 3]


def test_every_run_has_fresh_processes_in_a_fresh_directory_that_goes_with_it():
    files = [run_ranks(functions.write_file, PerRank(["a", "b"])) for _ in range(2)]
    pids = [int(name.rpartition(" ")[2]) for run in files for name in run]
    assert len({*pids, os.getpid(), SERVER._process.pid}) == 6
    directories = {Path(name).parent for run in files for name in run}
    assert len(directories) == 2 and not any(directory.exists() for directory in directories)


def test_the_seed_repeats_a_run_and_differs_between_ranks():
    first, second = (run_ranks(functions.random_number, seed=5) for _ in range(2))
    assert list(first) == list(second) and first[0] != first[1]
    assert list(run_ranks(functions.random_number)) != list(run_ranks(functions.random_number))


@pytest.mark.parametrize("stream", [True, False])
def test_events_arrive_one_by_one_or_in_batches(stream):
    heard = []
    listen = {"stream": stream, "on_event": lambda rank, event: heard.append((rank, event))}
    results = run_ranks(functions.reduce_often, 200, **listen)
    for rank, events in enumerate(results.events):
        assert [event["kind"] for event in events][:3] == ["connect", "connected", "launch"]
        assert [event["index"] for event in events if event["kind"] == "launch"] == list(range(200))
        assert [event for number, event in heard if number == rank] == events
    failure = get_failure(functions.fail, 1, "no such luck", stream=stream)
    assert (failure.rank, failure.message) == (1, "no such luck")


def test_a_run_on_the_terminal_has_no_deadline():
    assert list(run_ranks(functions.reduce_once, deadline=1e-9, terminal=True)) == [3.0, 3.0]
    assert get_failure(functions.reduce_once, deadline=1e-9).kind == "deadline"


def test_an_exception_before_the_deadline_is_reported_after_it(monkeypatch):
    """The deadline passes while the monitor, which has no processor, does not hear of the exception."""
    clock, make = give_clock(monkeypatch, monitor, deadline), monitor.make_exception_failure

    def make_late(*args: Any, **options: Any) -> RankFailure:
        clock.now = 3.0
        return make(*args, **options)

    monkeypatch.setattr(monitor, "make_exception_failure", make_late)
    failure = get_failure(functions.fail, 1, "no such luck", deadline=2.0)
    assert (failure.kind, failure.rank, failure.message) == ("exception", 1, "no such luck")


def test_output_is_capped_and_blocks_nobody():
    for text in run_ranks(functions.chatter, 3).output:
        assert text.startswith("xxxx") and len(text) < OUTPUT_LIMIT + 100 and text.endswith(" printed)")


# ---- failures


def test_an_exception_is_shown_with_the_frames_that_are_the_users(snapshot, monkeypatch):
    """The other rank waits, but that is no deadlock, even if nobody hears of anything else for a long time."""
    monkeypatch.setattr(monitor, "QUIET_S", 0.0)
    failure = get_failure(functions.fail, 1, "no such luck")
    assert (failure.kind, failure.rank, failure.error) == ("exception", 1, "ValueError")
    [(file, _, function, text)] = failure.frames
    assert (file, function, text) == ("basics.py", "fail", "raise ValueError(message)")
    assert [text.partition(" ")[0] for text in failure.output] == ["before"] * 2
    snapshot("exception", re.sub(r"line \d+", "line (n)", f"{failure}\n"))


@pytest.mark.parametrize(
    "how, error",
    [
        ("os._exit(0)", "exit code 0"),
        ("SIGKILL", describe_exit(-signal.SIGKILL)),
        ("segfault", describe_exit(-signal.SIGSEGV)),
    ],
)
def test_a_rank_that_dies(how, error):
    failure = get_failure(functions.end, 1, how, world_size=3)
    assert (failure.kind, failure.rank, failure.error) == ("died", 1, error)
    assert "rank 1 died" in failure.lines[1] and "last words" in failure.output[1]


@linux
@pytest.mark.parametrize("mode", ["record", "strict", "emulate"])
def test_threads_of_ranks(mode):
    """Gloo has one thread for collectives. Threads interrupt each other only on an emulated link.

    A collective that is due on this link must not wait for a computing thread.
    """
    for usual, policy, num_threads in run_ranks(functions.scheduling, mode=mode):
        is_chosen = mode == "emulate" or usual != os.SCHED_OTHER
        assert (policy, num_threads) == (usual if is_chosen else os.SCHED_BATCH, 1)


@linux
@pytest.mark.parametrize("policy", ["SCHED_OTHER", "SCHED_IDLE"])
def test_ranks_keep_a_policy_that_the_user_has_chosen(policy, tmp_path, monkeypatch):
    request = {"group_class": MODES["strict"], "backend": "gloo", "environment": {}, "world_size": 1}
    policies = [getattr(os, policy)]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "sched_getscheduler", lambda pid: policies[-1])
    monkeypatch.setattr(os, "sched_setscheduler", lambda pid, policy, param: policies.append(policy))
    main.run(request, sink=None, report=None)
    assert policies[1:] == [os.SCHED_BATCH] * (policy == "SCHED_OTHER")


def test_a_rank_that_cannot_connect_is_not_to_blame(gate, patient, monkeypatch):
    """The parent learns later that its peer was killed."""
    make = monitor.make_exception_failure
    monkeypatch.setattr(
        monitor, "make_exception_failure", lambda *args, **options: gate.let_pass() or make(*args, **options)
    )
    failure = get_failure(functions.cut_off, gate.path)
    assert (failure.kind, failure.rank, failure.error) == ("died", 0, describe_exit(-signal.SIGKILL))


def test_a_result_that_cannot_travel():
    failure = get_failure(functions.give_back)
    assert (failure.kind, failure.rank, failure.error) == ("exception", 1, "WireError")


@pytest.mark.parametrize("hides_course", [False, True])
def test_a_grader_shows_no_line_of_a_scenario(hides_course):
    """A submission can send the frames of any file, such as the scenario of a check that students do not have."""
    path = str(ROOT / "tests" / "helpers" / "training.py")
    packages = {"helpers": {"training": (path, "secret = 1\n")}, "submission": {"a.a": ("/x/a.py", "own = 1\n")}}
    frames = [[path, 1, "train"], ["/x/a.py", 1, "forward"]]
    error = {"frames": frames, "type": "ValueError", "message": "forged", "own": True}
    failure = make_exception_failure(0, error, packages, hides_course)
    assert ("secret" in str(failure)) == (not hides_course) and "own = 1" in str(failure)


def pass_deadline_after(monkeypatch: pytest.MonkeyPatch, *last: tuple[int, str]) -> dict[str, Any]:
    """Return options of a run whose deadline passes as soon as each (rank, kind) of `last` is the rank's last event."""
    clock = give_clock(monkeypatch, monitor, deadline)
    latest: dict[int, str] = {}

    def follow(rank: int, event: dict[str, Any]) -> None:
        latest[rank] = event["kind"]
        if latest.items() >= dict(last).items():
            clock.now = 3.0

    return {"deadline": 2.0, "on_event": follow}


def test_an_endless_loop_ends_by_the_deadline_with_its_line(patient, monkeypatch):
    failure = get_failure(functions.spin, **pass_deadline_after(monkeypatch, (0, "wait"), (1, "loop")))
    assert failure.kind == "deadline" and re.search(r"\b2 s\b", failure.summary)
    assert re.search(r"\bbasics\.py:\d+ in spin$", failure.lines[1])
    assert (
        set(failure.waiting) == {"all_reduce"} and "all_reduce #0" in failure.lines[0] and "rank 1" in failure.lines[0]
    )


def test_an_endless_loop_at_import_is_named_and_no_gpu_is_blamed(patient, monkeypatch):
    """Events arrive in batches, so the rank may seem to be creating the process group that it created before."""
    text = 'from brigade.ranks.rank import recording\n\nrecording.note("loop")\nwhile True:\n    pass\n'
    packages = {"submission": {"naive_ddp.naive_ddp": ("/handed in/naive_ddp.py", text)}}
    options = pass_deadline_after(monkeypatch, (0, "loop"), (1, "loop"))
    failure = get_failure(functions.import_submission, "naive_ddp.naive_ddp", packages=packages, **options)
    assert re.search(r"\b2 s\b.*\bnaive_ddp\.py, line [345]$", failure.summary)
    assert all(re.match(rf"rank {rank} .*\bnaive_ddp\.py, line [345]", failure.lines[rank]) for rank in range(2))
    assert "GPU" not in str(failure) and "process group" not in str(failure)


STUCK = [  # what the ranks do, their number, the kind of failure, what ranks wait in, and what the lines name
    (
        functions.leave_one_out,
        2,
        "deadlock",
        {"all_reduce"},
        ["#1 (weight, float32, 32 B)", "rank 1 never", "at basics.py:", "#0 (bias"],
    ),
    (functions.cross_over, 2, "deadlock", {"all_reduce"}, ["rank 1 never", "rank 0 never"]),
    (functions.create_group_on_rank_0, 2, "deadlock", set(), ["ranks 0, 1", "rank 1 never"]),
    (functions.hang_in_a_new_group, 2, "deadline", set(), ["process group", "rank 1 is"]),
    (functions.send_first, 3, "deadlock", {"send"}, ["send #0 to rank 1 (float32, 12 B)", "no recv"]),
]


@pytest.mark.parametrize(("function", "world_size", "kind", "waiting", "words"), STUCK)
def test_ranks_that_cannot_go_on_are_stopped_long_before_the_deadline(
    function, world_size, kind, waiting, words, patient, monkeypatch
):
    monkeypatch.setattr(monitor, "QUIET_S", 0.0)
    is_late = kind == "deadline"
    options = pass_deadline_after(monkeypatch, (0, "connect"), (1, "connect")) if is_late else {}
    failure = get_failure(function, world_size=world_size, **options)
    assert (failure.kind, set(failure.waiting)) == (kind, waiting)
    assert not [text for text in words if text not in str(failure)], failure
    assert "GPU" not in str(failure), "the ranks use gloo"


def test_a_line_is_found_in_a_file_of_any_name(tmp_path):
    path = '/Meine Kürse/"ddp" 作业 😀.py'
    exec(compile("def größe(write):\n    write()", path, "exec"), names := {})
    with open(tmp_path / "stacks", "w+b") as file:
        names["größe"](lambda: faulthandler.dump_traceback(file, all_threads=False))
        file.seek(0)
        assert locate(file.read(), {PACKAGE: {"ddp": (path, "")}}) == f"{Path(path).name}:2 in größe"


def test_the_line_is_the_one_of_the_main_thread(tmp_path):
    """The stack of a thread that the submission started, such as a logger's, comes first."""
    path, end = "/ddp.py", threading.Event()
    text = "def log(end):\n    end.wait()\ndef finish(write):\n    write()\n"
    exec(compile(text, path, "exec"), names := {})
    logger = threading.Thread(target=names["log"], args=(end,))
    logger.start()
    with open(tmp_path / "stacks", "w+b") as file:
        names["finish"](lambda: faulthandler.dump_traceback(file, all_threads=True))
        end.set()
        logger.join()
        file.seek(0)
        assert locate(file.read(), {PACKAGE: {"ddp": (path, "")}}) == "ddp.py:4 in finish"


def test_a_rank_that_prints_something_instead_of_its_stacks_does_not_delay_the_report():
    """The patterns that were used before took minutes, or raised UnicodeDecodeError."""
    evil = [
        b'File "' * (STACK_LIMIT // 6),
        b'  File "a", line 1' * (STACK_LIMIT // 18),
        rb'File "/ddp.py", line 1 in \x',
    ]
    for stack in (*evil, b"\n".join(evil)):
        assert locate(stack, {PACKAGE: {"ddp": ("/ddp.py", "")}}) in ("", "ddp.py:1 in \ufffd")


@pytest.mark.parametrize("moves", [False, True])
def test_the_line_of_a_rank_that_moved_on_is_left_out(moves):
    """Its stacks could be from an earlier wait than the one that its last event names."""
    progress = Progress(1)
    process = RankProcess(0, progress.ranks[0], {"calls": [[]]})
    launch = {"kind": "launch", "op": "all_reduce", "group": "0", "ranks": [0], "name": "bias", "dtype": "float32"}
    for index in range(2):
        progress.add(0, launch | {"index": index, "nbytes": 4, "numel": 1, "reduce_op": None, "root": None})
    progress.add(0, {"kind": "wait", "index": 0})
    process.stack, process.num_events_then = bytearray(b'  File "/a/ddp.py", line 3 in finish\n'), 3
    if moves:
        for kind, index in (("done", 0), ("wait", 1)):
            progress.add(0, {"kind": kind, "index": index})
    text = describe_rank(process, progress, {PACKAGE: {"ddp": ("/a/ddp.py", "")}})
    process.close()
    for descriptor in process.rank_ends:
        os.close(descriptor)
    assert (f"all_reduce #{int(moves)} " in text) and ("ddp.py:3" in text) == (not moves)


def test_a_slow_rank_is_no_deadlock(gate, monkeypatch):
    """Rank 1 goes on only after the monitor has looked for a deadlock while rank 0 waits."""
    monkeypatch.setattr(monitor, "QUIET_S", 0.0)
    is_deadlocked, looks = Progress.is_deadlocked, []

    def look(progress: Progress, settled: list[int]) -> bool:
        waiting = progress.ranks[0].waiting
        if waiting and waiting["kind"] == "launch":
            if not looks:
                gate.let_pass()
            looks.append(waiting)
        return is_deadlocked(progress, settled)

    monkeypatch.setattr(Progress, "is_deadlocked", look)
    assert list(run_ranks(functions.slow_peer, gate.path)) == [3.0, 3.0]
    assert looks


@pytest.mark.parametrize("mode", ["record", "strict"])
@pytest.mark.parametrize("how", ["size", "order", "operation", "dtype", "root", "reduce op"])
def test_collectives_that_do_not_fit_are_a_mismatch_at_once(how, mode, patient, monkeypatch):
    monkeypatch.setattr(monitor, "QUIET_S", HANG_S)  # it is not detected as a deadlock
    aborts = mode == "record" and how in ("size", "order", "operation")  # gloo does, now and then
    for _ in range(5 if aborts else 1):  # never may that hide the reason
        failure = get_failure(functions.mismatch, how, mode=mode)
        assert failure.kind == "mismatch"
        assert {*failure.waiting} < {"all_reduce", "broadcast"} and failure.rank in (0, 1)
        assert re.match(r"rank [01] .*\b(all_reduce|broadcast) #0 .*\brank [01] .*#0 ", failure.summary)


def test_a_mismatch_is_told_where_all_ranks_have_delivered(monkeypatch):
    monkeypatch.setattr(monitor, "LISTEN_S", 0.3)  # all that they say is heard at once
    for how in ("dtype", "reduce op"):
        assert get_failure(functions.mismatch, how, mode="strict").kind == "mismatch"


@linux
def test_a_process_that_left_its_rank_is_ended_too():
    pids = [pid for result in run_ranks(functions.start_daemon) for pid in result]
    assert len(set(pids)) == 4 and not any(is_alive(pid) for pid in pids)


@linux
def test_a_rank_that_kills_the_server():
    server = SERVER._process.pid
    with pytest.raises(UserError) as caught:
        run_ranks(functions.end_server)
    assert "\n" not in str(caught.value)
    wait_until(lambda: not is_alive(server))
    assert list(run_ranks(functions.reduce_once)) == [3.0, 3.0]
    assert SERVER._process.pid != server


@pytest.mark.parametrize("moment", ["fork", "kill"])
def test_after_ctrl_c_at_any_moment_the_next_run_is_in_order(moment, monkeypatch):
    """If an interrupt arrives before the server's answer, the next run must not receive this answer."""
    run_ranks(functions.reduce_once)  # the server runs
    send = protocol.send
    interrupted = []

    def interrupt_once(channel, order, *descriptors):
        send(channel, order, *descriptors)
        if moment in order and not interrupted:
            interrupted.append(moment)
            raise KeyboardInterrupt

    monkeypatch.setattr(protocol, "send", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        run_ranks(functions.reduce_once)
    assert list(run_ranks(functions.reduce_once)) == [3.0, 3.0]


# ---- the parent's end

PARENT = """
from in_ranks import basics
from brigade.ranks.runner import ranks

def show(rank, event):
    if event["kind"] == "pid":
        print(event["pid"], flush=True)

ranks.SERVER.start()
print(ranks.SERVER._process.pid, flush=True)
ranks.run_ranks(basics.forever, on_event=show, terminal=True)
"""


SIDE_BY_SIDE = """
import os, signal
from brigade.ranks.rank.fork_server import ForkServer
from brigade.grader.isolation import load_witness

def fork(ends):
    pid = os.fork()
    while pid == 0:
        os._exit(3) if ends else signal.pause()
    return pid

doomed, other, going_on = fork(False), fork(True), fork(False)
server = ForkServer()
server.ranks |= {doomed: 0, other: 1, going_on: 2}
os.waitid(os.P_PID, other, os.WEXITED | os.WNOWAIT)
assert server.kill([doomed]) == {doomed: -9} and server.kill([other]) == {other: 3} and server.ranks == {going_on: 2}
assert server.kill([going_on]) == {going_on: -9}
"""


@contextlib.contextmanager
def program(text: str, scratch: Path) -> Iterator[subprocess.Popen]:
    """Start another process that uses the toolkit, with its temporary files in `scratch`."""
    environment = os.environ | {"TMPDIR": str(scratch), "PYTHONPATH": str(ROOT / "tests" / "support")}
    process = subprocess.Popen(
        [sys.executable, "-c", text],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=hang_guard.hear_ctrl_c,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            stream.close()


def read_running_pids(process: subprocess.Popen) -> list[int]:
    """Return the process ids of the server and two ranks once the ranks are in their endless loop."""
    return [int(process.stdout.readline()) for _ in range(3)]


def test_ctrl_c_leaves_nothing(tmp_path):
    with program(PARENT, tmp_path) as parent:
        pids = read_running_pids(parent)
        assert list(tmp_path.glob("brigade-*"))
        os.killpg(parent.pid, signal.SIGINT)  # as a terminal does, to all in the foreground
        assert hang_guard.wait(parent) != 0
        assert "KeyboardInterrupt" in parent.stderr.read()
        assert not any(is_alive(pid) for pid in pids) and not list(tmp_path.iterdir())


def test_a_killed_parent_leaves_nothing(tmp_path):
    with program(PARENT, tmp_path) as parent:
        pids = read_running_pids(parent)
        parent.kill()
        wait_until(lambda: not any(is_alive(pid) for pid in pids) and not list(tmp_path.iterdir()))


def test_parent_and_server_killed_together_leave_no_rank_and_the_next_start_cleans_up(tmp_path, monkeypatch):
    with program(PARENT, tmp_path) as parent:
        server, *pids = read_running_pids(parent)
        parent.send_signal(signal.SIGSTOP)  # or it would see its server end, and clean up
        os.kill(server, signal.SIGKILL)
        parent.kill()
        try:
            wait_until(lambda: not any(is_alive(pid) for pid in (server, *pids)))
        finally:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    [stale] = tmp_path.glob("brigade-*")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    another = Server()
    another.start()
    wait_until(lambda: sweep() or not stale.exists())  # threads of a killed process hold its lock for a moment
    sweep()
    assert another.scratch.exists(), "a directory in use was swept"
    another._process.kill()  # it is still importing torch
    another.close()
    assert not list(tmp_path.iterdir())


def test_a_directory_whose_process_was_killed_before_locking_it_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    abandoned = tmp_path / f"{PREFIX}abandoned"
    abandoned.mkdir()
    (tmp_path / "brigade-other").mkdir()  # it is not locked, but sweep must ignore it because of its prefix
    directory, lock = make_locked_directory()
    sweep()
    assert not abandoned.exists() and directory.exists() and (tmp_path / "brigade-other").exists()
    os.close(lock)
    sweep()
    assert not directory.exists()


def test_killing_the_ranks_of_one_run_keeps_the_exit_statuses_of_another(tmp_path):
    with program(SIDE_BY_SIDE, tmp_path) as server:
        assert hang_guard.wait(server) == 0, server.stderr.read()
