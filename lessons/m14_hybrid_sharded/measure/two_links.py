"""Print the step times of four ranks in two nodes: module 11 on all ranks, and this module with and without overlap.

Two links are emulated: one inside a node, and one between nodes. Ranks sleep instead of computing, so that they do not
compete for the cores.
"""

import contextlib
import random
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn

from brigade.lab import emulated_link
from brigade.lab.emulated_link import Link
from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

UNITS, WIDTH = 8, 64
BACKWARD_S = 0.2
INNER = 0.25  # all reduce-scatters inside a node take this part of backward
NODE = 2  # ranks


class Sleep(torch.autograd.Function):
    """Take the time of a unit: 1/2 in forward and 1 in backward."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        time.sleep(seconds / 2)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class Unit(nn.Linear):
    def forward(self, x):
        return super().forward(Sleep.apply(x, BACKWARD_S / UNITS))


def make_link(slower):
    """Return the link whose reduce-scatters of all units, inside a node, take a quarter of backward.

    The outer link is `slower` times slower.
    """
    nbytes = UNITS * 4 * (WIDTH + 1) * WIDTH
    inner = nbytes * (NODE - 1) / NODE / (INNER * BACKWARD_S)
    return Link(0.0, inner, Link(0.0, inner / slower), NODE)


def wait_at_once(ddp):
    """Make a wrapper of this module wait for each all-reduce across nodes where it is launched."""
    start = ddp.shard_reduced

    def start_and_wait(shard):
        start(shard)
        if shard in ddp.in_flight:
            ddp.in_flight.pop(shard).wait()

    ddp.shard_reduced = start_and_wait
    return ddp


def measure(micro_batches, slower, rounds=6):
    """Return the step times of all variants in seconds. Their steps alternate in random order."""
    fully_sharded = student("m11_fully_sharded", "FullyShardedDDP")
    hybrid, make_groups = (student("m14_hybrid_sharded", name) for name in ("HybridShardedDDP", "make_groups"))
    groups = make_groups(dist.get_world_size(), NODE)
    models = [nn.Sequential(*[Unit(WIDTH, WIDTH) for _ in range(UNITS)]) for _ in range(3)]
    variants = {
        "module 11 on all ranks": fully_sharded(models[0], (Unit,)),
        "module 14": hybrid(models[1], (Unit,), *groups),
        "module 14, waiting at once": wait_at_once(hybrid(models[2], (Unit,), *groups)),
    }
    times = {name: [] for name in variants}
    emulated_link.use(make_link(slower))
    for turn in range(rounds):
        for name in random.Random(turn).sample(sorted(variants), len(variants)):
            ddp = variants[name]
            ddp.zero_grad()
            dist.barrier()
            begin = time.perf_counter()
            for number in range(micro_batches):
                is_last = number == micro_batches - 1
                skips = not is_last and hasattr(ddp, "no_replica_sync")
                with ddp.no_replica_sync() if skips else contextlib.nullcontext():
                    ddp(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
                    ddp.finish_grad_sync()
            times[name].append(time.perf_counter() - begin)
    return {name: values[1:] for name, values in times.items()}


def start_apart():
    """Make only the ranks of each node equal, and train. Return the first weight of this rank's model afterwards."""
    torch.manual_seed(dist.get_rank())
    hybrid, make_groups = (student("m14_hybrid_sharded", name) for name in ("HybridShardedDDP", "make_groups"))
    shard_group, replica_group = make_groups(dist.get_world_size(), NODE)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
    ddp = hybrid(model, (nn.Linear,), shard_group, alone)  # with one replica, it broadcasts inside the node only
    ddp.replica_group = replica_group
    optimizer = torch.optim.SGD(ddp.shards(), lr=0.1)
    for _ in range(20):
        optimizer.zero_grad()
        (ddp(torch.ones(4, 8)) - 1).square().mean().backward()
        ddp.finish_grad_sync()
        optimizer.step()
    return round(float(ddp.full_state_dict()["0.weight"][0, 0]), 4)


def measure_steps(run, micro_batches, slower):
    """Return the step times of the slowest rank in ms, by variant."""
    results = run(measure, micro_batches, slower, world_size=4, mode="emulate", deadline=120)
    return {name: [1e3 * max(ranks) for ranks in zip(*(result[name] for result in results))] for name in results[0]}


def main(run):
    for micro_batches, slower in ((1, 8), (4, 8), (1, 1)):
        print(f"micro-batches: {micro_batches}, inner rate / outer rate: {slower}")
        print(f"  computation alone: {1500 * BACKWARD_S * micro_batches:.0f} ms")
        steps = measure_steps(run, micro_batches, slower)
        for name, times in steps.items():
            ratio = statistics.median(time / base for time, base in zip(times, steps["module 11 on all ranks"]))
            print(f"  {name}: {statistics.median(times):.0f} ms, {ratio:.2f} of module 11's")


if __name__ == "__main__":
    run_experiment(main, module=14)
