"""DTensor averages in backward, and waits: it launches in backward, but without overlap."""

# Earns at most 2 points.

import contextlib

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.func import functional_call

from ..m01_naive_ddp.naive_ddp import broadcast_module_state


class OverlappedDDP(nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module = module
        broadcast_module_state(module, process_group)
        self.mesh = DeviceMesh.from_group(process_group or dist.group.WORLD, "cpu")

    def forward(self, *args, **kwargs):
        def averaged(parameter):
            whole = DTensor.from_local(parameter, self.mesh, [Replicate()], run_check=False)
            return whole.to_local(grad_placements=[Partial("avg")])

        params = {name: averaged(p) if p.requires_grad else p for name, p in self.module.named_parameters()}
        return functional_call(self.module, params, args, kwargs)

    def finish_grad_sync(self):
        pass

    def no_sync(self):
        return contextlib.nullcontext()
