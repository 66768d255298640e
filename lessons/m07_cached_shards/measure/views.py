"""Print how long it takes to get one shard, and all shards of a step of XL, in four ways, for 8 to 128 ranks."""

import timeit

import torch

from brigade.course.checks.tiny_lm import make_tiny_lm
from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student


def count_xl_buckets(ranks):
    numels = [parameter.numel() for parameter in make_tiny_lm("xl", "meta").parameters()][::-1]
    return len(student("m05_grad_buffer", "plan_layout")(numels, 40_000_000, ranks).bucket_ranges)


def slice_all(bucket, ranks):
    length = bucket.numel() // ranks
    return [bucket[rank * length : (rank + 1) * length] for rank in range(ranks)]


def slice_own(bucket, ranks, rank):
    length = bucket.numel() // ranks
    return bucket[rank * length : (rank + 1) * length]


def measure_us(function):
    return min(timeit.repeat(function, number=10, repeat=1000)) / 10 * 1e6  # the fastest sample is the least disturbed


def make_getters(bucket, ranks):
    """Return four functions that get rank 3's shard of a bucket, by name."""
    cache = {(0, 3): slice_own(bucket, ranks, 3)}
    return {
        "all by slicing": lambda: slice_all(bucket, ranks)[3],
        "all by chunk": lambda: bucket.chunk(ranks)[3],
        "own by slicing": lambda: slice_own(bucket, ranks, 3),
        "cached": lambda: cache[0, 3],
    }


def main(run):
    for numel in (10_000, 40_000_000):
        bucket = torch.zeros(numel)
        time = measure_us(lambda bucket=bucket: bucket[100:200])
        print(f"{numel} elements, one slice: {time:.1f} µs")
    for ranks in (8, 32, 128):
        print(f"{ranks} ranks")
        shards = 2 * run(count_xl_buckets, ranks, world_size=1)[0]
        for way, function in make_getters(bucket, ranks).items():
            time = measure_us(function)
            print(f"  {way}: {time:.2f} µs for a shard, {shards * time / 1e3:.3f} ms for {shards} of XL")


if __name__ == "__main__":
    run_experiment(main, module=5)
