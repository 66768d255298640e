"""Module 8: each rank keeps the optimizer state of its own part of the parameters (ZeRO, stage 1).

Both optimizers take a step in three phases. There are N ranks, and a bucket has the shape (bucket_numel,).

                  ShardedOptimizer                              ZeroOptimizer
    a rank has    whole parameters, each with one owner         one shard of every bucket, (bucket_numel / N,)
    1. gradients  one reduce per parameter, to its owner        one reduce-scatter per bucket, in backward (module 6)
    2. update     the inner optimizer steps on what this rank has
    3. weights    one broadcast per parameter, from its owner   one all-gather per bucket
    bytes         as in one all-reduce of the gradients         the same, in two launches per group of buckets
    accepts       optimizers that treat parameters one by one   elementwise optimizers, the wrapper of module 6 or 7

With P fp32 parameters, Adam's state takes 8 P / N bytes per rank, not 8 P. `ShardedOptimizer` may add the state of the
largest parameter. `ZeroOptimizer` adds padding and, for 16-bit weights, 4 P / N bytes of fp32 main parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..m01_naive_ddp.refusals import SPARSE, UnscaledOptimizer, require_own_memory, require_range
from ..m05_grad_buffer.grad_buffer import GradBuffer
from ..m06_coalesced.coalesced import CoalescedDDP

Params = Iterable[Any] | None  # parameters, or dicts of "params" and their options, as for any torch optimizer
ProcessGroup = dist.ProcessGroup | None  # None is the default group


class OuterOptimizer(UnscaledOptimizer):
    """Keep whole parameters in `param_groups`. The inner optimizer, `optim`, steps on this rank's part, `local`."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step. If there is a closure, call it first to compute the gradients, and return its loss."""
        loss = torch.enable_grad()(closure)() if closure else None
        # Run the three phases. A scheduler may have changed options in `param_groups`; `inner_group` returns them.
        ### BEGIN SOLUTION part (a)
        self.prepare_grads()
        for group, inner_group in zip(self.param_groups, self.optim.param_groups):
            inner_group.update(self.inner_group(group))
        self.optim.step()
        self.share_weights()
        ### END SOLUTION
        for group, inner_group in zip(self.param_groups, self.optim.param_groups):  # some optimizers count steps there
            group.update({key: value for key, value in inner_group.items() if key != "params"})
        return loss

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the averaged gradients to a global 2-norm of at most `max_norm`. Return the old norm in fp64.

        If the norm is NaN, all gradients become NaN. `torch.nn.utils.clip_grad_norm_` is wrong here: it would read all
        of `p.grad`, but only this rank's part has averages. After the finish of a wrapper, it raises RuntimeError, or
        clips nothing if a wider `grad_dtype` leaves `p.grad` None.
        """
        grads = self.prepare_grads()
        device = next((p.device for group in self.param_groups for p in group["params"]), None)
        # Use the factor of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), but at most 1.
        ### BEGIN SOLUTION part (e)
        squares = torch.zeros((), dtype=torch.float64, device=device)
        for grad in grads:
            squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
        dist.all_reduce(squares, group=self.process_group)
        norm = squares.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)
        return norm
        ### END SOLUTION

    # ---- how the inner optimizer is made

    # The methods of the two optimizers below: which part of the parameters is this rank's, and phases 1 and 3.
    divide: Callable[[list[nn.Parameter]], None]
    prepare_grads: Callable[[], list[Tensor]]
    share_weights: Callable[[], None]

    def __init__(self, params: Params, optimizer_cls: type[Optimizer], process_group: ProcessGroup, defaults: dict):
        self.process_group = process_group
        self.local: dict[nn.Parameter, nn.Parameter] = {}  # this rank's part of each parameter; `divide` fills it
        self.optim: Optimizer | None = None
        super().__init__(params, optimizer_cls([{"params": []}], **defaults).defaults)  # calls add_param_group
        self.optim = optimizer_cls([self.inner_group(group) for group in self.param_groups], **defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group and distribute its parameters among the ranks."""
        super().add_param_group(param_group)
        self.divide(self.param_groups[-1]["params"])
        if self.optim:
            self.optim.add_param_group(self.inner_group(self.param_groups[-1]))

    def inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """Return a parameter group's options, such as its learning rate, with this rank's part of its parameters."""
        return {**group, "params": [self.local[p] for p in group["params"] if p in self.local]}


# ---- ShardedOptimizer: whole parameters, each with one owner


