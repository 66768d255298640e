"""Module 2: the same average, in one all-reduce.

Starting a collective costs time however little it carries. After backward all gradients are copied into one
flat tensor, which is reduced at once, and copied back. A collective carries one dtype, so there is one flat tensor
for each dtype among the parameters.

Cost per step: one launch per dtype, after backward; the same bytes as before; two copies of all
gradients (in and out), and the memory of a second set of gradients while they are reduced.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state


class FlatDDP(nn.Module):
    """Wraps a model; `finish_grad_sync` averages all its gradients with one all-reduce per dtype."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = process_group
        broadcast_module_state(module, process_group)
        # Sort the trainable parameters by dtype, in an order that is the same on all ranks.
        # TODO: part (a)
        raise NotImplementedError("module 2, part (a)")

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_grad_sync(self) -> None:
        """Averages all gradients over the group. Afterwards each has its parameter's shape, dtype and strides.

        A gradient that is None takes part as zeros, so that the flat tensor is equally long on all ranks.
        """
        # For each dtype: copy the gradients into one flat tensor, average it over the group with a single
        # all-reduce, and copy its pieces back into the gradients. A gradient's memory need not be contiguous.
        # TODO: part (b)
        raise NotImplementedError("module 2, part (b)")
