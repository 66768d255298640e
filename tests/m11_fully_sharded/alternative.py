"""Module 11 in another style: a generator performs the schedule, and stops where a unit may compute."""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m03_overlapped_ddp.overlapped_ddp import GradSyncMixin
from ..m06_coalesced.coalesced import reduce_scatter
from .checkpoint import ShardedCheckpoints
from .flat_shard import FlatShard


def find_units(module, unit_types, name=""):
    """Yield (name, submodule) of each outermost submodule of these types."""
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        if isinstance(child, unit_types):
            yield path, child
        else:
            yield from find_units(child, unit_types, path)


def plan_units(module, unit_types):
    every = list(module.named_parameters(remove_duplicate=False))
    ids = [id(parameter) for _, parameter in every]
    single = {name for name, parameter in every if ids.count(id(parameter)) == 1}
    units = []
    for path, child in find_units(module, unit_types):
        names = [f"{path}.{name}" for name, _ in child.named_parameters() if f"{path}.{name}" in single]
        if names:
            units.append(names)
    taken = {name for names in units for name in names}
    return [[name for name, _ in module.named_parameters() if name not in taken], *units]


def plan_schedule(num_units, prefetch, backward):
    forward = list(range(num_units))
    gathers = forward if not backward else forward[:0:-1]
    actions, position = [], 0
    for unit in reversed(forward) if backward else forward:
        reach = unit - prefetch if backward else unit + prefetch
        while position < len(gathers) and (gathers[position] >= reach if backward else gathers[position] <= reach):
            actions.append(("gather", gathers[position]))
            position += 1
        actions.append(("compute", unit))
        if backward:
            actions.append(("reduce", unit))
    return actions


class Flat(FlatShard):
    """Gradients are divided before they are summed."""

    def free(self):
        self.wait_for_unshard()
        self.reshard()

    def start_reduce(self):
        if self.shard.requires_grad:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
            whole = self.flatten([grad.type(self.reduce_dtype) for grad in grads])
            for p in self.params:
                p.grad = None
            whole /= self.size
            part = whole.new_empty(self.shard.numel())
            work = reduce_scatter(part, whole, dist.ReduceOp.SUM, self.process_group, async_op=True)
            self.reduction = work, whole, part


def list_tensors(value):
    if isinstance(value, torch.Tensor):
        return [value] if value.grad_fn is not None else []
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in values for tensor in list_tensors(item)]


