"""Prints where a bf16 weight of 1.0 ends after 1000 small steps of Adam, without an fp32 master and with one."""

import torch
from torch import nn

from brigade.lab.experiment import experiment
from brigade.rank.api import student


def train(masters):
    model = nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    nn.init.ones_(model.weight)
    if masters:
        ddp = student("m07_cached_shards", "CachedDDP")(model, grad_dtype=torch.float32)
        optimizer = student("m08_zero_optimizer", "ZeroOptimizer")(ddp, torch.optim.Adam, lr=1e-4)
    else:
        ddp, optimizer = model, torch.optim.Adam(model.parameters(), lr=1e-4)
    for _ in range(1000):
        optimizer.zero_grad()
        ddp(torch.ones(1, 1, dtype=torch.bfloat16)).sum().backward()  # a gradient of 1, always
        if masters:
            ddp.finish_grad_sync()
        optimizer.step()
    return model.weight.item()


def main(run):
    print("without a master:", run(train, False, world_size=1)[0])
    print("with a master:", run(train, True, world_size=1)[0])


if __name__ == "__main__":
    experiment(main, module=8)
