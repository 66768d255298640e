"""Print a bf16 weight of 1.0 after 1000 small steps of Adam, without and with an fp32 main parameter."""

import torch
from torch import nn

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student


def train(has_main_params):
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    if has_main_params:
        ddp = student("m07_cached_shards", "CachedDDP")(model, grad_dtype=torch.float32)
        optimizer = student("m08_zero_optimizer", "ZeroOptimizer")(ddp, torch.optim.Adam, lr=1e-4)
    else:
        ddp, optimizer = model, torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(1000):
        optimizer.zero_grad()
        ddp(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()  # the gradient is always 1
        if has_main_params:
            ddp.finish_grad_sync()
        optimizer.step()
    return model.weight.item()


def main(run):
    print("without a main parameter:", run(train, False, world_size=1)[0])
    print("with a main parameter:", run(train, True, world_size=1)[0])


if __name__ == "__main__":
    run_experiment(main, module=8)
