"""Module 8a: each rank keeps the optimizer state of whole parameters. `zero_optimizer.py` compares it with 8b.

Each parameter has one owner. A step takes three phases: average each gradient on the owner of its parameter, let the
inner optimizer step there, and send the new weights from the owners to all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ..m01_naive_ddp.refusals import SPARSE, UnscaledOptimizer, require_own_memory, require_range

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

        `torch.nn.utils.clip_grad_norm_` is wrong here: it would read all of `p.grad`, but only this rank's part has
        averages. After the finish of a wrapper, it raises RuntimeError, or clips nothing if a wider `grad_dtype` leaves
        `p.grad` None.
        """
        device = next((p.device for group in self.param_groups for p in group["params"]), None)
        return clip_parts(self.prepare_grads(), max_norm, device, self.process_group)

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


def clip_parts(
    grads: list[Tensor], max_norm: float, device: torch.device | None, process_group: ProcessGroup
) -> Tensor:
    """Scale gradients, of which each rank has a part, to a norm of at most `max_norm`. Return the old norm in fp64.

    `grads` are this rank's averages, and may be empty. The norm, on `device`, is that of the gradients of all ranks. If
    it is NaN, all gradients become NaN.
    """
    # Use the factor of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), but at most 1.
    ### BEGIN SOLUTION part (e)
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for grad in grads:
        squares += torch.linalg.vector_norm(grad, dtype=torch.float64).square()
    dist.all_reduce(squares, group=process_group)
    norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(factor)
    return norm
    ### END SOLUTION
