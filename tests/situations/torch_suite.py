"""Run torch's own tests of DistributedDataParallel on the wrappers of the course, on ranks without GPUs.

The tests are in a file of torch's wheel. `Adapter` takes the place of DistributedDataParallel: it wraps the model with
a wrapper of the course, and calls its finish at the end of each backward, because torch's tests do not. Everything
private of torch that this needs is in `load_suite`, `call_after_backward`, `patch_torch` and `run_torch_test`. The
tests of FSDP are in `torch_fsdp.py`.
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
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from brigade.ranks.rank.api import student
from situations.kinds import KINDS, Kind
from situations.run import Plain

SUITE = "torch.testing._internal.distributed.distributed_test"
NO_GPU = ("current_device", "set_device", "synchronize", "manual_seed")  # functions of torch.cuda that do nothing here
# Communication hooks that leave the average over the group in each gradient, as the wrappers do without a hook.
AVERAGING_HOOKS = ("allreduce_hook", "allreduce_with_then_hook", "post_localSGD_hook")
SGD = torch.optim.SGD


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


class Parameters:
    """The parameters that `ddp.parameters()` returns, so that the optimizer made with them is that of the wrapper."""

    def __init__(self, owner: Adapter, values: Iterable[nn.Parameter]):
        self.owner, self.values = owner, iter(values)

    def __iter__(self) -> Parameters:
        return self

    def __next__(self) -> nn.Parameter:
        return next(self.values)


def make_optimizer(params: Any, **options: Any) -> Any:
    """Stand for torch.optim.SGD: return the optimizer that belongs to a wrapper, with SGD inside."""
    if not isinstance(params, Parameters):
        return SGD(params, **options)
    adapter = params.owner
    optimizer = adapter.kind.make_optimizer(adapter.wrapper, adapter.module, SGD, None, options)
    if adapter.awaits_weights:
        optimizer.register_step_post_hook(lambda *_: adapter.wrapper.finish_param_sync())
    return optimizer


class Adapter(nn.Module):
    """A wrapper of the course with the constructor and the methods of DistributedDataParallel that the tests use."""

    kind: Kind
    awaits_weights = False  # whether a step waits for them, as module 9 demands before others read weights

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        broadcast_buffers: bool | None = None,
        forward_sync_buffers: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: Any = None,
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ):
        super().__init__()
        self.module = module
        self.process_group = process_group
        self.forward_sync_buffers = forward_sync_buffers if broadcast_buffers is None else broadcast_buffers
        self.is_due, self.is_silent, self.is_joined = False, False, False
        self.wrap((nn.Linear,), process_group=process_group)

    def wrap(self, units: tuple[type[nn.Module], ...], **options: Any) -> None:
        """Wrap the model. Only a list keeps the wrapper from being a submodule."""
        self.wrappers = [self.kind.wrap(Plain, self.module, units, **options)]

    @property
    def wrapper(self) -> Any:
        return self.wrappers[0]

    def forward(self, *args, **kwargs):
        if self.forward_sync_buffers and not self.is_silent:
            buffers: Any = types.SimpleNamespace(buffers=self.module.buffers, parameters=list)
            student("m01_naive_ddp", "broadcast_module_state")(buffers, self.process_group)
        if self.is_joined and not self.is_silent:
            self.count_active(True)
        output = self.wrapper(*args, **kwargs)
        if torch.is_grad_enabled():
            self.is_due = True
            for tensor in find_tensors(output):
                tensor.register_hook(self.expect_finish)
        return output

    def expect_finish(self, _: Tensor) -> None:
        """Let this backward call the finish at its end, unless it has done so, or is inside `no_sync`."""
        if self.is_due and not self.is_silent:
            self.is_due = False
            call_after_backward(self.wrapper.finish_grad_sync)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.is_silent = self.is_silent, True
        try:
            with getattr(self.wrapper, "no_sync", contextlib.nullcontext)():
                yield
        finally:
            self.is_silent = before

    def parameters(self, recurse: bool = True) -> Any:
        return Parameters(self, super().parameters(recurse))

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """Do nothing for a hook that averages. The wrappers have no other ones."""
        if hook.__name__ not in AVERAGING_HOOKS:
            raise NotImplementedError(f"no communication hook like {hook.__name__}")

    def count_active(self, is_active: bool) -> int:
        """Return how many ranks still have inputs. In `join`, all ranks call this at the same time."""
        count = torch.tensor(int(is_active))
        dist.all_reduce(count, group=self.process_group)
        return int(count)

    @contextlib.contextmanager
    def join(self, divide_by_initial_world_size: bool = True, enable: bool = True) -> Iterator[None]:
        """Let a rank without inputs call the finish as often as the others do.

        At the end, it gets the weights of a rank that has taken all steps.
        """
        if not divide_by_initial_world_size:
            raise NotImplementedError("the wrappers divide by the number of all ranks")
        self._join_config = types.SimpleNamespace(enable=enable)
        self.is_joined = enable
        yield
        last = torch.tensor(dist.get_rank())
        while enable and self.count_active(False):
            last.fill_(-1)
            self.zero_grad()
            self.wrapper.finish_grad_sync()
        self.is_joined = False
        dist.all_reduce(last, dist.ReduceOp.MAX)
        for parameter in self.module.parameters():
            dist.broadcast(parameter.detach(), int(last))

    def do_nothing(self, *_: Any) -> None:
        """Accept a promise about the graph, or a wish to remove hooks or copies, none of which the wrappers need."""

    _set_static_graph = _set_ddp_sink_clone = _remove_autograd_hooks = do_nothing

    @property
    def reducer(self) -> Any:
        """Stand for torch's reducer. Tests ask it to plan its buckets again, which the wrappers do not need."""
        return types.SimpleNamespace(_rebuild_buckets=lambda: True)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.wrapper.__reduce_ex__(protocol)


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


