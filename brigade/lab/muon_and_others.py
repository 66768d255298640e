"""The optimizer that trains a TinyLM with module 15: Muon for the matrices of its blocks, and SGD for everything else.

The rest of the parameters (embedding, head and norms) have module 8's `ShardedOptimizer`. There is no wrapper.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from brigade.rank.api import student


class MuonAndOthers:
    """Two sharded optimizers with the interface of one. The constructor gives all ranks the weights of rank 0.

    `base` and `options` are the class and the options of the other parameters' optimizer.
    """

    def __init__(self, model: nn.Module, base: type[Optimizer], **options: Any):
        student("m01_naive_ddp", "broadcast_module_state")(model)
        matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in chosen]
        self.numbers = {p: number for number, p in enumerate(model.parameters())}
        self.muon = student("m15_sharded_muon", "ShardedMuon")(matrices)
        self.others = student("m08_zero_optimizer", "ShardedOptimizer")(others, base, **options)
        self.param_groups = [*self.muon.param_groups, *self.others.param_groups]

    @property
    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """The state that this rank keeps."""
        return {**self.muon.state, **self.others.optim.state}

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.muon.zero_grad()
        self.others.zero_grad()

    def step(self) -> None:
        """Take a step with both optimizers."""
        self.muon.step()
        self.others.step()

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state by the parameter's number in the model, on every rank. All ranks must call this."""
        own = {self.numbers[p]: entry for p, entry in self.others.optim.state.items()}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, own)
        matrices = self.muon.param_groups[0]["params"]
        state = {self.numbers[matrices[j]]: entry for j, entry in self.muon.state_dict()["state"].items()}
        for part in parts:
            state |= part
        return {"state": state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load such a state. Each rank keeps what it owns."""
        for optimizer in (self.muon, self.others.optim):
            params = enumerate(optimizer.param_groups[0]["params"])
            numbers = {j: self.numbers[p] for j, p in params}
            own = {j: state_dict["state"][number] for j, number in numbers.items() if number in state_dict["state"]}
            optimizer.load_state_dict(optimizer.state_dict() | {"state": own})
