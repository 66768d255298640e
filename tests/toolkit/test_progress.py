"""Events alone show what each rank is doing and whether a run is deadlocked. Invalid events are refused."""

import math

import pytest

from brigade.events import validate
from brigade.progress import Mismatch, Progress, RankRecord


class Run:
    """Events of several ranks, written by hand."""

    def __init__(self, world_size):
        self.progress = Progress(world_size)

    def launch(self, rank, group, ranks, op="all_reduce", numel=3, peer=None):
        index = len(self.progress.ranks[rank].launches)
        event = {"kind": "launch", "index": index, "group": group, "ranks": list(ranks), "op": op, "peer": peer}
        common = {"dtype": "float32", "numel": numel, "nbytes": 4 * numel, "reduce_op": "SUM"}
        common |= dict.fromkeys(("name", "root", "line", "caller"))
        self.progress.add(rank, event | common)
        return index

    def wait(self, rank, group, ranks, **call):
        index = self.launch(rank, group, ranks, **call)
        self.progress.add(rank, {"kind": "wait", "index": index})
        return index

    def done(self, rank, index):
        self.progress.add(rank, {"kind": "done", "index": index})


@pytest.fixture
def run():
    return Run(3)


def test_a_rank_whose_peers_have_launched_goes_on_by_itself(run):
    """Rank 1 only lacks processor time. It will launch the collective that rank 0 waits for."""
    both = run.launch(0, "world", (0, 1))
    run.wait(1, "world", (0, 1))
    run.progress.add(0, {"kind": "wait", "index": both})
    run.done(0, both)
    run.wait(0, "world", (0, 1))
    assert run.progress.find_missing_peers(0) == [1] and run.progress.find_missing_peers(1) == []
    assert not run.progress.is_deadlocked(settled=[2])


def test_groups_complete_independently_of_each_other(run):
    run.wait(0, "pair", (0, 1))
    run.wait(1, "other pair", (1, 2))
    run.launch(2, "other pair", (1, 2))
    run.wait(2, "world", range(3))
    assert not run.progress.is_deadlocked(settled=[]), "ranks 0 and 2 wait for rank 1, which goes on"


def test_ranks_that_wait_for_each_other_are_deadlocked(run):
    run.wait(0, "a", range(3))
    run.wait(1, "b", range(3))
    assert not run.progress.is_deadlocked(settled=[]), "rank 2 is busy"
    run.wait(2, "a", range(3))
    assert run.progress.is_deadlocked(settled=[])
    assert [run.progress.find_missing_peers(rank) for rank in range(3)] == [[1], [0, 2], [1]]


def test_a_rank_that_has_finished_launches_nothing_more(run):
    for rank in (0, 1):
        run.launch(rank, "world", range(3))
        run.wait(rank, "world", range(3))
    run.launch(2, "world", range(3))
    assert not run.progress.is_deadlocked(settled=[]), "rank 2 is busy"
    assert run.progress.is_deadlocked(settled=[2])


def test_a_rank_waits_for_what_a_finished_rank_has_launched(run):
    run.launch(2, "world", range(3))
    run.wait(0, "world", range(3))
    run.wait(1, "world", range(3))
    assert not run.progress.is_deadlocked(settled=[2])


def test_a_run_without_waiting_ranks_is_no_deadlock(run):
    run.launch(0, "world", range(3))
    assert not run.progress.is_deadlocked(settled=[1, 2]), "rank 0 is busy"
    assert not run.progress.is_deadlocked(settled=[0, 1, 2])


def test_a_send_waits_for_its_receive(run):
    """Messages to other ranks, or in the other direction, do not count."""
    run.wait(0, "world", range(3), op="send", peer=1)
    run.launch(1, "world", range(3), op="recv", peer=2)
    run.launch(1, "world", range(3), op="send", peer=0)
    run.wait(1, "world", range(3))
    run.wait(2, "world", range(3), op="recv", peer=0)
    assert [run.progress.find_missing_peers(rank) for rank in range(3)] == [[1], [0, 2], [0]]
    assert run.progress.is_deadlocked(settled=[])


def test_a_send_whose_peer_receives_goes_on_by_itself(run):
    run.launch(1, "world", range(3), op="recv", peer=0)
    run.wait(1, "world", range(3))
    run.wait(0, "world", range(3), op="send", peer=1)
    assert not run.progress.is_deadlocked(settled=[2])
    run.wait(0, "world", range(3), op="send", peer=1)
    assert run.progress.is_deadlocked(settled=[2]), "rank 1 receives one message only"


def test_a_receive_from_any_rank_may_go_on(run):
    """Such a run ends at the deadline, unless a rank continues."""
    run.wait(0, "world", range(3), op="recv")
    run.wait(1, "world", range(3), op="send", peer=0)
    run.wait(2, "world", range(3))
    assert not run.progress.is_deadlocked(settled=[])


