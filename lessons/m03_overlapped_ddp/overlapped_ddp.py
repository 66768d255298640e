"""Module 3: communicate while backward is still computing.

The gradient of the last layer is ready when backward has barely begun. A hook on each parameter launches the
all-reduce of its gradient there and then, without waiting; backward goes on. `finish_grad_sync` waits
for whatever is still under way.

Cost per step: one launch per trainable parameter, during backward, so that only what does not fit beside the
computation costs time; the same bytes as before; no copies. All ranks must use every parameter, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state


class OverlappedDDP(nn.Module):
    """Wraps a model; gradients are all-reduced one by one as backward produces them."""

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        self.process_group = process_group
        broadcast_module_state(module, process_group)
        self.synchronize = True  # no_sync turns it off
        # Have `launch` called for each trainable parameter as soon as its gradient is accumulated in parameter.grad.
        # Keep a list of the collectives that are under way.
        # TODO: part (a)
        raise NotImplementedError("module 3, part (a)")

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def launch(self, parameter: nn.Parameter) -> None:
        """Runs in backward, when `parameter.grad` is complete: starts its all-reduce and returns at once."""
        # Unless inside no_sync, start the all-reduce with async_op=True and remember its handle.
        # TODO: part (b)
        raise NotImplementedError("module 3, part (b)")

    def finish_grad_sync(self) -> None:
        """Waits for every all-reduce of this step; afterwards each gradient is the average over the group."""
        # Wait for every handle, then divide that gradient by the size of the group. The next step starts
        # with nothing under way.
        # TODO: part (c)
        raise NotImplementedError("module 3, part (c)")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block accumulate gradients without any communication.

        May be nested; the former state is restored when the block ends, by an exception too.
        """
        # Switch self.synchronize off for the length of the block.
        # TODO: part (d)
        raise NotImplementedError("module 3, part (d)")
