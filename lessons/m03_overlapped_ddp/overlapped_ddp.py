"""Module 3: communicate while backward is still computing.

The gradient of the last layer is ready when backward has barely begun. A hook on each parameter launches an all-reduce
without waiting, as soon as the parameter's gradient is ready, and backward continues. `finish_grad_sync` waits for the
all-reduces that are still running.

Cost per step: one launch per trainable parameter, during backward, the same number of bytes as in module 1, and no
copies. Only communication that does not overlap with computation makes the step longer. Restriction: all ranks must use
every parameter, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m01_naive_ddp.refusals import CLEARED, SECOND_BACKWARD, Wrapper


class OverlappedDDP(Wrapper):
    """Wrap a model and all-reduce each of its gradients as soon as backward has computed it.

    What `NaiveDDP` says of every wrapper holds, except that every rank must use every parameter, in the same order, in
    the last backward of each step. From here on, a step has at most one backward outside `no_sync`, after all others,
    and then one call of `finish_grad_sync`, also outside.
    """

    require_grad_sync = True  # whether a backward pass communicates

    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, process_group)
        broadcast_module_state(module, process_group)
        # Make backward call `launch` for each trainable parameter.
        # TODO: part (a)
        raise NotImplementedError("module 3, part (a)")
        self.mark_parameters()

    def launch(self, parameter: nn.Parameter) -> None:
        """Start the all-reduce of `parameter.grad` without waiting. The backward hook calls this method.

        Raise RuntimeError if this all-reduce is already in flight: then a second backward came before
        `finish_grad_sync`, even if it is inside `no_sync`, and added to a gradient that belongs to the collective. A
        wrapper that averages this backward as well, instead of raising an error, is right, too.
        """
        # TODO: part (b)
        raise NotImplementedError("module 3, part (b)")

    def finish_grad_sync(self) -> None:
        """Wait for every all-reduce of this step. Afterwards, each gradient is the average over the group.

        If all backward passes of the step ran inside `no_sync`, launch the all-reduces here. Raise RuntimeError if a
        gradient was cleared after its launch.
        """
        self.require_same_parameters()
        if any(parameter.grad is None for parameter in self.in_flight):
            raise RuntimeError(CLEARED)
        # TODO: part (c)
        raise NotImplementedError("module 3, part (c)")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let the backward passes inside the block accumulate gradients without any communication.

        The hooks read the flag during backward. Blocks may be nested. The end of a block restores the previous state,
        even after an exception. The next `finish_grad_sync` averages what was accumulated inside. A block silences one
        wrapper only, and nothing else does: in eval mode, gradients are averaged as well.
        """
        # TODO: part (d)
        raise NotImplementedError("module 3, part (d)")


class GradSyncMixin:
    """`no_sync` and its flag for the wrappers of later modules, which do not inherit from `OverlappedDDP`."""

    require_grad_sync = True
    no_sync: Callable[..., AbstractContextManager[None]] = OverlappedDDP.no_sync
