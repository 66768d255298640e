"""The switch performs what ranks ask for, believes nothing, and is the only way from one rank to another."""

from __future__ import annotations

import os
import random
import re
import socket
import struct
import sys

import pytest
import switch_functions as functions
from hang_guard import HANG_S

from brigade.course.checks.borders import find_contradiction
from brigade.course.checks.diagnose.exceptions import explain_deadline, explain_exception
from brigade.course.checks.reference import Case
from brigade.course.table.modules import ROOT
from brigade.course.table.submission import read
from brigade.grader import isolation
from brigade.grader.isolation import load_witness
from brigade.grader.witness import switch
from brigade.ranks.ipc.channel import ParentChannel
from brigade.ranks.runner.ranks import SERVER, RankFailure, run_ranks
from brigade.ranks.sandbox import enter
from helpers import training
from m06_coalesced.causes import UNEQUAL_SHARDS


@pytest.fixture(autouse=True)
def use_switch(monkeypatch):
    monkeypatch.setattr(SERVER, "load_witness", load_witness)


def test_sizes_may_differ_between_ranks_where_torch_allows_it():
    found = run_ranks(functions.exchange_everything, mode="strict", world_size=3)
    for rank, result in enumerate(found):
        assert [tensor.tolist() for tensor in result["received"]] == [[float(o)] * (rank + o + 1) for o in range(3)]
        assert result["output"].tolist() == [100.0 * o + 2 * rank + i for o in range(3) for i in range(2)]
    assert found[0]["any"].tolist() == [7.0] * 3 and found[0]["source"] == 1


def test_unusual_calls_give_the_same_as_gloo(monkeypatch):
    found = run_ranks(functions.call_unusually, mode="strict", world_size=3)
    monkeypatch.setattr(SERVER, "load_witness", None)
    assert list(found) == list(run_ranks(functions.call_unusually, mode="strict", world_size=3))
    for own in found.events:
        assert [event["parts"] for event in own if event["kind"] == "launch"][:2] == [2, 2]


@pytest.mark.parametrize("has_switch", [False, True])
def test_shards_of_another_length_raise_the_exception_that_causes_explain(has_switch, monkeypatch):
    monkeypatch.setattr(SERVER, "load_witness", load_witness if has_switch else None)
    with pytest.raises(RankFailure) as caught:
        run_ranks(functions.scatter_unequally, mode="strict")
    assert re.search(UNEQUAL_SHARDS, caught.value.message).groups() == ("6", "4")


@pytest.mark.parametrize("method", ["reduce_scatter", "all_gather_coalesced"])
def test_a_missing_output_gets_a_sentence(method):
    with pytest.raises(RankFailure) as caught:
        run_ranks(functions.pair_unequally, method, mode="strict")
    assert caught.value.message.startswith(f"{method} needs one output for each input")


WRONG = {  # what rank 1 does, and what is reported
    "huge": ("note(); launch(sizes=[1 << 40], receives=[1 << 40])", "cannot be performed"),
    "missing bytes": ("note(nbytes=16, numel=4); launch(sizes=[16], receives=[16])", "contains 8 bytes"),
    "not a member": ("note(ranks=[0]); launch()", "cannot be performed"),
    "a group that nobody created": (
        "note(op='barrier', dtype=None, reduce_op=None, group='x'); launch()",
        "not created",
    ),
    "barriers as bits": ("while True: dist.barrier(dist.new_group([1]))", "called 65 barriers"),
    "unknown operation": ("note(op='steal'); launch()", "the operation is unknown"),
    "unknown dtype": ("note(dtype='object'); launch()", "cannot be performed"),
    "part of an element": ("note(); launch(sizes=[7], receives=[7])", "not a multiple"),
    "other sizes inside and outside": ("note(); launch(receives=[4])", "do not fit together"),
    "root in an all_reduce": ("note(root=0); launch()", "its root"),
    "a root outside": ("note(op='broadcast', root=-1); launch()", "cannot be performed"),
    "a message to itself": ("note(op='send', peer=1, reduce_op=None); launch(receives=[])", "to itself"),
    "a message to nobody": ("note(op='send', peer=2, reduce_op=None); launch(receives=[])", "no peer in the group"),
    "lists of lists": ("note(); launch(sizes=[[8]])", "cannot be performed"),
    "many parts": ("note(); launch(sizes=[0] * 20_000, receives=[0] * 20_000)", "too many parts"),
    "no JSON": ("note(); channel._send(b'C', struct.pack('<I', 3) + b'[[[')", "cannot be performed"),
    "unrecorded": ("launch()", "without recording it"),
    "recorded numel": ("note(numel=1); launch()", "has numel = 1 instead of 2"),
    "recorded only": ("note(); note(index=1); channel._send()", "it did not make"),
    "recorded as the last one": ("note(); raise EOFError", "knows nothing"),
    "recorded as awaited": ("note(); launch(); note('done'); channel._send()", "did not wait"),
    "recorded as complete": ("note(); launch(); channel.poll(0); note('complete'); channel._send()", "did not ask"),
    "two questions": ("note(); launch(); note('wait'); note('phase'); channel._send()", "went on before"),
    "a result while it waits": (
        "note(); launch(); note('wait'); channel.send_result(b''); signal.pause()",
        "went on before",
    ),
    "a huge tag": ("note(op='send', peer=0, reduce_op=None); launch(receives=[], tag=1 << 32)", "its tag"),
    "a border of another batch": ("note('border', batch=-1, values=''); channel._send()", "border that it does not"),
    "another rank's group": ("note('connect', ranks=[0]); channel._send()", "not a member"),
    "a question of three bytes": ("channel._send(b'P', b'abc')", "unreadable"),
    "a question about the future": ("channel.poll(0)", "has not made"),
    "half a message": ("channel._socket.sendall(b'C' + struct.pack('<Q', 1000) + b'abc'); os._exit(0)", "exit code 0"),
    "a message without end": ("channel._socket.sendall(b'C' + struct.pack('<Q', 1 << 60))", "unreadable"),
    "flood": ("while True: dist.all_reduce(torch.ones(1 << 20), async_op=True)", "too many bytes"),
    "many launches": ("while True: dist.all_reduce(torch.ones(1), async_op=True)", "endless loop"),
}


