"""Drivers for `test_testing.py`."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from brigade.testing import run, step, watch


def drive(scale):
    """Reduce gradients in hooks in step 1, after backward in step 0, and without waiting in step 7."""
    print("from", dist.get_rank())
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch(model, optimizer)
    start = torch.zeros(1)
    dist.broadcast(start, 0)
    handles = []

    def launch(parameter):
        handles.append(dist.all_reduce(parameter.grad, async_op=True))

    hooks = [parameter.register_post_accumulate_grad_hook(launch) for parameter in model.parameters()]
    with step(1):
        model(torch.ones(2, 4)).sum().backward()
        for handle in handles:
            handle.wait()
        optimizer.step()
    for hook in hooks:
        hook.remove()
    for number in (0, 7):
        optimizer.zero_grad()
        with step(number):
            model(torch.ones(2, 4)).sum().backward()
            for parameter in reversed(list(model.parameters())):
                dist.all_reduce(parameter.grad, async_op=number == 7)
    total = torch.full((4,), scale)
    dist.all_reduce(total)
    return {"rank": dist.get_rank(), "sum": total}


def poll():
    """Reduce a tensor, and ask until it is complete instead of waiting for it."""
    with step(0):
        value = torch.ones(2)
        handle = dist.all_reduce(value, async_op=True)
        while not handle.is_completed():
            pass
        handle.is_completed()
    return value


def do_little():
    pass


def take_empty_step():
    with step(0):
        pass


def deadlock():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(2))
    else:
        dist.recv(torch.ones(2), 0)


def run_again():
    run(do_little)


def wait_in_cpp():
    model = DistributedDataParallel(nn.Linear(2, 2))
    model(torch.ones(1, 2)).sum().backward()
