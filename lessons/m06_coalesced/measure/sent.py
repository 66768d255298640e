"""Print how many bytes a rank sends in gloo's collectives, and in how many writes, one by one and coalesced.

This works only on Linux, which counts the bytes that a process writes.
"""

import sys

import torch
import torch.distributed as dist

from brigade.ranks.runner.ranks import run_ranks

reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def count_sent():
    with open("/proc/self/io") as counts:
        fields = dict(line.split(": ") for line in counts)
    return int(fields["wchar"]), int(fields["syscw"])


def measure():
    """Return, for each collective, (bytes sent / bytes of the tensors, writes one by one, writes coalesced)."""
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = {
        "all_reduce": lambda whole: dist.all_reduce(whole),
        "reduce_scatter": lambda whole: reduce_scatter(whole.chunk(size)[rank], whole),
        "all_gather": lambda whole: all_gather(whole, whole.chunk(size)[rank]),
    }
    tensors = [torch.ones(96_000) for _ in range(20)]
    results = {}
    for name, call in calls.items():
        marks = [count_sent()]
        for tensor in tensors:
            call(tensor)
        marks.append(count_sent())
        with dist._coalescing_manager():
            for tensor in tensors:
                call(tensor)
        marks.append(count_sent())
        (bytes_0, writes_0), (bytes_1, writes_1), (_, writes_2) = marks
        nbytes = sum(tensor.nbytes for tensor in tensors)
        results[name] = (bytes_1 - bytes_0) / nbytes, writes_1 - writes_0, writes_2 - writes_1
    return results


if __name__ == "__main__":
    if sys.platform != "linux":
        sys.exit("only Linux counts the bytes that a process writes")
    for size in (2, 4):
        print(f"{size} ranks")
        for name, (share, single, coalesced) in run_ranks(measure, world_size=size)[0].items():
            print(f"  {name}: {share:.2f} of the bytes sent; {single} writes one by one, {coalesced} coalesced")
