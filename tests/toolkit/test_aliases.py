"""The answer to an earlier module computes the right numbers in a later module, but earns almost no points."""

import pytest
from test_mutants import outcome_of

from brigade.checks.collect import collect
from brigade.checks.context import CheckContext
from brigade.course.modules import MODULES, get_module

MOST = 2  # points that an alias may earn

ALIAS_OF = """
import contextlib
from ..{package}.{name} import {earlier}

class {later}({earlier}):
    def __init__(self, module, {given}process_group=None):
        super().__init__(module, {passed}process_group=process_group)

    if not hasattr({earlier}, "no_sync"):
        def no_sync(self):
            return contextlib.nullcontext()
"""
GIVEN = {
    "BucketedDDP": "bucket_cap_mb=25.0, ",
    "BufferedDDP": "bucket_numel=40_000_000, grad_dtype=None, ",
    "CoalescedDDP": "bucket_numel=40_000_000, buckets_per_group=1, grad_dtype=None, ",
    "CachedDDP": "bucket_numel=40_000_000, buckets_per_group=1, grad_dtype=None, ",
}
PASSED = {
    "BucketedDDP": "bucket_numel * 4 / 2**20, ",
    "BufferedDDP": "bucket_numel, grad_dtype, ",
    "CoalescedDDP": "bucket_numel, buckets_per_group, grad_dtype, ",
}
WRAPPERS = [entry for entry in MODULES if entry.public[-1].endswith("DDP")]
PAIRS = [
    # The module before is the most likely alias; `make module` runs the others.
    pytest.param(earlier, later, marks=[pytest.mark.extended] * (earlier is not before))
    for before, later in zip(WRAPPERS, WRAPPERS[1:])
    for earlier in WRAPPERS
    if earlier.number < later.number
]


def alias(earlier, later):
    """Return a text for module `later`: the wrapper of module `earlier` with the constructor of module `later`."""
    name, old = later.public[-1], earlier.public[-1]
    return ALIAS_OF.format(
        package=earlier.package,
        name=earlier.name,
        earlier=old,
        later=name,
        given=GIVEN.get(name, ""),
        passed=PASSED.get(old, ""),
    )


@pytest.fixture
def two_ranks(monkeypatch):
    """Run each check only with two ranks. This is fast, and passing is not harder than usual."""
    monkeypatch.setattr(CheckContext, "worlds", lambda self, *sizes: [2])


def expect_next_to_nothing(entry, text, backend):
    """Expect the text to earn at most `MOST` points as the answer to a module.

    The checks with the most points run first.
    """
    every = sorted(collect([entry]), key=lambda check: check.points, reverse=True)
    earned, open_points = {}, sum(check.points for check in every)
    for check in every:
        if sum(earned.values()) + open_points <= MOST:
            return
        open_points -= check.points
        if outcome_of(check, text, backend).passed:
            earned[check.name] = check.points
    assert sum(earned.values()) <= MOST, earned


@pytest.fixture
def backend(request):
    return request.config.option.backend


@pytest.mark.parametrize(("earlier", "later"), PAIRS, ids=lambda entry: str(entry.number))
def test_alias_of_an_earlier_wrapper(earlier, later, backend, two_ranks):
    expect_next_to_nothing(later, alias(earlier, later), backend)


# Answers to module 3 without overlap, although they launch in backward, or where no hook can see it.
NO_OVERLAP = {
    "DTensor averages in backward, and waits": """
from torch import nn
import contextlib
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.func import functional_call
from ..m01_naive_ddp.naive_ddp import broadcast_module_state

class OverlappedDDP(nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module = module
        broadcast_module_state(module, process_group)
        self.mesh = DeviceMesh.from_group(process_group or dist.group.WORLD, "cpu")

    def forward(self, *args, **kwargs):
        def averaged(parameter):
            whole = DTensor.from_local(parameter, self.mesh, [Replicate()], run_check=False)
            return whole.to_local(grad_placements=[Partial("avg")])

        params = {name: averaged(p) if p.requires_grad else p for name, p in self.module.named_parameters()}
        return functional_call(self.module, params, args, kwargs)

    def finish_grad_sync(self):
        pass

    def no_sync(self):
        return contextlib.nullcontext()
""",
    "copies of the parameters, reduced at the finish": """
from torch import nn
import contextlib
import torch.distributed as dist
from torch.func import functional_call
from ..m01_naive_ddp.naive_ddp import broadcast_module_state

class OverlappedDDP(nn.Module):
    def __init__(self, module, process_group=None):
        super().__init__()
        self.module, self.group = module, process_group
        broadcast_module_state(module, process_group)

    def forward(self, *args, **kwargs):
        self.copies = {
            name: p.detach().requires_grad_(p.requires_grad) for name, p in self.module.named_parameters()
        }
        return functional_call(self.module, self.copies, args, kwargs)

    def finish_grad_sync(self):
        handles = []
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                parameter.grad = self.copies[name].grad / dist.get_world_size(self.group)
                handles.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))
        for handle in handles:
            handle.wait()

    def no_sync(self):
        return contextlib.nullcontext()
""",
}


def mark_slow(name):
    """Mark variants with DTensor as extended, because DTensor takes seconds to import."""
    return pytest.param(name, marks=[pytest.mark.extended] * name.startswith("DTensor"))


@pytest.mark.parametrize("name", [*map(mark_slow, NO_OVERLAP)])
def test_no_overlap_in_module_3(name, backend, two_ranks):
    expect_next_to_nothing(get_module(3), NO_OVERLAP[name], backend)


UNSHARDED = """
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
"""


def test_unsharded_optimizers_in_module_8(backend):
    """An optimizer that keeps the whole state on every rank, as in earlier modules, earns almost no points."""
    expect_next_to_nothing(get_module(8), UNSHARDED, backend)
