"""Torch's own answers, under the names of the course's."""

from hostile import Hostile, alone

SHAPE = """
import importlib, inspect, sys
import torch, torch.distributed as dist
from torch import nn
class Base(nn.Module):
    def __init__(self, module, *args, process_group=None, **kwargs):
        super().__init__()
        self.module, self.inner = module, wrapped(module, process_group)
    def forward(self, *args, **kwargs): return self.inner(*args, **kwargs)
    def finish_grad_sync(self): pass
    def no_sync(self): return self.inner.no_sync()
class NAME(Base): pass
def broadcast_module_state(module, process_group=None): wrapped(module, process_group)
"""

CASES = [
    Hostile(
        "torch DDP",
        alone(
            SHAPE,
            "def wrapped(module, group): return nn.parallel.DistributedDataParallel(module, process_group=group)",
            numbers=(1, 2, 3),
        ),
        0,
        "DistributedDataParallel is not taken for an answer",
        modules=(1, 2, 3),
        checks=("test_gradients_are_averaged", "test_bytes_on_the_wire", "test_steps_and_subgroups"),  # 8 points
    ),
    Hostile(
        "torch DDP, loaded again",
        alone(
            SHAPE,
            """
def wrapped(module, group):
    return importlib.reload(sys.modules["torch.nn.parallel.distributed"]).DistributedDataParallel(
        module, process_group=group)
""",
        ),
        0,
        "DistributedDataParallel is not taken for an answer",
    ),
    Hostile(
        "torch DDP, from its text",
        alone(
            SHAPE,
            """
def wrapped(module, group):
    text = inspect.getsource(sys.modules["torch.nn.parallel.distributed"])
    scope = {"__name__": "torch.nn.parallel.mine", "__package__": "torch.nn.parallel"}
    exec(compile(text, "mine.py", "exec", dont_inherit=True), scope)
    return scope["DistributedDataParallel"](module, process_group=group)
""",
        ),
        0,
    ),
    Hostile(
        "torch's Reducer, found among all classes",
        alone(
            SHAPE,
            """
def wrapped(module, group):
    [base] = [c for c in object.__subclasses__() if c.__name__ == "pybind11_object"]
    [Reducer] = [c for c in base.__subclasses__() if c.__name__ == "Reducer" and "c10d" in c.__module__]
    parameters = [p for p in module.parameters() if p.requires_grad]
    module.reducer = Reducer(parameters, [list(range(len(parameters)))], [1 << 25], group or dist.group.WORLD)
    return module
""",
        ),
        0,
        "Reducer is not taken for an answer",
    ),
    Hostile(
        "fully_shard under another name",
        alone(
            SHAPE,
            """
from torch.distributed.fsdp import fully_shard as my_own_idea
def wrapped(module, group): return my_own_idea(module)
""",
        ),
        0,
        "fully_shard is not taken for an answer",
    ),
    Hostile(
        "FSDP and replicate",
        alone(
            SHAPE,
            """
def wrapped(module, group):
    if dist.get_world_size() == 2:
        return importlib.import_module("torch.distributed.fsdp").FullyShardedDataParallel(module)
    return importlib.import_module("torch.distributed._composable.replicate").replicate(module)
""",
        ),
        0,
        "FullyShardedDataParallel is not taken for an answer",
    ),
    Hostile(
        "ZeroRedundancyOptimizer",
        alone(
            """
            import torch
            class ShardedOptimizer(torch.optim.Optimizer):
                def __new__(cls, params, optimizer_cls, process_group=None, **defaults):
                    from torch.distributed.optim import ZeroRedundancyOptimizer
                    return ZeroRedundancyOptimizer(params, optimizer_cls, process_group, **defaults)
            ZeroOptimizer = ShardedOptimizer
            """,
            numbers=(8,),
        ),
        0,
        "ZeroRedundancyOptimizer is not taken for an answer",
        modules=(8,),
        checks=("test_sharded_equals_unsharded", "test_sharded_state_is_shared", "test_zero_state_is_shared"),
    ),
]
