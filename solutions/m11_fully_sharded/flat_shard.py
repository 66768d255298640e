"""A flat shard: this rank's part of one unit's weights, and the full weights while they are needed."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from ..m05_grad_buffer.grad_buffer import plan_layout
from ..m06_coalesced.coalesced import all_gather, reduce_scatter

ProcessGroup = dist.ProcessGroup | None  # None is the default group
DType = torch.dtype | None  # None is the parameters' dtype
VIEWS = {"data", "T", "mT", "H", "mH", "real", "imag"}  # the properties of a tensor that lead to its values
WITHOUT_VALUES = {"data_ptr", "dim", "element_size", "numel", "size", "storage_offset", "stride", "untyped_storage"}
WITHOUT_VALUES |= {"is_complex", "is_contiguous", "is_floating_point", "requires_grad_"}
WITHOUT_VALUES |= {"empty_like", "new_empty", "new_zeros", "zeros_like"}
WITHOUT_VALUES |= {"register_hook", "register_post_accumulate_grad_hook"}


class FreedWeight(nn.Parameter):
    """The class of a parameter while its memory is released: it has a shape and a gradient, but no values.

    Reading released memory can crash the process, so functions that use values raise RuntimeError. torch has such a
    class, too, for parameters that have no shape yet (`torch.nn.parameter.UninitializedParameter`).
    """

    @classmethod
    def __torch_function__(cls, function, types, args, kwargs=None):
        name = getattr(function, "__name__", "")
        is_property, is_set = name in ("__get__", "__set__", "__delete__"), name == "__set__"
        if is_property:
            name = function.__self__.__name__
        is_refused = name in VIEWS if is_property else name not in WITHOUT_VALUES
        if is_set and name == "data":  # another view of the same memory is no harm
            is_refused = args[0].untyped_storage()._cdata != args[1].untyped_storage()._cdata
        if name == "backward":
            raise RuntimeError("backward(inputs=...) finds weights whose memory is released: call it without inputs")
        if is_refused:
            weight = next((f" of shape {list(value.shape)}" for value in args if isinstance(value, cls)), "")
            raise RuntimeError(
                f"{'a new ' * is_set}{name} needs the values of a weight{weight}, whose memory is released: use "
                "full_state_dict() or load_full_state_dict(state)"
            )
        return super().__torch_function__(function, types, args, kwargs or {})


@functools.cache
def make_freed_class(own: type[nn.Parameter]) -> type[FreedWeight]:
    """Return the class of a parameter of the class `own` while its memory is released."""
    return FreedWeight if own is nn.Parameter else type(f"Freed{own.__name__}", (FreedWeight, own), {})


def require_memory(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
    """Refuse a step on released weights. They have no gradients, so the step would leave all weights as they are."""
    if any(isinstance(p, FreedWeight) for group in optimizer.param_groups for p in group["params"]):
        raise RuntimeError("the optimizer has weights whose memory is released: make it with the wrapper's shards()")


register_optimizer_step_pre_hook(require_memory)


class ShardGrad(Tensor):
    """The gradient of a shard. If `torch.amp.GradScaler` looks for infinities in it, all ranks get the same answer.

    The scaler skips a step where it finds one, on each rank alone. Ranks that decide differently would diverge. So
    would ranks that clip by the norm of their own part, as torch's `clip_grad_norm_` does.
    """

    process_group: ProcessGroup = None

    @classmethod
    def __torch_function__(cls, function, types, args, kwargs=None):
        # torch's clip_grad_norm_ takes the norms in the dtype of the gradients. A loop that adds up the squares of all
        # ranks, such as that of module 12, names another one.
        if function is torch.linalg.vector_norm and "dtype" not in (kwargs or {}):
            raise RuntimeError("the norm of a shard's gradient is that of a part: use the wrapper's clip_grad_norm_")
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **kwargs or {})
        if function.__name__ == "_amp_foreach_non_finite_check_and_unscale_":
            grads, is_found, _ = args
            dist.all_reduce(is_found, dist.ReduceOp.MAX, group=grads[0].process_group)
        return result


class FlatShard:
    """Parameters of one unit and one dtype, all trainable or all frozen, in one flat tensor.

    `full`, of shape (numel,), has the layout of module 5 with a single bucket. The parameters are views of `full`.
    Rank r keeps part r of N equal parts in `shard`, of shape (numel / N,). The optimizer steps on `shard`. `full` has
    memory only between `unshard` and `reshard`. Autograd saves views of `full`, so its storage is resized but never
    replaced. `full` and the parameters have the dtype `compute_dtype` (default: as before). `shard` and its gradient
    keep the parameters' original dtype. Gradients are averaged in `reduce_dtype` (default: the original dtype).
    """

    def __init__(self, params: list[nn.Parameter], group: ProcessGroup, compute_dtype: DType, reduce_dtype: DType):
        self.params, self.process_group = params, group
        self.classes = [type(p) for p in params]
        self.memory: list[tuple[bool, int]] | None = None  # of the parameters, since the gather
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.layout = plan_layout([p.numel() for p in self.params], None, self.size)
        full = self.flatten([p.data for p in self.params])  # in the parameters' dtype
        self.reduce_dtype = reduce_dtype or full.dtype
        compute_dtype = compute_dtype if full.is_floating_point() else None  # frozen integers keep their dtype
        self.gather_handle: dist.Work | None = None  # of the all-gather in flight
        self.reduction: tuple[dist.Work, Tensor, Tensor] | None = None  # handle, input, output of a reduce-scatter
        # Create `shard`, a copy of this rank's part of `full` that is trainable if the parameters are trainable. Create
        # `self.full`, the same tensor in `compute_dtype` if one is given. Set each parameter.data to its view of
        # `self.full`. Then free `self.full`.
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
