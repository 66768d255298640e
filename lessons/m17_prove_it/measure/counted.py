"""Accumulate four micro-batches with torch's DDP, in no_sync blocks around different parts of the step.

Print how many all-reduces each step launches, and whether the gradients are equal: python counted.py
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from brigade.testing import run, step, watch

PLACES = ("nothing", "backward only", "forward and backward")
MICRO_BATCHES = 4


def drive(place: str) -> list[torch.Tensor]:
    """Take one step with no_sync around `place`, except in the last micro-batch. Return the gradients."""
    torch.manual_seed(0)
    model = watch(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))
    ddp = DistributedDataParallel(model)
    batches = torch.randn(MICRO_BATCHES, 16, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    with step(0):
        for number, batch in enumerate(batches):
            is_last = number == MICRO_BATCHES - 1
            with contextlib.nullcontext() if is_last or place != PLACES[2] else ddp.no_sync():
                loss = ddp(batch).square().mean()
                with contextlib.nullcontext() if is_last or place != PLACES[1] else ddp.no_sync():
                    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def measure() -> list[tuple[str, int, bool]]:
    """Return for each place the launches of rank 0, and whether the gradients are those of the first place."""
    rows: list[tuple[str, int, bool]] = []
    first: Any = None
    for place in PLACES:
        seen = run(drive, place, world_size=2, mode="record")
        first = first or seen[0]
        is_equal = all(torch.allclose(one, other, atol=1e-6) for one, other in zip(seen[0], first))
        rows.append((place, len(seen.step(0).launches("all_reduce")), is_equal))
    return rows


if __name__ == "__main__":
    print(f"{'no_sync around':<22}{'all-reduces':>12}   gradients")
    for place, count, is_equal in measure():
        print(f"{place:<22}{count:>12}   {'equal' if is_equal else 'DIFFERENT'}")
