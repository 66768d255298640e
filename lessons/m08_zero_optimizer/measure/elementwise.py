"""Print which of torch's optimizers `is_elementwise` allows `ZeroOptimizer` to shard."""

import inspect

import torch

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student


def classify():
    is_elementwise = student("m08_zero_optimizer", "is_elementwise")
    classes = {name: cls for name, cls in vars(torch.optim).items() if inspect.isclass(cls) and name != "Optimizer"}
    return {
        name: is_elementwise(cls, {}, torch.device("cpu"))
        for name, cls in classes.items()
        if issubclass(cls, torch.optim.Optimizer)
    }


def main(run):
    for name, accepted in sorted(run(classify, world_size=1)[0].items()):
        print(f"{name}: {'elementwise' if accepted else 'refused'}")


if __name__ == "__main__":
    run_experiment(main, module=8)
