"""Prints how much memory the process has while a view of 8 elements is left of a tensor that was replaced."""

import psutil
import torch


def resident_mb():
    return round(psutil.Process().memory_info().rss / 1e6)


if __name__ == "__main__":
    data = torch.ones(100_000_000)
    print("one tensor:", resident_mb(), "MB")
    shard = data[:8]
    data = data.clone()
    print("moved, and a view of 8 elements is left:", resident_mb(), "MB")
    shard.fill_(2)
    print("2 written through the view; in the new tensor:", data[0].item())
    del shard
    print("the view is gone:", resident_mb(), "MB")
