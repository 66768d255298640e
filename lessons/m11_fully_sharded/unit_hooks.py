"""Given: the hooks of module 11's wrapper, which follow its passes, and refuse what breaks a schedule."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from ..m01_naive_ddp.naive_ddp import broadcast_module_state
from ..m01_naive_ddp.refusals import (
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
from .plan import UnitTypes, plan_units

# What the wrapper is doing. DUE: a forward with gradients has ended, and its backward has not begun.
Phase = enum.Enum("Phase", ("IDLE", "FORWARD", "DUE", "BACKWARD"))


class UnitHooks(ShardedCheckpoints, GradSyncMixin, Wrapper):
    """Wrap a model. Each rank keeps 1/N of all weights, and full weights exist only while they are needed.

    Pass `shards()` to an elementwise torch optimizer. Call `finish_grad_sync` before each step; after it, `p.grad` is
    None for all parameters of the model. Several finishes add up in the gradients of `shards()`, until `zero_grad`.
    Inside `no_sync`, full gradients add up in `p.grad`, and the next finish reduces them. All ranks run the same
    backwards inside it. Clip with this wrapper's `clip_grad_norm_`: torch's raises RuntimeError.

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

    # The methods of `FullyShardedDDP`, which perform the schedule.
    begin_forward: Callable[[], None]
    begin_backward: Callable[[], None]
    reach: Callable[[int | None], None]
    leave: Callable[[int | None], None]
    perform_next: Callable[[], None]
    cast_inputs: Callable[[tuple, dict[str, Any]], tuple[tuple, dict[str, Any]]]

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
        self.begin_forward()
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
