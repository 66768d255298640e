"""Stubs for two parts of torch that the course does not use. They take longer to import than the rest of torch.

The first optimizer and `init_process_group` import torch's compiler, torch._dynamo, only to tell it what not to
compile. The import takes a second, and accounts for half of the memory that a fork copies. `import_torch` replaces the
compiler with a stub that answers these calls. Any other use replaces the stub with the real module.

`import torch` spends a third of its time on torch._meta_registrations, which contains Python kernels for the meta
device. Creating parameters on this device does not need the kernels. Torch's compiler, FakeTensor and DTensor need
them, and first import the compiler or one of `KERNEL_MODULES`. `postpone_meta_kernels`, which `import brigade` calls,
leaves the kernels out until then, but only in the version of torch that requirements.txt names. Other versions may need
these modules for something else.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from typing import Any

from brigade.ipc.temporary import temporary_directory

COMPILER = "torch._dynamo"
META_KERNELS = "torch._meta_registrations"
KERNELS_STUB_VERSION = "2.13."  # version of torch in which nothing else needs the kernels
KERNEL_MODULES = {  # these modules and the kernels import each other
    "torch._decomp", "torch._prims", "torch._prims_common.wrappers", "torch._refs", "torch.utils._content_store",
}  # fmt: skip


def import_torch() -> None:
    """Import torch, with the stub for torch._dynamo. The real module is imported when it is first used."""
    if "torch" not in sys.modules:
        collects = gc.isenabled()
        gc.disable()  # garbage collection would free nothing here, and takes a tenth of the import time
        importlib.import_module("torch")
        gc.freeze()  # later collections skip torch's objects, which live until the process ends
        if collects:
            gc.enable()
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = make_compiler_stub()
        sys.meta_path.insert(0, Submodules())


def import_compiler() -> types.ModuleType:
    """Return the real torch._dynamo. Remove the directory for compiled kernels that its import creates."""
    if isinstance(sys.modules.get(COMPILER), StubModule):
        del sys.modules[COMPILER]
    if COMPILER in sys.modules:
        return sys.modules[COMPILER]
    import_meta_kernels()
    name = "TORCHINDUCTOR_CACHE_DIR"
    with temporary_directory() as unused:
        before = os.environ.setdefault(name, str(unused))
        real = importlib.import_module(COMPILER)
        if before == str(unused):
            del os.environ[name]
    return real


class StubModule(types.ModuleType):
    """A module with some attributes. The others come from the real module, which `load` imports."""

    def __init__(self, name: str, load: Callable[[], types.ModuleType], **attributes: Any):
        super().__init__(name)
        self.__dict__.update(attributes, _load=load)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # code that inspects all modules, for example to list their files, does not compile
            raise AttributeError(name)
        return getattr(self._load(), name)


def make_compiler_stub() -> StubModule:
    """Return what torch uses of torch._dynamo without compiling (a private API, as in torch 2.11 to 2.15)."""
    return StubModule(
        COMPILER,
        import_compiler,
        __path__=[],  # makes Python search for submodules, which `Submodules` finds
        # The constructor of torch DDP asks for the mode, and activation checkpointing for the setting: the defaults.
        utils=StubModule(
            f"{COMPILER}.utils", lambda: import_compiler().utils, get_optimize_ddp_mode=lambda: "ddp_optimizer"
        ),
        config=StubModule(f"{COMPILER}.config", lambda: import_compiler().config, error_on_nested_fx_trace=True),
        graph_break=lambda *args, **kwargs: None,  # there is no graph; called by every `Optimizer.step`
        disable=lambda function=None, *args, **kwargs: function,  # called for `Optimizer.zero_grad` and others
        trace_rules=types.SimpleNamespace(clear_lru_cache=lambda: None),  # no cache; called by `init_process_group`
    )


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find submodules such as torch._dynamo.config by importing the real torch._dynamo."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(COMPILER + ".") or not isinstance(sys.modules[COMPILER], StubModule):
            return None
        import_compiler()
        return importlib.util.find_spec(fullname) if fullname not in sys.modules else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module was executed with the real torch._dynamo."""


def postpone_meta_kernels() -> None:
    """Make a later `import torch` leave out torch._meta_registrations until something needs it."""
    sys.meta_path.insert(0, MetaKernels())


def import_meta_kernels() -> types.ModuleType:
    """Return the real torch._meta_registrations."""
    if isinstance(sys.modules.get(META_KERNELS), StubModule):
        sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, MetaKernels)]
        del sys.modules[META_KERNELS]
    return importlib.import_module(META_KERNELS)


class MetaKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Find the stub for torch._meta_registrations. Find `KERNEL_MODULES` by importing the real module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname == META_KERNELS and sys.modules["torch"].__version__.startswith(KERNELS_STUB_VERSION):
            return ModuleSpec(fullname, self)
        if fullname not in KERNEL_MODULES or not isinstance(sys.modules.get(META_KERNELS), StubModule):
            return None
        import_meta_kernels()
        sys.modules[fullname].__spec__ = None  # otherwise, Python would use this spec and execute the module again
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return StubModule(META_KERNELS, import_meta_kernels) if spec.name == META_KERNELS else sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """Do the only work of these modules that torch needs immediately. `KERNEL_MODULES` were executed earlier."""
        if module.__name__ == META_KERNELS:
            torch = sys.modules["torch"]
            torch._C._set_generator_metaclass(torch._opaque_base.OpaqueBaseMeta)
