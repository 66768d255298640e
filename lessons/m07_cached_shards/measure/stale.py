"""Print the memory of the process while a view of 8 elements keeps a replaced tensor alive."""

import psutil
import torch


def measure_resident_mb():
    return round(psutil.Process().memory_info().rss / 1e6)


if __name__ == "__main__":
    data = torch.ones(100_000_000)
    print("one tensor:", measure_resident_mb(), "MB")
    shard = data[:8]
    data = data.clone()
    print("tensor replaced, view of 8 elements kept:", measure_resident_mb(), "MB")
    shard.fill_(2)
    print("after writing 2 through the view, in the new tensor:", data[0].item())
    del shard
    print("view deleted:", measure_resident_mb(), "MB")
