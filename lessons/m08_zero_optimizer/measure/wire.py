"""Print how many MB cross loopback per MB of a tensor that gloo reduces or gathers, on 2 and 4 ranks."""

import statistics
import time

import psutil
import torch
import torch.distributed as dist

from brigade.ranks.runner.ranks import run_ranks

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def count_sent_mb():
    return sum(n.bytes_sent for name, n in psutil.net_io_counters(pernic=True).items() if name.startswith("lo")) / 1e6


def measure(rounds=10):
    world_size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.zeros(world_size * 1_000_000)
    own = whole.chunk(world_size)[rank]
    cases = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "reduce_scatter": lambda: reduce_scatter(own, whole),
        "all_gather": lambda: all_gather(whole, own),
        "reduce": lambda: dist.reduce(whole, 0),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    results = {}
    for name, collective in cases.items():
        times = []
        collective()
        dist.barrier()
        before = count_sent_mb()
        dist.barrier()
        for _ in range(rounds):
            dist.barrier()
            start = time.perf_counter()
            collective()
            times.append(1e3 * (time.perf_counter() - start))
        dist.barrier()
        results[name] = ((count_sent_mb() - before) / rounds / (whole.nbytes / 1e6), statistics.median(times))
    return results


if __name__ == "__main__":
    for world_size in (2, 4):
        print(f"{world_size} ranks: MB sent by all ranks together per MB of tensor, and ms")
        for name, (sent, ms) in run_ranks(measure, world_size=world_size)[0].items():
            print(f"  {name:15} {sent:5.2f} {ms:7.1f}")
