"""The expected values, which one process computes on the batches of all ranks.

A `Case` is one random training problem. Only the parent process knows all of it. A rank gets its own part
(`make_jobs`): its starting weights, which differ between ranks, and its batches.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from brigade.course.checks import edge_case_models
from brigade.course.checks.edge_case_models import OPTIMIZERS, Gradients, compute_loss, copy_gradients
from brigade.ranks import dynamo_stub
from brigade.ranks.runner.ranks import PerRank

dynamo_stub.import_torch()  # without the compiler, which the first optimizer would import

# `step` calls one of these methods, which initialises CUDA if there is a GPU: its names in torch 2.11, and later.
GRAPH_CHECKS = ("_cuda_graph_capture_health_check", "_accelerator_graph_capture_health_check")
for _name in GRAPH_CHECKS:
    setattr(torch.optim.Optimizer, _name, lambda self: None)


class Case:
    """A model from `edge_case_models`, `world_size` sets of starting weights, and batches[rank][step][micro].

    `rng` determines all shapes and numbers. `branches[rank]` is the branch for the batches of a rank. `group`
    contains the global ranks that train together (default: all). Training starts with the weights of the first rank of
    the group. With `forward_borders`, the batches have borders in forward and inside of blocks.
    """

    def __init__(
        self,
        rng: random.Random,
        model: str,
        world_size: int,
        *,
        steps: int = 1,
        micro_batches: int = 1,
        dtype: torch.dtype | None = None,
        branches: Sequence[int] | None = None,
        group: Sequence[int] | None = None,
        optimizer: str = "sgd",
        hidden_layers: int = 2,
        forward_borders: bool = False,
    ):
        self.model, self.world_size, self.dtype, self.optimizer = model, world_size, dtype, optimizer
        self.group = list(group) if group is not None else list(range(world_size))
        self.sizes = draw_sizes(rng, hidden_layers + 2)
        self.batch_size = rng.randint(3, 6)
        self.num_borders = 2 * edge_case_models.ALL_BORDERS if forward_borders else edge_case_models.BORDERS
        self.states: list[dict[str, Tensor]] = []
        self.batches: list[list[list[dict[str, Any]]]] = []
        for branch in branches or [0] * world_size:  # seeds for each rank: no rank can draw another rank's numbers
            generator = torch.Generator().manual_seed(rng.randrange(2**63))
            self.states.append(self._random_state(generator))
            own = random.Random(rng.randrange(2**63))  # torch's generator can be reconstructed from its numbers
            batches = [[self._batch(branch, generator, own) for _ in range(micro_batches)] for _ in range(steps)]
            self.batches.append(batches)

    def make_jobs(self, **more: Any) -> PerRank:
        """Return the input of each rank: a description of its model, its batches, the optimizer, and `more`."""
        common = {"model": self.model, "sizes": self.sizes, "dtype": self.dtype, "optimizer": self.optimizer}
        common |= {"members": self.group} | more
        return PerRank(
            common | {"state": state, "batches": data} for state, data in zip(self.states, self.batches, strict=True)
        )

    def start(self) -> dict[str, Tensor]:
        """Return the parameters and buffers that every rank must have after construction."""
        return self.states[self.group[0]]

    def gradients(self, ranks: Sequence[int] | None = None, micro: slice = slice(None)) -> Gradients:
        """Return the gradients of step 0, averaged over `ranks` (default: the group).

        They are summed over the micro-batches that `micro` selects. Each rank's gradients are computed in the dtypes of
        the parameters and averaged in float64.
        """
        return self._average(self._local_gradients(self.group if ranks is None else ranks, micro))

    def gradients_and_scale(self) -> tuple[Gradients, dict[str, float]]:
        """Return `gradients()` and, for each parameter, the largest entry of any rank's own gradient.

        Rounding errors scale with this entry.
        """
        local = self._local_gradients(self.group, slice(None))
        own = {name: [grad for gradients in local if (grad := gradients[name]) is not None] for name in local[0]}
        scale = {name: max((float(g.double().abs().max()) for g in some), default=0.0) for name, some in own.items()}
        return self._average(local), scale

    def _average(self, local: Sequence[Gradients]) -> Gradients:
        averages: Gradients = {}
        for name, parameter in self.parameters().items():
            if parameter.requires_grad:
                present = [grad.double() for gradients in local if (grad := gradients[name]) is not None]
                averages[name] = (sum(present[1:], present[0]) / len(local)).to(parameter.dtype) if present else None
        return averages

    def _local_gradients(self, ranks: Sequence[int], micro: slice) -> list[Gradients]:
        local, model = [], self.build()
        for rank in ranks:
            model.zero_grad()
            for batch in self.batches[rank][0][micro]:
                compute_loss(model, batch).backward()
            local.append(copy_gradients(model))
        return local

    def train(self, zero: bool = True) -> dict[str, Tensor]:
        """Return the weights after all steps in one process.

        Without `zero`, gradients are never zeroed, so each step adds its gradients to those of all earlier steps.
        """
        model = self.build()
        optimizer = OPTIMIZERS[self.optimizer]([p for p in model.parameters() if p.requires_grad])
        for step in range(len(self.batches[0])):
            if zero:
                optimizer.zero_grad()
            for rank in self.group:
                for batch in self.batches[rank][step]:
                    (compute_loss(model, batch) / len(self.group)).backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters of the model by name, for their shapes. Tied parameters appear once."""
        return dict(self._parameters)

    @functools.cached_property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        return dict(self.build().named_parameters())

    def build(self, start: dict[str, Tensor] | None = None) -> torch.nn.Module:
        """Return the model with these weights, by default those with which training starts."""
        return edge_case_models.build(self.model, self.sizes, self.start() if start is None else start, self.dtype)

    def _random_state(self, generator: torch.Generator) -> dict[str, Tensor]:
        with DrawFrom(generator):
            model = edge_case_models.MODELS[self.model](self.sizes)
        for buffer in model.buffers():  # a fresh BatchNorm has the same statistics on all ranks
            if buffer.dtype.is_floating_point:
                buffer.uniform_(0.5, 1.5, generator=generator)
            else:
                buffer.random_(0, 2 if buffer.dtype == torch.bool else 100, generator=generator)
        return edge_case_models.copy_state(model.to(self.dtype))

    def _batch(self, branch: int, generator: torch.Generator, rng: random.Random) -> dict[str, Any]:
        dtype = self.dtype or torch.float32
        x = torch.randn(self.batch_size, self.sizes[0], dtype=dtype, generator=generator)
        y = torch.randn(self.batch_size, 1, dtype=dtype, generator=generator)
        seeds = [rng.randrange(2**62) for _ in range(self.num_borders)]
        return {"x": x, "y": y, "branch": branch, "borders": seeds}


class DrawFrom(TorchFunctionMode):
    """A context manager in which layers draw their weights from `generator`, not from torch's, which threads share."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if "generator" in kwargs or function in (torch.rand, torch.randn):  # functions of `nn.init` pass None
            kwargs = kwargs | {"generator": self.generator}
        return function(*args, **kwargs)


def draw_generators(rng: random.Random, world_size: int) -> list[torch.Generator]:
    """Return a generator for the tensors of each rank.

    If ranks shared one, a rank could compute the others' tensors: a few thousand numbers reveal a generator's state.
    """
    return [torch.Generator().manual_seed(rng.randrange(2**31)) for _ in range(world_size)]


def draw_sizes(rng: random.Random, count: int) -> list[int]:
    """Draw distinct layer sizes for which all weights differ in size, so that a gradient's size identifies it."""
    while True:
        sizes = rng.sample(range(5, 24), count)
        numels = [a * b for a, b in pairwise(sizes)]
        if len(set(numels)) == len(numels):
            return sizes
