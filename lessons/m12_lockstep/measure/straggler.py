"""Print how often a step has a late rank, and how long a step takes, if each rank is late in one of ten steps.

A rank sleeps 10 ms instead of computing, and 20 ms in a step in which it is late. An all-reduce ends each step.
"""

import time

import torch
import torch.distributed as dist

from brigade.ranks.runner.ranks import run_ranks

STEPS = 100
COMPUTE_S = 0.010
LATE = 0.1  # the probability that a rank is late in a step


def train():
    """Return in which steps this rank was late, and its mean time for a step in seconds."""
    chance = torch.rand(STEPS, generator=torch.Generator().manual_seed(dist.get_rank()))
    gradient = torch.ones(1)
    dist.barrier()
    start = time.perf_counter()
    for is_late in (chance < LATE).tolist():
        time.sleep(2 * COMPUTE_S if is_late else COMPUTE_S)
        dist.all_reduce(gradient)
    return (chance < LATE).tolist(), (time.perf_counter() - start) / STEPS


if __name__ == "__main__":
    for world_size in (1, 2, 4):
        late, seconds = zip(*run_ranks(train, world_size=world_size))
        steps = sum(map(any, zip(*late)))
        expected = 1 - (1 - LATE) ** world_size
        print(
            f"{world_size} ranks: {steps} of {STEPS} steps have a late rank (expected {expected:.0%}), "
            f"{1000 * max(seconds):.1f} ms per step"
        )
    print(f"512 ranks, expected: {1 - (1 - LATE) ** 512:.0%} of the steps have a late rank")
