"""torch without its compiler, which the course does not use.

The first optimizer and `init_process_group` import torch._dynamo only to tell it what it need not compile: a second of
processor time, and half of what a fork has to copy. `import_torch` puts a module in its place that answers these calls;
at whatever else is asked of it, it makes room for the real one.
"""

from __future__ import annotations

import gc
import importlib
import importlib.abc
import importlib.util
import os
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from typing import Any

COMPILER = "torch._dynamo"


def import_torch() -> None:
    """Imports torch. From now on `import torch._dynamo` costs nothing in this process, until it is really used."""
    collects = gc.isenabled()
    gc.disable()  # nothing of what is made now can go, and looking for it takes a tenth of the time
    importlib.import_module("torch")
    if collects:
        gc.enable()
    if COMPILER not in sys.modules:
        sys.modules[COMPILER] = DynamoStub(COMPILER)
        sys.meta_path.insert(0, Submodules())


def import_compiler() -> types.ModuleType:
    """The real torch._dynamo. The directory for compiled kernels that it makes at once is not left behind."""
    if isinstance(sys.modules.get(COMPILER), DynamoStub):
        del sys.modules[COMPILER]
    if COMPILER in sys.modules:
        return sys.modules[COMPILER]
    name = "TORCHINDUCTOR_CACHE_DIR"
    with tempfile.TemporaryDirectory(prefix="brigade-") as unused:
        before = os.environ.setdefault(name, unused)
        found = importlib.import_module(COMPILER)
        if before == unused:
            del os.environ[name]
    return found


class UtilitiesStub(types.ModuleType):
    """What torch calls of torch._dynamo.utils."""

    @staticmethod
    def get_optimize_ddp_mode() -> str:
        """What the compiler would do with torch DDP: called by its constructor."""
        return "ddp_optimizer"

    def __getattr__(self, name: str) -> Any:
        return getattr(import_compiler().utils, name)


class DynamoStub(types.ModuleType):
    """What torch calls of torch._dynamo where nothing is compiled. Private API: as in torch 2.11 to 2.15."""

    __path__: list[str] = []  # its submodules are looked for, and found by `Submodules`

    utils = UtilitiesStub(f"{COMPILER}.utils")

    @staticmethod
    def graph_break(*args: Any, **kwargs: Any) -> None:
        """There is no graph: called by every `Optimizer.step`."""

    @staticmethod
    def disable(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        """The function itself: called for `Optimizer.zero_grad` and others."""
        return function

    class trace_rules:
        @staticmethod
        def clear_lru_cache() -> None:
            """There is no cache: called by `init_process_group`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # whoever looks through all modules for their files does not want to compile
            raise AttributeError(name)
        return getattr(import_compiler(), name)


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds torch._dynamo.config and the like: they come with the real module."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if not fullname.startswith(COMPILER + ".") or not isinstance(sys.modules[COMPILER], DynamoStub):
            return None
        import_compiler()
        return importlib.util.find_spec(fullname) if fullname not in sys.modules else ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: types.ModuleType) -> None:
        """It was executed with the real torch._dynamo."""
