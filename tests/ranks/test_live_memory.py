"""Live bytes are counted from storages, regardless of what refers to them."""

from __future__ import annotations

import gc

import pytest
import torch
from in_ranks import strict as functions
from torch import nn

from brigade.ranks.rank.memory import LiveMemory
from brigade.ranks.runner.ranks import RankFailure, run_ranks

NUMEL, NBYTES = 1000, 4000


def make() -> torch.Tensor:
    return torch.ones(NUMEL)


@pytest.mark.parametrize("keep", [lambda t: t, lambda t: t[3:5], lambda t: t.detach(), lambda t: t.untyped_storage()])
def test_a_block_counts_as_long_as_anything_refers_to_it(keep):
    with LiveMemory() as memory:
        tensor = make()
        assert memory.total() == NBYTES
        second = keep(tensor)
        del tensor
        assert memory.total() == NBYTES
        del second
        assert memory.total() == 0 and memory.peak == NBYTES


def test_what_only_autograd_keeps_counts_too():
    with LiveMemory() as memory:
        x = make().requires_grad_()
        y = x.exp().sin().sum()  # sin keeps its input
        assert memory.count(leaf=[x], result=[y]) == {"leaf": NBYTES, "result": 4, "other": NBYTES}
        y.backward()
        assert memory.count(leaf=[x], grad=[x.grad]) == {"leaf": NBYTES, "grad": NBYTES, "other": 4}


def test_a_storage_counts_with_its_present_size():
    weight = nn.Parameter(make())
    with LiveMemory([weight]) as memory:
        second = weight.detach()
        weight.untyped_storage().resize_(0)
        assert memory.total() == 0
        second.untyped_storage().resize_(2 * NBYTES)
        assert memory.count(weights=[weight]) == {"weights": 2 * NBYTES, "other": 0}
        swapped = torch.empty(0).set_(torch.UntypedStorage(NBYTES))
        assert memory.count(weights=[weight, swapped[:1]]) == {"weights": 3 * NBYTES, "other": 0}


def test_a_strict_group_keeps_no_memory_after_the_wait():
    for counted in run_ranks(functions.count_around_an_all_gather, NUMEL, mode="strict"):
        assert counted == {"launched": 3 * NBYTES, "waited": 3 * NBYTES, "dropped": NBYTES}


@pytest.mark.parametrize("which", ["input", "output"])
def test_a_wait_refuses_a_tensor_that_was_freed(which):
    with pytest.raises(RankFailure, match=r"\bfreed\b"):
        run_ranks(functions.free_in_flight, which, mode="strict")


def test_a_garbage_collection_may_free_blocks_during_a_count():
    """The garbage collector can free a block that is part of a reference cycle at any allocation."""
    before = gc.get_threshold()
    try:
        with LiveMemory() as memory:
            gc.set_threshold(1)
            for _ in range(50):
                cycle = [make() for _ in range(20)]
                cycle.append(cycle)
                memory.total(), memory.count()
    finally:
        gc.set_threshold(*before)
