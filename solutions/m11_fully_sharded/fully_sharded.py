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
from collections import deque
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m01_naive_ddp.refusals import (
    ShardGrad,
    Wrapper,
    call_in_backward,
    find_tensors,
    queue_callback,
    require_own_memory,
    require_range,
)
from ..m03_overlapped_ddp.overlapped_ddp import GradSyncMixin
from .checkpoint import ShardedCheckpoints
from .flat_shard import DType, ProcessGroup, make_flat_shards
from .plan import UnitTypes, plan_schedule, plan_units

# What the wrapper is doing. DUE: a forward with gradients has ended, and its backward has not begun.
Phase = enum.Enum("Phase", ("IDLE", "FORWARD", "DUE", "BACKWARD"))


class FullyShardedDDP(ShardedCheckpoints, GradSyncMixin, Wrapper):
    """Wrap a model. Each rank keeps 1/N of all weights, and full weights exist only while they are needed.

    Pass `shards()` to an elementwise torch optimizer. Call `finish_grad_sync` before each step; after it, `p.grad` is
    None for all parameters of the model. Several finishes add up in the gradients of `shards()`, until `zero_grad`.
    Inside `no_sync`, full gradients add up in `p.grad`, and the next finish reduces them. All ranks run the same
    backwards inside it. Clip with this wrapper's `clip_grad_norm_`: torch's finds no gradients in the model, and
    raises RuntimeError for those of `shards()`.

    All ranks must call the wrapper the same number of times, and run units, as modules, in registration order. A rank
    may skip units, or a backward outside `no_sync`, but it must call the finish. A backward belongs to one forward and
    runs once; other backwards raise RuntimeError. Forwards without gradients may come at any time, and free units in
    the same way. From a forward to the end of its backward, the root stays gathered. Without `reshard_after_forward`,
    each unit stays gathered until it has computed in backward. While a unit computes, the next `prefetch` units are
    gathered. Use one activation checkpoint per unit, or for a part of a unit.

    A unit returns tensors, or nested dicts, lists, tuples or dataclasses of them, because backward finds its way by
    these tensors. Other objects raise TypeError. It may also keep such tensors in attributes. Between steps, the
    model's own parameters have no memory, and whatever reads, writes or copies them raises RuntimeError: use
    `full_state_dict()` and `load_full_state_dict(state)`. In forward and backward, they are copies of the shards, so
    code that writes into them raises it, too; a write through `p.data` is lost unseen. After a step that raised an
    exception, call `finish_grad_sync` and then `zero_grad`. To skip a step after micro-batches in `no_sync`, call this
    wrapper's `zero_grad`. A `torch.amp.GradScaler` gets the same answer on all ranks. Put only one forward into a block
    of `torch.autocast`: a weight that an evaluation has cast there gets its gradient too late, after its reduction.

    With a `compute_dtype`, weights are gathered and used in this dtype, and floating-point arguments of the wrapper and
    of each unit are cast to it, keyword arguments too. Shards, their gradients and the optimizer's state keep the
    parameters' dtype, in which gradients are averaged unless there is a `reduce_dtype`, and in which those of
    micro-batches add up. Buffers, integer parameters and outputs are not cast.
    """

    def __init__(
        self,
        module: nn.Module,
        unit_types: UnitTypes,
        reshard_after_forward: bool = True,
        prefetch: int = 1,
        process_group: ProcessGroup = None,
        compute_dtype: DType = None,
        reduce_dtype: DType = None,
    ):
        super().__init__(module, process_group)
        outermost = [(name, part) for name, part in module.named_modules() if name and isinstance(part, unit_types)]
        if prefetch < 0 or not outermost:
            raise ValueError(f"need prefetch >= 0, and submodules of the types {unit_types}: {prefetch=}, {outermost=}")
        self.reshard_after_forward, self.prefetch = reshard_after_forward, prefetch
        self.compute_dtype = compute_dtype
        require_range([reduce_dtype])
        require_own_memory(module.parameters())
        broadcast_module_state(module, process_group)
        plan, options = plan_units(module, unit_types), (process_group, compute_dtype, reduce_dtype)
        self.units = [make_flat_shards(map(module.get_parameter, names), *options) for names in plan]
        self.flats = [flat for unit in self.units for flat in unit]
        self.schedule: deque[tuple[str, int]] = deque()  # the remaining actions of this forward or backward
        self.current: int | None = None  # the unit that is computing
        self.origins: dict[int, set[Any]] = {}  # the autograd nodes of the inputs of each unit that runs in forward
        self.phase = Phase.IDLE
        self.postponed: list[tuple[str, int]] = []  # the reductions that the last backward left out, in no_sync
        self.parameters_of_shards = nn.ParameterList(flat.shard for flat in self.flats)  # for zero_grad
        for unit, names in enumerate(plan):
            owner = next(part for name, part in outermost if names[0].startswith(f"{name}.")) if unit else module
            owner.register_forward_pre_hook(partial(self.pre_forward, unit), with_kwargs=True)
            owner.register_forward_hook(partial(self.post_forward, unit))
            for parameter in map(module.get_parameter, names if unit else ()):
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(partial(self.require_in_time, unit))
        self.mark_parameters()

    def shards(self) -> list[nn.Parameter]:
        """Return this rank's trainable flat parameters."""
        return [flat.shard for flat in self.flats if flat.shard.requires_grad]

    # ---- passes

    def forward(self, *args, **kwargs):
        if self.phase is Phase.BACKWARD or (self.phase is Phase.FORWARD and self.postponed):
            raise RuntimeError("a step that raised has left gradients: call finish_grad_sync first, then zero_grad")
        is_due = torch.is_grad_enabled() or self.phase is Phase.DUE  # then a backward needs the root
        # Start a pass with the schedule of a forward, and wait for the root.
        ### BEGIN SOLUTION part (f)
        self.start_pass(Phase.FORWARD, plan_schedule(len(self.units), self.prefetch, backward=False))
        self.reach(0)
        ### END SOLUTION
        output = self.module(*args, **kwargs)
        self.end_pass(Phase.DUE if is_due else Phase.IDLE)
        return output

    def start_pass(self, phase: Phase, actions: Iterable[tuple[str, int]]) -> None:
        """Complete what an exception has left of an earlier pass. Then start the first gathers of a new one."""
        self.reach(None)
        self.phase = phase
        self.schedule.extend(actions)
        self.perform_next()

    def end_pass(self, phase: Phase) -> None:
        """Perform the remaining actions, so that units are skipped. Free all full weights if no backward is due."""
        self.reach(None)
        self.phase = phase
        if phase is Phase.IDLE:
            for flat in self.flats:
                flat.reshard()

    def reach(self, unit: int | None) -> None:
        """Perform the actions up to ("compute", unit), or all actions if `unit` is None. Make `unit` current.

        "compute" waits for the unit's weights. This rank skips the units in between: it gathers, awaits, frees and
        reduces them as the other ranks do.
        """
        # Leaving a unit performs all actions before the next "compute", which is then the first action that is left.
        ### BEGIN SOLUTION part (g)
        self.leave(self.current)
        while self.schedule:
            _, self.current = self.schedule.popleft()
            for flat in self.units[self.current]:
                flat.wait_for_unshard()
            if self.current == unit:
                return
            self.leave(self.current)
        ### END SOLUTION

    def leave(self, unit: int | None) -> None:
        """If `unit` is the current unit, free it, then perform the actions before the next "compute".

        During forward, do not free weights that the corresponding backward uses without gathering them again.
        """
        ### BEGIN SOLUTION part (h)
        if unit is None or unit != self.current:
            return
        self.current = None
        if self.phase is Phase.BACKWARD or (unit != 0 and self.reshard_after_forward):
            for flat in self.units[unit]:
                flat.reshard()
        self.perform_next()
        ### END SOLUTION

    def perform_next(self) -> None:
        """Perform the actions before the next "compute". None of them waits for the collective that it starts.

        At most one unit's reduction is in flight: wait for it before the next one starts.
        """
        ### BEGIN SOLUTION part (i)
        while self.schedule and self.schedule[0][0] != "compute":
            action, unit = self.schedule.popleft()
            if action == "reduce":
                self.finish_reduce()
            for flat in self.units[unit]:
                flat.unshard() if action == "gather" else flat.start_reduce()
        ### END SOLUTION

    def begin_backward(self) -> None:
        """Create the schedule of a backward, and start its first gathers."""
        # Which actions must a backward omit without reshard_after_forward? Which does it postpone inside no_sync, for
        # the finish? A backward outside no_sync reduces everything that is in p.grad.
        ### BEGIN SOLUTION part (l)
        actions = plan_schedule(len(self.units), self.prefetch, backward=True)
        actions = [action for action in actions if action[0] != "gather" or self.reshard_after_forward]
        self.postponed = [action for action in actions if action[0] == "reduce" and not self.require_grad_sync]
        self.start_pass(Phase.BACKWARD, [action for action in actions if action not in self.postponed])
        ### END SOLUTION

    def finish_reduce(self) -> None:
        """Wait for the reductions in flight: those of one unit, if there are any."""
        for flat in (flat for flat in self.flats if flat.reduction):
            flat.finish_reduce()
            self.shard_reduced(flat.shard)

    def shard_reduced(self, shard: nn.Parameter) -> None:
        """Do nothing. Module 14 overrides this method. Keep it, and the call above, if you write this class again.

        It is called once for each reduction, right after the average has been added to `shard.grad`, for unit i >= 3
        before unit i - 2's first gradient. It is never called for frozen shards, or inside `no_sync`.
        """

    # ---- between backward and the optimizer's step

    def finish_grad_sync(self) -> None:
        """Reduce what is not reduced. Then `shards()` have averaged gradients, and all full weights are freed."""
        self.require_same_parameters()
        if self.phase is Phase.DUE:  # this rank has not run the backward that other ranks have run
            self.begin_backward()
        self.end_pass(Phase.IDLE)
        # Perform the reductions that a backward in no_sync has postponed. Then wait for the last reduction.
        ### BEGIN SOLUTION part (m)
        self.schedule.extend(self.postponed)
        self.postponed = []
        self.perform_next()
        self.finish_reduce()
        ### END SOLUTION
        for flat in self.flats:
            if (grad := flat.shard.grad) is not None:
                grad.__class__, grad.process_group = ShardGrad, flat.process_group

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale the gradients to a global 2-norm of at most `max_norm`. Return the old norm in fp64."""
        for shard in self.shards():
            shard.grad.__class__ = Tensor  # instead of ShardGrad, which has no norm
        # torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm) scales, as module 8's part (e) does.
        ### BEGIN SOLUTION part (n)
        squares = sum(torch.linalg.vector_norm(shard.grad, dtype=torch.float64).square() for shard in self.shards())
        dist.all_reduce(squares, group=self.process_group)
        torch.nn.utils.clip_grads_with_norm_(self.shards(), max_norm, squares.sqrt())
        return squares.sqrt()
        ### END SOLUTION

    def cast_inputs(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Return the arguments of a forward. Floating-point tensors get the dtype `compute_dtype`."""
        ### BEGIN SOLUTION part (o)

        def cast(value: Any) -> Any:
            is_float = isinstance(value, Tensor) and value.is_floating_point()
            return value.to(self.compute_dtype) if is_float else value

        return tuple(map(cast, args)), {name: cast(value) for name, value in kwargs.items()}
        ### END SOLUTION

    # ---- hooks: how far forward and backward have come; torch.compile does not compile them

    @torch.compiler.disable
    def pre_forward(self, unit: int, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple:
        """Prepare the forward of a unit, also if backward computes it again. Return the arguments to use."""
        if unit != self.current:
            name = type(module).__name__
            if self.phase not in (Phase.FORWARD, Phase.BACKWARD):
                raise RuntimeError(f"{name} runs outside ddp(x)")
            if ("compute", unit) not in self.schedule:
                raise RuntimeError(
                    "a unit runs once per forward, in registration order, and is alone in its activation checkpoint: "
                    f"{name} runs again or too late"
                )
            self.reach(unit)  # in backward: a checkpoint computes the unit again before its output has a gradient
        tensors = find_tensors((args, kwargs))
        call_in_backward(tensors, partial(self.leave, unit))
        if self.phase is Phase.FORWARD:
            self.origins[unit] = {tensor.grad_fn for tensor in tensors}
        return self.cast_inputs(args, kwargs) if self.compute_dtype else (args, kwargs)

    @torch.compiler.disable
    def post_forward(self, unit: int, module: nn.Module, args: tuple, output: Any) -> None:
        """Leave a unit after its forward, but not if backward computes the unit again."""
        if self.phase is Phase.FORWARD:
            tensors = find_tensors(output, is_strict=unit != 0 and torch.is_grad_enabled())
            for part in module.modules() if unit else ():  # a unit may also keep tensors, such as self.aux_loss
                tensors += find_tensors([value for name, value in vars(part).items() if name[0] != "_"])
            passed_on = self.origins.pop(unit, set())  # what a unit returns as it is needs no weights in backward
            tensors = [tensor for tensor in tensors if tensor.grad_fn not in passed_on]
            call_in_backward(tensors, partial(self.pre_backward, unit))
            self.leave(unit)

    def pre_backward(self, unit: int) -> None:
        """Prepare the backward of a unit. The first call in a backward comes from the last unit or from the root."""
        if torch.is_grad_enabled():
            raise RuntimeError("create_graph=True needs the weights again in a second backward, but they are freed")
        if self.phase is Phase.DUE:
            self.begin_backward()
            queue_callback(partial(self.end_pass, Phase.IDLE))
        if self.phase is not Phase.BACKWARD or (unit != self.current and ("compute", unit) not in self.schedule):
            raise RuntimeError(
                "this backward belongs to an earlier or to a second forward, or is the second one of its forward: the "
                "weights are freed"
            )
        if unit not in (0, self.current):
            self.reach(unit)

    def require_in_time(self, unit: int, _: nn.Parameter) -> None:
        """Refuse a gradient that comes after its unit has computed in backward, and perhaps has been reduced."""
        if self.phase is Phase.BACKWARD and unit != self.current:
            raise RuntimeError("a gradient came after its unit had computed: put one forward into a block of autocast")
