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
        ### BEGIN SOLUTION part (a)
        self.in_flight: list[tuple[dist.Work, nn.Parameter]] = []
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.launch)
        ### END SOLUTION

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def launch(self, parameter: nn.Parameter) -> None:
        """Runs in backward, when `parameter.grad` is complete: starts its all-reduce and returns at once."""
        # Unless inside no_sync, start the all-reduce with async_op=True and remember its handle.
        ### BEGIN SOLUTION part (b)
        if self.synchronize:
            handle = dist.all_reduce(parameter.grad, group=self.process_group, async_op=True)
            self.in_flight.append((handle, parameter))
        ### END SOLUTION

    def finish_grad_sync(self) -> None:
        """Waits for every all-reduce of this step; afterwards each gradient is the average over the group."""
        # Wait for every handle, then divide that gradient by the size of the group. The next step starts
        # with nothing under way.
        ### BEGIN SOLUTION part (c)
        for handle, parameter in self.in_flight:
            handle.wait()
            parameter.grad /= dist.get_world_size(self.process_group)
        self.in_flight.clear()
        ### END SOLUTION

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block accumulate gradients without any communication.

        May be nested; the former state is restored when the block ends, by an exception too.
        """
        # Switch self.synchronize off for the length of the block.
        ### BEGIN SOLUTION part (d)
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before
        ### END SOLUTION
