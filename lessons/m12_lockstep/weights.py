"""Print the gradient that two ranks with one and three tokens compute, if the loss is weighted in three ways."""

import torch
import torch.distributed as dist
from torch import nn

from brigade.lab.experiment import run_experiment
from brigade.rank.api import student

TOKENS = ([6.0], [10 / 3] * 3)  # the gradient of each token, by rank
WEIGHTS = {
    "each rank divides by its own tokens": lambda own, total, size: 1 / own,
    "all ranks divide by all tokens": lambda own, total, size: 1 / total,
    "and multiply by the number of ranks": lambda own, total, size: size / total,
}


def measure():
    """Return the averaged gradient for each weight. The gradient of one process is 16 / 4 = 4."""
    size, gradients = dist.get_world_size(), []
    inputs = torch.tensor(TOKENS[dist.get_rank()])
    total = torch.tensor(float(len(inputs)))
    dist.all_reduce(total)
    for weigh in WEIGHTS.values():
        model = nn.Linear(1, 1, bias=False)
        ddp = student("m04_bucketed_ddp", "BucketedDDP")(model)
        loss = ddp(inputs[:, None]).sum() * weigh(len(inputs), total.item(), size)
        loss.backward()
        ddp.finish_grad_sync()
        gradients.append(model.weight.grad.item())
    return gradients


def main(run):
    for name, gradient in zip(WEIGHTS, run(measure, world_size=2)[0]):
        print(f"{name}: {gradient:.4f}")


if __name__ == "__main__":
    run_experiment(main, module=4)
