"""Module 2: the same average, in one all-reduce.

Launching a collective takes time, even if it carries few bytes. After backward, all gradients are copied into one flat
tensor, averaged with one all-reduce, and copied back. A collective carries only one dtype, so each dtype of the
parameters has its own flat tensor.

Cost per step: one launch per dtype, after backward, and the same number of bytes as in module 1. All gradients are
copied twice (in and out). During the all-reduce, the gradients take twice as much memory.
"""

from __future__ import annotations

from collections import defaultdict

import torch
import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m01_naive_ddp.refusals import Wrapper


class FlatDDP(Wrapper):
    """Wrap a model and average its gradients after backward, with one all-reduce per dtype.

    What holds for every wrapper is in the docstring of `NaiveDDP`.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, process_group)
        broadcast_module_state(module, process_group)
        # Decide which gradients share an all-reduce.
        ### BEGIN SOLUTION part (a)
        self.parameters_by_dtype: dict[torch.dtype, list[nn.Parameter]] = defaultdict(list)
        for parameter in module.parameters():
            if parameter.requires_grad:
                self.parameters_by_dtype[parameter.dtype].append(parameter)
        ### END SOLUTION

    def finish_grad_sync(self) -> None:
        """Average all gradients over the group, with one all-reduce per dtype, each in that dtype.

        Each averaged gradient keeps its parameter's shape, dtype and strides. A gradient that is None counts as zeros.
        """
        self.require_same_parameters()
        ### BEGIN SOLUTION part (b)
        for parameters in self.parameters_by_dtype.values():
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])  # (sum of numel,)
            dist.all_reduce(flat, group=self.process_group)
            flat /= dist.get_world_size(self.process_group)
            pieces = flat.split([parameter.numel() for parameter in parameters])
            for parameter, piece in zip(parameters, pieces):
                parameter.grad.copy_(piece.view(parameter.shape))
        ### END SOLUTION
