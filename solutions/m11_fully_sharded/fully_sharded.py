"""Module 11: weights in shards (ZeRO stage 3; torch calls it FSDP).

Each rank keeps 1/N of all weights, gradients and optimizer state. Some submodules of the model are *units*. The rest of
the model is the *root* unit. A unit's full weights exist only from its gather until it has computed. There are three
actions:

    "gather"    all-gather the full weights of a unit from the shards of all ranks
    "compute"   run the unit's forward or backward, then free its full weights (the root's at the end of the pass)
    "reduce"    reduce-scatter the unit's full gradients; each rank keeps the average of its own shard

`plan_schedule` lists these actions in an order that is the same on all ranks. Hooks tell `FullyShardedDDP` how far this
rank has progressed, and `FlatShard` performs the actions.

Cost per step, with P bytes of weights on N ranks: each rank sends 3 P (N - 1) / N bytes, 1.5 times as many as in an
all-reduce, but the root is gathered only once. Memory for weights: P / N bytes of shards, the full root, and `prefetch`
+ 1 full units.
"""

from __future__ import annotations

import enum
import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m03_overlapped_ddp.overlapped_ddp import GradSyncMixin
from ..m05_grad_buffer.grad_buffer import plan_layout
from ..m06_coalesced.coalesced import all_gather, reduce_scatter
from ..m08_zero_optimizer.zero_optimizer import is_elementwise

ProcessGroup = dist.ProcessGroup | None  # None is the default group
UnitTypes = tuple[type[nn.Module], ...]


# ---- the plan: two pure functions


def plan_units(module: nn.Module, unit_types: UnitTypes) -> list[list[str]]:
    """Return the parameter names of each unit, as in `named_parameters()`. The first unit is the root.

    Each outermost submodule of one of these types is a unit; `module` itself is not. Units are in registration order.
    The root contains all other parameters, and all parameters that are registered under more than one name. The root is
    listed even if it is empty, but other units without parameters are omitted.
    """
    # `named_parameters(remove_duplicate=False)` yields a tied parameter under all its names. The names of a submodule's
    # parameters begin with the name of the submodule.
    ### BEGIN SOLUTION part (a)
    counts = Counter(parameter for _, parameter in module.named_parameters(remove_duplicate=False))
    prefixes: list[str] = []
    for name, submodule in module.named_modules():
        is_inside = name.startswith(tuple(prefixes))
        if name and isinstance(submodule, unit_types) and not is_inside:
            prefixes.append(name + ".")
    root: list[str] = []
    units: dict[str, list[str]] = {prefix: [] for prefix in prefixes}
    for name, parameter in module.named_parameters():
        prefix = next((prefix for prefix in prefixes if name.startswith(prefix)), None)
        (root if prefix is None or counts[parameter] > 1 else units[prefix]).append(name)
    return [root, *filter(None, units.values())]
    ### END SOLUTION


def plan_schedule(num_units: int, prefetch: int, backward: bool) -> list[tuple[str, int]]:
    """Return the actions of a forward or backward pass in order: tuples ("gather" | "compute" | "reduce", unit).

    Forward computes units 0 (the root) to `num_units` - 1, and backward computes them in reverse order. Each unit is
    gathered before it computes, as early as `prefetch` allows: while unit i computes, the next `prefetch` units are
    gathered too, but no later units. Backward reduces each unit after it has computed and before the next unit
    computes. The root is gathered only in forward, and stays gathered until the end of backward.
    """
    ### BEGIN SOLUTION part (b)
    order = list(range(num_units))[:: -1 if backward else 1]
    to_gather = deque(unit for unit in order if unit or not backward)
    schedule: list[tuple[str, int]] = []
    for position, unit in enumerate(order):
        while to_gather and to_gather[0] in order[: position + prefetch + 1]:
            schedule.append(("gather", to_gather.popleft()))
        if backward and position:
            schedule.append(("reduce", order[position - 1]))
        schedule.append(("compute", unit))
    return schedule + [("reduce", 0)] * backward
    ### END SOLUTION


