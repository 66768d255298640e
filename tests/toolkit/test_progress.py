"""When a run is deadlocked, judged from events alone."""

import pytest

from brigade.events import Progress


class Run:
    """Events of several ranks, made by hand."""

    def __init__(self, world_size):
        self.progress = Progress(world_size)

    def launch(self, rank, group, ranks, op="all_reduce"):
        index = len(self.progress.launches[rank])
        self.progress.add(rank, {"kind": "launch", "index": index, "group": group, "ranks": list(ranks), "op": op})
        return index

    def wait(self, rank, group, ranks, op="all_reduce"):
        index = self.launch(rank, group, ranks, op)
        self.progress.add(rank, {"kind": "wait", "index": index})
        return index

    def done(self, rank, index):
        self.progress.add(rank, {"kind": "done", "index": index})


@pytest.fixture
def run():
    return Run(3)


def test_a_rank_whose_peers_have_launched_goes_on_by_itself(run):
    """Rank 1 lacks processor time only. It will launch what rank 0 waits for."""
    both = run.launch(0, "world", (0, 1))
    run.wait(1, "world", (0, 1))
    run.progress.add(0, {"kind": "wait", "index": both})
    run.done(0, both)
    run.wait(0, "world", (0, 1))
    assert run.progress.missing_peers(0) == [1] and run.progress.missing_peers(1) == []
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
    assert [run.progress.missing_peers(rank) for rank in range(3)] == [[1], [0, 2], [1]]


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


@pytest.mark.parametrize("op", ["send", "recv"])
def test_nothing_is_known_of_the_other_side_of_a_send(run, op):
    """Such a run ends at the deadline, unless a rank goes on."""
    run.wait(0, "world", range(3), op=op)
    run.wait(1, "world", range(3))
    assert not run.progress.is_deadlocked(settled=[2])


def test_a_wait_counts_the_launches_of_its_own_group(run):
    """A peer's launches in another group do not count, however many there are."""
    run.wait(0, "a", (0, 1))
    for _ in range(3):
        run.launch(1, "b", (0, 1))
    run.progress.add(1, {"kind": "wait", "index": 2})
    assert run.progress.is_deadlocked(settled=[2])
