"""The emulated link: its arithmetic is correct, collectives take exactly its time, and it changes no result."""

from collections import defaultdict
from dataclasses import asdict
from itertools import pairwise

import pytest
import torch
from given_clock import give_clock
from hang_guard import HANG_S
from in_ranks import link as functions

from brigade.course.table.modules import REFERENCE
from brigade.course.table.submission import read
from brigade.lab.emulated_link import Link, Pace, read_link
from brigade.ranks.events import count_sent_bytes
from brigade.ranks.ipc.wire import encode
from brigade.ranks.runner import deadline, monitor
from brigade.ranks.runner.ranks import RankFailure, run_ranks

LINK = Link(latency_s=1e-3, bytes_per_s=1e6)


@pytest.mark.parametrize(
    "op, world_size, sent, seconds",
    [  # of 6000 bytes, by hand
        ("all_reduce", 2, 6000, 2 * 1e-3 + 6e-3),
        ("all_reduce", 3, 8000, 4 * 1e-3 + 8e-3),
        ("all_reduce", 4, 9000, 6 * 1e-3 + 9e-3),
        ("reduce_scatter", 3, 4000, 2 * 1e-3 + 4e-3),
        ("all_gather", 4, 4500, 3 * 1e-3 + 4.5e-3),
        ("broadcast", 2, 3000, 1e-3 + 6e-3),  # passed on whole; one of two ranks sends
        ("reduce", 4, 4500, 3 * 1e-3 + 6e-3),
        ("all_reduce", 1, 0, 0),
        ("broadcast", 1, 0, 0),
    ],
)
def test_time_on_a_link(op, world_size, sent, seconds):
    assert count_sent_bytes(op, 6000, world_size) == pytest.approx(sent)
    assert LINK.seconds(op, 6000, world_size) == pytest.approx(seconds)


@pytest.mark.parametrize("world_size", [2, 8])
def test_a_pace_is_a_ratio_to_backward(world_size):
    link = Pace(comm_ratio=0.8, latency_ratio=0.01).link(backward_s=0.05, grad_bytes=4e6, world_size=world_size)
    assert link.seconds("all_reduce", 0, world_size) == pytest.approx(0.01 * 0.05)
    assert link.seconds("all_reduce", 4e6, world_size) == pytest.approx((0.8 + 0.01) * 0.05)


def test_collectives_take_the_time_of_the_link_one_after_the_other():
    """A collective takes at least the modelled time, and longer only if the machine is slow."""
    one_s = 0.2
    results = run_ranks(functions.on_link, one_s / 2, 1e12, "wait_for_the_link", 3, mode="emulate")
    for found, events in zip(results, results.events, strict=True):
        assert one_s <= found["one"]
        assert one_s <= found["subgroup"]
        assert 3 * one_s <= found["all"]
        assert found["pauses"] == 1, "a rank that waits sleeps until the end instead of looking again and again"
        barriers = {event["index"] for event in events if event["kind"] == "launch" and event["op"] == "barrier"}
        on_link = {event["index"] for event in events if event["kind"] == "end" and "began" in event}
        assert barriers and on_link and not barriers & on_link, "a barrier takes no time on the link"


@pytest.mark.parametrize("async_op", [False, True])
def test_results_are_those_of_the_group_that_records(async_op):
    """Results of all collectives are bitwise equal, except that a reduce-scatter may add in another order.

    Some of the collectives are coalesced or in a sub-group.
    """
    recorded = run_ranks(functions.every_collective, torch.float32, False, world_size=3)
    arguments = (1e-4, 1e9, "every_collective", torch.float32, async_op)
    paced = run_ranks(functions.on_link, *arguments, world_size=3, mode="emulate")
    for mine, theirs in zip(paced, recorded, strict=True):
        assert len(mine) >= 19
        for name, found in theirs.items():
            if "reduce_scatter" in name:
                torch.testing.assert_close(mine[name]["after"], found["after"])
            else:
                assert encode(mine[name]["after"]) == encode(found["after"]), name


