"""What the program of a situation gets: data, and the wrapper and the optimizer of one kind, or those of one process.

A program is a function of a `Run`. Each rank calls it with a wrapper of the course. One process calls the same program
with the plain model, on the data of all ranks, and its weights are the right answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from situations.kinds import Kind

WORLD = 2  # ranks
ROWS = 4  # of a rank's batch
INPUTS, OUTPUTS = 6, 3
CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # have no forward

SITUATIONS: dict[str, Situation] = {}


@dataclass(frozen=True)
class Situation:
    """A program that users of other libraries had trouble with."""

    source: str  # where they reported it, such as "pytorch #12603"
    title: str
    program: Callable[[Run], None]
    refused: tuple[str, ...]  # a refusal contains one of these texts. Without one, the weights must be right.
    needs: frozenset[str]  # see `Kind.offers`
    not_for: dict[str, str]  # kinds for which the program has no meaning, with the reason
    tolerance: float  # of weights, relative to 1
    imports_compiler: bool  # whether torch imports its compiler for this; it then runs only with --everything

    def applies_to(self, kind: Kind) -> bool:
        return self.needs <= kind.offers and kind.name not in self.not_for


def situation(
    source: str,
    title: str,
    refused: str | tuple[str, ...] = (),
    needs: str = "",
    not_for: dict[str, str] | None = None,
    tolerance: float = 2e-7,
    imports_compiler: bool = False,
) -> Callable[[Callable[[Run], None]], Callable[[Run], None]]:
    """Register a program. `refused` are parts of the sentences with which a wrapper may refuse it.

    `needs` names what a kind must offer, separated by spaces. `not_for` gives a reason for each kind that is left out.
    The tolerance is the rounding of float64, with a large margin, in weights near 1 that have moved with a learning
    rate of 1; a program in a shorter dtype has its own.
    """

    def register(program: Callable[[Run], None]) -> Callable[[Run], None]:
        sentences = (refused,) if isinstance(refused, str) else refused
        name = program.__name__
        assert name not in SITUATIONS, f"there are two situations named {name}"
        needed = frozenset(needs.split())
        SITUATIONS[name] = Situation(
            source, title, program, sentences, needed, not_for or {}, tolerance, imports_compiler
        )
        return program

    return register


class Plain(nn.Module):
    """The wrapper of one process, and of optimizers that need no wrapper."""

    process_group = None

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.no_sync = contextlib.nullcontext

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def finish_grad_sync(self) -> None:
        pass


class Net(nn.Sequential):
    """Three linear layers, of (6, 8), (8, 8) and (8, 3) weights."""

    def __init__(self, *layers: nn.Module):
        super().__init__(*layers or (nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))


@dataclass
class Run:
    """One execution of a program: on a rank with a wrapper of `kind`, or in one process if `rank` is None."""

    kind: Kind
    rank: int | None
    wrapped: list[tuple[nn.Module, nn.Module]] = field(default_factory=list)  # wrappers with their models
    recorded: dict[str, Tensor] = field(default_factory=dict)

    @property
    def ranks(self) -> range:
        """Return the ranks whose part of the data this process computes: its own or, in one process, all of them."""
        return range(WORLD) if self.rank is None else range(self.rank, self.rank + 1)

    def prepare(self, model: nn.Module, optimizer: type[Optimizer] | None = None, groups: Any = None, **options):
        """Wrap the model. Return the wrapper, and the optimizer that belongs to its kind.

        The default optimizer is the kind's own: SGD with a learning rate of 1, unless `options` says otherwise.
        `groups(model)` returns parameter groups.
        """
        options = {"lr": 1.0} | options
        ddp = self.wrap(model)
        parameters = list(groups(model)) if groups else None
        if self.rank is None:
            make = self.kind.make_plain_optimizer if optimizer is None else None
            return ddp, (make or (optimizer or SGD))(parameters or list(model.parameters()), **options)
        return ddp, self.kind.make_optimizer(ddp, model, optimizer or SGD, parameters, options)

    def wrap(self, model: nn.Module) -> nn.Module:
        """Wrap a model, without an optimizer."""
        units = tuple({type(child): None for child in model.children() if any(True for _ in child.parameters())}.keys())
        units = tuple(unit for unit in units if not issubclass(unit, CONTAINERS)) or (nn.Linear,)
        ddp = Plain(model) if self.rank is None else self.kind.wrap(Plain, model, units)
        self.wrapped.append((ddp, model))
        return ddp

    def batch(self, step: int, ranks: range | list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs, of shape (4, 6), and targets, (4, 3), for each of the ranks, the default being `ranks`."""
        parts = []
        for rank in self.ranks if ranks is None else ranks:
            generator = torch.Generator().manual_seed(100 * step + rank)
            parts.append(torch.randn(ROWS, INPUTS + OUTPUTS, generator=generator, dtype=torch.float64))
        whole = torch.cat(parts).to(torch.get_default_dtype())
        return whole[:, :INPUTS].contiguous(), whole[:, INPUTS:].contiguous()

    def batches(self, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Return this process's batch of each step."""
        return map(self.batch, range(steps))

    def steps(self, ddp: nn.Module, optimizer: Any, max_norm: float = 0.0) -> Iterator[tuple[Tensor, Tensor]]:
        """Return this process's batch of each of three steps, and do around it what every training loop does."""
        for batch in self.batches(3):
            optimizer.zero_grad()
            yield batch
            ddp.finish_grad_sync()
            if max_norm:
                self.record("norm", self.clip(ddp, optimizer, max_norm).double())
            optimizer.step()

    def train(self, ddp: nn.Module, optimizer: Optimizer, steps: int = 3, start: int = 0) -> None:
        """Take some steps, as every training loop does."""
        for step in range(start, start + steps):
            x, y = self.batch(step)
            optimizer.zero_grad()
            F.mse_loss(ddp(x), y).backward()
            ddp.finish_grad_sync()
            optimizer.step()

    def clip(self, ddp: nn.Module, optimizer: Optimizer, max_norm: float) -> Tensor:
        """Clip by the global norm, with the method that the kind has for it."""
        for owner in (optimizer, ddp):
            if hasattr(owner, "clip_grad_norm_"):
                return owner.clip_grad_norm_(max_norm)
        return torch.nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)

    def record(self, name: str, value: Tensor) -> None:
        """Compare a value, too, for example the norm of the gradients."""
        self.recorded[f"{name} {len(self.recorded)}"] = value.detach().clone()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights of all models of the program, as they are now, and what it recorded."""
        weights = dict(self.recorded)
        for number, (ddp, model) in enumerate(self.wrapped):
            own = self.kind.collect_weights(ddp, model) if self.rank is not None else dict(model.named_parameters())
            weights |= {f"{number}.{name}": p.detach().clone() for name, p in own.items()}
        return weights
