"""The wrappers and optimizers on which situations run. Each kind belongs to one module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from brigade.ranks.rank.api import student

# What a kind offers beyond the loop of module 1. A situation that needs more than a kind offers does not run on it.
EVERY = "wrapper no_sync dtypes groups any_optimizer elementwise_optimizer reads_grads reads_weights states"


@dataclass(frozen=True)
class Kind:
    """How to wrap a model with the wrapper of one module, and how to make the optimizer that belongs to it."""

    name: str  # such as "m05"
    module: int
    package: str
    offers: frozenset[str]
    wrapper: str | None = None  # None: there is no wrapper
    arguments: tuple[tuple[str, Any], ...] = ()  # of the wrapper: several small buckets
    optimizer: tuple[str, str] | None = None  # its package and its class
    tolerance: float = 0.0  # if it is larger than the situation's
    dtype: torch.dtype = torch.float64

    def wrap(
        self, plain: type[nn.Module], model: nn.Module, units: tuple[type[nn.Module], ...], **options: Any
    ) -> nn.Module:
        """Wrap a model on a rank. `options` are more arguments of the wrapper."""
        if self.wrapper is None:
            student("m01_naive_ddp", "broadcast_module_state")(model)
            return plain(model)
        wrapper = student(self.package, self.wrapper)
        if self.name == "m14":
            return wrapper(model, units, *make_grid())
        return wrapper(model, *[units] * (self.name == "m11"), **dict(self.arguments) | options)

    def make_optimizer(
        self, ddp: nn.Module, model: nn.Module, optimizer: type[Optimizer], groups: list[Any] | None, options: dict
    ) -> Any:
        """Make the optimizer for a wrapper on a rank. `groups` are parameters or parameter groups."""
        if self.name == "m15":
            return make_muon(functools.partial(student(*self.optimizer)), list(model.parameters()), options)
        if self.name in ("m11", "m14"):
            return optimizer(ddp.shards(), **options)
        if self.optimizer is None:
            return optimizer(groups or list(model.parameters()), **options)
        owner = student(*self.optimizer)
        if self.wrapper is None:
            return owner(groups or list(model.parameters()), optimizer, **options)
        return owner(ddp, optimizer, groups, **options)

    @property
    def make_plain_optimizer(self) -> Callable[..., Any] | None:
        """Return what makes the optimizer of one process, or None if it is torch's SGD."""
        return functools.partial(make_muon, PlainMuon) if self.name == "m15" else None

    def collect_weights(self, ddp: nn.Module, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole weights of a model by name."""
        if self.name in ("m11", "m14"):
            names = [name for name, _ in model.named_parameters()]
            full = ddp.full_state_dict()
            return {name: full[name] for name in names}
        if self.name == "m09":
            ddp.finish_param_sync()
        return dict(model.named_parameters())


class Together:
    """Optimizers of parts of a model, with the interface of one."""

    def __init__(self, optimizers: Sequence[Any]):
        self.optimizers = optimizers
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]

    @property
    def _step_supports_amp_scaling(self) -> bool:  # torch.amp.GradScaler asks for it
        return getattr(self.optimizers[0], "_step_supports_amp_scaling", False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = closure() if closure else None
        for optimizer in self.optimizers:
            optimizer.step()
        return loss


def make_muon(muon: Callable[..., Any], params: list[nn.Parameter], options: dict | None = None, **more) -> Together:
    """Train matrices with Muon, and all other parameters with SGD, which module 8's optimizer shards on ranks."""
    options = {"lr": 0.1} | {name: value for name, value in {**(options or {}), **more}.items() if name != "lr"}
    matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
    optimizers: list[Any] = [muon(matrices, **options)] if matrices else []
    if others and muon is PlainMuon:
        optimizers.append(torch.optim.SGD(others, lr=1.0))
    elif others:
        optimizers.append(student("m08_zero_optimizer", "ShardedOptimizer")(others, torch.optim.SGD, lr=1.0))
    return Together(optimizers)


class PlainMuon(Optimizer):
    """Muon in one process, by the formula in module 15's docstring."""

    def __init__(self, params: Any, lr: float = 0.02, momentum: float = 0.95, weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.requires_grad):
                grad = torch.zeros_like(p) if p.grad is None else p.grad
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                m.mul_(group["momentum"]).add_(grad)
                x = grad + group["momentum"] * m
                x = x / (x.norm() + 1e-7)
                for _ in range(5):
                    gram = x @ x.T
                    x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
                ratio = max(1, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * ratio * x)


@functools.lru_cache(maxsize=1)
def make_grid() -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return the groups of a grid of nodes with one rank: module 11's kind has shards, and this one has replicas."""
    own = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    return own[dist.get_rank()], dist.new_group(list(range(dist.get_world_size())))


def without(*names: str) -> frozenset[str]:
    """Return what a kind offers that lacks these."""
    assert set(names) <= set(EVERY.split())
    return frozenset(EVERY.split()) - set(names)


BUFFERED = (("bucket_numel", 40),)
WIDE = (*BUFFERED, ("grad_dtype", torch.float64))  # gradients accumulate in main_grad
GROUPED = (*BUFFERED, ("buckets_per_group", 2))
M07, M08 = "m07_cached_shards", "m08_zero_optimizer"
SHARDED = without("any_optimizer", "reads_grads")  # p.grad is no average: the optimizer has its shards
FULLY = without("any_optimizer", "reads_grads", "reads_weights", "groups", "states")

KINDS = [
    Kind("m01", 1, "m01_naive_ddp", without("no_sync"), "NaiveDDP"),
    Kind("m02", 2, "m02_flat_ddp", without("no_sync"), "FlatDDP"),
    Kind("m03", 3, "m03_overlapped_ddp", without(), "OverlappedDDP"),
    Kind("m04", 4, "m04_bucketed_ddp", without(), "BucketedDDP", (("bucket_cap_mb", 400 / 2**20),)),
    Kind("m05", 5, "m05_grad_buffer", without(), "BufferedDDP", BUFFERED),
    Kind("m05w", 5, "m05_grad_buffer", without("dtypes"), "BufferedDDP", WIDE, None, 1e-3, torch.float32),
    Kind("m06", 6, "m06_coalesced", without(), "CoalescedDDP", GROUPED),
    Kind("m07", 7, M07, without(), "CachedDDP", GROUPED),
    Kind("m08a", 8, M08, without("wrapper", "reads_grads", "states"), None, (), (M08, "ShardedOptimizer")),
    Kind("m08", 8, M07, SHARDED, "CachedDDP", GROUPED, (M08, "ZeroOptimizer")),
    Kind(
        "m09", 9, "m09_prefetched_weights", SHARDED - {"reads_weights"}, "PrefetchedDDP", GROUPED,
        ("m09_prefetched_weights", "PrefetchedZeroOptimizer"),
    ),
    Kind("m10", 10, "m10_grad_shards", SHARDED, "GradShardedDDP", BUFFERED, ("m10_grad_shards", "Zero2Optimizer")),
    Kind("m11", 11, "m11_fully_sharded", FULLY, "FullyShardedDDP"),
    Kind("m14", 14, "m14_hybrid_sharded", FULLY, "HybridShardedDDP"),
    Kind(
        "m15", 15, "m15_sharded_muon",
        frozenset({"no_sync", "reads_weights"}),
        None, (), ("m15_sharded_muon", "ShardedMuon"),
    ),
    # Gradients are rounded to bfloat16, so a weight of about 1 may differ by a hundredth after a few steps.
    Kind("m16", 16, "m16_half_bytes", without("dtypes"), "HalfBytesDDP", GROUPED, None, 2e-2, torch.float32),
]  # fmt: skip
