"""Module 4: buckets, the middle way between one launch and one per parameter.

Gradients become ready in roughly the reverse order of registration, so neighbours in that order share a bucket of about
25 MiB. A bucket is all-reduced as soon as its last gradient is ready, while backward goes on. Ranks may become ready in
different orders, but all of them launch bucket 0 first, then bucket 1, and so on: a bucket that is complete too early
waits for those before it.

Cost per step: about (bytes of gradients) / (bucket size) launches, all but the last ones during backward; the same
bytes as ever; a copy of each gradient into its bucket and one back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state


def plan_buckets(params: Iterable[nn.Parameter], bucket_cap_bytes: int) -> list[list[nn.Parameter]]:
    """Divides trainable parameters, given in the order of registration, into buckets, in the reverse order.

    A bucket closes before a parameter that would take it above the cap; one that fits exactly still belongs to it. A
    parameter larger than the cap has a bucket of its own, and a bucket has parameters of one dtype only. A pure
    function of shapes and dtypes: it works on the meta device.
    """
    # Go through the parameters from the last to the first, and open a new bucket where the rule asks for one.
    # TODO: part (a)
    raise NotImplementedError("module 4, part (a)")


class Bucket:
    """Parameters that share an all-reduce, and how far that is in the current step."""

    def __init__(self, parameters: list[nn.Parameter], process_group: dist.ProcessGroup | None):
        self.parameters = parameters
        self.process_group = process_group
        self.missing = len(parameters)  # gradients that are not ready yet
        self.flat: torch.Tensor | None = None  # (sum of numel,), while the all-reduce is under way
        self.handle: dist.Work | None = None

    def launch(self) -> None:
        """Copies the gradients together and starts their all-reduce, without waiting. A missing one counts as zeros."""
        # As in module 2, but asynchronous.
        # TODO: part (b)
        raise NotImplementedError("module 4, part (b)")

    def finish(self) -> None:
        """Waits, puts the averages into the gradients, and makes the bucket ready for the next step."""
        # Wait before anything else; at the end nothing of this step may be left.
        # TODO: part (c)
        raise NotImplementedError("module 4, part (c)")


class BucketedDDP(nn.Module):
    """Wraps a model; gradients are all-reduced bucket by bucket during backward. `bucket_cap_mb` counts MiB.

    Ranks may use different parameters, and in different orders.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0, process_group: dist.ProcessGroup | None = None):
        super().__init__()
        self.module = module
        broadcast_module_state(module, process_group)
        self.synchronize = True  # no_sync turns it off
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = [Bucket(group, process_group) for group in plan_buckets(trainable, int(bucket_cap_mb * 2**20))]
        self.launched = 0  # buckets 0 to launched - 1 are under way
        # Have `mark_ready` called with its bucket when the gradient of a parameter is accumulated.
        # TODO: part (d)
        raise NotImplementedError("module 4, part (d)")

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def mark_ready(self, bucket: Bucket) -> None:
        """Runs in backward when one more gradient of `bucket` is ready; launches every bucket whose turn has come."""
        # Unless inside no_sync, count, and launch in the order of the buckets as far as they are complete.
        # TODO: part (e)
        raise NotImplementedError("module 4, part (e)")

    def finish_grad_sync(self) -> None:
        """Launches the buckets that never became complete, waits for all; then each gradient is the average."""
        # A bucket with an unused parameter, and all those behind it, are still to be launched, in the same order.
        # TODO: part (f)
        raise NotImplementedError("module 4, part (f)")

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside the block accumulate gradients without any communication."""
        before, self.synchronize = self.synchronize, False
        try:
            yield
        finally:
            self.synchronize = before
