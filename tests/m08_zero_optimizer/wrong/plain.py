"""The optimizer itself: nothing is shared, and nothing is exchanged."""

# Fails: sharded_equals_unsharded, sharded_state_is_shared, zero_equals_unsharded, zero_state_is_shared

import torch


def ShardedOptimizer(params, optimizer_cls, process_group=None, **defaults):
    class Plain(optimizer_cls):
        @property
        def optim(self):
            return self

        def clip_grad_norm_(self, max_norm):
            return torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], max_norm)

        def state_dict(self):
            return super().state_dict() | {"masters": {}}

    return Plain(params, **defaults)


def ZeroOptimizer(ddp, optimizer_cls, param_groups=None, **defaults):
    return ShardedOptimizer(param_groups or ddp.module.parameters(), optimizer_cls, **defaults)
