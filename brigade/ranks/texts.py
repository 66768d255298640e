"""The texts of packages that ranks import, and the import hook with which they do.

A rank imports no file from the disk. It receives the texts of its packages (`Sources`), such as those of a submission,
and imports them with `install`. Of the files in `SEALED`, it receives compiled code instead (`prepare_for_ranks`), so
that other code in the rank cannot copy their text.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import inspect
import linecache
import marshal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from brigade.ranks.syntax import parse_tree

PACKAGE = "submission"  # the package under examination; feedback names its lines
OWN = "__own"  # ends the name of a module of this package whose place another one has taken
SEALED: set[Path] = set()  # files and directories

Sources = dict[str, tuple[str, str]]  # module name -> (path of the file, text), or ("", why it cannot be imported)
ForRanks = dict[str, tuple[str, str, "bytes | None"]]  # module name -> (path, text, code)


def find_sources(function: Callable[..., Any]) -> tuple[str, dict[str, Sources]]:
    """Return the name of the module from which a rank imports the function, and the texts that it needs for this."""
    name = function.__module__
    file = Path(inspect.getsourcefile(function) or function.__code__.co_filename)
    if name == "__main__":  # a script, or a module run with -m: ranks import it under its own name
        spec = sys.modules["__main__"].__spec__
        name = spec.name if spec else file.stem
    if "." not in name:
        return f"{name}.{name}", {name: {name: (str(file), file.read_text())}}
    packages: dict[str, Sources] = {}
    for imported, source in read_imported(file.parents[name.count(".")], [name]).items():
        package, _, inner = imported.partition(".")
        packages.setdefault(package, {})[inner] = source
    return name, packages


def read_imported(directory: Path, names: list[str], read: Callable[[Path], str] = Path.read_text) -> Sources:
    """Return the files of packages in `directory` that have these names, and those that they import, one by another."""
    sources: Sources = {}
    names = [*names]
    while names:
        name = names.pop()
        path = directory.joinpath(*name.split(".")).with_suffix(".py")
        if not name.startswith("brigade.") and name not in sources and path.is_file():
            sources[name] = (str(path), read(path))
            names += list_imports(sources[name][1])
    return sources


@functools.lru_cache(maxsize=128)  # every check sends the same few files
def list_imports(text: str) -> list[str]:
    """Return the names in packages from which a file imports, or that it imports from them; some are not modules."""
    nodes = [node for node in ast.walk(parse_tree(text)) if isinstance(node, ast.ImportFrom) and not node.level]
    names = [node.module or "" for node in nodes]
    names += [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]
    return [name for name in names if "." in name]


def prepare_for_ranks(sources: Sources, codes: Mapping[str, bytes | None]) -> ForRanks:
    """Return the sources in the form in which a rank receives them: the text, or only the code of sealed files.

    `codes` has the code of some of the texts, by module, from `compile_texts`.
    """
    return {
        name: (path, "", compile_code(path, text)) if is_sealed(path) else (path, text, codes.get(name))
        for name, (path, text) in sources.items()
    }


def compile_texts(sources: Sources) -> dict[str, bytes | None]:
    """Compile the texts of modules, and return the code of each, or None if the compiler refuses it.

    A rank that runs nothing else calls this, because a malicious text could crash the compiler, or run in it.
    """
    codes: dict[str, bytes | None] = {}
    for name, (path, text) in sources.items():
        with contextlib.suppress(Exception):  # the import of the text raises it again, where feedback explains it
            codes[name] = marshal.dumps(compile(text, path, "exec", dont_inherit=True))
    return codes


def is_sealed(path: str) -> bool:
    """Return whether ranks get only this file's compiled code."""
    return any(Path(path).is_relative_to(place) for place in SEALED)


def holds_sealed(sources: Sources) -> bool:
    """Return whether ranks that get these modules hold sealed code beside modules that are not sealed."""
    sealed = [is_sealed(path) for path, _ in sources.values() if path]
    return any(sealed) and not all(sealed)


@functools.lru_cache(maxsize=128)  # every check sends the same few files
def compile_code(path: str, text: str) -> bytes:
    """Compile a text and return the code for ranks, which run the same interpreter.

    The text must be trusted, because a malicious text could crash the compiler.
    """
    return marshal.dumps(compile(text, path, "exec", dont_inherit=True))


class SourceFinder(importlib.abc.MetaPathFinder, importlib.abc.InspectLoader):
    """An import hook that imports a package from texts and code. The files themselves need not exist."""

    def __init__(self, package: str, sources: Sources | ForRanks):
        self._sources = {f"{package}.{name}": (*source, None)[:3] for name, source in sources.items()}
        self._packages = {package}
        for name in self._sources:
            while "." in name:
                name = name.rpartition(".")[0]
                self._packages.add(name)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname in self._packages:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        if fullname in self._sources:
            return importlib.machinery.ModuleSpec(fullname, self, origin=self._sources[fullname][0])
        return None

    def is_package(self, fullname: str) -> bool:
        return fullname in self._packages

    def get_source(self, fullname: str) -> str | None:
        """Return the text of a module, or None if this process has only its code."""
        return "" if fullname in self._packages else self._sources[fullname][1] or None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name in self._packages:
            return
        path, text, code = self._sources[name]
        if not path:
            raise ImportError(text)
        module.__file__ = path
        if text:
            linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)  # for tracebacks
        self._sources[name] = (path, text, None)  # drop the code: it is needed only once, and must not be found
        exec(marshal.loads(code) if code else compile(text, path, "exec", dont_inherit=True), module.__dict__)
        if name + OWN in self._sources:
            vars(module)["__getattr__"] = functools.partial(get_own_attribute, name)


def get_own_attribute(name: str, attribute: str) -> Any:
    """Return what only the student's own module defines, when the reference's module has taken the place of `name`."""
    if attribute.startswith("__"):
        raise AttributeError(attribute)
    return getattr(importlib.import_module(name + OWN), attribute)


def install(package: str, sources: Sources | ForRanks) -> None:
    """Make `sources` importable as `package` in this process. Texts without code are compiled during import."""
    sys.meta_path.insert(0, SourceFinder(package, sources))
