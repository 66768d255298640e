"""Whole state dicts of a model and of an optimizer whose tensors are in shards. This file is given.

Both kinds have the layout of plain training in one process, so any number of ranks can load them, and so can a plain
model or optimizer. Loading needs no communication, because every rank has the whole state and takes its own part.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


def require_one_group(optimizer: Optimizer) -> None:
    """Raise ValueError if an optimizer has several parameter groups, because a shard has no number in a plain one's."""
    if len(optimizer.param_groups) != 1:
        raise ValueError(f"the shards must be in one parameter group, but there are {len(optimizer.param_groups)}")


class ShardedCheckpoints:
    """The methods of a wrapper that return and load whole states. `flats` are its flat shards."""

    def full_state_dict(self) -> dict[str, Any]:
        """Return the plain module's state dict on the CPU. Call it on every rank, because it gathers each unit."""
        values = {buffer: buffer.to("cpu", copy=True) for buffer in self.module.buffers()}
        for flat in self.flats:
            values |= flat.gather_values(flat.shard.data)
        state = self.module.state_dict(keep_vars=True)
        return {name: values[value] if isinstance(value, Tensor) else value for name, value in state.items()}

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a plain module's state dict. Every rank passes the full dict. Raise ValueError if it does not fit."""
        own, named = self.module.state_dict(keep_vars=True), dict(self.module.named_parameters(remove_duplicate=False))
        shapes = [{name: getattr(v, "shape", None) for name, v in tensors.items()} for tensors in (own, state)]
        if wrong := {name for name, _ in shapes[0].items() ^ shapes[1].items()}:
            raise ValueError(f"the state dict does not fit the model: look at {', '.join(sorted(wrong))}")
        values = {parameter: state[name] for name, parameter in named.items()}
        for flat in self.flats:
            flat.shard.data.copy_(flat.take_part([values[p] for p in flat.params]))
        self.module.load_state_dict({name: state[name] for name in state if name not in named}, strict=False)

    def full_optimizer_state_dict(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state dict that a plain optimizer of all the model's parameters would have, on the CPU.

        As in module 8, frozen parameters have numbers but no state. `optimizer` has all shards in one parameter group.
        Call this on every rank, because it gathers every tensor of the state that has the shape of a shard.
        """
        require_one_group(optimizer)
        numbers = {parameter: number for number, parameter in enumerate(self.module.parameters())}
        state: dict[int, dict[str, Any]] = {}
        for flat in self.flats:
            for key, value in optimizer.state.get(flat.shard, {}).items():
                is_part = isinstance(value, Tensor) and value.shape == flat.shard.shape
                values = flat.gather_values(value) if is_part else {p: deepcopy(value) for p in flat.params}
                for p in flat.params:
                    state.setdefault(numbers[p], {})[key] = values[p]
        return {"state": state, "param_groups": [{**optimizer.param_groups[0], "params": list(numbers.values())}]}

    def load_full_optimizer_state_dict(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Load such a state dict, or a plain optimizer's. Every rank passes the whole state. Missing entries are zero.

        Raise ValueError if it has another number of parameters.
        """
        require_one_group(optimizer)
        params, [group] = self.module.parameters(), state["param_groups"]
        entries = {p: state["state"].get(n, {}) for p, n in zip(params, group["params"], strict=True)}
        for flat in (flat for flat in self.flats if flat.shard.requires_grad):
            entry = optimizer.state[flat.shard] = {}
            for key, value in next(filter(None, map(entries.get, flat.params)), {}).items():
                values = [entries[p].get(key, torch.zeros(p.shape)) for p in flat.params]
                is_part = any(isinstance(value, Tensor) and value.dim() for value in values)
                entry[key] = flat.take_part(values) if is_part else deepcopy(value)
        optimizer.param_groups[0].update({key: value for key, value in group.items() if key != "params"})

    def state_dict(self, *args, **kwargs):
        raise RuntimeError(
            "the weights are in shards: to save, load or copy them, call full_state_dict() and "
            "load_full_state_dict(state)"
        )

    load_state_dict = __reduce_ex__ = state_dict
