"""Prints which of torch's optimizers `is_elementwise` lets `ZeroOptimizer` divide."""

import inspect

import torch

from brigade.lab.experiment import experiment
from brigade.rank.api import student


def ask():
    is_elementwise = student("m08_zero_optimizer", "is_elementwise")
    classes = {name: cls for name, cls in vars(torch.optim).items() if inspect.isclass(cls) and name != "Optimizer"}
    return {
        name: is_elementwise(cls, {}, torch.device("cpu"))
        for name, cls in classes.items()
        if issubclass(cls, torch.optim.Optimizer)
    }


def main(run):
    for name, found in sorted(run(ask, world_size=1)[0].items()):
        print(f"{name}: {'elementwise' if found else 'refused'}")


if __name__ == "__main__":
    experiment(main, module=8)
