"""Module 1: data parallelism in its plainest form.

Every rank holds a whole copy of the model and works on its own part of the batch. After backward, each
gradient is averaged over the ranks with one all-reduce, so that all copies take the same optimizer step.

Cost per step: one launch per trainable parameter, all of them after backward, when the processor has nothing else
to do. Each all-reduce carries the bytes of one gradient. No memory beyond the gradients themselves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


def broadcast_module_state(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Overwrites all parameters and buffers of `module` with those of the group's first rank.

    Frozen parameters and buffers of any dtype are part of the model too. A collective: every rank of the
    group calls it. `process_group` None means the default group.
    """
    # Go through all parameters and all buffers, and broadcast each from rank 0 *of the group*.
    # Broadcasting writes into the tensor behind autograd's back: use tensor.detach(). NCCL takes contiguous ones only.
    # TODO: part (a)
    raise NotImplementedError("module 1, part (a)")


class NaiveDDP(nn.Module):
    """Wraps a model so that its gradients can be averaged over the ranks of a group.

    Construction makes all replicas equal. After each backward, call `finish_grad_sync` once, on all ranks:
    then every `p.grad` is the average over the group.
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
        """Averages the gradient of each trainable parameter over the group, one all-reduce for each.

        All ranks must call the same collectives in the same order, so a parameter that this rank did not use,
        whose gradient is None, takes part with zeros.
        """
        # For every trainable parameter, in the same order on all ranks:
        #   give it a gradient of zeros if it has none, sum the gradient over the group, divide by the group's size.
        # TODO: part (c)
        raise NotImplementedError("module 1, part (c)")
