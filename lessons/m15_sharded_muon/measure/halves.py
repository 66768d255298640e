"""Orthogonalize a gradient in four ways on two ranks, and print how far the update is from that of one process.

AdamW's first update of the same gradient is computed in halves, too, to compare.
"""

import torch
import torch.distributed as dist

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

ROWS, COLUMNS = 64, 256


def step_adam(gradient):
    """Return the first update of AdamW: every element is divided by its own size."""
    return gradient / (gradient.abs() + 1e-8)


def measure():
    """Return the relative distance (2-norm) of each update from that of the whole, averaged gradient."""
    orthogonalize = student("m15_sharded_muon", "orthogonalize")
    torch.manual_seed(dist.get_rank())
    own = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    average = own.clone()
    dist.all_reduce(average, dist.ReduceOp.AVG)
    whole = orthogonalize(average)

    def halve(update, dim):
        return torch.cat([update(half) for half in average.chunk(2, dim)], dim)

    mean_of_updates = orthogonalize(own)
    dist.all_reduce(mean_of_updates, dist.ReduceOp.AVG)
    updates = {
        "halves of the rows": halve(orthogonalize, 0),
        "halves of the columns": halve(orthogonalize, 1),
        "each rank's own gradient, then the mean": mean_of_updates,
        "the sum instead of the mean": orthogonalize(2 * average),
    }
    distances = {name: float((update - whole).norm() / whole.norm()) for name, update in updates.items()}
    adam = step_adam(average)
    distances["AdamW, halves of the rows"] = float((halve(step_adam, 0) - adam).norm() / adam.norm())
    return distances


def main(run):
    for name, distance in run(measure, world_size=2)[0].items():
        print(f"{name}: {distance:.1e} away")


if __name__ == "__main__":
    run_experiment(main, module=15)
