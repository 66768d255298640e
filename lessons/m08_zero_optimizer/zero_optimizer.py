"""Module 8: every rank keeps the optimizer state of its share of the parameters only (ZeRO, stage 1).

Two ways to share. `ShardedOptimizer` gives whole parameters to ranks, for any optimizer and a plain model: a reduce and
a broadcast for each parameter. `ZeroOptimizer` takes the shards that module 6 makes of every bucket, wherever they cut
a parameter: reduce-scatter during backward, a step on the shard, all-gather of the weights, which are the bytes of one
all-reduce. Only optimizers that treat every element by itself allow that.

State per rank with Adam in fp32, P parameters, N ranks: 8 P / N bytes (and padding) instead of 8 P.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..m05_grad_buffer.grad_buffer import GradBuffer
from ..m06_coalesced.coalesced import CoalescedDDP

Params = Iterable[Any]  # parameters, or dicts of "params" and options of their own, as for any torch optimizer
ProcessGroup = dist.ProcessGroup | None  # None is the default group


def options_of(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group without its parameters: learning rate and so on."""
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


@torch.no_grad()
def clip_by_global_norm(
    grads: list[Tensor], max_norm: float, device: torch.device, process_group: ProcessGroup
) -> Tensor:
    """Scales gradients, of which each rank has a part, so that the 2-norm of all together is `max_norm` at most.

    Returns the norm before, in fp64 and the same on every rank: NaN or infinite if it is so anywhere.
    """
    # The factor is that of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), and never above 1.
    # TODO: part (a)
    raise NotImplementedError("module 8, part (a)")