def test_a_wait_counts_the_launches_of_its_own_group(run):
    """A peer's launches in another group do not count, regardless of their number."""
    run.wait(0, "a", (0, 1))
    for _ in range(3):
        run.launch(1, "b", (0, 1))
    run.progress.add(1, {"kind": "wait", "index": 2})
    assert run.progress.is_deadlocked(settled=[2])


# ---- mismatches


def test_launches_of_the_same_number_must_be_the_same_collective(run):
    run.launch(0, "world", (0, 1), numel=3)
    assert run.progress.find_mismatch(0) is None, "rank 1 has launched nothing"
    run.launch(1, "world", (0, 1), numel=4)
    [launch], [peer_launch], _ = [record.launches for record in run.progress.ranks]
    assert run.progress.find_mismatch(1) == Mismatch(1, peer_launch, 0, launch)
    run.launch(0, "pair", (0, 2))
    assert run.progress.find_mismatch(0) is None, "in this group rank 0 is alone so far"


def test_sends_are_no_collectives(run):
    run.launch(0, "world", (0, 1), op="send", peer=1)
    run.launch(1, "world", (0, 1), op="recv", peer=0)
    assert run.progress.find_mismatch(1) is None
    run.launch(0, "world", range(3))
    run.launch(2, "world", range(3))
    assert run.progress.find_mismatch(2) is None, "rank 2 takes no part in the message"


# ---- what a rank is doing, in words


def test_what_a_rank_is_doing():
    launch = {"kind": "launch", "phase": "backward", "op": "all_reduce", "dtype": "float32", "nbytes": 8, "name": "w"}
    record = RankRecord()
    assert record.describe_activity() == "is busy and has launched nothing"
    record.add(launch | {"index": 0})
    assert record.describe_activity() == "is in backward after all_reduce #0 (w, float32, 8 B)"
    record.add({"kind": "wait", "phase": "finish", "index": 0})
    assert record.describe_activity() == "waits in all_reduce #0 (w, float32, 8 B)"
    assert record.describe_activity([1, 3]).endswith("8 B), which rank 1 and rank 3 never launched")
    record.add({"kind": "done", "phase": "finish", "index": 0})
    assert record.describe_activity() == "is in finish after all_reduce #0 (w, float32, 8 B)"


def test_who_has_not_launched_what_a_rank_waits_for(run):
    run.wait(0, "world", range(3))
    run.launch(2, "world", range(3))
    assert run.progress.describe_activity(0) == "waits in all_reduce #0 (float32, 12 B), which rank 1 never launched"


def test_who_has_not_received_and_what_it_waits_for_instead(run):
    run.wait(0, "world", range(3), op="send", peer=1)
    run.wait(1, "world", range(3), op="send", peer=0)
    activity = run.progress.describe_activity(0)
    assert activity.startswith("waits in send #0 to rank 1 (float32, 12 B), for which rank 1 called no recv")
    assert activity.endswith("because it waits in send #0 to rank 0")
    run.wait(2, "world", range(3), op="recv")
    assert run.progress.describe_activity(2) == "waits in recv #0 from any rank (float32, 12 B)"


# ---- which events are valid

LAUNCH = {
    "kind": "launch", "time": 1.0, "phase": "backward", "index": 2, "group": "0", "ranks": [0, 1], "op": "all_reduce",
    "dtype": "float32", "numel": 3, "nbytes": 12, "parts": 1, "reduce_op": "SUM", "root": None, "sync": False,
    "peer": None, "name": None, "memory": None, "line": None, "caller": None,
}  # fmt: skip
WAIT = {"kind": "wait", "time": 1.0, "phase": "finish", "index": 1}


@pytest.mark.parametrize(
    "event",
    [
        LAUNCH,
        WAIT,
        WAIT | {"kind": "end", "began": 0.5},
        {"kind": "ready", "time": 1.0, "phase": "backward", "name": "w"},
        {"kind": "step", "time": 1.0, "phase": "setup", "step": None},
        {"kind": "the scenario's own", "time": 1.0, "phase": "setup", "values": [1, "x"]},
    ],
    ids=lambda event: event["kind"],
)
def test_valid_events(event):
    validate(event, num_launches=2)


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ([LAUNCH], "must be a dict"),
        (LAUNCH | {"kind": ["launch"]}, "kind"),
        (LAUNCH | {"time": 1}, "time"),
        (LAUNCH | {"time": math.inf}, "finite"),
        (LAUNCH | {"index": 3}, "wrong number"),
        (LAUNCH | {"ranks": ["0"]}, "not numbers"),
        (LAUNCH | {"sync": 0}, "sync"),
        (LAUNCH | {"line": 59}, "line"),
        *(({name: value for name, value in LAUNCH.items() if name != field}, field) for field in LAUNCH),
        *(
            (LAUNCH | {field: value}, field)
            for field, value in (("group", [1]), ("ranks", 3), ("op", 3), ("index", "0"))
        ),
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
