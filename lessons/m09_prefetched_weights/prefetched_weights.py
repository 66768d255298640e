"""Module 9: the all-gathers of the weights run while the next forward computes.

Module 8 waits for all weights at the end of every step, but the next forward needs those of the last layer much later.
In this module, `step` only launches the all-gathers, in the order in which forward needs the weights. Forward waits for
each bucket group just before it runs the first module that uses the group's parameters.

Cost per step: as in module 8, but if forward is slow enough, only the first group's all-gather is exposed.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..m06_coalesced.coalesced import BucketGroup
from ..m07_cached_shards.cached_shards import CachedDDP
from ..m08_zero_optimizer.zero_optimizer import ZeroOptimizer


class PrefetchedDDP(CachedDDP):
    """Like `CachedDDP`, but after `start_param_sync`, the next forward waits for each group when it needs the group.

    A module's weights are incomplete from `start_param_sync` until the module runs, in training or in an evaluation.
    Call `finish_param_sync` before you read, write or copy `ddp.module` or its weights directly. Call it also before an
    evaluation in which a fused kernel reads the weights of layers that it does not call, as `nn.TransformerEncoder`'s.
    """

    def __init__(
        self,
        module: nn.Module,
        bucket_numel: int | None = 40_000_000,
        buckets_per_group: int | None = 1,
        grad_dtype: torch.dtype | None = None,
        process_group: dist.ProcessGroup | None = None,
    ):
        super().__init__(module, bucket_numel, buckets_per_group, grad_dtype, process_group)
        self.groups_of: dict[nn.Module, list[BucketGroup]] = defaultdict(list)  # groups of a module's own parameters
        # Afterwards, groups_of is complete for every module with own parameters, forward_order has the groups in the
        # order of `parameters()`, and `before_forward` is a pre-hook of every module in groups_of.
        # TODO: part (a)
        raise NotImplementedError("module 9, part (a)")
        self.in_flight: list[BucketGroup] = []  # groups whose all-gather has been launched but not awaited
        self.called: set[nn.Module] = set()  # modules whose forward has run at least once

    def start_param_sync(self) -> None:
        """Launch the all-gathers of all groups in forward order, without waiting."""
        # TODO: part (b)
        raise NotImplementedError("module 9, part (b)")

    def wait_for(self, groups: list[BucketGroup]) -> None:
        """Wait for the weights of these groups. A group that is not in flight is already complete."""
        # TODO: part (c)
        raise NotImplementedError("module 9, part (c)")

    def before_forward(self, owner: nn.Module, inputs: Any) -> None:
        """Wait for the weights of a module. The module's forward pre-hook calls this just before the module runs."""
        self.called.add(owner)
        self.wait_for(self.groups_of[owner])

    def forward(self, *args, **kwargs):
        """Run the module, after a wait for the weights that no hook waits for."""
        # No hook runs for a module that is never called, such as a ParameterList or a layer whose weight another module
        # reads.
        # TODO: part (d)
        raise NotImplementedError("module 9, part (d)")
        return super().forward(*args, **kwargs)

    def finish_param_sync(self) -> None:
        """Wait until all weights are complete. A second call does nothing."""
        self.wait_for(self.forward_order)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrefetchedDDP:
        """Let a copy of `module` keep its hooks, which wait for nothing. The wrapper itself cannot be copied."""
        if not memo:  # copy.deepcopy(ddp), and not copy.deepcopy(ddp.module)
            self.__reduce_ex__(4)
        if self.in_flight:
            raise RuntimeError("weights are in flight: call finish_param_sync before you copy the module")
        return self

    def state_dict(self, *args, **kwargs) -> dict[str, Any]:
        """Return the state dict of the wrapper, with complete weights."""
        self.finish_param_sync()
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        """Wait until all weights are complete, then load a state dict, as in `nn.Module`."""
        self.finish_param_sync()
        return super().load_state_dict(*args, **kwargs)


class PrefetchedZeroOptimizer(ZeroOptimizer):
    """Like `ZeroOptimizer`, but used with a `PrefetchedDDP`. `step` returns while the all-gathers are in flight.

    `ddp(x)`, `ddp.state_dict()` and `ddp.load_state_dict(...)` wait for the weights. Before you read or write weights
    in any other way, or call `buffer.reallocate()`, call `ddp.finish_param_sync()`.
    """

    def share_weights(self) -> None:
        """Launch the all-gathers of the weights without waiting for them."""
        # TODO: part (e)
        raise NotImplementedError("module 9, part (e)")

    def prepare_grads(self) -> list[Tensor]:
        """Attach gradients and weights to the shards. Return the gradients as views of the buffers."""
        # The inner optimizer is about to write weights. Groups that forward has not used are still in flight.
        # TODO: part (f)
        raise NotImplementedError("module 9, part (f)")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Wait until all weights are complete, then add a parameter group."""
        self.ddp.finish_param_sync()
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Wait until all weights are complete, then load a state dict. Main parameters default to the weights."""
        self.ddp.finish_param_sync()
        super().load_state_dict(state_dict)
