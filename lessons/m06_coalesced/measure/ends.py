"""Print the exposed time of the reduce-scatters, relative to backward, by the number of buckets per group.

On the emulated link, a reduce-scatter of all gradients takes 0.8 times as long as backward. Starting a launch takes
4 % or 0.2 % of backward.
"""

import random
import statistics
import time

import torch
import torch.distributed as dist

from brigade.course.checks.tiny_lm import language_loss, make_tiny_lm
from brigade.lab import emulated_link
from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

HALF = 0.8  # the time of a reduce-scatter of all gradients on the link, relative to backward
CASES = [1, 2, 4, None]  # buckets_per_group


def backward(ddp, tokens):
    loss = language_loss(ddp(tokens), tokens)
    dist.barrier()
    start = time.perf_counter()
    loss.backward()
    return time.perf_counter() - start


def measure(start, rounds=6):
    wrapper = student("m06_coalesced", "CoalescedDDP")
    ddps = {case: wrapper(make_tiny_lm(), bucket_numel=32_000, buckets_per_group=case) for case in CASES}
    tokens = torch.randint(256, (8, 128))
    ratios = {case: [] for case in CASES}
    pace = emulated_link.Pace(2 * HALF, 2 * start)  # of an all-reduce, which takes twice as long as a reduce-scatter
    for turn in range(rounds):
        ddps[1].zero_grad()  # a backward must not add to the averages of the round before
        with ddps[1].no_sync():
            alone = backward(ddps[1], tokens)  # without communication
        emulated_link.use(None)
        longest = torch.tensor(alone)
        dist.all_reduce(longest, dist.ReduceOp.MAX)  # the link must be the same on all ranks
        alone = longest.item()
        emulated_link.use(pace.link(alone, ddps[1].grad_buffers[0].grad_data.nbytes, dist.get_world_size()))
        for case in random.Random(turn).sample(CASES, len(CASES)):
            ddp = ddps[case]
            ddp.gather_grads = False
            ddp.zero_grad()
            during = backward(ddp, tokens)
            middle = time.perf_counter()
            ddp.finish_grad_sync()
            ratios[case].append((during + time.perf_counter() - middle) / alone - 1)
    return [[case or "all", len(ddps[case].groups), statistics.median(ratios[case][1:])] for case in CASES]


def main(run):
    for start in (0.04, 0.002):
        print(f"starting a launch takes {start:.1%} of backward")
        for length, groups, exposed in run(measure, start, deadline=200, stream=False, mode="emulate")[0]:
            print(f"  buckets per group: {length}; {groups} launches: {exposed:.2f} of backward exposed")


if __name__ == "__main__":
    run_experiment(main, module=6)