@pytest.mark.parametrize(("code", "report"), WRONG.values(), ids=WRONG)
def test_a_rank_that_sends_something_wrong_is_reported(code, report, monkeypatch):
    monkeypatch.setattr(switch, "MOST_LAUNCHES", 2_000)
    monkeypatch.setattr(switch, "MOST_HELD", 32 << 20)
    with pytest.raises(RankFailure, match=report) as caught:
        run_ranks(functions.attack, code, mode="strict", deadline=HANG_S)
    assert caught.value.rank == 1


def test_the_rank_that_holds_most_is_reported_and_not_the_last_to_launch(gate, monkeypatch):
    monkeypatch.setattr(switch, "MOST_HELD", 32 << 20)
    with pytest.raises(RankFailure, match="too many bytes") as caught:
        run_ranks(functions.hold_much, gate.path, mode="strict", deadline=HANG_S)
    assert caught.value.rank == 1


def test_a_rank_that_does_not_read_does_not_hold_up_the_others():
    with pytest.raises(RankFailure) as caught:
        run_ranks(functions.never_read, world_size=3, mode="strict", deadline=HANG_S)
    assert (caught.value.kind, caught.value.rank) == ("died", 0) and "exit code 6" in caught.value.summary


def test_a_rank_that_asks_again_without_reading_is_refused():
    """Otherwise, the grader would have to keep an unlimited number of answers."""
    code = "dist.barrier(dist.new_group([1]), async_op=True)\nwhile True: channel._send(b'P', bytes(8))"
    with pytest.raises(RankFailure, match=r"rank 1 .*\bbefore\b") as caught:
        run_ranks(functions.attack, code, mode="strict", deadline=HANG_S)
    assert (caught.value.kind, caught.value.rank) == ("garbled", 1)


@pytest.mark.parametrize("mode", ["record", "strict"])
def test_asking_in_a_loop_becomes_a_wait(mode, monkeypatch):
    """So a right program goes on, and a deadlock is found."""
    monkeypatch.setattr(switch, "MOST_SIGNALS", 0)
    assert list(run_ranks(functions.ask_in_loops, True, mode=mode)) == [[0.0, 2.0, 4.0]] * 2
    with pytest.raises(RankFailure, match=r"rank 0 .*\ball_reduce #0\b") as caught:
        run_ranks(functions.ask_in_loops, False, mode=mode, deadline=HANG_S)
    assert caught.value.kind == "deadlock" and "all_reduce" in caught.value.waiting


def test_what_does_not_fit_into_a_socket_is_sent_when_the_rank_reads():
    """Neither end of the parent waits for a rank."""
    parent = ParentChannel()
    data = os.urandom(1 << 22)
    with socket.socket(fileno=parent.rank_end) as rank_end, parent.socket:
        parent.send(data)
        parent.send(b"another")
        assert parent.is_sending and parent.read(), "nothing has arrived, and the rank has not ended"
        received = bytearray()
        while parent.is_sending:
            received += rank_end.recv(1 << 16)
            parent.flush()
        received += rank_end.recv(1 << 22)
        assert received == b"".join(struct.pack("<Q", len(part)) + part for part in (data, b"another"))


def test_a_rank_that_has_ended_gets_nothing_more():
    parent = ParentChannel()
    with parent.socket:
        parent.send(bytes(1 << 22))
        os.close(parent.rank_end)
        parent.flush()
        assert not parent.is_sending and not parent.read()


