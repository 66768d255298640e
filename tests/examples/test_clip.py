"""Clipping each rank's gradient before the average shortens each step. One process with all data shows it."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from brigade.testing import PerRank, run


def make_data(num_ranks):
    torch.manual_seed(1)
    return torch.randn(8 * num_ranks, 64), 30 * torch.randn(8 * num_ranks, 8)


def drive(x, y, clips_first):
    torch.manual_seed(0)
    model = nn.Linear(64, 8)
    F.mse_loss(model(x), y).backward()
    if clips_first:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    if not clips_first:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return {"update": torch.cat([parameter.grad.flatten() for parameter in model.parameters()])}


@pytest.mark.parametrize(
    ("num_ranks", "clips_first", "ratio"), [(2, True, "0.716"), (4, True, "0.517"), (4, False, "")]
)
def test_the_update_is_that_of_one_process(num_ranks, clips_first, ratio):
    x, y = make_data(num_ranks)
    alone = run(drive, x, y, clips_first, world_size=1)
    parts = PerRank(x.chunk(num_ranks)), PerRank(y.chunk(num_ranks))
    seen = run(drive, *parts, clips_first, world_size=num_ranks)
    seen.are_equal_on_all_ranks("update")  # in both orders
    if not clips_first:
        seen.equals_one_process(alone, "update")
        return
    with pytest.raises(
        AssertionError, match=rf"rank 0: update .* {ratio} times as large, in nearly the same direction"
    ):
        seen.equals_one_process(alone, "update")
