"""Lock parts of the course's own code, so that student code in the same process cannot use them.

Python has no private names, but each frame contains its code and the namespace of its module, so a function can refuse
a caller. The caller must be a module that has called `trust`, or a torch module that the lock names. These locks do not
protect objects that student code can find in frames, closures or `__globals__`.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
import weakref
from collections.abc import Callable, Container, Iterator
from types import CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

_trusted: dict[int, dict[str, Any]] = {}  # namespaces by id; keeping them here keeps the ids unique


def trust(namespace: dict[str, Any]) -> None:
    """Trust the module that passes its globals(). Its code may use hidden attributes and private methods."""
    _trusted[id(namespace)] = namespace


def is_trusted(frame: FrameType) -> bool:
    """Return whether the frame runs code of a trusted module."""
    return id(frame.f_globals) in _trusted


def hidden_attribute() -> property:
    """Return an attribute that only trusted code can read or set. Its values are not in the objects' `__dict__`."""
    values: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def read(owner: Any) -> Any:
        if not is_trusted(sys._getframe(1)) or owner not in values:
            raise AttributeError("this object has no such attribute")
        return values[owner]

    def write(owner: Any, value: Any) -> None:
        if not is_trusted(sys._getframe(1)):
            raise AttributeError("this object has no such attribute")
        values[owner] = value

    return property(read, write)


def private(method: Callable[..., Any]) -> property:
    """Make a method callable by trusted code only. An object's own `__dict__` cannot replace it."""

    def read(owner: Any) -> Any:
        if not is_trusted(sys._getframe(1)):
            raise AttributeError("this object has no such attribute")
        return MethodType(method, owner)

    return property(read)


def make_sealed_metaclass(base: type) -> type:
    """Return the metaclass for a subclass of `base` that only trusted code can change."""

    class Sealed(type(base)):
        def __setattr__(cls, name: str, value: Any) -> None:
            if not is_trusted(sys._getframe(1)):
                raise AttributeError(f"{cls.__name__} belongs to the grader; submissions must not change it")
            super().__setattr__(name, value)

        def __delattr__(cls, name: str) -> None:
            raise AttributeError(f"{cls.__name__} belongs to the grader; submissions must not change it")

    return Sealed


def copy_module(name: str) -> ModuleType:
    """Return a new copy of a module, in which a submission cannot replace anything."""
    spec = importlib.util.find_spec(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reserve(owner: Any, name: str, sentence: str, users: Container[FrameType] = ()) -> None:
    """Reserve the function `name` of a module or class for trusted code and the code of `users`.

    Other callers get a RuntimeError with this sentence.
    """
    original = getattr(owner, name)

    def call_if_allowed(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1)
        if not is_trusted(caller) and caller not in users:
            raise RuntimeError(sentence)
        return original(*args, **kwargs)

    setattr(owner, name, call_if_allowed)


class CodeOf:
    """The code of a module when this object was created, for tests such as `frame in CodeOf(module)`.

    A frame runs this code if its code object and its globals belong to the module. Names and file names are not enough,
    because student code can use any name.
    """

    def __init__(self, module: ModuleType):
        self._namespace = vars(module)
        self._codes: dict[int, CodeType] = {}  # by id, because a submission's code may compare equal to torch's
        pending = list(self._namespace.values())
        while pending:
            value = pending.pop()
            if issubclass(type(value), type) and value.__module__ == module.__name__:
                pending += vars(value).values()
            elif type(value) in (staticmethod, classmethod):
                pending.append(value.__func__)
            elif type(value) is property:
                pending += [value.fget, value.fset]
            elif type(value) is FunctionType:
                if value.__globals__ is self._namespace:
                    pending.append(value.__code__)
                pending.append(getattr(value, "__wrapped__", None))
            elif type(value) is CodeType and id(value) not in self._codes:
                self._codes[id(value)] = value
                pending += value.co_consts

    def __contains__(self, frame: FrameType) -> bool:
        return id(frame.f_code) in self._codes and frame.f_globals is self._namespace


class NotForSubmissions(importlib.abc.MetaPathFinder):
    """Refuse to import the course's own packages."""

    def __init__(self, packages: set[str]):
        self._packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        if fullname.partition(".")[0] in self._packages:
            raise ModuleNotFoundError(
                f"{fullname} belongs to the grader; submissions must not import it", name=fullname
            )


def imported_modules(package: ModuleType) -> Iterator[str]:
    """Yield the names of a package and of its imported modules. A loop over sys.modules would copy memory in a fork."""
    yield package.__name__
    for value in list(vars(package).values()):
        if type(value) is ModuleType and value.__name__.rpartition(".")[0] == package.__name__:
            yield from imported_modules(value)


def hide_packages(packages: set[str]) -> None:
    """Make these packages impossible to import. Code that has already imported them can still use them."""
    for package in packages & sys.modules.keys():
        for name in list(imported_modules(sys.modules[package])):
            sys.modules.pop(name, None)
    sys.meta_path.insert(0, NotForSubmissions(packages))
