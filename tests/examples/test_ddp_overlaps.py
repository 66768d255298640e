"""torch's DDP reduces each bucket while backward computes the next ones."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from brigade.testing import run, step, watch


def drive():
    torch.manual_seed(0)  # equal weights; DDP broadcasts them anyway
    model = watch(nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)  # 1 KiB: a weight and its bias
    for number in range(2):
        with step(number):
            ddp(torch.randn(4, 16)).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_every_bucket_overlaps():
    seen = run(drive, world_size=2, mode="record")  # DDP waits in C++, where the strict mode cannot see it
    for each in seen.steps():
        if each.number > 0:  # in its first step, DDP learns the order of the gradients
            launched = each.launches("all_reduce")
            assert len(launched) > 2
            launched.are_asynchronous().come_before_gradient(+1).are_awaited()
    seen.are_equal_on_all_ranks()
