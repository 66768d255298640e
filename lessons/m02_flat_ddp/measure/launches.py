"""Print how many ms all-reduces take on two ranks, for one element and for TinyLM's gradients, flat and one by one."""

import statistics
import time

import torch
import torch.distributed as dist

from brigade.course.checks.tiny_lm import make_tiny_lm
from brigade.ranks.runner.ranks import run_ranks


def measure(rounds=20):
    """Return, for each case, the ms of every round."""
    sizes = [p.numel() for p in make_tiny_lm("tiny", "meta").parameters()]
    cases = {"one element": [1], "one flat tensor": [sum(sizes)], f"{len(sizes)} tensors": sizes}
    samples = {name: [] for name in cases}
    for _ in range(rounds):
        for name, numels in cases.items():
            tensors = [torch.zeros(numel) for numel in numels]
            dist.barrier()
            start = time.perf_counter()
            for tensor in tensors:
                dist.all_reduce(tensor)
            samples[name].append(1e3 * (time.perf_counter() - start))
    return samples


if __name__ == "__main__":
    for name, times in run_ranks(measure)[0].items():
        print(f"{name}: {statistics.mean(times):.2f} ms")
