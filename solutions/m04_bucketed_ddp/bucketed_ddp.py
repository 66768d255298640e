"""Module 4: buckets, a compromise between one launch for all parameters and one launch per parameter.

Gradients become ready in roughly reverse registration order, so neighbours in that order share a bucket of about
25 MiB. A bucket is all-reduced as soon as its last gradient is ready, while backward continues. Gradients may become
ready in a different order on each rank, but all ranks launch buckets in the same order (`LaunchQueue`).

Cost per step: about (bytes of gradients) / (bucket size) launches, most of them during backward, and the same number
of bytes as in module 3. Each gradient is copied into its bucket and back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m01_naive_ddp.refusals import CLEARED, SECOND_BACKWARD, Wrapper
from ..m03_overlapped_ddp.overlapped_ddp import GradSyncMixin


def plan_buckets(params: Iterable[nn.Parameter], bucket_cap_bytes: int) -> list[list[nn.Parameter]]:
    """Assign trainable parameters, given in registration order, to buckets, in reverse order.

    A bucket closes before a parameter that would make it exceed the cap. If a parameter fits exactly, it still goes
    into the bucket. A parameter larger than the cap gets its own bucket. All parameters of a bucket have the same
    dtype: when the dtype changes, you may close the bucket, or keep one open for each dtype. The function reads only
    shapes and dtypes, so it works on the meta device. Without parameters, `[]` and `[[]]` are both right.
    """
    ### BEGIN SOLUTION part (a)
    buckets: list[list[nn.Parameter]] = []
    nbytes = 0  # in the open bucket
    for parameter in reversed(list(params)):
        size = parameter.numel() * parameter.element_size()
        if not buckets or nbytes + size > bucket_cap_bytes or parameter.dtype != buckets[-1][0].dtype:
            buckets.append([])
            nbytes = 0
        buckets[-1].append(parameter)
        nbytes += size
    return buckets
    ### END SOLUTION


class Bucket:
    """Parameters that share an all-reduce."""

    def __init__(self, parameters: list[nn.Parameter], process_group: dist.ProcessGroup | None):
        self.parameters = parameters
        self.process_group = process_group
        self.flat: torch.Tensor | None = None  # (sum of numel,), while the all-reduce is running
        self.handle: dist.Work | None = None

    def launch(self) -> None:
        """Copy the gradients into one flat tensor and start its all-reduce without waiting.

        A gradient that is None counts as zeros.
        """
        ### BEGIN SOLUTION part (b)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.flat = torch.cat([parameter.grad.reshape(-1) for parameter in self.parameters])  # (sum of numel,)
        self.handle = dist.all_reduce(self.flat, group=self.process_group, async_op=True)
        ### END SOLUTION

    def finish(self) -> None:
        """Wait for the all-reduce and copy the averages back into the gradients."""
        ### BEGIN SOLUTION part (c)
        self.handle.wait()
        self.flat /= dist.get_world_size(self.process_group)
        pieces = self.flat.split([parameter.numel() for parameter in self.parameters])  # each (numel,)
        for parameter, piece in zip(self.parameters, pieces):
            parameter.grad.copy_(piece.view(parameter.shape))
        self.flat, self.handle = None, None
        ### END SOLUTION


class LaunchQueue:
    """Launch units strictly in order: each unit as soon as it is complete and all earlier units are launched.

    A unit is what one launch carries: a bucket or, in module 6, a group of buckets. Unit k is complete when
    `num_grads[k]` gradients are ready. `launch(k)` starts its communication without waiting. All ranks have the same
    units and therefore launch them in the same order. Modules 5 to 10 use this class, so do not rename its methods and
    attributes.
    """

    def __init__(self, num_grads: Sequence[int], launch: Callable[[int], None]):
        self.num_grads = num_grads
        self.launch = launch
        self.reset()

    def reset(self) -> None:
        """Prepare for the next step: mark every gradient as pending and no unit as launched."""
        self.num_pending = list(self.num_grads)  # gradients of each unit that are not ready yet
        self.next_to_launch = 0  # units 0 to next_to_launch - 1 are launched

    def mark_ready(self, unit: int) -> None:
        """Count one more ready gradient of a unit. Then launch the next units, in order, while they are complete."""
        ### BEGIN SOLUTION part (d)
        self.num_pending[unit] -= 1
        while self.next_to_launch < len(self.num_pending) and self.num_pending[self.next_to_launch] == 0:
            self.launch(self.next_to_launch)
            self.next_to_launch += 1
        ### END SOLUTION

    def launch_remaining(self) -> None:
        """Launch, in order, the units that never became complete and all units after them."""
        ### BEGIN SOLUTION part (e)
        while self.next_to_launch < len(self.num_pending):
            self.launch(self.next_to_launch)
            self.next_to_launch += 1
        ### END SOLUTION


class BucketedDDP(GradSyncMixin, Wrapper):
    """Wrap a model and all-reduce its gradients bucket by bucket during backward.

    `bucket_cap_mb` is in MiB: 25 means 26 214 400 bytes. The rules of `NaiveDDP`, and module 3's about `no_sync` and a
    second backward, hold here too. A backward inside `no_sync` neither launches nor counts.
    """

    def __init__(self, module: nn.Module, bucket_cap_mb: float = 25.0, process_group: dist.ProcessGroup | None = None):
        super().__init__(module, process_group)
        broadcast_module_state(module, process_group)
        # Plan the buckets, and let backward call `mark_ready` for each gradient.
        ### BEGIN SOLUTION part (f)
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.buckets = [Bucket(params, process_group) for params in plan_buckets(trainable, int(bucket_cap_mb * 2**20))]
        self.queue = LaunchQueue([len(b.parameters) for b in self.buckets], lambda index: self.buckets[index].launch())
        for index, bucket in enumerate(self.buckets):
            for parameter in bucket.parameters:
                self.register_grad_hook(parameter, lambda _, index=index: self.mark_ready(index))
        ### END SOLUTION
        self.launch_all_in_backward()
        self.mark_parameters()

    def mark_ready(self, index: int) -> None:
        """Tell the queue that a gradient of bucket `index` is ready. The backward hook calls this method.

        Raise RuntimeError if the bucket is already complete: then a second backward came before `finish_grad_sync`.
        """
        ### BEGIN SOLUTION part (g)
        if self.queue.num_pending[index] == 0:
            raise RuntimeError(SECOND_BACKWARD)
        if self.require_grad_sync:
            self.queue.mark_ready(index)
        ### END SOLUTION

    def finish_grad_sync(self) -> None:
        """Launch the remaining buckets and wait for all buckets. Afterwards, each gradient is the average.

        Raise RuntimeError if a gradient was cleared after its launch.
        """
        self.require_same_parameters()
        launched, ready = self.buckets[: self.queue.next_to_launch], self.in_backward | self.in_last_backward
        if any(p.grad is None and p in ready for bucket in launched for p in bucket.parameters):
            raise RuntimeError(CLEARED)
        ### BEGIN SOLUTION part (h)
        self.queue.launch_remaining()
        for bucket in self.buckets:
            bucket.finish()
        self.queue.reset()
        ### END SOLUTION
