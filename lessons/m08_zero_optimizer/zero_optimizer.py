"""Module 8: each rank keeps the optimizer state of its own part of the parameters (ZeRO, stage 1). This file is 8b.

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
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..m05_grad_buffer.grad_buffer import GradBuffer
from ..m06_coalesced.coalesced import CoalescedDDP
from .sharded_optimizer import OuterOptimizer, Params, ProcessGroup
from .sharded_optimizer import ShardedOptimizer as ShardedOptimizer


class ParamShard:
    """The overlap of parameter `i` of a buffer with this rank's shard of the parameter's bucket. It is often empty.

    `param_slice` is the overlap's range in the flattened parameter, and `buffer_slice` is its range in the buffer. The
    inner optimizer steps on `shard`, of shape (overlap,): a view of the buffer, or an fp32 main parameter.
    """

    def __init__(self, buffer: GradBuffer, i: int, process_group: ProcessGroup):
        self.buffer, self.param, self.process_group = buffer, buffer.params[i], process_group
        # The parameter and this rank's shard are two ranges of elements in the buffer. Compute their intersection.
        # TODO: part (f)
        raise NotImplementedError("module 8, part (f)")
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
        # TODO: part (g)
        raise NotImplementedError("module 8, part (g)")
        return [part.buffer.grad_data[part.buffer_slice] for part in self.param_shards.values()]

    def start_sharing(self) -> None:
        """Drop used gradients, copy rounded main parameters into the buffers, and start the all-gathers."""
        # TODO: part (h)
        raise NotImplementedError("module 8, part (h)")

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
        # TODO: part (i)
        raise NotImplementedError("module 8, part (i)")

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict saved on any number of ranks or by a plain optimizer. Later steps do not change it.

        Main parameters that it does not contain start from the current weights. Their moments are loaded in fp32. Other
        old state is forgotten.
        """
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        # The inner optimizer numbers the shards from 0, in the same order.
        # TODO: part (j)
        raise NotImplementedError("module 8, part (j)")


# ---- given
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
