"""Stubs for three parts of torch that the course does not use. They take longer to import than the rest of torch.

The first optimizer and `init_process_group` import torch's compiler, torch._dynamo, only to tell it what not to
compile. The import takes a second, and accounts for half of the memory that a fork copies. The stub answers these
calls. Any other use replaces the stub with the real module.

`import torch` spends a third of its time on torch._meta_registrations, which contains Python kernels for the meta
device. Creating parameters on this device does not need the kernels. Torch's compiler, FakeTensor and DTensor need
them, and first import the compiler or one of `KERNEL_MODULES`. Only the version of torch that requirements.txt names
gets this stub. Other versions may need these modules for something else.

The import of `torch.distributed.optim`, which contains ZeroRedundancyOptimizer, spends four fifths of its time on
`named_optimizer`, which imports FSDP and DTensor. Nothing else in that package uses it.

The fork server, the processes of commands and the kernels of notebooks ask for this. A program that imports
`brigade.testing` gets all of torch.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.util
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

KERNELS_STUB_VERSION = "2.13."  # version of torch in which nothing else needs the kernels
KERNEL_MODULES = {  # these modules and the kernels import each other
    "torch._decomp", "torch._prims", "torch._prims_common.wrappers", "torch._refs", "torch.utils._content_store",
}  # fmt: skip


def import_torch() -> None:
    """Import torch without these parts, until something needs them.

    Garbage collection would free nothing meanwhile, and takes a tenth of the time.
    """
    if "torch" not in sys.modules:
        postpone_imports()
        collects = gc.isenabled()
        gc.disable()
        importlib.import_module("torch")
        gc.freeze()  # later collections skip torch's objects, which live until the process ends
        if collects:
            gc.enable()


class StubModule(types.ModuleType):
    """A module with some attributes. The others come from the real module, which `load` imports."""

    def __init__(self, name: str, load: Callable[[], types.ModuleType], **attributes: Any):
        super().__init__(name)
        self.__dict__.update(attributes, _load=load)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # code that inspects all modules, for example to list their files, does not compile
            raise AttributeError(name)
        return getattr(self._load(), name)


class Postponed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find a stub instead of the module `name`. Find modules that need the real one by importing the real one first."""

    def __init__(self, name: str, needs_real: Callable[[str], bool], make_stub: Callable[[], StubModule | None]):
        self._name, self._needs_real, self._make_stub = name, needs_real, make_stub

    def load(self) -> types.ModuleType:
        """Return the real module."""
        if isinstance(sys.modules.get(self._name), StubModule):
            sys.meta_path.remove(self)
            del sys.modules[self._name]
        return importlib.import_module(self._name)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == self._name:
            stub = self._make_stub()
            return ModuleSpec(fullname, self, loader_state=stub) if stub else None
        if not self._needs_real(fullname) or not isinstance(sys.modules.get(self._name), StubModule):
            return None
        self.load()
        if fullname not in sys.modules:
            return importlib.util.find_spec(fullname)
        module = sys.modules[fullname]
        vars(module)["__spec__"] = None  # otherwise, Python would use this spec and execute the module again
        return ModuleSpec(fullname, self, loader_state=module)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return spec.loader_state

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a stub has no code, and the other modules were executed with the real one."""


def make_compiler_stub() -> StubModule:
    """Return what torch uses of torch._dynamo without compiling (a private API, as in torch 2.11 to 2.15)."""
    load = COMPILER.load
    # The constructor of torch DDP asks for the mode, and activation checkpointing for the setting: the defaults.
    utils = {"get_optimize_ddp_mode": lambda: "ddp_optimizer"}
    return StubModule(
        "torch._dynamo",
        load,
        __path__=[],  # makes Python search for submodules
        utils=StubModule("torch._dynamo.utils", lambda: load().utils, **utils),
        config=StubModule("torch._dynamo.config", lambda: load().config, error_on_nested_fx_trace=True),
        graph_break=lambda *args, **kwargs: None,  # there is no graph; called by every `Optimizer.step`
        disable=lambda function=None, *args, **kwargs: function,  # called for `Optimizer.zero_grad` and others
        trace_rules=types.SimpleNamespace(clear_lru_cache=lambda: None),  # no cache; called by `init_process_group`
    )


def make_kernels_stub() -> StubModule | None:
    """Return the stub for torch._meta_registrations, or None if this version of torch may need the kernels."""
    torch = sys.modules["torch"]
    if not torch.__version__.startswith(KERNELS_STUB_VERSION):
        return None
    torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)  # all that torch needs immediately
    return StubModule("torch._meta_registrations", KERNELS.load)


def make_named_optimizer_stub() -> StubModule:
    """Return what `torch.distributed.optim` imports from its `named_optimizer` (a private API, as in 2.11 to 2.15)."""
    return StubModule("torch.distributed.optim.named_optimizer", NAMED_OPTIMIZER.load, _NamedOptimizer=None)


COMPILER = Postponed("torch._dynamo", lambda name: name.startswith("torch._dynamo."), make_compiler_stub)
KERNELS = Postponed("torch._meta_registrations", lambda name: name in KERNEL_MODULES, make_kernels_stub)
NAMED_OPTIMIZER = Postponed("torch.distributed.optim.named_optimizer", lambda name: False, make_named_optimizer_stub)


def postpone_imports() -> None:
    """Make later imports leave out these parts until something needs them, also if torch itself has been imported."""
    if COMPILER not in sys.meta_path:
        sys.meta_path[:0] = [COMPILER, KERNELS, NAMED_OPTIMIZER]
