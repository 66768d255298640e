"""The recording process group records every collective, no matter who calls it, and changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hang_guard import HANG_S
from in_ranks import recording as functions

from brigade.ranks.events import Event
from brigade.ranks.progress import RankRecord
from brigade.ranks.runner.ranks import run_ranks

# What one rank of two records in each phase of `recorded_calls`. Sizes are those of the full buffer.
SUM = {"op": "all_reduce", "numel": 15, "parts": 1, "reduce_op": "SUM", "root": None, "dtype": "float32"}
GATHERED = SUM | {"op": "all_gather", "numel": 8, "reduce_op": None}
SCATTERED = SUM | {"op": "reduce_scatter", "numel": 8}
EXPECTED = {
    "all_reduce": SUM,
    "all_reduce_average": SUM | {"reduce_op": "AVG"},
    "all_reduce_max": SUM | {"reduce_op": "MAX"},
    "all_reduce_view": SUM | {"numel": 4},
    "by another name": SUM | {"dtype": "bfloat16", "numel": 4, "reduce_op": "MAX"},
    "reduce": SUM | {"op": "reduce", "numel": 7, "root": 1},
    "broadcast": SUM | {"op": "broadcast", "numel": 7, "reduce_op": None, "root": 1},
    "all_gather": GATHERED,
    "all_gather_into_tensor": GATHERED,
    "all_gather_in_place": GATHERED,
    "reduce_scatter": SCATTERED,
    "reduce_scatter_tensor": SCATTERED,
    "reduce_scatter_in_place": SCATTERED,
    "all_to_all_single": GATHERED | {"op": "all_to_all", "numel": 4},
    "barrier": GATHERED | {"op": "barrier", "dtype": None, "numel": 0},
    "coalesced": SUM | {"numel": 6, "parts": 3},
    "coalesced_reduce_scatter": SCATTERED | {"numel": 6, "parts": 2},
    "coalesced_all_gather": GATHERED | {"numel": 6, "parts": 2},
    "functional all_reduce": SUM | {"numel": 4},
    "functional broadcast": GATHERED | {"op": "broadcast", "numel": 4, "root": 1},
}
NEVER_SYNC = ["functional all_reduce", "functional broadcast"]
if hasattr(torch.distributed, "all_gather_single"):
    EXPECTED |= {"all_gather_single": GATHERED, "reduce_scatter_single": SCATTERED}
else:  # before torch 2.13, the coalescing manager does not pass on the options of an all-gather
    NEVER_SYNC += ["coalesced_all_gather"]
ALWAYS_SYNC = ("by another name", "barrier", "all_gather_single", "reduce_scatter_single")


def select_phase(events: list[Event], phase: str, kind: str = "launch") -> list[Event]:
    return [event for event in events if event["kind"] == kind and event["phase"] == phase]


def select_kind(events: list[Event], *kinds: str) -> list[Event]:
    return [event for event in events if event["kind"] in kinds]


@pytest.fixture(scope="module")
def both() -> dict[bool, Any]:
    """Return the results of all calls without and with async_op."""
    return {async_op: run_ranks(functions.recorded_calls, async_op, deadline=HANG_S) for async_op in (False, True)}


@pytest.fixture
def calls(both) -> Any:
    return both[False]


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("phase", EXPECTED)
def test_every_collective_is_one_launch(both, phase, async_op):
    expected = EXPECTED[phase] | {"group": "0", "ranks": [0, 1]}
    expected["nbytes"] = expected["numel"] * {"float32": 4, "bfloat16": 2, None: 0}[expected["dtype"]]
    expected["sync"] = not (async_op or phase in NEVER_SYNC) or phase in ALWAYS_SYNC
    for events in both[async_op].events:
        [launch] = select_phase(events, phase)
        assert {field: launch[field] for field in expected} == expected
        indices = {kind: {e["index"] for e in select_phase(events, phase, kind)} for kind in ("wait", "done")}
        assert indices == {"wait": {launch["index"]}, "done": {launch["index"]}}


@pytest.mark.parametrize(
    "phase, expected",
    [
        ("gather", [[("gather", 0, 8)], [("gather", 0, 4)]]),  # a rank that is not the root knows only its own part
        ("scatter", [[("scatter", 0, 8)], [("scatter", 0, 4)]]),
        ("send and recv", [[("send", None, 4)], [("recv", None, 4)]]),
        ("recv from anyone", [[("send", None, 4)], [("recv", None, 4)]]),
    ],
)
def test_calls_that_differ_between_ranks_or_are_several_launches(calls, phase, expected):
    found = [[(e["op"], e["root"], e["numel"]) for e in select_phase(events, phase)] for events in calls.events]
    assert found == expected


def test_subgroups_are_recorded_however_they_are_made():
    results = run_ranks(functions.recorded_subgroups, world_size=3)
    pair = {"plain": 4.0, "with a backend": 4.0, "backend by position": 4.0}
    assert [result["sums"] for result in results] == [pair, {}, pair]
    assert all(result["backends"] == ["gloo"] for result in results)
    assert not select_kind(results.events[1], "launch")
    for rank in (0, 2):
        groups = set()
        for phase in pair:
            reduced, broadcast = select_phase(results.events[rank], phase)
            assert (reduced["op"], reduced["ranks"], broadcast["op"]) == ("all_reduce", [0, 2], "broadcast")
            assert broadcast["root"] == 1  # rank 2 of the world is rank 1 of the group
            assert reduced["group"] == broadcast["group"]
            groups.add(reduced["group"])
        assert len(groups) == 3 and "0" not in groups


@pytest.mark.parametrize("how", ["None", "views", "moved", "unused bias"])
def test_a_gradient_is_ready_between_its_tensor_hooks_and_its_post_accumulate_hooks(how):
    for events in run_ranks(functions.readiness, how, world_size=1).events:
        for name in ("weight", "bias"):
            kinds = [event["kind"] for event in events if event.get("name") == name]
            times = 0 if how == f"unused {name}" else 2
            assert kinds == ["tensor hook", "ready", "post hook"] * times, name
        assert {event["phase"] for event in select_kind(events, "ready")} == {"backward"}


def test_torch_ddp_is_seen_and_not_changed():
    results = run_ranks(functions.train_ddp_twice)
    recorded, plain = results[0]
    for name, weight in recorded.items():
        assert torch.equal(weight, plain[name]), name
        assert torch.equal(weight, results[1][0][name]), name
    numel = sum(weight.numel() for weight in plain.values())
    for events in results.events:
        backward = [e for e in select_phase(events, "backward") if e["op"] == "all_reduce"]
        assert sum(launch["numel"] for launch in backward) == 4 * numel  # four steps, on the recording group only
        assert len(backward) > 4 and not any(launch["sync"] for launch in backward)
        waited = {event["index"] for event in select_kind(events, "wait")}
        assert all(launch["index"] in waited for launch in backward)


# ---- events.py: reading a record


def event(kind: str, **fields: Any) -> Event:
    return {"kind": kind, "time": 1.0, "phase": "backward", **fields}


def launch_event(index: int, **fields: Any) -> Event:
    common = {"op": "all_reduce", "dtype": "float32", "numel": 3, "nbytes": 12, "parts": 1, "sync": False}
    fields = common | {"name": None, "memory": None, "peer": None, "line": None} | fields
    return event("launch", index=index, reduce_op="SUM", **fields)


def test_events_of_each_call():
    first = [launch_event(0), event("wait", index=0), launch_event(1), event("note", index=1)]
    second = [launch_event(2), event("wait", index=2)]
    late = [event("wait", index=0), event("note", index=0)]  # the wait is dropped
    record = RankRecord()
    for own in (first, [*second, *late]):
        for each in own:
            record.add(each)
        record.end_call()
    assert record.calls == [first, [launch_event(0), event("wait", index=0), late[1]], []]
