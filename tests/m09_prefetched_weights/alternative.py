"""Module 9 in another style: every module has a hook, which looks its parameters up; what is on its way is kept by
parameter, not by group; the optimizer uses nothing of module 8's but its public methods."""

import torch

from ..m07_cached_shards.cached_shards import CachedDDP
from ..m08_zero_optimizer.zero_optimizer import ZeroOptimizer


class PrefetchedDDP(CachedDDP):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.postponed = False  # then finish_param_sync leaves the waiting to forward
        self.arriving = {}  # parameter -> the group that brings it
        self.silent = set(self.module.modules())  # modules that have never been called
        for module in self.module.modules():
            module.register_forward_pre_hook(self.receive, prepend=True)

    def start_param_sync(self):
        order = {p: number for number, p in enumerate(self.module.parameters())}
        members = [[group.buffer.params[i] for i in group.param_indices] for group in self.groups]
        for params, group in sorted(
            zip(members, self.groups, strict=True), key=lambda pair: min(order[p] for p in pair[0])
        ):
            group.start_param_sync()
            self.arriving.update(dict.fromkeys(params, group))

    def receive(self, module, inputs=None):
        self.silent.discard(module)
        self.take(module.parameters(recurse=False))

    def take(self, params):
        for p in params:
            group = self.arriving.get(p)
            if group is not None:
                group.finish_param_sync()
                self.arriving = {p: other for p, other in self.arriving.items() if other is not group}

    def forward(self, *args, **kwargs):
        for module in self.silent:
            self.take(module.parameters(recurse=False))
        return super().forward(*args, **kwargs)

    def finish_param_sync(self):
        if not self.postponed:
            self.take(list(self.arriving))

    def state_dict(self, *args, **kwargs):
        self.finish_param_sync()
        return super().state_dict(*args, **kwargs)


class PrefetchedZeroOptimizer(ZeroOptimizer):
    def step(self, closure=None):
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.ddp.finish_param_sync()
        self.ddp.postponed = True
        try:
            super().step()
        finally:
            self.ddp.postponed = False
        return loss

    def add_param_group(self, param_group):
        self.ddp.finish_param_sync()
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict):
        self.ddp.finish_param_sync()
        super().load_state_dict(state_dict)
