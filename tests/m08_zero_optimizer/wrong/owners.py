"""Whole parameters belong to ranks. Under ZeroOptimizer's name, the scattered gradients are gathered first."""

# Fails: sharded_state_is_shared, zero_volume, sharded_groups_and_schedulers, zero_groups_and_schedulers

import torch
import torch.distributed as dist


class Owners(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, process_group=None, **defaults):
        self.group = process_group
        prototype = optimizer_cls([torch.nn.Parameter(torch.zeros(1))], **defaults)
        super().__init__(params, prototype.defaults)
        everything = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.owner = {p: i % size for i, p in enumerate(everything)}
        self.optim = optimizer_cls(
            [
                dict(group, params=[p for p in group["params"] if self.owner.get(p) == rank])
                for group in self.param_groups
            ],
            **defaults,
        )

    def gather_grads(self):
        pass

    def step(self, closure=None):
        loss = closure() if closure else None
        with torch.no_grad():
            self.gather_grads()
            for p in self.owner:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=self.group)
            for group, inner in zip(self.param_groups, self.optim.param_groups):
                inner.update({key: value for key, value in group.items() if key != "params"})
            self.optim.step()
            for p, owner in self.owner.items():
                dist.broadcast(p, group=self.group, group_src=owner)
        return loss

    def clip_grad_norm_(self, max_norm):
        for p in self.owner:
            dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=self.group)
        return torch.nn.utils.clip_grad_norm_(list(self.owner), max_norm)


class ShardedOptimizer(Owners):
    pass


class ZeroOptimizer(Owners):
    def __init__(self, ddp, optimizer_cls, param_groups=None, **defaults):
        self.ddp = ddp
        ddp.gather_grads = False
        super().__init__(param_groups or ddp.module.parameters(), optimizer_cls, ddp.process_group, **defaults)

    def gather_grads(self):
        size = dist.get_world_size(self.group)
        for buffer in self.ddp.grad_buffers:
            for start, end in buffer.layout.bucket_ranges:
                bucket = buffer.grad_data[start:end]
                own = bucket.chunk(size)[dist.get_rank(self.group)].clone()
                dist.all_gather(list(bucket.chunk(size)), own, group=self.group)
