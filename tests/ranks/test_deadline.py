"""A run ends at its deadline, except on a machine that is so busy that the ranks could not run."""

from __future__ import annotations

import os
import sys
import threading

import pytest
from given_clock import give_clock

from brigade.ranks.runner import deadline
from brigade.ranks.runner.deadline import Deadline, read_threads
from brigade.ranks.runner.options import RunOptions

OURS, FIRST, SECOND = os.getpid(), 11, 12  # process ids


@pytest.fixture
def proc(tmp_path, monkeypatch):
    """Write what Linux says about the threads of processes, in seconds: {pid: [(ran, delay), ...]}."""
    monkeypatch.setattr(deadline, "PROC", tmp_path)
    own_thread = threading.get_native_id()

    def write(times):
        for pid, threads in times.items():
            for number, (ran, delay) in enumerate(threads, own_thread if pid == "self" else 1):
                file = tmp_path / str(pid) / "task" / str(number) / "schedstat"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(f"{ran * 10**9:.0f} {delay * 10**9:.0f} 7\n")

    return write


def run_until(clock, one, seconds):
    """Move the clock to a time since the beginning. Return whether the run ends there."""
    clock.now = 1000.0 + seconds
    return one.has_passed()


def begin(monkeypatch, limit_s=20.0, longest_s=100.0):
    clock = give_clock(monkeypatch, deadline)
    clock.now = 1000.0
    return clock, Deadline(limit_s, longest_s, [FIRST, SECOND])


BUSY = {  # each rank's threads, and the delay of our own thread: which runs end after 20 s, and which go on
    "nobody lacks a processor": ([(1, 0)], [(1, 0)], 0, True),
    "an endless loop on an idle machine": ([(20, 0)], [(0, 0)], 0, True),
    "endless loops on every rank of a laptop": ([(7, 13)], [(7, 13)], 0, True),
    "an endless loop that hardly gets a turn": ([(1, 19)], [(0, 0)], 0, False),
    "ranks that run alternately, and wait for their turns": ([(1, 9)], [(1, 9)], 0, False),
    "threads that wait for their turns": ([(1, 3), (1, 3), (0, 4)], [(1, 8)], 0, False),
    "threads that compute": ([(3, 3), (3, 3), (0, 4)], [(1, 8)], 0, True),
    "ranks that wait for our answers": ([(1, 0)], [(1, 0)], 18, False),
    "ranks that sleep on a busy machine": ([(1, 5)], [(1, 5)], 2, True),
    "a rank that has ended": ([], [(1, 18)], 0, False),
}


@pytest.mark.parametrize("first, second, own_delay, ends", BUSY.values(), ids=BUSY)
def test_ranks_that_lack_processor_time_get_more(first, second, own_delay, ends, proc, monkeypatch):
    proc({"self": [(50, 500)]})  # before the run
    clock, one = begin(monkeypatch)
    assert not run_until(clock, one, 20)
    proc({"self": [(51, 500 + own_delay)], FIRST: first, SECOND: second})
    assert run_until(clock, one, 20.1) == ends
    if ends:
        assert one.limit_s == 20


def test_they_get_it_until_they_have_run_enough_or_for_five_times_the_deadline(proc, monkeypatch):
    proc({"self": [(0, 0)], FIRST: [(1, 19)], SECOND: [(0, 0)]})
    clock, one = begin(monkeypatch)
    assert not run_until(clock, one, 20.1)
    proc({FIRST: [(3, 57)]})
    assert not run_until(clock, one, 60)
    proc({FIRST: [(4, 76)]})
    assert run_until(clock, one, 80) and 60 <= one.limit_s <= 80
    clock, one = begin(monkeypatch)
    proc({FIRST: [(1, 99)]})
    assert not run_until(clock, one, 99)
    assert run_until(clock, one, 100.1) and 99 <= one.limit_s <= 100


def test_without_counts_or_without_a_longer_time_a_run_ends_at_its_deadline(proc, monkeypatch):
    clock, one = begin(monkeypatch)  # this system counts nothing
    assert not run_until(clock, one, 20) and run_until(clock, one, 20.1)
    proc({"self": [(0, 0)], FIRST: [(1, 19)], SECOND: [(0, 0)]})
    clock, one = begin(monkeypatch, longest_s=None)
    assert not run_until(clock, one, 20) and run_until(clock, one, 20.1)
    clock, one = begin(monkeypatch, limit_s=None, longest_s=None)
    assert not run_until(clock, one, 10**9)


def test_a_run_without_a_deadline_of_its_own_may_take_longer_on_a_busy_machine():
    assert (RunOptions().deadline_s, RunOptions().longest_s) == (20, 100)
    assert (RunOptions(deadline=3).deadline_s, RunOptions(deadline=3).longest_s) == (3, None)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it")
def test_linux_counts_what_a_thread_has_run_and_waited():
    threads = read_threads(OURS)
    assert len(threads) >= 1 and all(ran >= 0 and delay >= 0 for ran, delay in threads)
    before = Deadline._read_own_delay()
    assert before is not None and Deadline._read_own_delay() >= before
    assert sum(ran for ran, _ in threads) > 0
