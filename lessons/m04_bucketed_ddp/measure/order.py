"""Print the gradient norms of two layers, a and b, that two ranks use in different orders (module 4).

This is module 3's order.py, with buckets so small that each layer has its own.
"""

import torch
import torch.distributed as dist
from torch import nn

from brigade.lab.experiment import run_experiment
from brigade.ranks.rank.api import student

CASES = [(3, 3, ["ab", "ab"]), (3, 3, ["ab", "ba"]), (3, 5, ["ab", "ba"]), (3, 5, ["ab", "b"])]


class TwoLayers(nn.Module):
    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = nn.Linear(4, a, bias=False), nn.Linear(4, b, bias=False)

    def forward(self, x, layers):
        return sum(getattr(self, name)(x).square().sum() for name in layers)


def step(a, b, layers):
    torch.manual_seed(0)  # the same on both ranks
    model = TwoLayers(a, b)
    ddp = student("m04_bucketed_ddp", "BucketedDDP")(model, bucket_cap_mb=1e-5)  # 10 bytes
    ddp(torch.randn(8, 4), layers[dist.get_rank()]).backward()
    ddp.finish_grad_sync()
    return {name: round(p.grad.norm().item(), 2) for name, p in model.named_parameters()}


def main(run):
    for a, b, layers in CASES:
        print(f"\na has {a} outputs and b {b}; rank 0 uses {layers[0]}, rank 1 {layers[1]}:")
        for rank, norms in enumerate(run(step, a, b, layers)):
            print(f"rank {rank}: {norms}")


if __name__ == "__main__":
    run_experiment(main, module=4)
