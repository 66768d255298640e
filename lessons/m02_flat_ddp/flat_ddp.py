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
        # TODO: part (a)
        raise NotImplementedError("module 2, part (a)")

    def finish_grad_sync(self) -> None:
        """Average all gradients over the group, with one all-reduce per dtype, each in that dtype.

        Each averaged gradient keeps its parameter's shape, dtype and strides. A gradient that is None counts as zeros.
        """
        self.require_same_parameters()
        # TODO: part (b)
        raise NotImplementedError("module 2, part (b)")
