"""Events alone show what each rank is doing and whether a run is deadlocked. Invalid events are refused."""

import math
import re

import pytest

from brigade.ranks.events import validate
from brigade.ranks.progress import Mismatch, Progress, RankRecord

KINDS = {"w": "wait", "d": "done", "c": "call", "e": "called"}


class Run:
    """Events of three ranks, written by hand."""

    def __init__(self, script=""):
        """Add the events of a script. In each of its words, a rank acts:

        0>a01    launches in group a of ranks 0 and 1
        0!a01    launches there, and waits
        0!s1     sends to rank 1, and waits; r is a receive, without a number from any rank
        0w2, 0d2 waits for its launch 2, or has waited for it
        0c2, 0e2 enters NCCL for its launch 2, or has returned from there
        """
        self.progress = Progress(3)
        for rank, action, what, numbers in (re.fullmatch(r"(.)(.)(\D?)(.*)", word).groups() for word in script.split()):
            if action in KINDS:
                self.progress.add(int(rank), {"kind": KINDS[action], "phase": "finish", "index": int(numbers)})
                continue
            op = {"s": "send", "r": "recv"}.get(what)
            peer = {"op": op, "peer": int(numbers) if numbers else None} if op else {}
            ranks = range(3) if op else map(int, numbers)
            (self.wait if action == "!" else self.launch)(int(rank), "world" if op else what, ranks, **peer)

    def launch(self, rank, group, ranks, op="all_reduce", numel=3, peer=None):
        index = len(self.progress.ranks[rank].launches)
        event = {"kind": "launch", "index": index, "group": group, "ranks": list(ranks), "op": op, "peer": peer}
        common = {"phase": "backward", "dtype": "float32", "numel": numel, "nbytes": 4 * numel, "reduce_op": "SUM"}
        common |= dict.fromkeys(("name", "root", "line", "caller"))
        self.progress.add(rank, event | common)
        return index

    def wait(self, rank, group, ranks, **call):
        self.progress.add(rank, {"kind": "wait", "index": self.launch(rank, group, ranks, **call)})


@pytest.fixture
def run():
    return Run()


@pytest.mark.parametrize(
    ("script", "settled", "missing"),
    [
        ("0>a01 1!a01 0w0 0d0 0!a01", [2], [[1], [], []]),  # rank 1 only lacks processor time
        ("0!a01 1!b12 2>b12 2!w012", [], [[1], [], [0, 1]]),  # ranks 0 and 2 wait for rank 1, which goes on
        ("0!a012 1!b012", [], [[1, 2], [0, 2], []]),  # rank 2 is busy
        ("0!a012 1!b012 2!a012", [], [[1], [0, 2], [1]]),
        ("0>w012 0!w012 1>w012 1!w012 2>w012", [2], [[2], [2], []]),  # a finished rank launches nothing more
        ("2>w012 0!w012 1!w012", [2], [[], [], []]),  # it had launched before
        ("0>w012", [1, 2], [[], [], []]),  # rank 0 is busy
        ("0>a01 0c0 1>b01 1c0", [2], [[1], [0], []]),  # both are inside a launch
        ("0>a01 0c0 0e0 1>b01 1c0", [2], [[], [0], []]),  # rank 0 has left it
        ("0>a01 0>a01 0c1 0w0 0e1 1>b01 1c0", [2], [[1], [0], []]),  # one thread has left it, and another one waits
        ("0>w012", [0, 1, 2], [[], [], []]),
        ("0!s1 1>r2 1>s0 1!w012 2!r0", [], [[1], [0, 2], [0]]),  # other messages do not count
        ("1>r0 1!w012 0!s1", [2], [[], [0, 2], []]),
        ("1>r0 1!w012 0!s1 0!s1", [2], [[1], [0, 2], []]),  # rank 1 receives one message only
        ("0!r 1!s0 2!w012", [], [[], [], [0, 1]]),  # a receive from any rank may go on until the deadline
        ("0!a01 1>b01 1>b01 1>b01 1w2", [2], [[1], [0], []]),  # launches in another group do not count
    ],
)
def test_for_whom_each_rank_waits(script, settled, missing):
    progress = Run(script).progress
    assert [progress.find_missing_peers(rank) for rank in range(3)] == missing
    unsettled = [missing[rank] for rank in range(3) if rank not in settled]
    assert progress.is_deadlocked(settled) == (bool(unsettled) and all(unsettled))


