"""Prints how long it takes to get a shard of a bucket, and all shards of a step of XL: four ways, 8 to 128 ranks."""

import timeit

import torch

from brigade.lab.experiment import experiment
from brigade.lab.models import tiny_lm
from brigade.rank.api import student


def buckets_of_xl(ranks):
    numels = [parameter.numel() for parameter in tiny_lm("xl", "meta").parameters()][::-1]
    return len(student("m05_grad_buffer", "plan_layout")(numels, 40_000_000, ranks).bucket_ranges)


def all_slices(bucket, ranks):
    length = bucket.numel() // ranks
    return [bucket[rank * length : (rank + 1) * length] for rank in range(ranks)]


def own_slice(bucket, ranks, rank):
    length = bucket.numel() // ranks
    return bucket[rank * length : (rank + 1) * length]


def microseconds(function):
    return min(timeit.repeat(function, number=10, repeat=1000)) / 10 * 1e6  # the least disturbed of 1000


def ways(bucket, ranks):
    """Ways to get rank 3's shard of a bucket."""
    cache = {(0, 3): own_slice(bucket, ranks, 3)}
    return {
        "all by slicing": lambda: all_slices(bucket, ranks)[3],
        "all by chunk": lambda: bucket.chunk(ranks)[3],
        "only the own": lambda: own_slice(bucket, ranks, 3),
        "cached": lambda: cache[0, 3],
    }


def main(run):
    for numel in (10_000, 40_000_000):
        bucket = torch.zeros(numel)
        time = microseconds(lambda bucket=bucket: bucket[100:200])
        print(f"{numel} elements, one slice: {time:.1f} µs")
    for ranks in (8, 32, 128):
        print(f"{ranks} ranks")
        shards = 2 * run(buckets_of_xl, ranks, world_size=1)[0]
        for way, function in ways(bucket, ranks).items():
            time = microseconds(function)
            print(f"  {way}: {time:.2f} µs for a shard, {shards * time / 1e3:.3f} ms for {shards} of XL")


if __name__ == "__main__":
    experiment(main, module=5)
