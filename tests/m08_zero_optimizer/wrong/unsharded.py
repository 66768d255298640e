"""Every rank keeps the whole state, as in earlier modules."""

# Earns at most 2 points.

import torch
import torch.distributed as dist


class Unsharded(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, **defaults):
        self.optim = None
        super().__init__(params, optimizer_cls([{"params": []}], **defaults).defaults)
        self.optim = optimizer_cls(self.param_groups, **defaults)

    def add_param_group(self, group):
        super().add_param_group(group)
        if self.optim:
            self.optim.add_param_group(self.param_groups[-1])

    def step(self, closure=None):
        with torch.enable_grad():
            loss = closure() if closure else None
        self.average()
        self.is_averaged = False
        self.optim.step()
        return loss

    def clip_grad_norm_(self, max_norm):
        self.average()
        return torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], max_norm)

    def average(self):
        if not getattr(self, "is_averaged", False):
            self.is_averaged = True
            self.communicate()

    def zero_grad(self, set_to_none=True):
        self.is_averaged = False
        super().zero_grad(set_to_none)


class ShardedOptimizer(Unsharded):
    def __init__(self, params, optimizer_cls, process_group=None, **defaults):
        self.group = process_group
        super().__init__(params, optimizer_cls, **defaults)

    def communicate(self):
        for parameter in [p for group in self.param_groups for p in group["params"] if p.requires_grad]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, self.group)


class ZeroOptimizer(Unsharded):
    def __init__(self, ddp, optimizer_cls, param_groups=None, **defaults):
        if optimizer_cls.__name__ in ("Adafactor", "LARS", "LBFGS"):
            raise ValueError("this optimizer cannot be divided")
        self.ddp, ddp.gather_grads = ddp, False
        super().__init__(param_groups or ddp.module.parameters(), optimizer_cls, **defaults)

    def communicate(self):
        for group in self.ddp.groups:
            group.start_all_gather(group.buffer.grad_data).wait()

    def state_dict(self):
        return self.optim.state_dict() | {"masters": {}}

    def load_state_dict(self, state_dict):
        self.optim.load_state_dict({key: value for key, value in state_dict.items() if key != "masters"})
        self.param_groups[:] = self.optim.param_groups