@pytest.mark.parametrize(
    ("script", "settled", "lost"),
    [
        ("0>a01 0c0 0e0 0>a01 0c1 0e1", [1, 2], 0),  # CUDA may block rank 0 before it reaches the wait
        ("0>a01 0c0 0e0 0>a01 0c1 0e1 1>a01", [1, 2], 1),
        ("0>a01 0c0 0e0 0>a01 0c1 0e1 1>a01 1>a01", [1, 2], None),  # rank 0 is busy
        ("0>a01 0c0 0e0", [2], None),  # rank 1 may launch it later
        ("0>a01 0c0 0e0 1!b01", [2], None),  # so it may, if rank 0 launches in group b
        ("0>a01", [1, 2], None),  # not on CUDA: rank 0 may forget the handle, and finish
        ("0>a01 0>a01 0c0 0e0 0c1 0e1 0w0 0d0 1>a01", [1, 2], 1),  # it has waited for the first one
        ("0>a01 0c0 0e0", [0, 1, 2], None),
    ],
)
def test_a_launch_on_cuda_that_a_finished_peer_left_out_is_lost(script, settled, lost):
    progress = Run(script).progress
    found = progress.find_lost_launch(0, settled)
    assert (found and found["index"]) == lost
    assert progress.is_deadlocked(settled) == (lost is not None)
    if found:
        assert f"rank 1 never launched all_reduce #{lost}" in progress.describe_activity(0, settled)
    assert "never" not in progress.describe_activity(0)


def test_a_lost_launch_and_a_wait_for_the_same_peer_are_a_deadlock():
    progress = Run("0>a012 0c0 0e0 2!a012").progress
    assert not progress.is_deadlocked([])
    assert progress.is_deadlocked([1])


# ---- mismatches


def test_launches_of_the_same_number_must_be_the_same_collective(run):
    run.launch(0, "world", (0, 1), numel=3)
    assert run.progress.mismatch is None, "rank 1 has launched nothing"
    run.launch(1, "world", (0, 1), op="recv", peer=0)
    assert run.progress.mismatch is None, "a message is no collective"
    run.launch(0, "pair", (0, 2), numel=5)
    assert run.progress.mismatch is None, "in this group rank 0 is alone so far"
    run.launch(1, "world", (0, 1), numel=4)
    [launch, _], [_, peer_launch], _ = [record.launches for record in run.progress.ranks]
    assert run.progress.mismatch == Mismatch(1, peer_launch, 0, launch)


# ---- what a rank is doing, in words


def test_what_a_rank_is_doing(run, snapshot):
    """The last two ranks send to each other, and neither receives."""
    launch = {"kind": "launch", "phase": "backward", "op": "all_reduce", "dtype": "float32", "nbytes": 8, "name": "w"}
    record = RankRecord()
    said = [record.describe_activity()]
    for event in (
        launch | {"index": 0},
        {"kind": "wait", "phase": "finish", "index": 0},
        {"kind": "done", "phase": "finish", "index": 0},
    ):
        record.add(event)
        said += [record.describe_activity(), record.describe_activity([1, 3])]
    run.wait(0, "world", range(3), op="send", peer=1)
    run.wait(1, "world", range(3), op="send", peer=0)
    said.append(run.progress.describe_activity(0))
    run.wait(2, "world", range(3), op="recv")
    said.append(run.progress.describe_activity(2))
    lost = Run("0>a01 0c0 0e0 0>a01 0c1 0e1 1>a01").progress
    said.append(lost.describe_activity(0, [1, 2]))
    snapshot("activities", "".join(f"rank 0 {activity}\n" for activity in said))


# ---- which events are not valid

LAUNCH = {
    "kind": "launch", "time": 1.0, "phase": "backward", "index": 2, "group": "0", "ranks": [0, 1], "op": "all_reduce",
    "dtype": "float32", "numel": 3, "nbytes": 12, "parts": 1, "reduce_op": "SUM", "root": None, "sync": False,
    "peer": None, "name": None, "memory": None, "line": None, "caller": None,
}  # fmt: skip
WAIT = {"kind": "wait", "time": 1.0, "phase": "finish", "index": 1}


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ([LAUNCH], "must be a dict"),
        (LAUNCH | {"kind": ["launch"]}, "kind"),
        (LAUNCH | {"time": 1}, "time"),
        (LAUNCH | {"time": math.inf}, "finite"),
        (LAUNCH | {"index": 3}, "wrong number"),
        (LAUNCH | {"ranks": ["0"]}, "not numbers"),
        *(({name: value for name, value in LAUNCH.items() if name != field}, field) for field in LAUNCH),
        *((LAUNCH | {field: [1.0]}, field) for field in LAUNCH if field not in ("ranks", "kind")),
        (WAIT | {"index": 2}, "not made"),
        (WAIT | {"index": True}, "index"),
        (WAIT | {"index": -1}, "too large"),
        (WAIT | {"kind": "end", "began": "0"}, "finite"),
        ({"kind": "own", "time": 1.0, "phase": "setup", "index": 1 << 40}, "too large"),
        ({"kind": "ready", "time": 1.0, "phase": "backward"}, "name"),
    ],
)
def test_invalid_events(event, why):
    with pytest.raises(ValueError, match=why):
        validate(event, num_launches=2)
