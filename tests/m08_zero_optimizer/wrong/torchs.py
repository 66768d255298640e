"""torch's ZeroRedundancyOptimizer."""

# Fails: zero_equals_unsharded

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer


class ShardedOptimizer(ZeroRedundancyOptimizer):
    def __init__(self, params, optimizer_cls, process_group=None, **defaults):
        super().__init__(params, optimizer_class=optimizer_cls, process_group=process_group, **defaults)

    def step(self, closure=None):
        loss = closure() if closure else None
        for p in self.all():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=self.process_group)
        super().step()
        return loss

    def all(self):
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    def clip_grad_norm_(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.all(), max_norm)


class ZeroOptimizer(ShardedOptimizer):
    def __init__(self, ddp, optimizer_cls, param_groups=None, **defaults):
        super().__init__(param_groups or ddp.module.parameters(), optimizer_cls, ddp.process_group, **defaults)