class ShardedOptimizer(OuterOptimizer):
    """Shard an optimizer that treats each parameter by itself, by whole parameters and without checkpoints.

    The weights are already equal on all ranks, and there is no wrapper. A rank may own nothing. `add_param_group` may
    be called at any time.
    """

    def __init__(self, params: Params, optimizer_cls: type[Optimizer], process_group: ProcessGroup = None, **defaults):
        self.owner: dict[nn.Parameter, int] = {}  # the owner of each parameter: a rank in the group
        self.owned_bytes = [0] * dist.get_world_size(process_group)  # bytes of trainable parameters, by rank
        self.trainable: set[nn.Parameter] = set()  # fixed when their group is added
        self.is_reduced = False  # whether the owners have the averaged gradients of this step
        super().__init__(params, optimizer_cls, process_group, defaults)

    def divide(self, parameters: list[nn.Parameter]) -> None:
        """Choose an owner for each parameter, the same on all ranks. Raise ValueError for float16 or shared memory.

        No rank may own more bytes than the mean over all ranks plus the size of the largest parameter.
        """
        require_own_memory([*self.trainable, *(p for p in parameters if p.requires_grad)])
        require_range(p.dtype for p in parameters if p.requires_grad)
        # Balance the bytes. A frozen parameter adds none, because it has no state.
        ### BEGIN SOLUTION part (b)
        for parameter in sorted(parameters, key=lambda p: p.nbytes, reverse=True):
            owner = self.owned_bytes.index(min(self.owned_bytes))
            self.owner[parameter] = owner
            self.owned_bytes[owner] += parameter.nbytes if parameter.requires_grad else 0
        ### END SOLUTION
        self.trainable |= {p for p in parameters if p.requires_grad}
        self.local |= {p: p for p in parameters if self.owner[p] == dist.get_rank(self.process_group)}
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.data = parameter.data.contiguous()  # a transposed one cannot be sent; its gradient follows it
                parameter.register_post_accumulate_grad_hook(self.require_unreduced)

    def require_unreduced(self, _: nn.Parameter) -> None:
        """Raise RuntimeError if a backward would add to averages that no step has used yet."""
        if self.is_reduced:
            raise RuntimeError("the gradients of this step are already averages: call step or zero_grad first")

    def prepare_grads(self) -> list[Tensor]:
        """Average each trainable gradient on its owner, once per step. Return the gradients that this rank owns.

        Raise RuntimeError if a parameter was frozen or unfrozen after its group was added.
        """
        if self.trainable != {p for p in self.owner if p.requires_grad}:
            raise RuntimeError(
                "a parameter was frozen, unfrozen or replaced after the optimizer was constructed: construct it again"
            )
        if any(p.grad is not None and p.grad.is_sparse for p in self.owner):
            raise RuntimeError(SPARSE)
        # A gradient that is None counts as zeros. dist.reduce takes the root as group_dst, a rank in the group.
        ### BEGIN SOLUTION part (c)
        trainable = [p for p in self.owner if p.requires_grad and not self.is_reduced]
        for p in trainable:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        options = {"op": dist.ReduceOp.AVG, "group": self.process_group, "async_op": True}
        handles = [dist.reduce(p.grad, group_dst=self.owner[p], **options) for p in trainable]
        for handle in handles:
            handle.wait()
        self.is_reduced = True
        ### END SOLUTION
        return [p.grad for p in self.local if p.grad is not None]

    def share_weights(self) -> None:
        """Broadcast every trainable parameter from its owner."""
        self.is_reduced = False
        ### BEGIN SOLUTION part (d)
        trainable = [p for p in self.owner if p.requires_grad]
        options = {"group": self.process_group, "async_op": True}
        handles = [dist.broadcast(p.detach(), group_src=self.owner[p], **options) for p in trainable]
        for handle in handles:
            handle.wait()
        ### END SOLUTION

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients. The next step reduces again, even if this step was skipped after a reduction."""
        self.is_reduced = False
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("ShardedOptimizer has no checkpoints: each rank has its part of the state in .optim")


# ---- ZeroOptimizer: one shard of every bucket
#
# Later modules use `is_elementwise`, `ParamShard` (`param`, `buffer_slice`, `shard`, `is_master`) and `ZeroOptimizer`
# (`ddp`, `positions`, `param_shards`, `prepare_grads`, `start_sharing`, `share_weights`).

SCALARS = ("step", "mu_product", "eta", "mu")  # scalars in the state of torch's optimizers


def is_elementwise(optimizer_cls: type[Optimizer], defaults: dict[str, Any], device: torch.device | None) -> bool:
    """Return whether updating two parts of a vector with separate optimizers equals updating the whole vector."""
    optimizer_cls([{"params": []}], **defaults)  # raises an error if the options are invalid
    vector = torch.linspace(-1, 1, 8, dtype=torch.float64, device=device)
    whole, first, second = (nn.Parameter(values.clone()) for values in (vector, vector[:3], vector[3:]))
    try:
        for parameter in (whole, first, second):
            optimizer = optimizer_cls([parameter], **defaults)
            for factor in (1, 2, 3):
                parameter.grad = factor * parameter.detach().neg().exp()
                optimizer.step()
    except (TypeError, ValueError, RuntimeError):  # the optimizer needs a closure, a matrix, or sparse gradients
        return False
    return torch.allclose(whole, torch.cat([first, second]), rtol=1e-9)


class ParamShard:
    """The overlap of parameter `i` of a buffer with this rank's shard of the parameter's bucket. It is often empty.

    `param_slice` is the overlap's range in the flattened parameter, and `buffer_slice` is its range in the buffer. The
    inner optimizer steps on `shard`, of shape (overlap,). This is a view of the buffer or, for a 16-bit parameter, its
    main parameter: an fp32 copy.
    """

    def __init__(self, buffer: GradBuffer, i: int, process_group: ProcessGroup):
        self.buffer, self.param, self.process_group = buffer, buffer.params[i], process_group
        # The parameter and this rank's shard are two ranges of elements in the buffer. Compute their intersection.
        ### BEGIN SOLUTION part (f)
        param_start, param_end = buffer.layout.param_ranges[i]
        bucket_start, bucket_end = buffer.layout.bucket_ranges[buffer.layout.bucket_of[i]]
        length = (bucket_end - bucket_start) // dist.get_world_size(process_group)
        shard_start = bucket_start + dist.get_rank(process_group) * length
        start = max(param_start, shard_start)
        end = max(start, min(param_end, shard_start + length))
        self.param_slice, self.buffer_slice = slice(start - param_start, end - param_start), slice(start, end)
        ### END SOLUTION
        weights = buffer.param_data[self.buffer_slice]
        if self.param_slice.start > self.param_slice.stop or self.buffer_slice.start > self.buffer_slice.stop:
            raise ValueError("a slice stops before it starts. If the overlap is empty, start and stop must be equal")
        self.is_master = weights.itemsize < 4
        self.shard = nn.Parameter(weights.float() if self.is_master else weights)

    def cut(self, full: Tensor) -> Tensor:
        """Return this rank's part, of shape (overlap,), of a tensor with the shape of the parameter."""
        return full.flatten()[self.param_slice].clone()

    def all_gather_full(self, part: Tensor) -> Tensor:
        """Return a tensor with the shape of the parameter, assembled from all ranks' parts of shape (overlap,)."""
        full = part.new_zeros(self.param.numel())
        full[self.param_slice] = part
        dist.all_reduce(full, group=self.process_group)  # each element is zero on all ranks except one
        return full.view(self.param.shape)


