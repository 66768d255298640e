"""Refuse torch's own wrappers in a graded rank, because they are finished answers to the assignments."""

from __future__ import annotations

import importlib.abc
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

# The name and the class of each finished answer in torch, by module. A graded rank refuses to create such an object.
FINISHED_ANSWERS = {
    "torch.nn.parallel.distributed": ("DistributedDataParallel", "DistributedDataParallel"),
    "torch._C._distributed_c10d": ("Reducer", "Reducer"),
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel", "FullyShardedDataParallel"),
    "torch.distributed.fsdp._fully_shard._fsdp_state": ("fully_shard", "FSDPState"),
    "torch.distributed.optim.zero_redundancy_optimizer": ("ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer"),
}


def forbid() -> None:
    """Make torch's own wrappers raise RuntimeError in this process."""
    for module in FINISHED_ANSWERS:
        if module in sys.modules:
            refuse(sys.modules[module])
    sys.meta_path.insert(0, RefusingFinder())


def refuse(module: types.ModuleType) -> None:
    """Make the finished answer in a module raise RuntimeError when it is used."""
    name, class_name = FINISHED_ANSWERS[module.__name__]

    def raise_error(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name} is not accepted as an answer; use the collectives of torch.distributed")

    getattr(module, class_name).__init__ = raise_error


class RefusingFinder(importlib.abc.MetaPathFinder):
    """Make a finished answer raise RuntimeError as soon as its module is imported."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in FINISHED_ANSWERS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        execute = spec.loader.exec_module

        def execute_and_refuse(module: types.ModuleType) -> None:
            execute(module)
            refuse(module)

        spec.loader.exec_module = execute_and_refuse
        return spec
