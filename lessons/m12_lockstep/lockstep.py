"""Module 12: a training loop for ranks whose data are unequal.

The wrappers of modules 4 to 7 average gradients over the ranks. That is what one process would compute only if every
rank has equally many tokens, and a batch in every step. Real sequences have different lengths, so this module

1. assigns sequences to ranks so that no rank has much more work than the others (`assign_sequences`),
2. weights every token equally, wherever it is (`LockstepLoop.step`),
3. skips a step on all ranks if the gradient or the loss is not finite on any of them,
4. ends on all ranks after the same step, although their data run out at different times (`LockstepLoop.run`).

Cost per step: two small all-reduces, of at most 16 bytes each. Everything else is the wrapper's and the optimizer's.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from ..m04_bucketed_ddp.bucketed_ddp import BucketedDDP
from ..m05_grad_buffer.grad_buffer import BufferedDDP
from ..m06_coalesced.coalesced import CoalescedDDP
from ..m07_cached_shards.cached_shards import CachedDDP
from ..m08_zero_optimizer.zero_optimizer import ZeroOptimizer

IGNORED = -100  # the target of a position that must not be learnt, such as padding
WRAPPERS = (BucketedDDP, BufferedDDP, CoalescedDDP, CachedDDP)

MicroBatch = tuple[Tensor, Tensor]  # inputs and targets


@dataclass(frozen=True)
class StepResult:
    """What a step did, equal on every rank. `loss` is the mean over all tokens; NaN if there is no token."""

    loss: float
    num_tokens: int
    is_skipped: bool


def count_tokens(targets: Tensor) -> int:
    """Return the number of targets that are not IGNORED."""
    return int((targets != IGNORED).sum())


def sum_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the sum of the cross entropies of all targets that are not IGNORED.

    `targets` contains class numbers. `outputs` has one more dimension, the last one, with a number per class.
    """
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def assign_sequences(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Return, for each rank, the indices of its sequences. `lengths` are their numbers of tokens.

    Every index is on one rank, also that of an empty sequence. No rank has more tokens than the mean over the ranks
    plus the longest sequence. All ranks call this function and get the same result without communication.
    """
    # TODO: part (a)
    raise NotImplementedError("module 12, part (a)")


class LockstepLoop:
    """Train `ddp.module` with one optimizer, in the same steps on all ranks of `ddp.process_group`.

    `ddp` is a wrapper of modules 4 to 7. The optimizer is a torch optimizer or, for a wrapper of module 6 or 7, a
    `ZeroOptimizer`. If there is a `max_norm`, gradients are clipped to this global 2-norm.
    """

    def __init__(self, ddp: nn.Module, optimizer: Optimizer, max_norm: float | None = None):
        if not isinstance(ddp, WRAPPERS):
            names = ", ".join(wrapper.__name__ for wrapper in WRAPPERS)
            raise ValueError(f"LockstepLoop needs a wrapper of modules 4 to 7 ({names}), not {type(ddp).__name__}")
        if not getattr(ddp, "gather_grads", True) and not isinstance(optimizer, ZeroOptimizer):
            raise ValueError(f"{type(ddp).__name__} keeps gradients in shards: LockstepLoop needs its ZeroOptimizer")
        self.ddp = ddp
        self.optimizer = optimizer
        self.max_norm = max_norm

    def sum_over_ranks(self, values: Sequence[float], dtype: torch.dtype) -> list[float]:
        """Return the sum of each of these numbers over the group, with one all-reduce in `dtype`."""
        # TODO: part (b)
        raise NotImplementedError("module 12, part (b)")

    def step(self, micro_batches: Sequence[MicroBatch]) -> StepResult:
        """Train on the micro-batches of all ranks. This rank's list may be empty, or contain only IGNORED targets.

        The gradient is that of the sum of all token losses, of all ranks and micro-batches, divided by the number of
        these tokens. If there is no token, or if the reduced gradient or the loss is NaN or infinite, the optimizer
        does not step on any rank: weights and optimizer state stay as they are, and the gradients are cleared. A finite
        gradient is used, however large it is: its norm is computed in float64, because 1e20 squared is too large for
        float32.
        """
        [num_tokens] = self.sum_over_ranks([sum(count_tokens(targets) for _, targets in micro_batches)], torch.int64)
        return self.train(micro_batches, num_tokens)

    def train(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> StepResult:
        """Take the step, as `step` describes it, if all ranks together have `num_tokens` tokens."""
        self.optimizer.zero_grad()
        if num_tokens == 0:
            return StepResult(math.nan, 0, True)
        loss_sum = self.compute_gradients(micro_batches, num_tokens)
        is_skipped, loss = self.decide(loss_sum, num_tokens)
        if is_skipped:
            self.optimizer.zero_grad()
        else:
            self.optimizer.step()
        return StepResult(loss, num_tokens, is_skipped)

    def compute_gradients(self, micro_batches: Sequence[MicroBatch], num_tokens: int) -> float:
        """Run forward and backward on this rank's micro-batches, and finish. Return the sum of their token losses.

        Afterwards, the gradient is that of the mean over all `num_tokens` tokens of all ranks. The wrapper reduces
        once, beginning in the last backward.
        """
        # The wrapper divides the sum over the ranks by the number of ranks. A rank without micro-batches must take part
        # in its collectives all the same.
        # TODO: part (c)
        raise NotImplementedError("module 12, part (c)")

    def decide(self, loss_sum: float, num_tokens: int) -> tuple[bool, float]:
        """Clip the gradients. Return whether all ranks skip the step, and the loss, with this rank's sum of losses."""
        # The norm of all gradients, in float64, is finite only if each of them is. A rank cannot see all gradients if
        # the optimizer is a ZeroOptimizer, but the optimizer's own clip_grad_norm_ returns this norm. Otherwise,
        # torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm) scales. A max_norm of infinity does not clip.
        # TODO: part (d)
        raise NotImplementedError("module 12, part (d)")

    def run(self, batches: Iterable[MicroBatch], micro_batches: int = 1) -> list[StepResult]:
        """Train on every batch of this rank's iterable, up to `micro_batches` of them per step.

        All ranks take equally many steps, until no rank has data left. If an iterable raises an exception instead of a
        batch, the step that would use this batch happens on no rank, but all earlier steps do, even if `run` reads
        ahead. The exception leaves `run` on its own rank, and RuntimeError on the others. Raise ValueError if
        `micro_batches` is less than 1.
        """
        if micro_batches < 1:
            raise ValueError(f"micro_batches must be at least 1, not {micro_batches}")
        # Before each step, all ranks must learn whether any rank has data left, and whether an iterable has raised an
        # exception. The all-reduce of the number of tokens can carry this: int32 is enough for 2 billion tokens.
        # TODO: part (e)
        raise NotImplementedError("module 12, part (e)")