@contextlib.contextmanager
def patch_torch(suite: types.ModuleType, name: str, wrapper: type[nn.Module]) -> Iterator[None]:
    """Let a file of torch's tests use a wrapper under this name, and no GPUs."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **dict.fromkeys(NO_GPU, lambda *_, **__: 0)))
        stack.enter_context(mock.patch.object(suite, name, wrapper))
        for method in ("to", "cuda"):  # torch parses the device of these before OnCpu sees it
            stack.enter_context(mock.patch.object(nn.Module, method, stay(getattr(nn.Module, method))))
        stack.enter_context(mock.patch.object(torch.optim, "SGD", make_optimizer))
        stack.enter_context(OnCpu())
        torch.manual_seed(0)
        yield


def make_wrapper(base: type[nn.Module], name: str) -> type[nn.Module]:
    """Return the class that takes the place of torch's: an adapter of a kind, or the base itself for "torch"."""
    return type(base.__name__, (base,), {"kind": next(kind for kind in KINDS if kind.name == name)})


def run_ring(_: Any, title: str, is_async: bool, call: Any, *args: Any, **options: Any) -> None:
    """Stand for a method of torch's tests that calls a collective. Call a function of module 0 instead."""

    def ring(name: str) -> Callable[..., Any]:
        return student("m00_ring", name)

    if title == ":all_reduce" and not is_async and args[1] == dist.ReduceOp.SUM:
        tensor, _, group = args
        ring("ring_all_reduce")(tensor, group)
    elif title == ":all_gather_into_tensor":
        whole, part, group, _ = args
        whole.view(-1).tensor_split(dist.get_world_size(group))[dist.get_rank(group)].copy_(part.view(-1))
        ring("ring_all_gather")(whole, group)
    elif title == ":reduce_scatter_tensor":
        part, whole, _, group, _ = args
        part.view(-1).copy_(ring("ring_reduce_scatter")(whole.clone(), group))
    else:
        raise NotImplementedError(f"module 0 has no {title[1:]} like this one")


@contextlib.contextmanager
def rank_temp_file(torchs: Callable[[], contextlib.AbstractContextManager[str]]) -> Iterator[str]:
    """Keep a file of torch's tests until all ranks are done. Torch's own rank 0 removes it at once."""
    with torchs() as name:
        yield name
        dist.barrier()


def run_torch_test(name: str, kind: str) -> str:
    """Run one of torch's tests with a wrapper on this rank, or with torch's own if `kind` is "torch".

    If `kind` is "m00", it is a test of a collective. Return "" or type and text of the exception that it raised.
    """
    suite = load_suite()
    base = suite.DistributedTest._DistTestBase
    own = {"rank": dist.get_rank(), "world_size": str(dist.get_world_size())}
    own |= {"_barrier": lambda *_, **__: dist.barrier()} | ({"call_dist_op": run_ring} if kind == "m00" else {})
    cases = importlib.import_module("torch.testing._internal.common_utils").TestCase
    case = type("Case", (base, cases), own)(name)
    wrapper: Any = Baseline if kind in ("torch", "m00") else make_wrapper(Adapter, kind)
    wrapper.awaits_weights = kind == "m09" and "localSGD" in name
    gpus = mock.Mock(return_value={rank: [rank] for rank in range(dist.get_world_size())})
    with (
        mock.patch.object(nn.parallel, "DistributedDataParallel", wrapper),
        mock.patch.object(suite, "init_multigpu_helper", gpus),
        mock.patch.object(suite, "_rank_temp_file", functools.partial(rank_temp_file, suite._rank_temp_file)),
        patch_torch(suite, "DistributedDataParallel", wrapper),
    ):
        try:
            inspect.unwrap(getattr(base, name))(case)
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
    return ""
