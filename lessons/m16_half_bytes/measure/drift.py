"""Print how far two replicas drift apart in 100 steps if a rank keeps its own part of the averages in float32."""

import torch
import torch.distributed as dist

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

NUMEL, STEPS, RATE = 4096, 100, 0.1
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def measure(keeps_own):
    """Return the largest difference between the weights of rank 0 and of this rank after each step."""
    rank, size = dist.get_rank(), dist.get_world_size()
    start = student("m16_half_bytes", "start_reduce_scatter")
    generator = torch.Generator().manual_seed(rank)
    weights, differences = torch.zeros(NUMEL), []
    for _ in range(STEPS):
        own, gathered = torch.empty(NUMEL // size), torch.empty(NUMEL, dtype=torch.bfloat16)
        start(own, torch.randn(NUMEL, generator=generator)).wait()
        all_gather(gathered, own.bfloat16())
        average = gathered.float()
        if keeps_own:
            average.chunk(size)[rank].copy_(own)
        weights -= RATE * average
        others = weights.clone()
        dist.broadcast(others, 0)
        differences.append(float((weights - others).abs().max()))
    return differences


def main(run):
    for keeps_own, name in ((True, "a rank keeps its own part"), (False, "all ranks have the rounded parts")):
        differences = run(measure, keeps_own, world_size=2)[1]
        print(f"{name}: replicas differ by {differences[0]:.1e} after 1 step, by {differences[-1]:.1e} after {STEPS}")


if __name__ == "__main__":
    run_experiment(main, module=16)
