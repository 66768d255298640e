"""Run torch's own test of FullyShardedDataParallel on the wrappers of the course, on ranks without GPUs.

The wheel contains the test, `_test_fsdp_parity`, and its models. It trains a model with DistributedDataParallel, and
again with FSDP, which saves, clears and loads the weights after each step. Losses and weights must be equal. A
sharding strategy of torch stands for modules of the course.
"""

from __future__ import annotations

import contextlib
import importlib
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import nn

from situations.torch_suite import Adapter, Baseline, load_suite, make_wrapper, patch_torch

FSDP_SUITE = "torch.testing._internal.common_fsdp"
SHARDED_WEIGHTS = ("m11", "m14")


class FsdpAdapter(Adapter):
    """A wrapper of the course in the place of FullyShardedDataParallel.

    Like torch's, it wraps the model when it is first used, because only the outermost one has the wrapper: the inner
    ones are module 11's units.
    """

    is_unit = False
    full: dict[str, nn.Parameter] | None = None  # inside summon_full_params

    def __init__(self, module: nn.Module, process_group: Any = None, **options: Any):
        nn.Module.__init__(self)
        self.module, self.process_group, self.options = module, None, options
        self.forward_sync_buffers = self.is_due = self.is_silent = self.is_joined = False
        self.wrappers: list[Any] = []

    @property
    def wrapper(self) -> Any:
        if not self.wrappers:
            inner = [part for part in self.module.modules() if isinstance(part, FsdpAdapter)]
            for part in inner:
                part.is_unit = True
            policy = self.options.get("auto_wrap_policy")
            units = getattr(policy, "_module_classes", None) or ({FsdpAdapter} if inner else {nn.Linear})
            reshards = self.options["sharding_strategy"].name == "FULL_SHARD"
            self.wrap(tuple(units), **({"reshard_after_forward": reshards} if self.kind.name == "m11" else {}))
        return self.wrappers[0]

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs) if self.is_unit else super().forward(*args, **kwargs)

    def parameters(self, recurse: bool = True) -> Any:
        return iter(self.full.values()) if self.full is not None else super().parameters(recurse)

    def state_dict(self, *args: Any, **options: Any) -> dict[str, Any]:
        if self.is_unit:
            return super().state_dict(*args, **options)
        if self.kind.name in SHARDED_WEIGHTS:
            return self.wrapper.full_state_dict()
        self.kind.collect_weights(self.wrapper, self.module)  # module 9 waits for its all-gathers
        return self.module.state_dict()

    def load_state_dict(self, state: Any, *_: Any, **__: Any) -> Any:
        load = self.wrapper.load_full_state_dict if self.kind.name in SHARDED_WEIGHTS else self.module.load_state_dict
        return load(state)

    @staticmethod
    @contextlib.contextmanager
    def summon_full_params(adapter: FsdpAdapter, **_: Any) -> Iterator[None]:
        """Let `parameters()` return whole weights inside, and write them back at the end."""
        state = {name: value.clone() for name, value in adapter.state_dict().items()}
        adapter.full = {name: nn.Parameter(state[name]) for name, _ in adapter.module.named_parameters()}
        try:
            yield
        finally:
            adapter.load_state_dict(state | {name: value.detach() for name, value in adapter.full.items()})
            adapter.full = None

    def _assert_state(self, _: Any) -> None:
        """Do nothing: the states of torch's FSDP have other names."""


def run_fsdp_test(model: str, strategy: str, kind: str) -> str:
    """Run torch's test of FSDP with a wrapper on this rank. Return "" or the type and the text of its exception."""
    load_suite()  # replaces packages that torch's tests import
    suite = importlib.import_module(FSDP_SUITE)
    cases = importlib.import_module("torch.testing._internal.common_utils").TestCase
    own = {"process_group": dist.group.WORLD, "rank": dist.get_rank(), "world_size": dist.get_world_size()}
    case = type("Case", (suite.FSDPTestMixin, cases), own)("run")
    with mock.patch.object(suite, "DDP", Baseline), patch_torch(suite, "FSDP", make_wrapper(FsdpAdapter, kind)):
        try:
            case._test_fsdp_parity(
                getattr(suite, model),
                suite.FSDPInitMode.RECURSIVE,
                suite.DEVICEInitMode.DEVICE_BEFORE,
                sharding_strategy=suite.ShardingStrategy[strategy],
            )
        except (Exception, unittest.SkipTest) as error:
            return f"{type(error).__name__}: {error}"
    return ""