def map_like(like: Tensor, function: Callable[[Tensor], Tensor], state: dict[str, Any]) -> dict[str, Any]:
    """Apply a function to the entries of a parameter's state that have the shape of `like`. Copy the other entries."""
    mapped = {key for key, v in state.items() if isinstance(v, Tensor) and v.shape == like.shape and key not in SCALARS}
    return {key: function(value) if key in mapped else copy.deepcopy(value) for key, value in state.items()}


def adopt_weights(buffer: GradBuffer) -> None:
    """Copy weights whose `.data` was replaced into the buffer, and make them views of it again.

    A layer with a constraint may replace it, and so does `nn.utils.vector_to_parameters`. The optimizer would step on
    the buffer, which the model no longer reads.
    """
    memory = buffer.param_data.untyped_storage().data_ptr()
    for p, (start, end) in zip(buffer.params, buffer.layout.param_ranges):
        if (p.untyped_storage().data_ptr(), p.storage_offset()) != (memory, start):
            p.data = buffer.param_data[start:end].view(p.shape).copy_(p.data)


class ZeroOptimizer(OuterOptimizer):
    """Shard an elementwise torch optimizer in the same way as the buckets of `ddp`.

    When `step` returns, all weights are complete. Parameter groups may have their own options, even if a shard contains
    parameters of two groups; `add_param_group` accepts parameters that are in the buffers. `buffer.reallocate()` may be
    called between steps.

    Raise ValueError if the optimizer is not elementwise. Without `param_groups`, there is one parameter group with all
    parameters. The constructor turns off `ddp.gather_grads`. Call `ddp.finish_grad_sync()` before `clip_grad_norm_` and
    `step`, once, with no backward in between, and `zero_grad` before the next backward. Load weights before you
    construct the optimizer, because the constructor copies the fp32 main parameters from them. The next step
    overwrites 16-bit weights that are loaded later.
    """

    def __init__(self, ddp: CoalescedDDP, optimizer_cls: type[Optimizer], param_groups: Params = None, **defaults):
        device = next((p.device for p in ddp.parameters()), None)
        if not is_elementwise(optimizer_cls, defaults, device):
            raise ValueError(f"{optimizer_cls.__name__} cannot be sharded, because it is not elementwise")
        self.ddp = ddp
        self.positions = {p: (buffer, i) for buffer in ddp.grad_buffers for i, p in enumerate(buffer.params)}
        self.param_shards: dict[int, ParamShard] = {}  # by the index of the parameter in a state dict
        params = list(ddp.module.parameters()) if param_groups is None else param_groups
        super().__init__(params, optimizer_cls, ddp.process_group, defaults)
        ddp.gather_grads = False

    def divide(self, parameters: list[nn.Parameter]) -> None:
        """Find this rank's shard of each parameter. Raise ValueError if a trainable parameter is not in the buffers."""
        if any(p.requires_grad and p not in self.positions for p in parameters):
            self.param_groups.pop()
            raise ValueError("ZeroOptimizer: a parameter of the group is not in the wrapped model's buffers")
        first = sum(len(group["params"]) for group in self.param_groups[:-1])
        for index, p in enumerate(parameters, first):
            if p in self.positions:
                self.param_shards[index] = ParamShard(*self.positions[p], self.process_group)
                self.local[p] = self.param_shards[index].shard

    def prepare_grads(self) -> list[Tensor]:
        """Attach gradients and weights to the shards. Return the gradients as views of the buffers.

        `shard.grad` is such a view, too, because copies of all gradients would take 4 P / N bytes. Only a main
        parameter gets a copy, in fp32. Raise RuntimeError between a backward and its `finish_grad_sync`.
        """
        if self.ddp.queue.num_pending != self.ddp.queue.num_grads:
            raise RuntimeError("the gradients are not averages yet: call finish_grad_sync first")
        for buffer in self.ddp.grad_buffers:
            adopt_weights(buffer)
        # In every step, get the flat tensors from the buffers again, because `reallocate` replaces them.
        ### BEGIN SOLUTION part (g)
        for part in self.param_shards.values():
            part.shard.grad = part.buffer.grad_data[part.buffer_slice].to(part.shard.dtype)
            if not part.is_master:
                part.shard.data = part.buffer.param_data[part.buffer_slice]
        ### END SOLUTION
        return [part.buffer.grad_data[part.buffer_slice] for part in self.param_shards.values()]

    def start_sharing(self) -> None:
        """Drop used gradients, copy rounded main parameters into the buffers, and start the all-gathers."""
        ### BEGIN SOLUTION part (h)
        for part in self.param_shards.values():
            part.shard.grad = None
            if part.is_master:
                part.buffer.param_data[part.buffer_slice] = part.shard
        self.ddp.start_param_sync()
        ### END SOLUTION

    def share_weights(self) -> None:
        """Gather the weights of all ranks, and wait for them. Module 9 overrides this method."""
        self.start_sharing()
        self.ddp.finish_param_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, even if no step has used them."""
        self.ddp.zero_grad(set_to_none)

    @torch.no_grad()
    def state_dict(self) -> dict[str, Any]:
        """Return the unsharded optimizer's state dict plus "masters". Call it on every rank.

        Each 16-bit parameter has fp32 moments and, by its index in "masters", its whole fp32 main parameter. Later
        steps do not change the state dict.
        """
        result = super().state_dict() | {"masters": {}}  # the parameter groups; the state is in `optim`
        # `all_gather_full` launches a collective, so every rank must call it for every shard.
        ### BEGIN SOLUTION part (i)
        for index, part in self.param_shards.items():
            if state := self.optim.state.get(part.shard):
                result["state"][index] = map_like(part.shard, part.all_gather_full, state)
            if part.is_master:
                result["masters"][index] = part.all_gather_full(part.shard)
        return result
        ### END SOLUTION

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict saved on any number of ranks or by a plain optimizer. Later steps do not change it.

        Main parameters that it does not contain start from the current weights. Their moments are loaded in fp32. Other
        old state is forgotten.
        """
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        # The inner optimizer numbers the shards from 0, in the same order.
        ### BEGIN SOLUTION part (j)
        masters = state_dict.get("masters", {})
        inner_state = {}
        for number, (index, part) in enumerate(self.param_shards.items()):
            inner_state[number] = map_like(part.param, part.cut, state_dict["state"].get(index, {}))
            if part.is_master:
                part.shard.copy_(part.cut(masters.get(index, part.param)))
        groups = self.optim.state_dict()["param_groups"]
        self.optim.load_state_dict({"state": inner_state, "param_groups": groups})
        ### END SOLUTION
