"""The model trains copies of the parameters, which no hook can see, and the finish reduces them."""

# Earns at most 2 points.

import contextlib

import torch.distributed as dist
from torch import nn
from torch.func import functional_call

from ..m01_naive_ddp.naive_ddp import broadcast_module_state


class OverlappedDDP(nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module, self.group = module, process_group
        broadcast_module_state(module, process_group)

    def forward(self, *args, **kwargs):
        self.copies = {name: p.detach().requires_grad_(p.requires_grad) for name, p in self.module.named_parameters()}
        return functional_call(self.module, self.copies, args, kwargs)

    def finish_grad_sync(self):
        handles = []
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parameter.grad = self.copies[name].grad / dist.get_world_size(self.group)
                handles.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))
        for handle in handles:
            handle.wait()

    def no_sync(self):
        return contextlib.nullcontext()
