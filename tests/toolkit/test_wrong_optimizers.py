"""Wrong answers to module 8 train, many of them correctly, but do not shard the state as required. None passes."""

import pytest
from test_mutants import checks, outcome_of

from brigade.course.modules import ROOT, get_module

MODULE_8 = get_module(8)
REFERENCE = (ROOT / "solutions" / MODULE_8.path).read_text()

# Whole parameters belong to ranks. OWNER is that of parameter i of n among `size` ranks, None where every rank steps on
# it. Under ZeroOptimizer's name the gradients, which stay scattered, are gathered first.
OWNERS = """
import torch
import torch.distributed as dist


class Owners(torch.optim.Optimizer):
    def __init__(self, params, optimizer_cls, process_group=None, **defaults):
        self.group = process_group
        prototype = optimizer_cls([torch.nn.Parameter(torch.zeros(1))], **defaults)
        super().__init__(params, prototype.defaults)
        everything = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        rank, size, n = dist.get_rank(self.group), dist.get_world_size(self.group), len(everything)
        self.owner = {p: OWNER for i, p in enumerate(everything)}
        self.optim = optimizer_cls(
            [
                dict(group, params=[p for p in group["params"] if self.owner.get(p, -1) in (None, rank)])
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
                if owner is not None:
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
"""
EXCHANGED = "dist.all_reduce(p.grad, dist.ReduceOp.AVG, group=self.group)\n            for group"
COPIED = 'inner.update({key: value for key, value in group.items() if key != "params"})'


def owners(owner, *changes):
    text = OWNERS.replace("OWNER", owner)
    for old, new in changes:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


PLAIN = """
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
"""
TORCHS = """
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
"""
EACH_OTHERS = """

class Owning(ShardedOptimizer):
    def __init__(self, ddp, optimizer_cls, param_groups=None, **defaults):
        super().__init__(param_groups or ddp.module.parameters(), optimizer_cls, ddp.process_group, **defaults)


ShardedOptimizer, ZeroOptimizer = ZeroOptimizer, Owning
"""

# The answer, and checks that it fails, of both classes.
WRONG = {
    "the plain optimizer": (
        PLAIN,
        ("sharded_equals_unsharded", "sharded_state_is_shared", "zero_equals_unsharded", "zero_state_is_shared"),
    ),
    "all state everywhere, nothing exchanged": (
        owners("None", (EXCHANGED, "pass\n            for group")),
        ("sharded_equals_unsharded", "zero_state_is_shared"),
    ),
    "all state everywhere, gradients all-reduced": (
        owners("None"),
        ("sharded_state_is_shared", "sharded_launches", "zero_state_is_shared", "zero_volume"),
    ),
    "all state on rank 0": (owners("0"), ("sharded_state_is_shared", "zero_state_is_shared")),
    "owners in turn": (owners("i % size"), ("sharded_state_is_shared", "zero_volume")),
    "two halves": (owners("min(2 * i // n, size - 1)"), ("sharded_state_is_shared", "zero_volume")),
    "learning rates that change are ignored": (
        owners("i % size", (COPIED, "pass")),
        ("sharded_groups_and_schedulers", "zero_groups_and_schedulers"),
    ),
    "late groups are never stepped": (
        owners("i % size"),
        ("sharded_groups_and_schedulers", "zero_groups_and_schedulers"),
    ),
    "torch's ZeroRedundancyOptimizer": (TORCHS, ("zero_equals_unsharded",)),  # any check: it is refused
    "each under the other's name": (REFERENCE + EACH_OTHERS, ("sharded_equals_unsharded", "zero_equals_unsharded")),
}


@pytest.mark.parametrize(("name", "check"), [(name, check) for name, (_, failed) in WRONG.items() for check in failed])
def test_wrong_answer_fails(name, check, request):
    text, _ = WRONG[name]
    outcome = outcome_of(checks(MODULE_8)[f"test_{check}"], text, request.config.option.backend)
    assert outcome.status == "failed", outcome.verdict