class FullyShardedDDP(ShardedCheckpoints, GradSyncMixin, nn.Module):
    def __init__(
        self,
        module,
        unit_types,
        reshard_after_forward=True,
        prefetch=1,
        process_group=None,
        compute_dtype=None,
        reduce_dtype=None,
    ):
        super().__init__()
        self.module, self.process_group, self.prefetch = module, process_group, prefetch
        self.compute, self.reduce = compute_dtype, reduce_dtype
        self.reshard = reshard_after_forward
        broadcast_module_state(module, process_group)
        self.names = plan_units(module, unit_types)
        self.units = [self.make_flats([module.get_parameter(name) for name in names]) for names in self.names]
        self.flats = [flat for flats in self.units for flat in flats]
        self.running = None  # a generator that performs the schedule, and stops at each "compute"
        self.now = self.reducing = None
        self.pending = self.busy = False  # a backward is to come, or is running
        self.token = self.serving = None  # of the latest forward, and of the forward whose backward is running
        self.reduced = self.kept = False  # since the last finish, a backward was reduced, or was in no_sync
        number = {names[0]: unit for unit, names in enumerate(self.names) if unit}
        for path, child in find_units(module, unit_types):
            first = next((f"{path}.{name}" for name, _ in child.named_parameters() if f"{path}.{name}" in number), None)
            if first:
                self.hook(child, number[first])

    def make_flats(self, params):
        kinds = dict.fromkeys((p.dtype, p.requires_grad) for p in params)
        return [
            Flat(
                [p for p in params if (p.dtype, p.requires_grad) == kind], self.process_group, self.compute, self.reduce
            )
            for kind in kinds
        ]

    def hook(self, child, unit):
        def before(_, args, kwargs):
            if self.busy:  # computed again in backward
                return self.cast(args), self.cast(kwargs)
            self.advance(unit)
            for tensor in list_tensors([args, kwargs]):
                tensor.register_hook(lambda _: self.advance(unit, leave=True))
            return self.cast(args), self.cast(kwargs)

        def after(_, args, output):
            if self.busy:
                return
            self.advance(unit, leave=True)
            if tensors := list_tensors(output):
                token = self.token
                register_multi_grad_hook(tensors, lambda _: self.enter_backward(unit, token), mode="any")

        child.register_forward_pre_hook(before, with_kwargs=True)
        child.register_forward_hook(after)

    def cast(self, value):
        if isinstance(value, dict):
            return {key: self.cast(item) for key, item in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(self.cast(item) for item in value)
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.type(self.compute) if self.compute and is_float else value

    def shards(self):
        return [flat.shard for flat in self.flats if flat.shard.requires_grad]

    def perform(self, actions, backward, reshard):
        """Perform the actions. Yield each unit when it may compute, and free it when the caller comes back."""
        for action, unit in actions:
            if action == "gather":
                for flat in self.units[unit]:
                    flat.unshard()
            elif action == "reduce":
                self.finish_reduction()
                for flat in self.units[unit]:
                    flat.start_reduce()
                self.reducing = unit
            else:
                yield None  # what comes before a "compute" is done
                for flat in self.units[unit]:
                    flat.wait_for_unshard()
                yield unit
                for flat in self.units[unit] if backward or (unit and reshard) else ():
                    flat.reshard()
        yield None

    def start(self, backward):
        actions = plan_schedule(len(self.units), self.prefetch, backward)
        if backward and not self.reshard:
            actions = [action for action in actions if action[0] != "gather"]
        if backward and not self.require_grad_sync:
            actions = [action for action in actions if action[0] != "reduce"]
        self.running, self.now = self.perform(actions, backward, self.reshard), None
        next(self.running)

    def advance(self, unit, leave=False):
        """Perform actions until `unit` may compute, or has computed with `leave`. None: perform all."""
        if leave:
            if self.now == unit:
                self.now = next(self.running)
            return
        if self.now is not None:
            self.now = None
            next(self.running)
        for reached in self.running or ():
            if reached is not None and reached == unit:
                self.now = unit
                return

    def enter_backward(self, unit, token):
        self.begin_backward(token)
        self.advance(unit)
        if self.now != unit:
            raise RuntimeError("one forward, one backward")

    def begin_backward(self, token):
        if self.pending:
            self.pending, self.serving = False, token
            self.reduced, self.kept = self.require_grad_sync, not self.require_grad_sync
            self.busy = True
            self.start(backward=True)
        elif token is not self.serving:
            raise RuntimeError("one backward, one forward")

    def forward(self, *args, **kwargs):
        self.advance(None)
        if torch.is_grad_enabled() and self.reduced and self.require_grad_sync:
            raise RuntimeError("finish_grad_sync comes before the next forward")
        self.token, self.busy = (token := object()), False
        self.start(backward=False)
        self.advance(0)
        output = self.module(*self.cast(args), **self.cast(kwargs))
        self.advance(None)
        if torch.is_grad_enabled():
            self.pending = True
            if tensors := list_tensors(output):
                register_multi_grad_hook(tensors, lambda _: self.begin_backward(token), mode="any")
        elif not self.pending:
            self.free_all()
        return output

    def free_all(self):
        for flat in self.flats:
            flat.free()

    def finish_reduction(self):
        for flat in self.units[self.reducing] if self.reducing is not None else ():
            if flat.reduction:
                flat.finish_reduce()
                self.shard_reduced(flat.shard)
        self.reducing = None

    def shard_reduced(self, shard):
        pass

    def finish_grad_sync(self):
        if self.pending:
            self.begin_backward(None)
        self.advance(None)
        for unit in reversed(range(len(self.units))) if self.kept else ():
            self.finish_reduction()
            for flat in self.units[unit]:
                flat.start_reduce()
            self.reducing = unit
        self.finish_reduction()
        self.free_all()
        self.serving, self.reduced, self.kept = None, False, False

    def zero_grad(self, set_to_none=True):
        for parameter in [*self.module.parameters(), *self.shards()]:
            if parameter.grad is not None:
                parameter.grad = None if set_to_none else torch.zeros_like(parameter.grad)

    def clip_grad_norm_(self, max_norm):
        total = sum(shard.grad.double().pow(2).sum() for shard in self.shards())
        dist.all_reduce(total, group=self.process_group)
        norm = float(total) ** 0.5
        for shard in self.shards():
            shard.grad *= min(1.0, max_norm / norm)
        return norm
