"""How to train with a variant: the one description that bench, trace, plan, score and the capstone use.

    engine = find_engine(variant)(variant, model, workload)
    engine.zero_grad()
    with engine.no_sync():                                  all micro-batches but the last one
        compute_loss(engine(tokens), targets).backward()
    compute_loss(engine(tokens), targets).backward()
    engine.finish_grad_sync()
    engine.step()
    weights, state = engine.state_dict()

Ranks import this file. `variant` has the fields of `ladder.Variant`, and `workload["optimizer"]` is the optimizer's
class, or its name in `torch.optim`. Nothing else knows how wrappers and optimizers are constructed or called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from brigade.course.checks.tiny_lm import Block
from brigade.ranks.rank.api import device, student

Fields = Mapping[str, Any]
State = dict[int, dict[str, Any]]  # of an optimizer, by parameter number


class Engine:
    """A model that trains without a wrapper. Each rank has its own gradients, unless its optimizer averages them."""

    process_group = None  # module 12's loop counts tokens over all ranks, also if the wrapper's group is a node

    def __init__(self, variant: Fields, model: Any, workload: Fields):
        self.label, self.module, self.overlaps = variant["label"], model, variant["overlaps_forward"]
        self.marks: list[list[float]] = []  # of its steps
        self.wrapper: Any = self.wrap(variant, workload)
        base = workload["optimizer"]
        base = getattr(torch.optim, base) if isinstance(base, str) else base
        momentum = {"momentum": 0.9} if issubclass(base, torch.optim.SGD) else {}
        self.optimizer: Any = self.make_optimizer(variant, base, {"lr": workload["learning_rate"], **momentum})

    def wrap(self, variant: Fields, workload: Fields) -> Any:
        """Return the wrapped model."""
        return self.module

    def make_optimizer(self, variant: Fields, base: Any, options: dict[str, Any]) -> Any:
        """Return the optimizer, whose rule is `base`."""
        if variant["optimizer"]:
            return student(*variant["optimizer"])(self.parameters(), base, **options)
        return base(self.shards() or self.parameters(), **options)

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers of torch that take the steps."""
        return [getattr(self.optimizer, "optim", self.optimizer)]

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return the model's parameters."""
        return self.module.parameters()

    def shards(self) -> Sequence[Tensor]:
        """Return this rank's shards of the weights, if the model has whole weights only while it computes."""
        return ()

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self.wrapper(*inputs)

    def no_sync(self) -> AbstractContextManager:
        """Only accumulate gradients in the block. Raise TypeError if a wrapper cannot."""
        raise TypeError("it has no no_sync for micro-batches")

    def finish_grad_sync(self) -> None:
        """Wait until all gradients are averaged."""

    def step(self) -> None:
        """Update the weights."""
        self.optimizer.step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()

    def start_param_sync(self) -> None:
        """Launch the all-gathers that a step leaves to the next forward, if it does."""
        if self.overlaps:
            self.wrapper.start_param_sync()

    def finish_param_sync(self) -> None:
        """Wait for these all-gathers."""
        if self.overlaps:
            self.wrapper.finish_param_sync()

    def state_dict(self) -> tuple[dict[str, Tensor], State]:
        """Return the weights by name, or their fp32 copies, and the optimizer's state. All ranks must call this.

        All tensors are whole, and in the layout of plain torch.
        """
        weights = {name.removeprefix("module."): value for name, value in self.wrapper.state_dict().items()}
        whole = self.optimizer.state_dict()
        names = [name for name, _ in self.module.named_parameters()]
        return weights | {names[i]: value for i, value in whole.get("masters", {}).items()}, whole["state"]

    def load_state(self, weights: Sequence[Tensor], state: State) -> None:
        """Give a new optimizer a state of `state_dict`. `weights` are the parameters in fp32, which the model has."""
        masters = dict(enumerate(weights))
        self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state, "masters": masters})


class MuonEngine(Engine):
    """Module 15's optimizer for the matrices of a TinyLM's blocks, and module 8's for embedding, head and norms."""

    def make_optimizer(self, variant: Fields, base: Any, options: dict[str, Any]) -> Any:
        for tensor in self.module.state_dict().values():  # there is no wrapper that does this
            dist.broadcast(tensor, 0)
        matrices = [p for p in self.module.blocks.parameters() if p.dim() == 2]
        chosen = {id(p) for p in matrices}
        self.others = student(*variant["others"])(
            [p for p in self.parameters() if id(p) not in chosen], base, **options
        )
        self.numbers = {p: number for number, p in enumerate(self.parameters())}
        return student(*variant["optimizer"])(matrices)

    @property
    def optimizers(self) -> list[Any]:
        return [self.optimizer, self.others.optim]

    def step(self) -> None:
        super().step()
        self.others.step()

    def zero_grad(self) -> None:
        super().zero_grad()
        self.others.zero_grad()

    def state_dict(self) -> tuple[dict[str, Tensor], State]:
        matrices = self.optimizer.param_groups[0]["params"]
        state = {self.numbers[matrices[j]]: entry for j, entry in self.optimizer.state_dict()["state"].items()}
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, {self.numbers[p]: entry for p, entry in self.others.optim.state.items()})
        for part in parts:
            state |= part
        return self.module.state_dict(), state

    def load_state(self, weights: Sequence[Tensor], state: State) -> None:
        for optimizer in self.optimizers:  # each rank keeps what it owns
            numbers = [self.numbers[p] for p in optimizer.param_groups[0]["params"]]
            own = {j: state[number] for j, number in enumerate(numbers) if number in state}
            optimizer.load_state_dict(optimizer.state_dict() | {"state": own})