class ShardedOptimizer(Optimizer):
    """Any torch optimizer, for a model that is the same on all ranks; each rank steps on the parameters it owns.

    `param_groups` hold all parameters, those of `optim`, the inner optimizer, the owned ones. A trainable parameter
    without a gradient counts as zero. After a step gradients are averages on their owner only. It makes no checkpoints.
    """

    def __init__(
        self, params: Params, optimizer_cls: type[Optimizer], process_group: ProcessGroup = None, **defaults: Any
    ):
        self.process_group = process_group
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.owner: dict[nn.Parameter, int] = {}  # rank in the group
        self.loads = [0] * self.size  # bytes of parameters that each rank owns
        self.reduced = False  # whether this step's gradients are reduced already
        self.optim: Optimizer | None = None
        super().__init__(params, optimizer_cls([{"params": []}], **defaults).defaults)  # calls add_param_group
        self.optim = optimizer_cls([self.inner_group(group) for group in self.param_groups], **defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Gives each parameter of the group to a rank; none owns more than the mean and one parameter."""
        super().add_param_group(param_group)
        self.assign(self.param_groups[-1]["params"])
        if self.optim:
            self.optim.add_param_group(self.inner_group(self.param_groups[-1]))

    def assign(self, parameters: list[nn.Parameter]) -> None:
        """Finds the owner of each parameter, the same on every rank."""
        # What a parameter adds to a rank's load is its bytes; nothing if it is frozen, because it will have no state.
        # TODO: part (b)
        raise NotImplementedError("module 8, part (b)")

    def inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """What the inner optimizer has of a parameter group."""
        return {**options_of(group), "params": [p for p in group["params"] if self.owner[p] == self.rank]}

    def reduce_grads(self) -> None:
        """Averages the gradient of every trainable parameter on its owner, unless that was done in this step."""
        # dist.reduce takes the root as group_dst, a rank in the group.
        # TODO: part (c)
        raise NotImplementedError("module 8, part (c)")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduces the gradients (unless clipping did), steps on the owned parameters, broadcasts all."""
        with torch.enable_grad():  # a closure computes the gradients anew
            loss = closure() if closure else None
        # Options may have changed since the last step, through a scheduler; the inner groups have copies of them.
        # TODO: part (d)
        raise NotImplementedError("module 8, part (d)")
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Reduces the gradients and clips them by their global norm, which it returns. Call it after backward."""
        self.reduce_grads()
        owned = [p.grad for p, owner in self.owner.items() if owner == self.rank and p.grad is not None]
        return clip_by_global_norm(owned, max_norm, next(iter(self.owner)).device, self.process_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in any optimizer. What was reduced, and never used for a step, is forgotten."""
        self.reduced = False
        super().zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("ShardedOptimizer makes no checkpoints: each rank has its part of the state in .optim")


def is_elementwise(optimizer_cls: type[Optimizer], defaults: dict[str, Any], device: torch.device) -> bool:
    """Whether the two parts of a vector, each with an optimizer of its own, end where the whole does."""
    values = torch.linspace(-1, 1, 8, dtype=torch.float64, device=device)

    def trained(part: slice) -> Tensor:
        parameter = nn.Parameter(values[part].clone())
        optimizer = optimizer_cls([parameter], **defaults)
        for step in range(1, 4):
            parameter.grad = step * values.flip(0)[part].exp()
            optimizer.step()
        return parameter.detach()

    try:
        return torch.allclose(trained(slice(0, 8)), torch.cat([trained(slice(0, 3)), trained(slice(3, 8))]), rtol=1e-9)
    except (TypeError, ValueError, RuntimeError):  # it needs a closure, a matrix, or sparse gradients
        return False


@dataclass
class Piece:
    """The part of a parameter that lies in this rank's shard of its bucket.

    `local` are its elements in the flattened parameter, `place` those in the buffer. `inner`, of one dimension, is what
    the inner optimizer steps on: the part itself, or for 16-bit parameters its fp32 copy, the master.
    """

    buffer: GradBuffer
    local: slice
    place: slice
    inner: nn.Parameter
    is_master: bool


class ZeroOptimizer(Optimizer):
    """An elementwise torch optimizer, divided among the ranks as the buckets of `ddp` are.

    Without `param_groups` it has one group of all the model's parameters. It sets `ddp.gather_grads` to False: after
    `ddp.finish_grad_sync()`, which the loop or the closure calls, gradients are averages in the own shard only.
    Masters of 16-bit parameters are copied now: load weights before. ValueError if the optimizer is not elementwise.
    """

    def __init__(
        self, ddp: CoalescedDDP, optimizer_cls: type[Optimizer], param_groups: Params | None = None, **defaults: Any
    ):
        self.ddp = ddp
        self.rank, self.size = dist.get_rank(ddp.process_group), dist.get_world_size(ddp.process_group)
        self.device = next(ddp.module.parameters()).device
        self.places = {p: (buffer, i) for buffer in ddp.grad_buffers for i, p in enumerate(buffer.params)}
        self.pieces: dict[nn.Parameter, Piece] = {}  # of the parameters of which this rank has a part
        self.optim: Optimizer | None = None
        params = ddp.module.parameters() if param_groups is None else param_groups
        super().__init__(params, optimizer_cls([{"params": []}], **defaults).defaults)  # calls add_param_group
        if not is_elementwise(optimizer_cls, defaults, self.device):
            raise ValueError(
                f"ZeroOptimizer cannot divide {optimizer_cls.__name__}: it does not treat every element by itself"
            )
        self.optim = optimizer_cls([self.inner_group(group) for group in self.param_groups], **defaults)
        ddp.gather_grads = False

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters that lie in the buffers of `ddp`, or are frozen; ValueError for others."""
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        if any(parameter.requires_grad and parameter not in self.places for parameter in params):
            self.param_groups.pop()
            raise ValueError("ZeroOptimizer: the group has a parameter that is not in the wrapped model's buffers")
        found = {parameter: self.piece_of(*self.places[parameter]) for parameter in params if parameter in self.places}
        self.pieces |= {parameter: piece for parameter, piece in found.items() if piece}
        if self.optim:
            self.optim.add_param_group(self.inner_group(self.param_groups[-1]))

    def inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        """What the inner optimizer has of a parameter group."""
        return {**options_of(group), "params": [self.pieces[p].inner for p in group["params"] if p in self.pieces]}

    def piece_of(self, buffer: GradBuffer, i: int) -> Piece | None:
        """What of parameter i of the buffer lies in this rank's shard of its bucket; None if nothing does."""
        # Both are ranges of elements in the buffer: intersect them. A dtype of less than 4 bytes needs a master.
        # TODO: part (e)
        raise NotImplementedError("module 8, part (e)")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps on the own shards, after `ddp.finish_grad_sync()`, and gathers the weights of all ranks."""
        with torch.enable_grad():  # a closure computes the gradients anew
            loss = closure() if closure else None
        # Take the flat tensors from the buffer in every step: `reallocate` replaces them.
        # TODO: part (f)
        raise NotImplementedError("module 8, part (f)")
        return loss

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the averages by their global norm, which it returns. Call it after `ddp.finish_grad_sync()`."""
        grads = [piece.buffer.grad_data[piece.place] for piece in self.pieces.values()]
        return clip_by_global_norm(grads, max_norm, self.device, self.ddp.process_group)

    def parameters(self) -> list[nn.Parameter]:
        """Those of all groups; a parameter's position is its number in a `state_dict`."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """What the unsharded optimizer's would be, whole, and "masters", which are the fp32 copies by number.

        All ranks must call it, and all get it. What has the shape of a parameter is gathered; the rest is scalars.
        """
        result = super().state_dict() | {"masters": {}}  # the groups; no state, that is in `optim`
        # A rank without a part of a parameter does not know what its state consists of: ask the others first,
        # with dist.all_gather_object. Then `gathered` makes one tensor whole.
        # TODO: part (g)
        raise NotImplementedError("module 8, part (g)")

    @torch.no_grad()
    def gathered(self, parameter: nn.Parameter, dtype: torch.dtype, part: Tensor | None) -> Tensor:
        """A tensor in the shape of the parameter, put together from what all ranks have of it, `part` or nothing."""
        whole = torch.zeros(parameter.numel(), dtype=dtype, device=self.device)
        if part is not None:
            whole[self.pieces[parameter].local] = part
        dist.all_reduce(whole, group=self.ddp.process_group)  # each element is zero on all ranks but one
        return whole.view(parameter.shape)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes a `state_dict` made with any number of ranks, or the unsharded optimizer's.

        Where that has no masters, they are copied from the model's weights as they are now.
        """
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        # The inner optimizer has numbers of its own for its pieces, in the same order.
        # TODO: part (h)
        raise NotImplementedError("module 8, part (h)")


def is_like(value: Any, parameter: Tensor) -> bool:
    """Whether an entry of an optimizer's state has the shape of its parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape
