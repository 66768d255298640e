"""Run torch's own tests of DistributedDataParallel on the wrappers of the course, on ranks without GPUs.

The tests are in a file of torch's wheel. `Adapter` takes the place of DistributedDataParallel: it wraps the model with
a wrapper of the course, and calls its finish at the end of each backward, because torch's tests do not. Everything
private of torch that this needs is in `load_suite`, `call_after_backward` and `run_torch_test`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import os
import sys
import types
import unittest
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from brigade.rank.api import student

SUITE = "torch.testing._internal.distributed.distributed_test"
NO_GPU = ("current_device", "set_device", "synchronize", "manual_seed")  # functions of torch.cuda that do nothing here
# The wrappers whose gradients are in p.grad, with arguments that make several small buckets.
WRAPPERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "m01": ("m01_naive_ddp", "NaiveDDP", {}),
    "m02": ("m02_flat_ddp", "FlatDDP", {}),
    "m03": ("m03_overlapped_ddp", "OverlappedDDP", {}),
    "m04": ("m04_bucketed_ddp", "BucketedDDP", {"bucket_cap_mb": 0.001}),
    "m05": ("m05_grad_buffer", "BufferedDDP", {"bucket_numel": 256}),
    "m06": ("m06_coalesced", "CoalescedDDP", {"bucket_numel": 256, "buckets_per_group": 2}),
    "m07": ("m07_cached_shards", "CachedDDP", {"bucket_numel": 256, "buckets_per_group": 2}),
    "m09": ("m09_prefetched_weights", "PrefetchedDDP", {"bucket_numel": 256, "buckets_per_group": 2}),
}


def load_suite() -> types.ModuleType:
    """Import torch's file of tests. It reads the environment, and imports two packages that these tests do not use."""
    for name, value in {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": os.getcwd()}.items():
        os.environ.setdefault(name, value)
    for name in ("expecttest", "numpy"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
        if name not in sys.modules:
            sys.modules[name] = mock.MagicMock(name=name, TestCase=unittest.TestCase)
    return importlib.import_module(SUITE)


def call_after_backward(function: Callable[[], None]) -> None:
    """Call a function at the end of the backward that is running."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def find_tensors(values: Any) -> list[Tensor]:
    """Return the tensors with a history in an output: a tensor, or nested lists, tuples, dicts and objects."""
    if isinstance(values, Tensor):
        return [values] if values.grad_fn is not None else []
    nested: Any = vars(values).values() if hasattr(values, "__dict__") else ()
    if isinstance(values, dict):
        nested = values.values()
    elif isinstance(values, (list, tuple)):
        nested = values
    return [tensor for value in nested for tensor in find_tensors(value)]


class Adapter(nn.Module):
    """A wrapper of the course with the constructor and the methods of DistributedDataParallel that the tests use."""

    kind = ""  # a key of WRAPPERS

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool = True,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: Any = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ):
        super().__init__()
        package, name, arguments = WRAPPERS[self.kind]
        self.wrappers = [student(package, name)(module, process_group=process_group, **arguments)]  # no submodule
        self.module = module
        self.process_group = process_group
        self.is_due, self.is_silent = False, False

    def forward(self, *args, **kwargs):
        output = self.wrappers[0](*args, **kwargs)
        if torch.is_grad_enabled():
            self.is_due = True
            for tensor in find_tensors(output):
                tensor.register_hook(self.expect_finish)
        return output

    def expect_finish(self, _: Tensor) -> None:
        """Let this backward call the finish at its end, unless it has done so, or is inside `no_sync`."""
        if self.is_due and not self.is_silent:
            self.is_due = False
            call_after_backward(self.wrappers[0].finish_grad_sync)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_silent = self.is_silent, True
        try:
            with getattr(self.wrappers[0], "no_sync", contextlib.nullcontext)():
                yield
        finally:
            self.is_silent = before

    def _set_static_graph(self) -> None:
        """Do nothing, because the wrappers need no promise about the graph."""

    @property
    def reducer(self) -> Any:
        """Stand for torch's reducer. Tests ask it to plan its buckets again, which the wrappers do not need."""
        return types.SimpleNamespace(_rebuild_buckets=lambda: True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.wrappers[0].__reduce_ex__(protocol)


class Baseline(nn.parallel.DistributedDataParallel):
    """Torch's own wrapper, without the GPUs that a test names."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, **options: Any):
        super().__init__(module, **options)


def is_gpu(value: Any) -> bool:
    """Return whether a value names a GPU."""
    if isinstance(value, torch.device):
        return value.type == "cuda"
    return type(value) is int or (isinstance(value, str) and value.startswith("cuda"))


class OnCpu(TorchFunctionMode):
    """Leave tensors on the CPU where a test moves them to a GPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {name: value for name, value in (kwargs or {}).items() if name != "device" or not is_gpu(value)}
        name = getattr(function, "__name__", "")
        if name in ("cuda", "to"):
            args = (args[0], *(value for value in args[1:] if not is_gpu(value)))
            if name == "cuda" or (len(args) == 1 and not kwargs):
                return args[0]
        return function(*args, **kwargs)


def stay(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method of a module that moves it, except to a GPU."""

    @functools.wraps(method)
    def wrapper(module: nn.Module, *args: Any, **options: Any) -> Any:
        args = tuple(value for value in args if not is_gpu(value))
        options = {name: value for name, value in options.items() if not is_gpu(value)}
        return method(module, *args, **options) if args or options else module

    return wrapper


def run_torch_test(name: str, kind: str) -> str:
    """Run one of torch's tests with a wrapper on this rank, or with torch's own if `kind` is "torch".

    Return "" or the type and the text of the exception that it raised. At the end, the ranks wait for each other.
    """
    suite = load_suite()
    base = suite.DistributedTest._DistTestBase
    own = {"rank": dist.get_rank(), "world_size": str(dist.get_world_size())}
    own |= {"_barrier": lambda *_, **__: dist.barrier()}
    cases = importlib.import_module("torch.testing._internal.common_utils").TestCase
    case = type("Case", (base, cases), own)(name)
    with contextlib.ExitStack() as stack:
        for function in NO_GPU:
            stack.enter_context(mock.patch.object(torch.cuda, function, lambda *_: 0))
        wrapper = Baseline if kind == "torch" else type("DistributedDataParallel", (Adapter,), {"kind": kind})
        for module in (suite, nn.parallel):
            stack.enter_context(mock.patch.object(module, "DistributedDataParallel", wrapper))
        for method in ("to", "cuda"):  # torch parses the device of these before OnCpu sees it
            stack.enter_context(mock.patch.object(nn.Module, method, stay(getattr(nn.Module, method))))
        gpus = mock.Mock(return_value={rank: [rank] for rank in range(dist.get_world_size())})
        stack.enter_context(mock.patch.object(suite, "init_multigpu_helper", gpus))
        stack.enter_context(OnCpu())
        torch.manual_seed(0)
        try:
            inspect.unwrap(getattr(base, name))(case)
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
    return ""