# ---- a flat shard


class FlatShard:
    """Parameters of one unit and one dtype, all trainable or all frozen, in one flat tensor.

    `full`, of shape (numel,), has the layout of module 5 with a single bucket. The parameters are views of `full`.
    Rank r keeps part r of N equal parts in `shard`, of shape (numel / N,). The optimizer steps on `shard`. `full` has
    memory only between `start_gather` and `free`. Autograd saves views of `full`, so its storage is resized but never
    replaced. `full` and the parameters have the dtype `compute_dtype` (default: as before). `shard` and its gradient
    keep the parameters' original dtype. Gradients are averaged in `reduce_dtype` (default: the original dtype).
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        process_group: ProcessGroup,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
    ):
        self.params = list(params)
        self.process_group = process_group
        rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.layout = plan_layout([p.numel() for p in self.params], None, size)
        full = self.params[0].detach().new_zeros(self.layout.numel)  # in the parameters' dtype
        for parameter, view in zip(self.params, self.make_views(full)):
            view.copy_(parameter.data)
        self.reduce_dtype = reduce_dtype or full.dtype
        self.gather_handle: dist.Work | None = None  # of the all-gather in flight
        self.reduce_handle: dist.Work | None = None  # of the reduce-scatter in flight
        self.full_grad: Tensor | None = None  # (numel,), the input of the reduce-scatter
        self.grad_part: Tensor | None = None  # (numel / N,), the output of the reduce-scatter
        # Create `shard`, a copy of this rank's part of `full` that is trainable if the parameters are trainable. Create
        # `self.full`, the same tensor in `compute_dtype` if one is given. Set each parameter.data to its view of
        # `self.full`. Then free `self.full`.
        ### BEGIN SOLUTION part (c)
        self.shard = nn.Parameter(full.chunk(size)[rank].clone(), self.params[0].requires_grad)
        self.full = full.to(compute_dtype or full.dtype)
        for parameter, view in zip(self.params, self.make_views(self.full)):
            parameter.data = view
        self.free()
        ### END SOLUTION

    def make_views(self, flat: Tensor) -> list[Tensor]:
        """Return each parameter's part of a flat tensor, in the parameter's shape."""
        return [flat[start:end].view(p.shape) for p, (start, end) in zip(self.params, self.layout.param_ranges)]

    def start_gather(self) -> None:
        """Allocate the memory of `full` and start the all-gather, in the dtype of `full`, without waiting."""
        ### BEGIN SOLUTION part (d)
        self.full.untyped_storage().resize_(self.full.nbytes)
        part = self.shard.detach().to(self.full.dtype)
        self.gather_handle = all_gather(self.full, part, self.process_group, async_op=True)
        ### END SOLUTION

    def free(self) -> None:
        """Release the memory of `full`. A second call does nothing. No all-gather may be in flight."""
        ### BEGIN SOLUTION part (e)
        self.full.untyped_storage().resize_(0)
        ### END SOLUTION

    def start_reduce(self) -> None:
        """Move the parameters' gradients into one flat tensor of `reduce_dtype`. Start the reduce-scatter of averages.

        A gradient that is None counts as zeros. Afterwards parameter.grad is None. Frozen parameters have no gradients.
        """
        if not self.shard.requires_grad:
            return
        ### BEGIN SOLUTION part (f)
        self.full_grad = torch.zeros_like(self.full, dtype=self.reduce_dtype)
        for parameter, view in zip(self.params, self.make_views(self.full_grad)):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                parameter.grad = None
        self.grad_part = torch.empty_like(self.shard, dtype=self.reduce_dtype)
        self.reduce_handle = reduce_scatter(
            self.grad_part, self.full_grad, dist.ReduceOp.AVG, self.process_group, async_op=True
        )
        ### END SOLUTION

    def finish_reduce(self) -> None:
        """Wait for the reduce-scatter and add the average to shard.grad. Release the memory of the full gradients."""
        if not self.shard.requires_grad:
            return
        ### BEGIN SOLUTION part (g)
        self.reduce_handle.wait()
        part = self.grad_part.to(self.shard.dtype)
        self.shard.grad = part if self.shard.grad is None else self.shard.grad.add_(part)
        self.full_grad = self.grad_part = self.reduce_handle = None
        ### END SOLUTION

    def finish_gather(self) -> None:
        """Wait for the all-gather in flight, if there is one."""
        if self.gather_handle is not None:
            self.gather_handle.wait()
            self.gather_handle = None


def make_flat_shards(params: Sequence[nn.Parameter], *options: Any) -> list[FlatShard]:
    """Return the flat shards of one unit: one for each dtype, and separate ones for frozen parameters."""
    by_kind: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = defaultdict(list)
    for parameter in params:
        by_kind[parameter.dtype, parameter.requires_grad].append(parameter)
    return [FlatShard(group, *options) for group in by_kind.values()]


# ---- the wrapper


class Phase(enum.Enum):
    """What the wrapper is doing."""

    IDLE = enum.auto()
    FORWARD = enum.auto()
    DUE = enum.auto()  # a forward with gradients has ended, and its backward has not begun
    BACKWARD = enum.auto()


class FullyShardedDDP(GradSyncMixin, nn.Module):
    """Wrap a model. Each rank keeps 1/N of all weights, and full weights exist only while they are needed.

    Pass `shards()` to an elementwise torch optimizer, or use `make_optimizer`. Call `finish_grad_sync` before each
    step. All ranks must call the wrapper the same number of times, and run units in registration order. A rank may skip
    units. A backward belongs to one forward and runs once. Forwards without gradients may come at any time. Between
    steps, the model's own parameters have no memory: read them with `full_state_dict()`. From a forward to the end of
    its backward, the root stays gathered. Without `reshard_after_forward`, each unit stays gathered until it has
    computed in backward. While a unit computes, the next `prefetch` units are gathered.

    With a `compute_dtype`, weights are gathered and used in this dtype, and floating-point arguments of the wrapper and
    of each unit are cast to it. Shards, their gradients and the optimizer's state keep the parameters' dtype, in which
    gradients are averaged unless there is a `reduce_dtype`. Buffers and outputs are not cast.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_types: UnitTypes,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        process_group: ProcessGroup = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if prefetch < 0:
            raise ValueError(f"prefetch must be at least 0, but it is {prefetch}")
        if not any(isinstance(submodule, unit_types) for submodule in module.modules() if submodule is not module):
            raise ValueError(f"no submodule of {type(module).__name__} has one of the types {unit_types}")
        self.module = module
        self.reshard_after_forward = reshard_after_forward
        self.prefetch = prefetch
        self.process_group = process_group
        self.compute_dtype = compute_dtype
        broadcast_module_state(module, process_group)
        named = dict(module.named_parameters())
        plan = plan_units(module, unit_types)
        if sorted(named) != sorted(name for names in plan for name in names):
            raise ValueError("plan_units must return the name of every parameter exactly once")
        options = process_group, compute_dtype, reduce_dtype
        self.units = [make_flat_shards([named[name] for name in names], *options) for names in plan]
        self.schedule: deque[tuple[str, int]] = deque()  # the remaining actions of this forward or backward
        self.current: int | None = None  # the unit that is computing
        self.reducing: list[FlatShard] = []  # the flat shards whose reduction is in flight
        self.phase = Phase.IDLE
        self.num_forwards = 0
        self.backward_of = 0  # the number of the forward to which the latest backward belongs
        self.has_accumulated = False  # whether full gradients of a backward in no_sync are in p.grad
        self.register_hooks({named[name]: unit for unit, names in enumerate(plan) for name in names}, unit_types)

    def shards(self) -> list[nn.Parameter]:
        """Return this rank's trainable flat parameters."""
        return [flat.shard for flat in itertools.chain(*self.units) if flat.shard.requires_grad]

    def make_optimizer(self, optimizer_cls: type[Optimizer], **defaults: Any) -> Optimizer:
        """Return an optimizer of this class for `shards()`. Raise ValueError unless the class is elementwise."""
        shards = self.shards()
        if not is_elementwise(optimizer_cls, defaults, shards[0].device):
            raise ValueError(f"{optimizer_cls.__name__} cannot step on shards, because it is not elementwise")
        return optimizer_cls(shards, **defaults)

    def register_hooks(self, unit_of: dict[nn.Parameter, int], unit_types: UnitTypes) -> None:
        """Register hooks on each unit and each submodule with parameters of its own. The hooks only call methods."""
        outermost = ""
        for name, submodule in self.module.named_modules():
            is_inside = bool(outermost) and name.startswith(outermost)
            is_unit = bool(name) and isinstance(submodule, unit_types) and not is_inside
            outermost = f"{name}." if is_unit else outermost
            for unit in {unit_of[parameter] for parameter in submodule.parameters(recurse=is_unit)}:
                is_whole = is_unit and unit != 0
                submodule.register_forward_pre_hook(
                    partial(self.before_forward, unit, name, is_whole), with_kwargs=True
                )
                submodule.register_forward_hook(partial(self.after_forward, unit, is_whole))

    def before_forward(self, unit: int, name: str, is_whole: bool, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Prepare the forward of a unit (`is_whole`), or of its submodule `name`. Return the arguments to use."""
        self.enter_forward(unit, name)
        if is_whole:  # backward has left the unit when it has computed the gradient of an input
            call_in_backward((args, kwargs), partial(self.leave, unit))
            return self.cast_inputs(args, kwargs)

    def after_forward(self, unit: int, is_whole: bool, _: nn.Module, args: Any, output: Any) -> None:
        """Leave the forward of a unit. Backward enters the unit when it has computed the gradient of `output`."""
        if unit != 0 and self.phase is Phase.FORWARD:  # the root is always gathered
            call_in_backward(output, partial(self.enter_backward, self.num_forwards, unit))
            if is_whole:
                self.leave(unit)

    def forward(self, *args, **kwargs):
        self.reach(None)  # what a forward or a backward has left that ended with an exception
        is_due = self.phase is Phase.DUE  # then this forward comes between another forward and its backward
        self.phase = Phase.FORWARD
        self.num_forwards += 1
        # Create the schedule of this forward, start its first gathers, and wait for the root.
        ### BEGIN SOLUTION part (h)
        self.schedule.extend(plan_schedule(len(self.units), self.prefetch, backward=False))
        self.perform_next()
        self.reach(0)
        ### END SOLUTION
        args, kwargs = self.cast_inputs(args, kwargs)
        try:
            output = self.module(*args, **kwargs)
            self.reach(None)
        finally:
            self.phase = Phase.DUE if is_due else Phase.IDLE
        if torch.is_grad_enabled():
            self.phase = Phase.DUE
            call_in_backward(output, partial(self.enter_backward, self.num_forwards))
        if self.phase is Phase.IDLE:
            self.free_all()
        return output

    def cast_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a forward. Floating-point tensors get the dtype `compute_dtype`, if there is one."""
        if self.compute_dtype is None:
            return args, kwargs
        ### BEGIN SOLUTION part (o)

        def cast(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(self.compute_dtype) if is_float else value

        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
        ### END SOLUTION

    def enter_forward(self, unit: int, name: str) -> None:
        """Prepare the forward of a unit, or of its submodule `name`."""
        if self.phase not in (Phase.FORWARD, Phase.BACKWARD):
            raise RuntimeError(f"call the wrapper, not {name or 'the model'}: only the wrapper gathers weights")
        if unit in (0, self.current):  # the root is always gathered, and the current unit calls its submodules
            return
        if self.phase is Phase.BACKWARD:
            raise RuntimeError(f"backward computes {name} again, but not while it runs the backward of its unit")
        if ("compute", unit) not in self.schedule:
            raise RuntimeError(f"{name} is called again, or after a later unit: its weights are freed")
        self.reach(unit)

    def enter_backward(self, forward: int, unit: int = 0) -> None:
        """Prepare the backward of a unit. A hook on the output of the unit, in forward number `forward`, calls this."""
        if self.phase is Phase.DUE:
            self.backward_of = forward
            self.begin_backward()
            Variable._execution_engine.queue_callback(self.end_backward)  # for the end of this backward
        if self.phase is not Phase.BACKWARD or forward != self.backward_of:
            raise RuntimeError("this backward belongs to an earlier or to a second forward: the weights are freed")
        if ("compute", unit) in self.schedule and unit != 0:
            self.reach(unit)

    def begin_backward(self) -> None:
        """Create the schedule of a backward, and start its first gathers."""
        self.reach(None)
        self.phase = Phase.BACKWARD
        self.has_accumulated = not self.require_grad_sync  # otherwise this backward reduces all gradients in p.grad
        # Which actions must a backward omit inside no_sync? Which actions must it omit without reshard_after_forward?
        ### BEGIN SOLUTION part (i)
        actions = plan_schedule(len(self.units), self.prefetch, backward=True)
        if not self.reshard_after_forward:
            actions = [action for action in actions if action[0] != "gather"]
        if not self.require_grad_sync:
            actions = [action for action in actions if action[0] != "reduce"]
        self.schedule.extend(actions)
        self.perform_next()
        ### END SOLUTION

    def end_backward(self) -> None:
        """Perform the remaining actions of a backward: skip the units that are left, and free the root."""
        self.reach(None)
        self.phase = Phase.IDLE

    def reach(self, unit: int | None) -> None:
        """Perform the actions up to ("compute", unit), or all actions if `unit` is None. Make `unit` current.

        This rank skips the units in between. It gathers, frees and reduces them as the other ranks do.
        """
        # When there is no current unit, the first remaining action is always a "compute".
        ### BEGIN SOLUTION part (j)
        self.leave(self.current)
        while self.schedule:
            action, index = self.schedule.popleft()
            self.perform(action, index)
            self.current = index
            if index == unit:
                return
            self.leave(index)
        ### END SOLUTION

    def leave(self, unit: int | None) -> None:
        """If `unit` is the current unit, free it, then perform the actions before the next "compute".

        During forward, do not free weights that the corresponding backward uses without gathering them again.
        """
        ### BEGIN SOLUTION part (k)
        if unit is None or unit != self.current:
            return
        self.current = None
        if self.phase is Phase.BACKWARD or (unit != 0 and self.reshard_after_forward):
            self.free(unit)
        self.perform_next()
        ### END SOLUTION

    def perform_next(self) -> None:
        """Perform the actions before the next "compute". None of them waits for the collective that it starts."""
        while self.schedule and self.schedule[0][0] != "compute":
            self.perform(*self.schedule.popleft())

    def perform(self, action: str, unit: int) -> None:
        """Perform one action. For "compute", wait for the unit's weights. At most one reduction is in flight."""
        ### BEGIN SOLUTION part (l)
        if action == "reduce":
            self.finish_reduce()
            self.reducing = self.units[unit]
        for flat in self.units[unit]:
            if action == "gather":
                flat.start_gather()
            elif action == "compute":
                flat.finish_gather()
            else:
                flat.start_reduce()
        ### END SOLUTION

    def free(self, unit: int) -> None:
        """Free the full weights of a unit."""
        for flat in self.units[unit]:
            flat.free()

    def free_all(self) -> None:
        """Free the full weights of all units, also those that a discarded forward has gathered."""
        for unit in range(len(self.units)):
            self.free(unit)

    def finish_reduce(self) -> None:
        """Wait for the reduction in flight, if there is one."""
        for flat in self.reducing:
            flat.finish_reduce()
            if flat.shard.requires_grad:
                self.shard_reduced(flat.shard)
        self.reducing = []

    def shard_reduced(self, shard: nn.Parameter) -> None:
        """Do nothing. A subclass can use `shard.grad`, which is complete: this is called after each reduction."""

    def finish_grad_sync(self) -> None:
        """Reduce what is not reduced. Then `shards()` have averaged gradients, and all full weights are freed."""
        if self.phase is Phase.DUE:  # this rank has not run the backward that other ranks have run
            self.begin_backward()
        self.end_backward()
        # If the last backward was in no_sync, reduce all units. Then wait for the last reduction.
        ### BEGIN SOLUTION part (m)
        if self.has_accumulated:
            self.schedule.extend(("reduce", unit) for unit in reversed(range(len(self.units))))
            self.perform_next()
            self.has_accumulated = False
        self.finish_reduce()
        ### END SOLUTION
        self.free_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of `shards()`, and the full gradients that no_sync has accumulated."""
        super().zero_grad(set_to_none)
        for shard in self.shards():
            shard.grad = None if set_to_none or shard.grad is None else shard.grad.zero_()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to a global 2-norm of at most `max_norm`. Return the old norm in fp64."""
        grads = [shard.grad for shard in self.shards()]
        # Use the factor of torch.nn.utils.clip_grad_norm_: max_norm / (norm + 1e-6), but at most 1.
        ### BEGIN SOLUTION part (n)
        squares = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float64) for g in grads]).square().sum()
        dist.all_reduce(squares, group=self.process_group)
        norm = squares.sqrt()
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for grad in grads:
            grad.mul_(factor)
        return norm
        ### END SOLUTION

    # ---- checkpoints

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Any]:
        """Return the plain module's state dict on the CPU. Call it on every rank, because it gathers each unit."""
        weights = {}
        for flat in itertools.chain(*self.units):
            full = flat.shard.new_empty(flat.layout.numel)  # in the dtype of the shard, not in `compute_dtype`
            all_gather(full, flat.shard.detach(), self.process_group)
            weights |= {p: view.to("cpu", copy=True) for p, view in zip(flat.params, flat.make_views(full))}
        state = self.module.state_dict()
        state |= {name: weights[p] for name, p in self.module.named_parameters(remove_duplicate=False)}
        buffers = self.module.named_buffers(remove_duplicate=False)
        state |= {name: buffer.to("cpu", copy=True) for name, buffer in buffers if name in state}
        return state

    @torch.no_grad()
    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a plain module's state dict. Every rank passes the full dict. Raise ValueError if it does not fit."""
        named = dict(self.module.named_parameters(remove_duplicate=False))
        wrong = state.keys() ^ self.module.state_dict().keys()
        wrong |= {name for name, p in named.items() if name in state and state[name].shape != p.shape}
        if wrong:
            raise ValueError(f"the state dict does not fit the model: look at {', '.join(sorted(wrong))}")
        values = {parameter: state[name] for name, parameter in named.items()}
        for flat in itertools.chain(*self.units):
            full = flat.shard.new_zeros(flat.layout.numel)
            for parameter, view in zip(flat.params, flat.make_views(full)):
                view.copy_(values[parameter])
            flat.shard.copy_(full.view(-1, flat.shard.numel())[dist.get_rank(self.process_group)])
        self.module.load_state_dict({name: state[name] for name in state if name not in named}, strict=False)

    def state_dict(self, *args, **kwargs):
        raise RuntimeError("the weights are in shards: call full_state_dict() on every rank")

    def load_state_dict(self, *args, **kwargs):
        raise RuntimeError("the weights are in shards: call load_full_state_dict(state) on every rank")


def call_in_backward(values: Any, function: Callable[[], None]) -> None:
    """Call a function when backward has computed the gradient of a tensor in nested dicts, lists and tuples."""
    if isinstance(values, Tensor):
        if values.grad_fn is not None:
            values.register_hook(lambda _: function())
    elif isinstance(values, (dict, list, tuple)):
        for value in values.values() if isinstance(values, dict) else values:
            call_in_backward(value, function)
