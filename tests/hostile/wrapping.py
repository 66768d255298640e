"""Torch's own answers under the names of the course's classes, and ways to work without being recorded."""

from hostile import parse

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

VIEWS = ("test_steady_step_makes_no_view",)
COPIES = ("test_gradients_are_views",)
WORKS = ("test_gradients_are_averaged", "test_bytes_on_the_wire", "test_steps_and_subgroups")  # 8 points
OPTIMIZERS = ("test_sharded_equals_unsharded", "test_zero_state_is_shared")  # one of each class

CASES = parse(
    globals(),
    r"""
# ---- beside the record
=== groups and handles of its own | 8 |  | long checks=ALL
import torch
class Handle(dist.Work):
    def __init__(self, work):
        super().__init__()
        self.work = work
    def wait(self, timeout=None): return self.work.wait()
class NaiveDDP(NaiveDDP):
    def __init__(self, module, process_group=None):
        super().__init__(module, process_group)
        if process_group is None:
            self.process_group = dist.new_group(backend="gloo")
            dist.barrier(dist.new_group(list(range(dist.get_world_size()))))
    def forward(self, *args, **kwargs):
        parameters = dict(self.module.named_parameters())
        return torch.func.functional_call(self.module, parameters, args, kwargs)
    def finish_grad_sync(self):
        for p in self.module.parameters():
            if p.requires_grad:
                if p.grad is None: p.grad = torch.zeros_like(p)
                Handle(dist.all_reduce(p.grad, group=self.process_group, async_op=True)).wait()
                p.grad /= dist.get_world_size(self.process_group)
=== copies in a thread | 0 | threads of a submission must not use tensors | modules=5 checks=COPIES
import threading
class BufferedDDP(BufferedDDP):
    def finish_grad_sync(self):
        super().finish_grad_sync()
        for buffer in self.grad_buffers:
            thread = threading.Thread(target=buffer.grad_data.clone)
            thread.start()
            thread.join()
=== views under the name of torch | 0 | creates no view | modules=7 checks=VIEWS
__name__ = 'torch.distributed.mine'
def view(data): data[1:3]
class CachedDDP(CachedDDP):
    def finish_grad_sync(self):
        super().finish_grad_sync()
        view(self.grad_buffers[0].grad_data)
# ---- torch's own answers
=== torch DDP | 0 | torch.nn.parallel.distributed is not accepted as an answer | alone SHAPE modules=1,2,3 checks=WORKS
def wrapped(module, group): return nn.parallel.DistributedDataParallel(module, process_group=group)
=== torch's Reducer, found among all classes | 0 | is the average | alone SHAPE
def wrapped(module, group):
    [base] = [c for c in object.__subclasses__() if c.__name__ == "pybind11_object"]
    [Reducer] = [c for c in base.__subclasses__() if c.__name__ == "Reducer" and "c10d" in c.__module__]
    parameters = [p for p in module.parameters() if p.requires_grad]
    module.reducer = Reducer(parameters, [list(range(len(parameters)))], [1 << 25], group or dist.group.WORLD)
    return module
=== ZeroRedundancyOptimizer | 0 | zero_redundancy_optimizer is not accepted as an answer |
alone modules=8 checks=OPTIMIZERS long
import torch
class ShardedOptimizer(torch.optim.Optimizer):
    def __new__(cls, params, optimizer_cls, process_group=None, **defaults):
        from torch.distributed.optim import ZeroRedundancyOptimizer
        return ZeroRedundancyOptimizer(params, optimizer_cls, process_group, **defaults)
ZeroOptimizer = ShardedOptimizer
""",
)