def test_a_pass_belongs_to_the_step_of_its_batch():
    """Otherwise, a rank could compute gradients and average them before the step in which launches are counted."""
    jobs = Case(random.Random(1), "Plain", 2, steps=2).make_jobs(package="m01_naive_ddp", wrapper="NaiveDDP")
    sources = {"submission": read("solutions", 1, "own")}
    events = run_ranks(training.train, jobs, mode="strict", packages=sources).events[0]
    assert find_contradiction(events, jobs, 0, 0, [0, 1]) == ""
    later = sorted(events, key=lambda event: event["kind"] == "step" and event["step"] == 1)
    assert "another step" in find_contradiction(later, jobs, 0, 0, [0, 1])


@pytest.mark.parametrize("numbers", [[], [0, 0], [None], [0, None]])
def test_a_rank_reports_the_steps_of_the_scenario(numbers):
    """Otherwise, a claim about all launches of a step would be about none."""
    steps = [{"kind": "step", "step": number} for number in numbers]
    assert find_contradiction([{"kind": "step", "step": 0}], [], 0, 0, [0]) == ""
    assert "other steps were reported than [0]" in find_contradiction(steps, [], 0, 0, [0])


def as_ordinary_user(patch):
    """Let ranks from now on run as without root, in namespaces of the user that runs this test."""
    if sys.platform != "linux" or not enter.has_namespaces():
        pytest.skip("no namespaces here")
    patch.setattr(os, "geteuid", lambda: 1000)


@pytest.mark.skipif(not isolation.may_isolate(), reason="isolation needs Linux, and root or namespaces")
@pytest.mark.parametrize("is_ordinary", [False, True])
def test_offline_ranks_reach_nobody(is_ordinary, tmp_path, monkeypatch):
    """Ranks have no network, no common directory and, from root, no common user, and see no process of another rank."""
    tmp_path.chmod(0o777)
    if is_ordinary:
        as_ordinary_user(monkeypatch)
    with isolation.isolate_ranks([str(tmp_path / "results")], "gloo"):
        if not run_ranks(enter.probe, [], world_size=1)[0]["is_filtered"]:
            pytest.skip("no filter of system calls here")
        found = run_ranks(functions.look_around, str(tmp_path), mode="strict")
    for result in found:
        refused = ["internet", "unix", "socketpair", "flock", "lock", "notify"]
        refused += ["drop pages", "pages in memory", "free memory"]
        assert [result[name] for name in refused] == ["EPERM"] * len(refused)
        assert result["terminal"] in ("ENODEV", "ENOENT"), "its number tells how many the other rank has opened"
        assert result["change"] in ("EROFS", "EACCES") and set(result["rights"]) == {"0" * 16}
        assert result["pid"] == (1, 0), "priorities and other properties of processes are messages"
        assert result["files"] == [], "a rank sees a file of the other rank"
        own = ["/proc/1", *(f"/proc/1/{name}" for name in enter.PROCESS_FILES), "/proc/self"]
        assert result["counters"] == own, "a rank can change some of the others, and another can read them"
        assert result["own numbers"] == ["1", "0", "1"], "a rank can change how many processes there are outside"
        assert result["memory"] > 1 << 20, "psutil works"
        assert result["processes"] == []
    assert (found[0]["uid"] != found[1]["uid"]) == (os.geteuid() == 0), "only root can have several users"


def test_ranks_of_an_ordinary_user_see_only_the_system_and_python(tmp_path, monkeypatch):
    as_ordinary_user(monkeypatch)
    python = [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix, *sys.path)]
    seen = {path[: path.find("/", 1)] for path in python} | enter.SYSTEM | {"/tmp"}
    (tmp_path / "ada").mkdir()
    monkeypatch.setenv("HOME", "/nowhere/ada")
    secrets = [f"/{name}" for name in os.listdir("/") if f"/{name}" not in seen]
    secrets += map(str, [tmp_path, ROOT, *isolation.SECRETS])
    with isolation.isolate_ranks([str(tmp_path / "ada")], "gloo"):
        assert "/nowhere/ada" in SERVER.sandbox.hidden, "it may be in a directory of the system"
        [found] = run_ranks(enter.probe, secrets, world_size=1)
    assert found["secrets"] == [] and found["unreachable"] == []


@pytest.mark.skipif(not isolation.may_isolate(), reason="isolation needs Linux, and root or namespaces")
def test_what_the_kernel_refuses_to_offline_ranks_has_a_cause():
    """The exceptions and the printed text are those by which `diagnose/exceptions.py` knows the causes."""
    with isolation.isolate_ranks([], "gloo"):
        if not run_ranks(enter.probe, [], world_size=1)[0]["is_filtered"]:
            pytest.skip("no filter of system calls here")
        run = run_ranks(functions.do_what_is_refused, world_size=1)
        failures = [RankFailure("exception", "", [], 0, error, message=text) for error, text in run[0]]
        names = [explain_exception(failure, {})[1] for failure in failures]
        hung = RankFailure("deadline", "", [], output=run.output)
        assert names == ["hidden load", "no user name", "refused lock"]
        assert explain_deadline(hung, {})[1] == "lost tensor"