def test_a_peer_that_ends_is_the_one_to_blame():
    """The rank that ended is named even if torch DDP's C++ reducer waits for it."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(functions.on_link, 1e-4, 1e9, "train_ddp_with_a_peer_that_ends", mode="emulate")
    failure = failure.value
    assert (failure.kind, failure.rank, failure.error) == ("died", 1, "exit code 0"), failure


# ---- the times are possible: recorded runs are replayed

SLOW = Link(latency_s=8e-3, bytes_per_s=2e6)  # much slower than gloo, also on a busy machine
LATE_S = 0.04
ROUNDING_S = 1e-7  # a rank reads its peer's launch and the common end from one clock: nothing else differs


def replay(events, link):
    """Fail unless the recorded collectives are possible on the link.

    Return the number of collectives. `events` are the events of all ranks. The k-th launches of a
    group on all ranks belong together.
    """
    groups = defaultdict(lambda: defaultdict(list))  # by group and rank, (launch, end)
    for rank, of_rank in enumerate(events):
        ends = {event["index"]: event for event in of_rank if event["kind"] == "end"}
        for event in of_rank:
            if event["kind"] == "launch" and event["op"] != "barrier" and "began" in ends.get(event["index"], {}):
                groups[event["group"], tuple(event["ranks"])][rank].append((event, ends[event["index"]]))
    carried = defaultdict(list)  # by rank and link, (start, end)
    count = 0
    for (_, ranks), launches in groups.items():
        assert sorted(launches) == sorted(ranks)
        for together in zip(*launches.values(), strict=True):
            launch = together[0][0]
            num_nodes = link.count_nodes(ranks)
            own = num_nodes > 1
            seconds = link.seconds(launch["op"], launch["nbytes"], len(ranks), num_nodes)
            slowest = max(launch["time"] for launch, _ in together)
            began = {end["began"] for _, end in together}
            ends = [end["time"] for _, end in together]
            for rank, (_, end) in zip(launches, together, strict=True):
                assert end["time"] >= slowest + seconds - ROUNDING_S, (
                    f"rank {rank} finishes {launch['op']} #{launch['index']} "
                    f"{1e3 * (slowest + seconds - end['time']):.1f} ms before its transfer can be over"
                )
            assert len(began) == 1, f"{launch['op']} #{launch['index']} starts at different times"
            modelled = began.pop() + seconds
            late = [end for end in ends if end > modelled + ROUNDING_S]  # gloo was slower than the link
            assert late or max(ends) - min(ends) <= ROUNDING_S, f"{launch['op']} #{launch['index']} ends differ"
            count += 1
            for rank in ranks:
                carried[rank, own].append((modelled - seconds, modelled))
    for (rank, _), spans in carried.items():
        for one, other in pairwise(sorted(spans)):
            assert one[1] <= other[0] + ROUNDING_S, f"the link of rank {rank} carries two collectives at once"
    return count


RUNS = {  # (ranks, what they do, collectives of all steps at least)
    "overlapped, in a sub-group": (4, ("train_with_a_late_rank", 3, LATE_S, [1, 3]), 35),
    "torch DDP": (2, ("train_with_a_late_rank", 1, LATE_S, None), 10),
    "two groups": (3, ("launch_in_two_groups",), 6),
}


@pytest.mark.parametrize("name", RUNS)
def test_no_collective_ends_before_its_slowest_launch_allows(name):
    """Recorded runs with one late rank are possible on a real link."""
    world_size, call, least = RUNS[name]
    how = {"world_size": world_size, "mode": "emulate", "packages": {"submission": read(REFERENCE, 3)}}
    events = run_ranks(functions.on_link, SLOW.latency_s, SLOW.bytes_per_s, *call, **how).events
    count = replay(events, SLOW)
    assert count >= least
    if name == "two groups":  # a collective occupies the link only after all ranks have launched it
        ends = [event for event in events[0] if event["kind"] == "end" and "began" in event]
        assert all(quick["time"] < late["began"] for quick, late in zip(ends[::2], ends[1::2], strict=True))


def test_ranks_have_one_link_inside_their_node_and_one_to_other_nodes():
    """Both carry collectives at the same time. A group that spans nodes takes as long as on the outer link."""
    link = Pace(comm_ratio=0.5, latency_ratio=0.25, node_size=2, slowdown=4).link(0.1, 4e6, world_size=4)
    assert link.seconds("all_reduce", 4e6, 2) == pytest.approx(0.1 * 0.75)
    assert link.outer == Link(4 * link.latency_s, link.bytes_per_s / 4)
    assert read_link(asdict(link)) == link
    events = run_ranks(functions.on_two_links, asdict(link), world_size=4, mode="emulate").events
    count = replay(events, link)
    assert count == 13


def test_a_rank_that_never_launches_is_waited_for_until_the_deadline(monkeypatch):
    """This includes the root of a broadcast, on which gloo has already finished."""
    clock = give_clock(monkeypatch, monitor, deadline)
    monkeypatch.setattr(monitor, "ANSWER_S", HANG_S)

    def follow(rank, event):
        if rank == 0 and event["kind"] == "wait":
            clock.now = 1.5  # beyond the deadline

    how = {"mode": "emulate", "deadline": 1, "on_event": follow}
    with pytest.raises(RankFailure) as failure:
        run_ranks(functions.on_link, 1e-3, 1e9, "launch_without_rank_1", **how)
    assert failure.value.kind == "deadline"
    assert "broadcast" in failure.value.waiting, failure.value
