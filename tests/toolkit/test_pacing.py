"""The emulated link: its arithmetic, that collectives take its time and no more, and that it changes no result."""

import pytest
import rank_functions as functions
import torch

from brigade.pacing import Link, Pace, sent_bytes
from brigade.ranks import RankFailure, run_ranks
from brigade.wire import encode

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
    assert sent_bytes(op, 6000, world_size) == pytest.approx(sent)
    assert LINK.seconds(op, 6000, world_size) == pytest.approx(seconds)


def test_a_reduce_scatter_and_an_all_gather_are_an_all_reduce():
    for world_size in (2, 3, 8):
        halves = LINK.seconds("reduce_scatter", 1e6, world_size) + LINK.seconds("all_gather", 1e6, world_size)
        assert halves == pytest.approx(LINK.seconds("all_reduce", 1e6, world_size))


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_pace_is_a_ratio_to_backward(world_size):
    link = Pace(comm_ratio=0.8, latency_ratio=0.01).link(backward_s=0.05, grad_bytes=4e6, world_size=world_size)
    assert link.seconds("all_reduce", 0, world_size) == pytest.approx(0.01 * 0.05)
    assert link.seconds("all_reduce", 4e6, world_size) == pytest.approx((0.8 + 0.01) * 0.05)
    # k collectives that carry the same together have k times the latency.
    assert 5 * link.seconds("all_reduce", 4e6 / 5, world_size) == pytest.approx((0.8 + 5 * 0.01) * 0.05)
    slower = Pace(comm_ratio=0.8, latency_ratio=0.01).link(backward_s=0.1, grad_bytes=4e6, world_size=world_size)
    assert slower.bytes_per_s == pytest.approx(link.bytes_per_s / 2)
    assert slower.latency_s == pytest.approx(link.latency_s * 2)


def test_collectives_take_the_time_of_the_link_one_after_the_other():
    """At least its time, never mind how slow this machine is; more only as far as the machine is slow."""
    one_s = 0.2
    for found in run_ranks(functions.on_link, one_s / 2, 1e12, "wait_for_the_link", 3, mode="pace"):
        assert one_s <= found["one"]
        assert one_s <= found["subgroup"]
        assert 3 * one_s <= found["all"]
        assert found["overlapped"] < found["one"] + one_s, "work and communication followed each other"
        assert found["barrier"] < one_s, "a barrier takes no time on the link"
        assert found["processor"] < one_s / 2, "waiting takes processor time"


def test_the_record_has_the_time_of_the_link():
    seconds = 0.02
    for events in run_ranks(functions.on_link, seconds / 2, 1e12, "reduce_often", 3, mode="pace").events:
        starts = [event["time"] for event in events if event["kind"] == "launch"]
        ends = [event["time"] for event in events if event["kind"] == "end"]
        assert len(starts) == len(ends) == 3
        assert all(end - start >= seconds for start, end in zip(starts, ends))


def test_a_launch_is_completed_when_its_time_is_over():
    for answers in run_ranks(functions.on_link, 0.05, 1e12, "ask_for_completion", mode="pace"):
        assert answers == [False, True]


@pytest.mark.parametrize("async_op", [False, True])
def test_results_are_those_of_the_group_that_records(async_op):
    """Bit by bit, for all collectives, coalesced ones and those of a sub-group too."""
    recorded = run_ranks(functions.every_collective, torch.float32, False, world_size=3)
    arguments = (1e-4, 1e9, "every_collective", torch.float32, async_op)
    paced = run_ranks(functions.on_link, *arguments, world_size=3, mode="pace")
    for mine, theirs in zip(paced, recorded):
        assert len(mine) >= 19
        for name, found in theirs.items():
            assert encode(mine[name]["after"]) == encode(found["after"]), name


def test_torch_ddp_trains_as_it_does_without():
    recorded = run_ranks(functions.train_ddp)
    for mine, theirs in zip(run_ranks(functions.on_link, 1e-4, 1e9, "train_ddp", mode="pace"), recorded):
        assert encode(mine) == encode(theirs)


@pytest.mark.parametrize("call", [("end", 1, "os._exit(0)"), ("train_ddp_with_a_peer_that_ends",)], ids=lambda c: c[0])
def test_a_peer_that_ends_is_the_one_to_blame(call):
    """Also where torch DDP's C++ reducer is what waits."""
    with pytest.raises(RankFailure) as failure:
        run_ranks(functions.on_link, 1e-4, 1e9, *call, mode="pace")
    assert (failure.value.kind, failure.value.rank) == ("died", 1), failure.value
    assert failure.value.summary == "rank 1 ended without a result (exit code 0)"
