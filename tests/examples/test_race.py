"""An optimizer that forgets to wait is found, although its numbers are right on an idle machine."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from brigade.testing import run, step, watch


class AveragingSGD:
    """Average each gradient and take a step. It waits for the last all-reduce only."""

    def __init__(self, params, lr, waits_for_all):
        self.params, self.lr, self.waits_for_all = list(params), lr, waits_for_all

    @torch.no_grad()
    def step(self):
        handles = [dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True) for p in self.params]
        for handle in handles if self.waits_for_all else handles[-1:]:
            handle.wait()
        for p in self.params:
            p -= self.lr * p.grad


def drive(waits_for_all):
    torch.manual_seed(0)
    model = watch(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    optimizer = AveragingSGD(model.parameters(), lr=0.1, waits_for_all=waits_for_all)
    with step(0):
        model(torch.full((2, 4), float(dist.get_rank()))).sum().backward()
        optimizer.step()
    return list(model.parameters())


def test_the_race_is_found():
    seen = run(drive, False)
    with pytest.raises(AssertionError, match=r"rank 0, step 0: nobody waits for all_reduce #0 \(0.weight, float32"):
        seen.step(0).launches("all_reduce", count=4).are_awaited()
    assert all(weight.isnan().all() for weight in seen[0][:3]), "what is read before the wait is NaN"


def test_without_the_race():
    seen = run(drive, True)
    seen.step(0).launches("all_reduce", count=4).are_awaited()
    seen.are_equal_on_all_ranks()