class CourseEngine(Engine):
    """A wrapper of the course. Its module's row says what the constructor takes, and which optimizer it has."""

    def wrap(self, variant: Fields, workload: Fields) -> Any:
        bucket_mb = find_bucket_mb(variant, workload)
        known: dict[str, Any] = {
            "bucket_cap_mb": bucket_mb,
            "bucket_numel": max(1, int(bucket_mb * 2**20 / torch.float32.itemsize)),
            "unit_types": (Block,),
            "grad_dtype": torch.float32,  # for models in 16 bits
            "compute_dtype": workload.get("compute_dtype"),
        }
        package, name = variant["wrapper"]
        if "replica_group" in variant["takes"]:
            world_size = dist.get_world_size()
            groups = student(package, "make_groups")(world_size, workload["node_size"] or world_size)
            known["shard_group"], known["replica_group"] = groups
        taken = {argument: known[argument] for argument in variant["takes"]}
        return student(package, name)(self.module, **taken, **variant["arguments"])

    def make_optimizer(self, variant: Fields, base: Any, options: dict[str, Any]) -> Any:
        if variant["optimizer"]:
            return student(*variant["optimizer"])(self.wrapper, base, **options)
        return super().make_optimizer(variant, base, options)

    def no_sync(self) -> AbstractContextManager:
        return self.wrapper.no_sync() if hasattr(self.wrapper, "no_sync") else super().no_sync()

    def finish_grad_sync(self) -> None:
        self.wrapper.finish_grad_sync()


class ShardedEngine(CourseEngine):
    """A wrapper of the course that gathers the weights of a unit while it computes."""

    def shards(self) -> Sequence[Tensor]:
        return self.wrapper.shards()

    def state_dict(self) -> tuple[dict[str, Tensor], State]:
        return self.wrapper.full_state_dict(), self.wrapper.full_optimizer_state_dict(self.optimizer)["state"]

    def load_state(self, weights: Sequence[Tensor], state: State) -> None:
        group = {**self.optimizer.param_groups[0], "params": [*range(len(weights))]}
        self.wrapper.load_full_optimizer_state_dict(self.optimizer, {"state": state, "param_groups": [group]})


class TorchEngine(Engine):
    """torch DDP, alone or with torch's ZeRO. It has finished when backward returns."""

    def wrap(self, variant: Fields, workload: Fields) -> Any:
        bucket_mb = find_bucket_mb(variant, workload)
        return DistributedDataParallel(self.module, bucket_cap_mb=bucket_mb, **variant["arguments"])

    def make_optimizer(self, variant: Fields, base: Any, options: dict[str, Any]) -> Any:
        if not variant["optimizer"]:
            return super().make_optimizer(variant, base, options)
        from torch.distributed.optim import ZeroRedundancyOptimizer  # imported late because it prints a warning

        return ZeroRedundancyOptimizer(self.parameters(), base, **options)

    def no_sync(self) -> AbstractContextManager:
        return self.wrapper.no_sync()


class FullyShardEngine(Engine):
    """torch's fully_shard, for each block of the model and for the rest, with the weights of rank 0.

    With a `compute_dtype`, units are gathered in this dtype, and gradients are reduced in fp32.
    """

    def wrap(self, variant: Fields, workload: Fields) -> Any:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        tensors = self.module.state_dict().values()
        for tensor in tensors:
            dist.broadcast(tensor, 0)
        group = dist.group.WORLD
        assert group is not None  # ranks have one
        where = "meta" if any(tensor.is_meta for tensor in tensors) else device().type
        mesh = DeviceMesh.from_group(group, where)
        compute_dtype = workload.get("compute_dtype")
        policy = MixedPrecisionPolicy(compute_dtype, torch.float32 if compute_dtype else None)
        blocks = [part for part in self.module.modules() if isinstance(part, Block)]
        units = [fully_shard(block, mesh=mesh, mp_policy=policy) for block in blocks]
        for unit, following in pairwise(units):  # torch prefetches one unit in backward, but none in forward
            unit.set_modules_to_forward_prefetch([following])
        sharded = fully_shard(self.module, mesh=mesh, mp_policy=policy)
        sharded.set_modules_to_forward_prefetch(units[:1])
        return sharded

    def shards(self) -> Sequence[Tensor]:
        return [*self.parameters()]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        self.wrapper.set_requires_gradient_sync(False)
        yield
        self.wrapper.set_requires_gradient_sync(True)


def find_bucket_mb(variant: Fields, workload: Fields) -> float:
    """Return the size of the buckets in MiB."""
    return workload["bucket_mb"] if variant["bucket_mb"] is None else variant["bucket_mb"]


def find_engine(variant: Fields) -> type[Engine]:
    """Return the kind of engine that trains a variant."""
    package, name = variant["wrapper"] or ("", "")
    if package == "torch":
        return FullyShardEngine if name == "fully_shard" else TorchEngine
    if package:
        return ShardedEngine if "unit_types" in variant["takes"] else CourseEngine
    return MuonEngine if variant["others"] else Engine
