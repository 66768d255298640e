"""Refuse torch's own wrappers in a graded rank: they are finished answers to what the student is to write."""

from __future__ import annotations

import importlib.abc
import sys
import types
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

# What the course has students write, and the class that each of torch's own answers makes one of, by module.
# A graded rank refuses to make one.
FINISHED_ANSWERS = {
    "torch.nn.parallel.distributed": ("DistributedDataParallel", "DistributedDataParallel"),
    "torch._C._distributed_c10d": ("Reducer", "Reducer"),
    "torch.distributed.fsdp.fully_sharded_data_parallel": ("FullyShardedDataParallel", "FullyShardedDataParallel"),
    "torch.distributed.fsdp._fully_shard._fsdp_state": ("fully_shard", "FSDPState"),
    "torch.distributed.optim.zero_redundancy_optimizer": ("ZeroRedundancyOptimizer", "ZeroRedundancyOptimizer"),
}


def forbid() -> None:
    """From now on torch's own wrappers raise RuntimeError in this process."""
    for module in FINISHED_ANSWERS:
        if module in sys.modules:
            refuse(sys.modules[module])
    sys.meta_path.insert(0, RefusingFinder())


def refuse(module: types.ModuleType) -> None:
    """Let the finished answer in a module raise RuntimeError when it is used."""
    name, made = FINISHED_ANSWERS[module.__name__]

    def refused(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(f"{name} is not taken for an answer: the collectives of torch.distributed are")

    getattr(module, made).__init__ = refused


class RefusingFinder(importlib.abc.MetaPathFinder):
    """Refuses a finished answer as soon as it is imported."""

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
