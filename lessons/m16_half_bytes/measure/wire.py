"""Print the relative error of the average of normal values, by the number of ranks and the way of reducing them."""

import torch
import torch.distributed as dist

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

RANKS = (2, 3, 4, 6, 8)
NUMEL = 24 * 4096  # every number of ranks divides it
SEEDS = 3


def all_reduce(values):
    """Average in bfloat16 with one all-reduce."""
    total = values.bfloat16()
    dist.all_reduce(total)
    return total.float() / dist.get_world_size()


def reduce_scatter(values):
    """Average in bfloat16 with one reduce-scatter, the collective of module 6."""
    values = values.bfloat16()
    output = values.chunk(dist.get_world_size())[0].clone()
    (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(output, values)
    return output.float() / dist.get_world_size()


def all_to_all(values):
    """Average with your `start_reduce_scatter`."""
    output = torch.empty_like(values.chunk(dist.get_world_size())[0])
    student("m16_half_bytes", "start_reduce_scatter")(output, values).wait()
    return output


def all_to_all_and_gather(values):
    """Average with your `start_reduce_scatter`, and round the average again, as `HalfBytesDDP` does to gather it."""
    return all_to_all(values).bfloat16()


WAYS = {  # name -> the function, and the bytes per element that a rank sends in a ring, times N / (N - 1)
    "all-reduce in bfloat16": (all_reduce, 4),
    "reduce-scatter in bfloat16": (reduce_scatter, 2),
    "all-to-all, summed in float32": (all_to_all, 2),
}
ALL_WAYS = WAYS | {"the same, rounded once more": (all_to_all_and_gather, 2)}


def measure():
    """Return the relative error of each way, the mean over the seeds and ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    errors = torch.zeros(len(ALL_WAYS), dtype=torch.float64)
    for seed in range(SEEDS):
        values = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(97 * seed + r)) for r in range(size)]
        exact = sum(one.double() for one in values) / size
        for number, (way, _) in enumerate(ALL_WAYS.values()):
            output = way(values[rank].clone()).double()
            expected = exact if output.numel() == NUMEL else exact.chunk(size)[rank]
            errors[number] += (output - expected).norm() / expected.norm() / SEEDS / size
    dist.all_reduce(errors)
    return errors.tolist()


def measure_all(run, names=WAYS):
    """Return the errors of the first ways, by name, for each number of ranks in RANKS."""
    columns = [run(measure, world_size=size)[0] for size in RANKS]
    return dict(zip(names, zip(*columns)))


def main(run):
    errors = measure_all(run, ALL_WAYS)
    print(f"{'N':30}" + "".join(f"{size:>9}" for size in RANKS))
    for name, values in errors.items():
        print(f"{name:30}" + "".join(f"{value:9.2e}" for value in values))


if __name__ == "__main__":
    run_experiment(main, module=16)
