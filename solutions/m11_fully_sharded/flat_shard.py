"""A flat shard: this rank's part of one unit's weights, and the full weights while they are needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..m01_naive_ddp.refusals import make_freed_class, require_memory
from ..m05_grad_buffer.grad_buffer import plan_layout
from ..m06_coalesced.coalesced import all_gather, reduce_scatter

ProcessGroup = dist.ProcessGroup | None  # None is the default group
DType = torch.dtype | None  # None is the parameters' dtype


class FlatShard:
    """Parameters of one unit and one dtype, all trainable or all frozen, in one flat tensor.

    `full`, of shape (numel,), has the layout of module 5 with a single bucket. The parameters are views of `full`.
    Rank r keeps part r of N equal parts in `shard`, of shape (numel / N,). The optimizer steps on `shard`. `full` has
    memory only between `unshard` and `reshard`. Autograd saves views of `full`, so its storage is resized, to 0 bytes
    and back, but never replaced. `full` and the parameters have the dtype `compute_dtype` (default: as before). `shard`
    and its gradient keep the parameters' original dtype. Gradients are averaged in `reduce_dtype` (default: the
    original dtype).
    """

    def __init__(self, params: list[nn.Parameter], group: ProcessGroup, compute_dtype: DType, reduce_dtype: DType):
        self.params, self.process_group = params, group
        self.classes = [type(p) for p in params]
        self.memory: list[tuple[bool, int]] | None = None  # of the parameters, since the gather
        self.gather_handle: dist.Work | None = None  # of the all-gather in flight
        self.reduction: tuple[dist.Work, Tensor, Tensor] | None = None  # handle, input, output of a reduce-scatter
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.layout = plan_layout([p.numel() for p in self.params], None, self.size)
        full = self.flatten([p.data for p in self.params])  # in the parameters' dtype
        self.reduce_dtype = reduce_dtype or full.dtype
        compute_dtype = compute_dtype if full.is_floating_point() else None  # frozen integers keep their dtype
        # Afterwards, `shard` is a copy of this rank's part of `full`, trainable if the parameters are. `self.full` has
        # the dtype `compute_dtype`, if one is given. Each parameter.data is its view, and it has no memory.
        ### BEGIN SOLUTION part (c)
        self.shard = nn.Parameter(full.chunk(self.size)[self.rank].clone(), self.params[0].requires_grad)
        self.full = full.to(compute_dtype or full.dtype)
        for parameter, view in zip(self.params, self.make_views(self.full)):
            parameter.data = view
        self.reshard()
        ### END SOLUTION
        if self.shard.requires_grad:
            for parameter in self.params:  # in no_sync, gradients of `compute_dtype` add up in the shard's dtype
                parameter.grad_dtype = torch.promote_types(self.full.dtype, self.shard.dtype)

    def make_views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a flat tensor, in the parameter's shape."""
        return [flat[start:end].view(p.shape) for p, (start, end) in zip(self.params, self.layout.param_ranges)]

    def flatten(self, values: Sequence[Tensor]) -> Tensor:
        """Return a new flat tensor, (numel,), with one value for each parameter, and zeros as padding."""
        flat = values[0].new_zeros(self.layout.numel, device=self.params[0].device)
        for view, value in zip(self.make_views(flat), values):
            view.copy_(value)
        return flat

    def gather_values(self, part: Tensor) -> dict[nn.Parameter, Tensor]:
        """Gather a tensor that has the shape of the shard. Return each parameter's values on the CPU, in its dtype."""
        flat = part.new_empty(self.layout.numel)
        all_gather(flat, part, self.process_group)
        return {p: view.to("cpu", copy=True) for p, view in zip(self.params, self.make_views(flat))}

    def take_part(self, values: Sequence[Tensor]) -> Tensor:
        """Return this rank's part of the flat tensor with these values, one for each parameter."""
        return self.flatten(values).chunk(self.size)[self.rank].clone()

    def unshard(self) -> None:
        """Allocate the memory of `full` and start the all-gather, in the dtype of `full`, without waiting."""
        ### BEGIN SOLUTION part (d)
        self.full.untyped_storage().resize_(self.full.nbytes)
        part = self.shard.detach().to(self.full.dtype)
        self.gather_handle = all_gather(self.full, part, self.process_group, async_op=True)
        ### END SOLUTION

    def wait_for_unshard(self) -> None:
        """Wait for the all-gather in flight, if there is one."""
        if self.gather_handle:
            self.gather_handle.wait()
            self.gather_handle = None
        self.set_class()

    def reshard(self) -> None:
        """Release the memory of `full`. A second call does nothing. No all-gather may be in flight.

        Raise RuntimeError if a parameter was written, or its data replaced, since the gather.
        """
        is_written = self.memory is not None and self.memory != self.list_memory()
        self.memory = None
        ### BEGIN SOLUTION part (e)
        self.full.untyped_storage().resize_(0)
        ### END SOLUTION
        self.set_class()
        if is_written:
            raise RuntimeError(
                "a weight was written or replaced in forward or backward, but only shards are kept: change weights "
                "between steps, with load_full_state_dict(state)"
            )

    def set_class(self) -> None:
        """Make the parameters of `full` refuse to be read while it has no memory."""
        has_memory = self.full.untyped_storage().nbytes() == self.full.nbytes
        for parameter, own in zip(self.params, self.classes):
            parameter.__class__ = own if has_memory else make_freed_class(own)
        if has_memory and self.memory is None:
            self.memory = self.list_memory()

    def list_memory(self) -> list[tuple[bool, int]]:
        """Return for each parameter whether it is in the memory of `full`, and how often it was written."""
        memory = self.full.untyped_storage().data_ptr()
        return [(p.untyped_storage().data_ptr() == memory, p._version) for p in self.params]

    def start_reduce(self) -> None:
        """Move the parameters' gradients into one flat tensor of `reduce_dtype`. Start the reduce-scatter of averages.

        A gradient that is None counts as zeros. Afterwards parameter.grad is None. Frozen parameters have no gradients.
        """
        if not self.shard.requires_grad:
            return
        ### BEGIN SOLUTION part (j)
        full_grad = torch.zeros_like(self.full, dtype=self.reduce_dtype)
        for parameter, view in zip(self.params, self.make_views(full_grad)):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        part = torch.empty_like(self.shard, dtype=self.reduce_dtype)
        handle = reduce_scatter(part, full_grad, dist.ReduceOp.AVG, self.process_group, async_op=True)
        self.reduction = handle, full_grad, part
        ### END SOLUTION

    def finish_reduce(self) -> None:
        """Wait for the reduce-scatter and add the average to shard.grad. Release the memory of the full gradients."""
        ### BEGIN SOLUTION part (k)
        handle, _, part = self.reduction
        handle.wait()
        self.shard.grad = part.to(self.shard.dtype) if self.shard.grad is None else self.shard.grad.add_(part)
        self.reduction = None
        ### END SOLUTION


def make_flat_shards(params: Iterable[nn.Parameter], *options) -> list[FlatShard]:
    """Return the flat shards of one unit: one for each dtype, and separate ones for frozen parameters."""
    by_kind: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
    for parameter in params:
        by_kind.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
    return [FlatShard(group, *options) for group in by_kind.values()]


register_optimizer_step_pre_hook(require_memory)
