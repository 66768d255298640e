"""Module 11: weights in shards (ZeRO stage 3; torch calls it FSDP).

Each rank keeps 1/N of all weights, gradients and optimizer state. Some submodules of the model are *units*. The rest of
the model is the *root* unit. A unit's full weights exist only from its gather until it has computed. There are three
actions:

    "gather"    all-gather the full weights of a unit from the shards of all ranks
    "compute"   run the unit's forward or backward, then free its full weights (the root's at the end of the pass)
    "reduce"    reduce-scatter the unit's full gradients; each rank keeps the average of its own shard

`plan_schedule` lists these actions in an order that is the same on all ranks. `UnitHooks` (given) tells how far this
rank has come, `FullyShardedDDP` which actions are due, and `FlatShard` performs them.

Cost per step, with P bytes of weights on N ranks: each rank sends 3 P (N - 1) / N bytes, 1.5 times as many as in an
all-reduce, but the root is gathered only once. Memory for weights: P / N bytes of shards, the full root, and `prefetch`
+ 1 full units.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..m01_naive_ddp.refusals import ShardGrad
from .plan import plan_schedule
from .plan import plan_units as plan_units  # `UnitHooks` calls it
from .unit_hooks import Phase, UnitHooks


class FullyShardedDDP(UnitHooks):
    """Perform the actions of a schedule. `UnitHooks` says what the wrapper promises, and what it needs."""

    def begin_forward(self) -> None:
        """Start a pass with the schedule of a forward, and wait for the root."""
        ### BEGIN SOLUTION part (f)
        self.start_pass(Phase.FORWARD, plan_schedule(len(self.units), self.prefetch, backward=False))
        self.reach(0)
        ### END SOLUTION

    def reach(self, unit: int | None) -> None:
        """Perform the actions up to ("compute", unit), or all actions if `unit` is None. Make `unit` current.

        "compute" waits for the unit's weights. This rank skips the units in between: it gathers, awaits, frees and
        reduces them as the other ranks do.
        """
        # After `leave`, the first action that remains is the next "compute".
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

        A forward keeps the weights that its backward uses without another gather.
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
        # Afterwards, no reduction is postponed or in flight.
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
