"""Module 1: data parallelism in its plainest form.

Every rank has a full copy of the model and works on its own part of the batch. After backward, each gradient is
averaged over the ranks with one all-reduce, so all copies take the same optimizer step.

Cost per step: one launch per trainable parameter. All launches come after backward, when no computation is left to
overlap with. Each all-reduce carries the bytes of one gradient. No additional memory is needed.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def broadcast_module_state(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Overwrite all parameters and buffers of `module` with the values that they have on the group's first rank.

    This includes frozen parameters, and buffers of any dtype. Every rank of the group must call this function.
    `process_group=None` means the default group.
    """
    # TODO: part (a)
    raise NotImplementedError("module 1, part (a)")


class NaiveDDP(nn.Module):
    """Wrap a model. After backward, average its gradients over the ranks of a group, one by one.

    The constructor makes all replicas equal. After each backward, call `finish_grad_sync` once, on all ranks.
    Afterwards, every `p.grad` is the average over the group.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = process_group
        # Make all replicas start from the same weights.
        # TODO: part (b)
        raise NotImplementedError("module 1, part (b)")

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_grad_sync(self) -> None:
        """Average the gradient of each trainable parameter over the group, with one all-reduce per parameter.

        All ranks must call the same collectives in the same order. If this rank did not use a parameter, the
        parameter's gradient is None and counts as zeros.
        """
        # TODO: part (c)
        raise NotImplementedError("module 1, part (c)")
