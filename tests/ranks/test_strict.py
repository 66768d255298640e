"""The strict group delivers the result of a collective only when its handle is waited on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from in_ranks import collectives
from in_ranks import strict as functions
from torch import Tensor

from brigade.grader.isolation import load_witness
from brigade.ranks.events import launches
from brigade.ranks.ipc.wire import encode
from brigade.ranks.rank.recorder import Recorder
from brigade.ranks.rank.recording_group import RecordingGroup
from brigade.ranks.rank.strict import StrictGroup, get_filler
from brigade.ranks.runner.ranks import RankFailure, run_ranks
from brigade.ranks.runner.server import SERVER

WORLD = 3
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.fixture(params=["gloo", "switch"], autouse=True)
def inner(request, monkeypatch) -> str:
    """Run each test with gloo and with the grader's switch as the inner group."""
    monkeypatch.setattr(SERVER, "load_witness", load_witness if request.param == "switch" else None)
    return request.param


def is_filler(tensor: Tensor) -> bool:
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == get_filler(tensor.dtype)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_results_are_those_of_the_group_that_records(dtype):
    """Results are bitwise equal for all collectives. Asynchronous collectives deliver nothing before the wait."""
    recorded = run_ranks(collectives.every_collective, dtype, False, world_size=WORLD)
    synchronous = run_ranks(collectives.every_collective, dtype, False, world_size=WORLD, mode="strict")
    held = run_ranks(collectives.every_collective, dtype, True, world_size=WORLD, mode="strict")
    for rank in range(WORLD):
        assert len(held[rank]) >= 18
        for name, found in recorded[rank].items():
            expected = encode(found["after"])
            assert encode(synchronous[rank][name]["before"]) == expected, f"{name}: a synchronous call has its result"
            assert encode(synchronous[rank][name]["after"]) == expected, name
            assert encode(held[rank][name]["after"]) == expected, name
            assert all(is_filler(tensor) for tensor in held[rank][name]["before"]), f"{name}: it was there too early"
        assert not [event for event in held.events[rank] if event["kind"] == "race"]


WAYS = "wait with a timeout, result, is_completed, synchronize, then, collect_all, done"


@pytest.mark.parametrize("how", WAYS.split(", "))
def test_only_the_own_handle_delivers_and_every_way_of_asking_does(how):
    results = run_ranks(functions.deliver, how, mode="strict")
    assert [[launch.is_polled for launch in launches(events)] for events in results.events] == [
        [how in ("is_completed", "done"), False]
    ] * 2, "an answer that a launch is complete is no wait"
    for rank, result in enumerate(results):
        first, second = result["before"]
        assert first.isnan().all(), "another handle's wait, or time, has delivered"
        assert second.tolist() == [2.0, 2.0]
        assert [tensor.tolist() for tensor in result["after"]] == [[2.0] * 3, [2.0] * 2], rank
        assert result["later"].tolist() == [7.0] * 3, "it delivers once"
        if how in ("result", "then", "collect_all"):
            assert [tensor.tolist() for tensor in result["answer"]] == [[7.0] * 3]  # the tensors themselves
        elif how != "synchronize":
            assert result["answer"] is True


def test_asking_in_a_loop_is_waiting(inner):
    results = run_ranks(functions.poll, mode="strict")
    if inner == "switch":  # which may also answer yes at once
        assert all(result == sorted(result) and result[2:] == [True, True] for result in results)
        return
    assert list(results) == [[False, False, True, True]] * len(results)
    for events in results.events:
        kinds = [event["kind"] for event in events if event["kind"] not in ("connect", "connected", "end")]
        assert kinds == ["launch", "other", "wait", "done"]


@pytest.mark.parametrize(
    "where, raced",
    [("input", True), ("output", True), ("reduced", True), ("data", True), ("reading", False), ("", False)],
)
def test_a_write_between_launch_and_wait_is_noted(where, raced):
    results = run_ranks(functions.change, where, mode="strict")
    for result, events in zip(results, results.events, strict=True):
        races = [event for event in events if event["kind"] == "race"]
        assert [event["index"] for event in races] == ([0] if raced else [])
        if where in ("input", "output", "reading"):  # the collective works on what it was given
            assert result["output"].tolist() == [0.0, 1.0, 2.0, 3.0] * 2
        else:  # `x /= 2` changes no NaN to be seen, and is noted all the same
            assert result["input"].tolist() == [1.0, 3.0, 5.0, 7.0]


REFUSED = {  # how NCCL refuses tensors too
    "all_reduce": r"all_reduce needs a contiguous tensor, as with NCCL. This tensor has .* strides \(1, 6\)",
    "send": r"send needs a contiguous tensor, as with NCCL. This tensor has .* strides \(6, 2\)",
    "all_to_all": "all_to_all needs an output that shares no memory",
    "coalesced": "do not pass a device to the coalescing manager",
}


@pytest.mark.parametrize("how", REFUSED)
def test_tensors_that_nccl_refuses_are_refused(how):
    with pytest.raises(RankFailure, match=REFUSED[how]):
        run_ranks(functions.call_wrongly, how, mode="strict")


def test_channels_last_tensors_are_accepted_as_by_nccl():
    for rank in run_ranks(functions.reduce_channels_last, mode="strict"):
        assert rank == [2.0, 2.0]


class LikeNCCL:
    """A stand-in for NCCL's group with two equal ranks. It returns no handle for a synchronous call."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def allreduce(self, tensors: list[Tensor], options: Any) -> None:
        for tensor in tensors:
            tensor.mul_(2)


@pytest.mark.parametrize("group_class", [RecordingGroup, StrictGroup])
def test_a_synchronous_call_without_a_handle_has_its_result(group_class):
    events: list[dict[str, Any]] = []
    group = group_class(LikeNCCL(), Recorder(events.append), "group", [0, 1])
    tensor, options = torch.ones(3), dist.AllreduceOptions()
    options.asyncOp = False
    work = group.allreduce([tensor], options)
    assert work is not None, "torch waits for what it is given"
    work.wait()
    assert tensor.tolist() == [2, 2, 2]
    assert [event["kind"] for event in events] == ["launch", "wait", "end", "done"]
    assert events[0]["sync"]
