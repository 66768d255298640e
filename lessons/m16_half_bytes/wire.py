"""Print the relative error of the average of normal values, by the number of ranks and the way of reducing them.

The second argument draws the picture of the reading: python lessons/m16_half_bytes/wire.py solutions wire.png
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from brigade.lab.experiment import run_experiment
from brigade.rank.api import student

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


WAYS = {  # name -> the function, and the bytes per element that a rank sends in a ring, times N / (N - 1)
    "all-reduce in bfloat16": (all_reduce, 4),
    "reduce-scatter in bfloat16": (reduce_scatter, 2),
    "all-to-all, summed in float32": (all_to_all, 2),
}


def measure():
    """Return the relative error of each way, the mean over the seeds and ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    errors = torch.zeros(len(WAYS), dtype=torch.float64)
    for seed in range(SEEDS):
        values = [torch.randn(NUMEL, generator=torch.Generator().manual_seed(97 * seed + r)) for r in range(size)]
        exact = sum(one.double() for one in values) / size
        for number, (way, _) in enumerate(WAYS.values()):
            output = way(values[rank].clone()).double()
            expected = exact if output.numel() == NUMEL else exact.chunk(size)[rank]
            errors[number] += (output - expected).norm() / expected.norm() / SEEDS / size
    dist.all_reduce(errors)
    return errors.tolist()


def measure_all(run):
    """Return the errors of each way, by name, for each number of ranks in RANKS."""
    columns = [run(measure, world_size=size)[0] for size in RANKS]
    return dict(zip(WAYS, zip(*columns)))


def draw(errors, path):
    """Draw the errors against the number of ranks, as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), dpi=100, layout="constrained")
    axes = figure.subplots()
    styles = (("#d55e00", "s", "--", 11), ("#0072b2", "^", ":", 6), ("#009e73", "o", "-", 6))
    for (name, values), (colour, marker, line, size) in zip(errors.items(), styles):
        label = f"{name}, {WAYS[name][1]}n (N − 1)/N bytes"
        look = {"color": colour, "marker": marker, "linestyle": line, "markersize": size}
        axes.plot(RANKS, [1e3 * value for value in values], label=label, fillstyle="none", **look)
    axes.set_xticks(RANKS)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("N, the number of ranks", fontsize=10)
    axes.set_ylabel("error, in thousandths", fontsize=10)
    axes.set_title(
        "Relative error of the average of n normal values, and the bytes that a rank sends", loc="left", fontsize=10
    )
    axes.legend(frameon=False, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    figure.savefig(path)


def main(run):
    errors = measure_all(run)
    print(f"{'N':28}" + "".join(f"{size:>9}" for size in RANKS))
    for name, values in errors.items():
        print(f"{name:28}" + "".join(f"{value:9.2e}" for value in values))
    if PICTURE:
        draw(errors, Path(PICTURE))


if __name__ == "__main__":
    PICTURE = sys.argv.pop(2) if len(sys.argv) > 2 else ""
    run_experiment(main, module=16)
