"""Print the gradient that two ranks with one and three tokens compute, if the loss is weighted in three ways.

The last line is the gradient of your own loop, once parts (b) and (c) are written.
"""

import importlib

import torch
import torch.distributed as dist
from torch import nn

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

TOKENS = ([6.0], [10 / 3] * 3)  # the gradient of each token, by rank
WEIGHTS = {
    "each rank divides by its own tokens": lambda own, total, size: 1 / own,
    "all ranks divide by all tokens": lambda own, total, size: 1 / total,
    "and multiply by the number of ranks": lambda own, total, size: size / total,
}


def measure():
    """Return the averaged gradient for each weight, and that of the loop. The gradient of one process is 16 / 4 = 4."""
    size, gradients = dist.get_world_size(), []
    inputs = torch.tensor(TOKENS[dist.get_rank()])[:, None]
    total = torch.tensor(float(len(inputs)))
    dist.all_reduce(total)
    for weigh in WEIGHTS.values():
        model = nn.Linear(1, 1, bias=False)
        ddp = student("m04_bucketed_ddp", "BucketedDDP")(model)
        (ddp(inputs).sum() * weigh(len(inputs), total.item(), size)).backward()
        ddp.finish_grad_sync()
        gradients.append(f"{model.weight.grad.item():.4f}")
    return [*gradients, measure_loop(inputs)]


def measure_loop(inputs):
    """Return the gradient after `LockstepLoop.compute_gradients`, with the sum of the outputs as the loss."""
    loop_class = student("m12_lockstep", "LockstepLoop")
    importlib.import_module(loop_class.__module__).sum_loss = lambda outputs, targets: outputs.sum()
    model = nn.Linear(1, 1, bias=False)
    ddp = student("m04_bucketed_ddp", "BucketedDDP")(model)
    loop = loop_class(ddp, torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        [num_tokens] = loop.sum_over_ranks([len(inputs)], torch.int64)
        loop.compute_gradients([(inputs, inputs)], num_tokens)
    except NotImplementedError:
        return "not written yet"
    return f"{model.weight.grad.item():.4f}"


def main(run):
    for name, gradient in zip([*WEIGHTS, "your loop"], run(measure, world_size=2)[0]):
        print(f"{name}: {gradient}")


if __name__ == "__main__":
    run_experiment(main, module=12)
