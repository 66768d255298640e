"""The switch performs what ranks ask for, believes nothing, and is the only way from one rank to another."""

from __future__ import annotations

import os
import sys
import time

import pytest
import switch_functions as functions

from brigade.runner.ranks import SERVER, RankFailure, run_ranks
from brigade.sandbox import enter, users
from brigade.switch import switch


def test_sizes_may_differ_between_ranks_where_torch_allows_it():
    found = run_ranks(functions.exchange_everything, switch=True, mode="strict", world_size=3)
    for rank, result in enumerate(found):
        assert [tensor.tolist() for tensor in result["received"]] == [[float(o)] * (rank + o + 1) for o in range(3)]
        assert result["output"].tolist() == [100.0 * o + 2 * rank + i for o in range(3) for i in range(2)]
    assert found[0]["any"].tolist() == [7.0] * 3 and found[0]["source"] == 1


WRONG = {
    "huge": "cannot be performed", "negative": "cannot be performed", "missing bytes": "contains 8 bytes",
    "not a member": "cannot be performed", "no such rank": "cannot be performed",
    "twice the same rank": "cannot be performed", "unknown operation": "the operation is unknown",
    "unknown dtype": "cannot be performed", "part of an element": "not a multiple",
    "other sizes inside and outside": "do not fit together", "root in an all_reduce": "root",
    "lists of lists": "cannot be performed", "many parts": "too many parts", "no JSON": "cannot be performed",
    "deep JSON": "cannot be performed", "unrecorded": "without recording it",
    "recorded as smaller": "recorded numel = 1 for a launch with numel = 2|recorded nbytes = 4",
    "recorded only": "it did not make", "recorded as the last one": "knows nothing",
    "recorded as awaited": "did not wait", "unrecorded wait": "without recording the wait",
    "wait for nothing": "without recording", "half a message": "exit code 0", "a message without end": "unreadable",
    "flood": "too many bytes", "many launches": "endless loop", "death": "exit code 3",
}  # fmt: skip


@pytest.mark.parametrize("how", WRONG)
def test_a_rank_that_sends_something_wrong_is_reported(how, monkeypatch):
    monkeypatch.setattr(switch, "MOST_LAUNCHES", 2_000)
    monkeypatch.setattr(switch, "MOST_HELD", 32 << 20)
    started = time.monotonic()
    with pytest.raises(RankFailure, match=WRONG[how]) as caught:
        run_ranks(functions.attack, how, switch=True, mode="strict", deadline=20)
    assert caught.value.rank == 1
    assert time.monotonic() - started < 18


def test_a_rank_that_does_not_read_holds_up_nobody_else():
    with pytest.raises(RankFailure) as caught:
        run_ranks(functions.never_read, switch=True, mode="strict", deadline=6)
    assert caught.value.kind == "deadline"
    assert "rank 0 ended" in caught.value.lines[0]


def test_ranks_with_other_ideas_of_a_group_deadlock_at_once():
    started = time.monotonic()
    with pytest.raises(RankFailure) as caught:
        run_ranks(functions.own_groups, [[0, 1], [1, 2], [2, 0]], switch=True, mode="record", world_size=3)
    assert caught.value.kind in ("garbled", "deadlock")
    assert time.monotonic() - started < 15


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="isolation needs Linux and root")
def test_offline_ranks_reach_nobody(tmp_path):
    """Ranks have no network, no common directory and no common user, and see no process of another rank."""
    tmp_path.chmod(0o777)
    SERVER.close()
    with users.reserve_user() as (uid, reservation):
        SERVER.sandbox = enter.Sandbox(uid, reservation, hidden=[str(tmp_path)])
        try:
            found = run_ranks(functions.look_around, str(tmp_path), mode="strict")
        finally:
            SERVER.sandbox = None
            SERVER.close()
    for result in found:
        assert {result[name] for name in ("internet", "unix", "flock")} == {"EPERM"}
        assert result["gloo"] != "made"
        assert result["files"] == [], "a rank sees a file of the other rank"
        assert result["processes"] == []
    assert found[0]["uid"] != found[1]["uid"]
