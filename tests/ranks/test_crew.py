"""Ranks that stay for later runs give the results of new ranks, and none of them is left."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest
from in_ranks import basics as functions

from brigade.ranks.runner.crew import Crew, Crews
from brigade.ranks.runner.ranks import SERVER, RankFailure, run_calls, run_ranks

TEXTS = {name: {"counted": ("counted.py", text)} for name, text in (("one", "runs = []"), ("other", "runs = [0]"))}


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew()
    yield crew
    crew.end()
    assert not crew.ranks and not list(SERVER.scratch.glob("run-*"))


def list_pids(crew: Crew, world_size: int, **options) -> list[int]:
    return [result["pid"] for result in run_ranks(functions.whoami, world_size=world_size, crew=crew, **options)]


@pytest.mark.parametrize("mode", ["record", "strict"])
def test_rank_r_of_each_run_is_the_same_process_in_a_new_group(crew, mode):
    pids: list[int] = []
    for world_size in (2, 3, 1, 4):
        results = run_ranks(functions.reduce_once, world_size=world_size, crew=crew, mode=mode)
        assert [*results] == [sum(range(1, world_size + 1))] * world_size
        for events in results.events:
            assert [event["index"] for event in events if event["kind"] == "launch"] == [0]
        assert len(crew.ranks) == max(world_size, len(pids))
        assert [rank.pid for rank in crew.ranks][: len(pids)] == pids
        pids = [rank.pid for rank in crew.ranks]
    crew.end()
    assert not any(psutil.pid_exists(pid) for pid in pids)


def test_what_a_run_sees_does_not_depend_on_earlier_runs(crew):
    """That is, its random numbers, its directory, and what it prints."""
    alone = run_ranks(functions.random_number, world_size=2, seed=3)
    run_ranks(functions.write_file, "file", world_size=2, crew=crew)
    assert [*run_ranks(functions.random_number, world_size=2, seed=3, crew=crew)] == [*alone]
    assert run_ranks(functions.list_files, world_size=2, crew=crew)[1] == []
    printed = [run_ranks(functions.print_text, text, world_size=2, crew=crew).output for text in ("one", "two\n")]
    assert printed == [["one"] * 2, ["two\n"] * 2]


def test_a_transfer_that_nobody_waited_for_does_not_disturb_the_next_run(crew):
    for _ in range(3):
        run_ranks(functions.launch_without_waiting, world_size=2, crew=crew, mode="strict")
        events = run_ranks(functions.whoami, world_size=2, crew=crew, mode="strict").events
        assert {event["kind"] for own in events for event in own} <= {"connect", "connected"}


def test_ranks_that_have_imported_other_texts_do_not_stay(crew):
    first = list_pids(crew, 2, packages={"submission": TEXTS["one"]})
    assert list_pids(crew, 2, packages={"submission": TEXTS["one"], "helper": TEXTS["other"]}) == first
    assert list_pids(crew, 2, packages={"submission": TEXTS["one"], "helper": TEXTS["one"]})[0] not in first
    assert not {*list_pids(crew, 2, packages={"submission": TEXTS["other"]})} & {*first}
    assert not any(psutil.pid_exists(pid) for pid in first)


def test_no_rank_of_a_failed_run_stays(crew):
    pids = list_pids(crew, 4)
    with pytest.raises(RankFailure) as caught:
        run_calls(functions.fail, [[5, "fine"], [1, "no"]], world_size=2, crew=crew)
    assert caught.value.rank == 1 and not crew.ranks and not any(psutil.pid_exists(pid) for pid in pids)
    assert not {*list_pids(crew, 2)} & {*pids}


def test_a_crew_whose_server_has_been_killed_is_of_no_use_once(crew):
    list_pids(crew, 2)
    SERVER.close()
    with pytest.raises(Exception, match="has ended|died"):
        list_pids(crew, 2)
    assert len(list_pids(crew, 2)) == 2


def test_each_thread_has_a_crew_of_its_own():
    crews = Crews()
    with crews.lend() as first, crews.lend() as second:
        assert first is not second
        pids = list_pids(second, 1)
    with crews.lend() as again:
        assert again in (first, second)
    crews.end()
    assert not psutil.pid_exists(pids[0])
