"""Time four ways to all-reduce on an emulated link, with 2 and 4 ranks, and compare the times with the α–β model."""

import time

import torch
import torch.distributed as dist

from brigade.lab import emulated_link
from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

LINK = emulated_link.Link(latency_s=30e-3, bytes_per_s=4e6)  # so slow that Python's own time hardly counts
SIZES = {12_000: 2, 120_000: 2, 960_000: 1}  # bytes -> number of measurements, of which the fastest counts
NAMES = ("root", "ring", "exchange", "dist.all_reduce")


def exchange(tensor):
    """All-reduce on 2 or 4 ranks in log2(N) steps. In each step, exchange the whole tensor with a different partner."""
    rank, received = dist.get_rank(), torch.empty_like(tensor)
    for distance in (1, 2)[: dist.get_world_size() // 2]:
        handle = dist.isend(tensor, rank ^ distance)
        dist.recv(received, rank ^ distance)
        handle.wait()
        tensor += received


def predict(name, nbytes, size):
    """Return the seconds that an all-reduce takes: the number of consecutive messages times the duration of each."""
    messages = size.bit_length() - 1 if name == "exchange" else 2 * (size - 1)
    length = nbytes if name in ("root", "exchange") else nbytes / size
    return messages * (LINK.latency_s + length / LINK.bytes_per_s)


def measure():
    """Return the seconds of each all-reduce on this rank, under keys such as "ring 12000" (name and bytes)."""
    root, ring = student("m00_ring", "all_reduce_via_root"), student("m00_ring", "ring_all_reduce")
    functions = dict(zip(NAMES, (root, ring, exchange, dist.all_reduce)))
    emulated_link.use(LINK)
    for function in functions.values():
        function(torch.ones(dist.get_world_size()))  # connects the ranks
    seconds = {}
    for nbytes, repeats in SIZES.items():
        for name, function in functions.items():
            times = []
            for _ in range(repeats):
                tensor = torch.ones(nbytes // 4)
                dist.barrier()
                began = time.perf_counter()
                function(tensor)
                times.append(time.perf_counter() - began)
            seconds[f"{name} {nbytes}"] = times
    return seconds


def find_crossover(seconds):
    """Return the bytes for which ring and exchange take equally long, on straight lines through the last two sizes."""
    first, last = list(SIZES)[-2:]
    before, after = (seconds["ring", nbytes] - seconds["exchange", nbytes] for nbytes in (first, last))
    return first + (last - first) * before / (before - after)


def main(run):
    print(f"α = {1e3 * LINK.latency_s:g} ms, β = {1e-6 * LINK.bytes_per_s:g} MB/s; p: predicted ms, m: measured ms\n")
    for size in (2, 4):
        ranks = run(measure, world_size=size, mode="emulate")
        print(f"{f'{size} ranks':16}" + "".join(f"{f'{nbytes:,} B':>25}" for nbytes in SIZES))
        print(" " * 16 + f"{'p':>9}{'m':>9}{'m/p':>7}" * len(SIZES))
        slowest = {}
        for name in NAMES:
            for nbytes in SIZES:
                rounds = zip(*(rank[f"{name} {nbytes}"] for rank in ranks))
                slowest[name, nbytes] = min(max(times) for times in rounds)  # the slowest rank counts
            pairs = [(predict(name, nbytes, size), slowest[name, nbytes]) for nbytes in SIZES]
            print(f"{name:16}" + "".join(f"{1e3 * p:9.1f}{1e3 * m:9.1f}{m / p:7.2f}" for p, m in pairs))
        print()
    crossover = find_crossover(slowest)
    predicted = 8 * LINK.latency_s * LINK.bytes_per_s
    print(f"4 ranks: the ring overtakes the exchange at {1e-3 * predicted:.0f} kB (predicted), ", end="")
    print(f"{1e-3 * crossover:.0f} kB (measured)")


if __name__ == "__main__":
    run_experiment(main, module=0)
