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

from .refusals import Wrapper


def broadcast_module_state(module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
    """Overwrite all parameters and buffers of `module` with the values that they have on the group's first rank.

    This includes frozen parameters, and buffers of any dtype. Every rank of the group must call this function.
    `process_group=None` means the default group. NCCL takes only contiguous tensors: for a transposed one, broadcast a
    contiguous copy, then copy the result back. Later modules import this function.
    """
    ### BEGIN SOLUTION part (a)
    for tensor in [*module.parameters(), *module.buffers()]:
        whole = tensor.detach().contiguous()  # copies non-contiguous tensors only
        dist.broadcast(whole, group=process_group, group_src=0)
        tensor.detach().copy_(whole)
    ### END SOLUTION


class NaiveDDP(Wrapper):
    """Wrap a model. After backward, average its gradients over the ranks of a group, one by one.

    The constructor makes all replicas equal. In each step, all ranks call `finish_grad_sync` once, after one or more
    backward passes. Afterwards, every `p.grad` is the average over the group: what one process would compute on the
    whole batch, if the loss is a mean and every rank has equally many examples.

    The docstring of `Wrapper` (`refusals.py`) says what else holds, for this wrapper and for those of later modules.
    Read it once: checks test that, too.
    """

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, process_group)
        # Make all replicas start from the same weights.
        ### BEGIN SOLUTION part (b)
        broadcast_module_state(module, process_group)
        ### END SOLUTION

    def finish_grad_sync(self) -> None:
        """Average the gradient of each trainable parameter over the group, with one all-reduce per parameter.

        All ranks must call the same collectives in the same order.
        """
        self.require_same_parameters()
        ### BEGIN SOLUTION part (c)
        for parameter in self.module.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.process_group)
            parameter.grad /= dist.get_world_size(self.process_group)
        ### END SOLUTION
