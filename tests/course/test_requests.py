"""A rank receives its own part of a case, and nothing from which it could compute the part of another rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_forging import list_places

from brigade.course.checks.collect import collect
from brigade.course.checks.context import CheckContext
from brigade.course.checks.run import Conditions, run_check
from brigade.course.table.modules import MODULES, ROOT
from brigade.grader.isolation import load_witness
from brigade.ranks.borders import list_batches
from brigade.ranks.ipc import wire
from brigade.ranks.runner import ranks
from brigade.ranks.runner.monitor import Monitor

# Equal on all ranks by contract: weights that are equal before the optimizer exists, checkpoints, the weights that all
# ranks have when they load a checkpoint, and the input of an evaluation.
SHARED = {"start", "load", "params", "values", "weights", "late_weights", "probe"}
LARGE = 8  # entries of a tensor; smaller ones can be equal by chance


class Collected(Exception):
    """Ends a check that would start ranks."""


@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_a_rank_gets_only_its_own_part(entry, monkeypatch):
    """Compare what would enter the ranks of each check's first run with several ranks. No ranks are started."""

    def collect_requests(function, args_per_call, **options):
        requests = ranks.make_requests("scenario", "train", args_per_call, {}, ranks.RunOptions(**options))
        for request in requests:
            del request["borders"]  # if there is a switch, only it has the seeds
        expect_own_parts([wire.decode(wire.encode(request)) for request in requests])
        raise Collected

    monkeypatch.setattr(ranks, "run_calls", collect_requests)
    monkeypatch.setattr(CheckContext, "worlds", lambda self, *sizes: sizes[1:2] or sizes)
    for check in collect([entry]):
        error = run_check(check, "solutions", Conditions(seed=3)).exception
        assert not isinstance(error, AssertionError), error  # others: the check's lists are for other world sizes


@pytest.mark.extended
@pytest.mark.parametrize("entry", MODULES, ids=lambda entry: entry.package)
def test_ranks_get_only_their_own_parts_in_all_runs(entry, monkeypatch):
    """Compare everything that enters the ranks in all checks of the module."""
    received: list[list[dict[str, Any]]] = []
    encode = wire.encode

    def keep(value: Any) -> bytes:
        if isinstance(value, dict) and "calls" in value:
            if value["rank"] == 0:
                received.append([])
            received[-1].append(wire.decode(encode(value)))  # as the rank sees it
        return encode(value)

    monkeypatch.setattr(wire, "encode", keep)
    monkeypatch.setattr(ranks.SERVER, "load_witness", load_witness)
    for check in collect([entry]):
        assert run_check(check, ROOT / "solutions", Conditions(seed=3)).passed, check.name
    for requests in received:
        expect_own_parts(requests)


def expect_own_parts(requests: list[dict[str, Any]]) -> None:
    """Expect that no rank has a seed of the case, or a tensor of another rank."""
    assert len({request["seed"] for request in requests}) == len(requests)
    values = [[*list_places(request["calls"])] for request in requests]
    assert all(abs(value) < 2**31 for own in values for _, value in own if type(value) is int), "a seed of a case"
    tensors = [
        (rank, path, value)
        for rank, own in enumerate(values)
        for path, value in own
        if isinstance(value, torch.Tensor) and value.is_floating_point() and not SHARED & {*path}
    ]
    for rank, path, tensor in (entry for entry in tensors if len(entry[2].unique()) >= LARGE):
        same = [other for other, _, value in tensors if other != rank and torch.equal(value, tensor)]
        assert not same, f"rank {rank} has at {path} a tensor of rank {same}"


def test_the_seeds_of_borders_stay_in_the_parent(monkeypatch):
    batch = {"x": 1, "borders": [5, 6]}
    [request] = ranks.make_requests("scenario", "train", [[[batch]]], {}, ranks.RunOptions(world_size=1))
    assert request["calls"] == [[[{"x": 1, "borders": {"batch": 0, "count": 2}}]]] and request["borders"] == [[5, 6]]
    assert list_batches([[batch]]) == [batch] == [{"x": 1, "borders": [5, 6]}]
    monkeypatch.setattr(ranks.SERVER, "load_witness", load_witness)
    Monitor(ranks.RunOptions(world_size=1), {}, [request]).end()
    assert "borders" not in request
