"""What a driver calls on a rank, and how a rank finds the driver."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import linecache
import os
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from brigade.ranks.rank import recording
from brigade.ranks.rank.memory import LiveMemory, get_local, list_tensors

Model = TypeVar("Model", bound=nn.Module)
Kinds = dict[str, list[Tensor]]

IS_RANK = "BRIGADE_TESTING_RANK"  # the environment variable that ranks have
_watched: tuple[nn.Module, Optimizer | None] | None = None


def watch(model: Model, optimizer: Optimizer | None = None) -> Model:
    """Record what a model does on this rank, and return it. Call this before you wrap the model.

    From now on, launches on a parameter or on its gradient have its name, the record says when each gradient becomes
    ready, and each `step` counts bytes: of parameters, of gradients, of the optimizer's state if there is an
    `optimizer`, and of everything else. To add an optimizer that needs the wrapper, call this function again. Outside a
    rank, this function has no effect.
    """
    global _watched
    is_new = _watched is None or _watched[0] is not model
    _watched = model, optimizer
    if is_new:
        recording.note("watched", numels={name: parameter.numel() for name, parameter in model.named_parameters()})
        recording.name_parameters(model)
        recording.watch_gradients(model)
        model.register_forward_hook(follow_outputs, always_call=True)
    return model


def follow_outputs(_: nn.Module, inputs: Any, output: Any) -> None:
    """Record the phase "backward" in a backward through any of the outputs."""
    values = output.values() if isinstance(output, dict) else output
    for tensor in list_tensors(list(values) if not isinstance(values, Tensor) else values):
        recording.follow_backward(tensor)


@contextlib.contextmanager
def step(number: int) -> Iterator[None]:
    """Everything in the block belongs to step `number`, from 0 on. Steps may have any numbers, but no block in common.

    If a model is watched, count its bytes in the block. Outside a rank, this function has no effect.
    """
    recording.note("step", step=number)
    try:
        if _watched is None:
            yield
        else:
            with PeakByKind(*_watched) as memory:
                yield
            memory.follow_kinds()
            kept = memory.count(**list_kinds(*_watched))
            recording.note("memory", number=number, peak=memory.peak_by_kind, kept=kept)
    finally:
        recording.note("step", step=None)


def list_kinds(model: nn.Module, optimizer: Optimizer | None) -> Kinds:
    """Return the tensors that a model and its optimizer have now, by kind; of sharded ones, this rank's shards."""
    kinds: dict[str, list[Any]] = {
        "parameters": [*model.parameters()],
        "gradients": [parameter.grad for parameter in model.parameters()],
    }
    if optimizer is not None:
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        kinds["gradients"] += [p.grad for p in stepped]
        kinds["optimizer state"] = [*(v for entries in optimizer.state.values() for v in entries.values()), *stepped]
    return {kind: [*map(get_local, list_tensors(values))] for kind, values in kinds.items()}


class PeakByKind(LiveMemory):
    """A context manager that keeps, for each kind, the largest number of bytes that were alive at once."""

    def __init__(self, model: nn.Module, optimizer: Optimizer | None):
        self.objects = model, optimizer
        self.peak_by_kind: dict[str, int] = {}
        super().__init__([tensor for tensors in list_kinds(*self.objects).values() for tensor in tensors])
        self.follow_kinds()

    def _follow(self, tensors: Any) -> None:
        before = self.peak
        super()._follow([get_local(tensor) for tensor in tensors])
        if self.peak > before:
            self.follow_kinds()

    def follow_kinds(self) -> None:
        """Compare the bytes that are alive now with the largest so far."""
        nbytes = self.count(**list_kinds(*self.objects))
        for kind, number in (nbytes | {"all": sum(nbytes.values())}).items():
            self.peak_by_kind[kind] = max(number, self.peak_by_kind.get(kind, 0))


def call(where: dict[str, Any], arguments: Sequence[Any]) -> Any:
    """Import a driver as its caller does, and call it. `where` is what `running.locate` returns."""
    forget()
    sys.path[:] = where["path"]
    function: Any = load(where)
    for name in where["function"].split("."):
        function = getattr(function, name)
    return function(*arguments)


def forget() -> None:
    """Prepare this rank for a driver: no model is watched, and `run` refuses to work."""
    os.environ[IS_RANK] = str(dist.get_rank())
    global _watched
    _watched = None
    recording.name_parameters(nn.Module())


def load(where: dict[str, Any]) -> Any:
    """Return the module of a driver: by its name, from its file, or from the text of a notebook's cells."""
    if where["text"] is not None:
        module = ModuleType(where["module"])
        file = f"<{where['module']}>"
        linecache.cache[file] = len(where["text"]), None, where["text"].splitlines(keepends=True), file
        exec(compile(where["text"], file, "exec", dont_inherit=True), module.__dict__)
        return module
    with contextlib.suppress(ImportError):
        module = importlib.import_module(where["module"])
        if os.path.realpath(module.__file__ or "") == where["file"]:
            return module
    spec = importlib.util.spec_from_file_location(where["module"], where["file"])
    assert spec and spec.loader  # of a Python file
    module = importlib.util.module_from_spec(spec)
    sys.modules[where["module"]] = module
    spec.loader.exec_module(module)
    return module
