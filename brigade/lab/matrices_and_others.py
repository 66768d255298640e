"""Optimizers of parts of a model, with the interface of one: Muon for matrices, another one for everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer


class Together:
    """Optimizers of parts of a model, with the interface of one."""

    def __init__(self, optimizers: Sequence[Any]):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    @property
    def _step_supports_amp_scaling(self) -> bool:  # torch.amp.GradScaler asks for it
        return getattr(self.optimizers[0], "_step_supports_amp_scaling", False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step with every optimizer. If there is a closure, call it first, and return its loss."""
        loss = closure() if closure else None
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


class MatricesAndOthers(Together):
    """Module 15's optimizer for the matrices of a TinyLM's blocks, and module 8's for embedding, head and norms.

    `matrices` is the first one's class. `others`, the second one's, gets `base` and `options`. The constructor gives
    all ranks the weights of rank 0, because there is no wrapper.
    """

    def __init__(
        self,
        model: Any,
        matrices: Callable[..., Any],
        others: Callable[..., Any],
        base: type[Optimizer],
        **options: Any,
    ):
        for tensor in model.state_dict().values():
            dist.broadcast(tensor, 0)
        blocks = [p for p in model.blocks.parameters() if p.dim() == 2]
        chosen = {id(p) for p in blocks}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        self.numbers = {p: number for number, p in enumerate(model.parameters())}
        self.matrices, self.others = matrices(blocks), others(rest, base, **options)
        super().__init__([self.matrices, self.others])

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The state that this rank keeps."""
        return {**self.matrices.state, **self.others.optim.state}

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state by the parameter's number in the model, on every rank. All ranks must call this."""
        own = {self.numbers[p]: entry for p, entry in self.others.optim.state.items()}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        matrices = self.matrices.param_groups[0]["params"]
        state = {self.numbers[matrices[j]]: entry for j, entry in self.matrices.state_dict()["state"].items()}
        for part in parts:
            state |= part
        return {"state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load such a state. Each rank keeps what it owns."""
        for optimizer in (self.matrices, self.others.optim):
            numbers = {j: self.numbers[p] for j, p in enumerate(optimizer.param_groups[0]["params"])}
            own = {j: state_dict["state"][number] for j, number in numbers.items() if number in state_dict["state"]}
            optimizer.load_state_dict(optimizer.state_dict() | {"state": own})
