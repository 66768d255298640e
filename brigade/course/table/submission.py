"""Read the modules of a submission as text.

A submission consists of the module files in `lessons`, `solutions` or any other directory; other files are ignored.
A module may have further files beside its main one. They count if the main one imports them, or if they are given:
later modules may import those.
`read` reads their text and never imports them. Only a rank imports them (`brigade/ranks/texts.py`), as one package
called `submission`. Therefore, `from ..m05_grad_buffer.grad_buffer import GradBuffer` finds the module of the same
submission, wherever its file is on disk.
"""

from __future__ import annotations

import ast
import codecs
import contextlib
import functools
import os
import re
import stat
import threading
import tokenize
from collections.abc import Collection
from pathlib import Path

from brigade.course.table.modules import HAS_SOLUTIONS, MODULES, ROOT, TRAINING_MODULES, Module, get_module
from brigade.ranks.errors import UserError
from brigade.ranks.syntax import find_syntax_error, parse_tree
from brigade.ranks.texts import OWN, Sources

MAX_SOURCE_BYTES = 250_000
ENCODINGS = ("utf-8", "utf-8-sig", "ascii", "iso8859-1", "iso8859-15", "cp1252")  # that a file may declare
DECLARED = re.compile(rb"coding[:=]\s*([-\w.]+)")
PART = re.compile(r"### BEGIN SOLUTION|raise NotImplementedError")


def find(target: Path, entry: Module) -> Path | None:
    """Return the main file of a module, or None if there is none.

    `target` is a clone, a lessons directory, a module's directory or a directory with all files.
    """
    for path in (target / "lessons" / entry.path, target / entry.path, target / entry.path.name):
        if path.is_file():
            return path
    return None


def resolve_target(target: str | Path) -> Path:
    """Return the directory that "lessons", "solutions" or a path names. Raise UserError if it does not exist."""
    if str(target) == "solutions" and not any(find(ROOT / "solutions", entry) for entry in MODULES):
        raise UserError(
            "this edition has no solutions: use --target lessons or another directory with --prior own, or ask your "
            "instructor to unlock a module"
        )
    path = ROOT / target if str(target) in ("lessons", "solutions") else Path(os.path.expanduser(target))
    if not path.exists():
        raise UserError(f"there is no directory {path}")
    if not path.is_dir():
        raise UserError(f"{path} is not a directory; --target takes the directory that contains the module files")
    return path


class Snapshot:
    """The modules of a submission. Each is read once, when it is asked for first. Threads may share a snapshot.

    All checks that get the same snapshot judge the same text, even if a student saves a file between two checks. With
    `hides_place`, the path of a file is its module and its name, as in the course: the seed of a grading
    run does not follow from the names of an upload's directories, so ranks must not learn them.
    """

    def __init__(self, target: str | Path, hides_place: bool = False):
        self.name = str(target)  # as a command names it
        self.target = resolve_target(target)
        self._hides_place = hides_place
        self._modules: dict[tuple[Path, Module], Sources | UserError] = {}
        self._lock = threading.Lock()

    def read(self, number: int, prior: str = "own", replaced: Collection[int] | None = None) -> Sources:
        """Return module `number` with the earlier modules that it may import.

        If `prior` is "own", the earlier modules are the submission's. If it is "reference", the reference's modules
        replace those in `replaced` (default: all), and modules that nothing names are left out. In the student edition,
        modules of the reference that are not unlocked replace nothing. A replaced module stays available under a second
        name, which ends with OWN, because later modules may use functions that only this module defines. Importing an
        earlier module that is missing or broken raises an ImportError with the reason. Raise UserError, with a
        message of one line, if module `number` itself is missing, unreadable, outside the directory or not Python.
        """
        entry = get_module(number)
        try:
            own = self.read_module(entry)
        except UserError:
            if find(self.target, entry):
                raise
            advice = "Hand it in under this name; `brigade submit` puts it into the right place of a zip."
            if self.target == ROOT / "lessons":
                advice = f"`brigade reset {number}` writes its skeleton."
            raise UserError(f"module {number} is missing: there is no {entry.path}. {advice}") from None
        earlier: Sources = {}
        for other in [other for other in TRAINING_MODULES if other.number < entry.number]:
            sources = self.read_earlier(other)
            if prior == "reference" and (replaced is None or other.number in replaced):
                solutions = resolve_target("solutions")
                if find(solutions, other):
                    own_names = {name + OWN: source for name, source in sources.items()}
                    sources = own_names | self.read_module(other, solutions)
            earlier |= sources
        if prior == "reference":
            earlier = select_used(entry, own, earlier)
        return own | earlier

    def read_module(self, entry: Module, directory: Path | None = None) -> Sources:
        """Return the files of one module, from `directory` instead if given. Raise UserError like `read_source`."""
        key = (directory or self.target, entry)
        with self._lock:
            if key not in self._modules:
                try:
                    sources = read_module(*key)
                    is_hidden = self._hides_place and not directory
                    self._modules[key] = hide_place(sources, self.target, entry) if is_hidden else sources
                except UserError as error:
                    self._modules[key] = error
            found = self._modules[key]
        if isinstance(found, UserError):
            raise UserError(str(found))
        return found

    def read_earlier(self, entry: Module) -> Sources:
        """Return the files of a module. The main one is "" and a reason if the module cannot be imported."""
        try:
            return self.read_module(entry)
        except UserError as error:
            return {f"{entry.package}.{entry.name}": ("", f"module {entry.number} cannot be imported: {error}")}


def hide_place(sources: Sources, target: Path, entry: Module) -> Sources:
    """Return the files of a module. Those in `target` have the paths that they have in the course."""
    return {
        name: (f"{entry.package}/{Path(path).name}" if path and Path(path).is_relative_to(target) else path, text)
        for name, (path, text) in sources.items()
    }


def take_snapshot(target: str | Path | Snapshot) -> Snapshot:
    """Return a new snapshot of a directory, or the one that is given."""
    return target if isinstance(target, Snapshot) else Snapshot(target)


def read(target: str | Path, number: int, prior: str = "own") -> Sources:
    """Return module `number` in `target` with the earlier modules that it may import: see `Snapshot.read`."""
    return Snapshot(target).read(number, prior)


def read_module(target: Path, entry: Module) -> Sources:
    """Return the main file of a module, and its further files: those that it imports, and those that are given.

    Raise UserError like `read_source`. A given file may be missing: then it is the course's own.
    """
    path = find(target, entry)
    if path is None:
        raise UserError(f"there is no {entry.path}")
    sources = {f"{entry.package}.{entry.name}": (str(path), read_source(path, target))}
    left = {Path(name).stem: name for name in entry.more_files}
    given = {stem for stem, name in left.items() if read_given(entry, name)}
    # A text is parsed only to find files of the student.
    while left.keys() - given and (
        used := [one for one in left if any(one in list_names(text) for text in list_texts(sources))]
    ):
        for stem in used:
            sources[f"{entry.package}.{stem}"] = read_further(path.with_name(left.pop(stem)), target, entry)
    for stem in left.keys() & given:  # what it imports is not read: then the main file has its own
        sources[f"{entry.package}.{stem}"] = read_further(path.with_name(left[stem]), target, entry)
    return sources


def read_further(path: Path, target: Path, entry: Module) -> tuple[str, str]:
    """Return the path and the text of a further file of a module, or "" and the reason why it cannot be imported."""
    try:
        if not path.exists() and (given := read_given(entry, path.name)):
            return str(ROOT / "lessons" / entry.package / path.name), given
        return str(path), read_source(path, target)
    except UserError as error:
        return "", f"module {entry.number} cannot be imported: {error}"


def read_given(entry: Module, name: str) -> str:
    """Return the text of a module's further file that students get as it is, or "" if they have to write it."""
    path = ROOT / ("solutions" if HAS_SOLUTIONS else "skeletons") / entry.package / name
    text = path.read_text() if path.is_file() else ""
    return "" if PART.search(text) else text


def list_texts(sources: Sources) -> list[str]:
    """Return the texts of the files that can be imported."""
    return [text for path, text in sources.values() if path]


def select_files(entry: Module, sources: Sources) -> Sources:
    """Return the files of one module."""
    return {name: source for name, source in sources.items() if name.partition(".")[0] == entry.package}


def select_used(entry: Module, own: Sources, earlier: Sources) -> Sources:
    """Return the `earlier` modules that the module or its checks name, directly or through other earlier modules."""
    checks = [entry.checks, *entry.tests.glob("scenario*.py")]
    texts = [*list_texts(own), *(path.read_text() for path in checks)]
    return select_named(frozenset().union(*map(list_names, texts)), earlier)


def select_named(packages: Collection[str], sources: Sources) -> Sources:
    """Return the entries of `sources` in these packages, and those that they import, directly or through others."""
    selected: Sources = {}
    names = {*packages}
    while used := {n: source for n, source in sources.items() if n not in selected and n.partition(".")[0] in names}:
        selected |= used
        names.update(*map(list_names, list_texts(used)))
    return selected


def list_earlier(snapshot: Snapshot, entry: Module) -> frozenset[int]:
    """Return the numbers of the modules that a module of the submission may import: none if it names no module.

    If the module cannot be read, it may name all.
    """
    earlier = {other.package: other for other in TRAINING_MODULES if other.number < entry.number}
    with contextlib.suppress(UserError):
        if not select_used(entry, snapshot.read_module(entry), dict.fromkeys(earlier, ("", ""))):
            return frozenset()
    return frozenset(other.number for other in earlier.values())


def read_source(path: Path, within: Path) -> str:
    """Return the text of a Python file. Raise UserError if it is not Python, or as `read_text` does."""
    text = read_text(path, within)
    if message := find_syntax_error(path.name, text):
        raise UserError(message)
    return text


def read_text(path: Path, within: Path) -> str:
    """Return the text of a file. Raise UserError if it is not text, or as `read_bytes` does for a long file."""
    content = read_bytes(path, within)
    if len(content) > MAX_SOURCE_BYTES:
        raise UserError(f"{path.name} is larger than {MAX_SOURCE_BYTES} bytes")
    try:
        return content.decode(find_encoding(path.name, content)).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        line = content[: error.start].count(b"\n") + 1
        raise UserError(
            f"{path.name} is not UTF-8: line {line} has a byte {content[error.start]:#x}, as a file saved as Latin-1 "
            "has; save it as UTF-8"
        ) from None


def find_encoding(name: str, content: bytes) -> str:
    """Return the encoding of a Python file (PEP 263). Raise UserError if it is one that the course does not read."""
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in content[:2]:
        raise UserError(f"{name} is saved as UTF-16; save it as UTF-8")
    try:
        encoding, _ = tokenize.detect_encoding(iter(content.splitlines(keepends=True)[:2]).__next__)
        encoding = codecs.lookup(encoding).name
    except SyntaxError:  # the declared encoding is unknown, or the first lines have another one
        declared = DECLARED.search(b"".join(content.splitlines()[:2]))
        encoding = declared[1].decode() if declared else "utf-8"
    if encoding not in ENCODINGS:
        raise UserError(f"{name} declares the encoding {encoding[:40]}; save it as UTF-8 and delete this declaration")
    return encoding


def read_bytes(path: Path, within: Path) -> bytes:
    """Return the first MAX_SOURCE_BYTES + 1 bytes of a file.

    Raise UserError if it cannot be read, is not an ordinary file, or lies outside the directory `within`.
    """
    try:
        if not path.resolve().is_relative_to(within.resolve()):
            raise UserError(f"{path.name} is a link to a file outside of the submission")
        with open(path.resolve(), "rb", opener=open_no_follow) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UserError(f"{path.name} is not an ordinary file")
            return file.read(MAX_SOURCE_BYTES + 1)
    except OSError as error:
        raise UserError(f"{path.name} cannot be read: {error.strerror}") from None
    except RuntimeError as error:  # a link to itself
        raise UserError(f"{path.name} cannot be read: {error}") from None


def open_no_follow(path: str, flags: int) -> int:
    """Open a file that was examined before. Refuse a link that has replaced it since, and do not wait for a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


@functools.lru_cache(maxsize=128)  # every check reads the same few files
def list_names(text: str) -> frozenset[str]:
    """Return the parts of the names that a file imports, and of those in its strings."""
    names = set()
    for node in ast.walk(parse_tree(text)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {getattr(node, "module", None) or "", *(alias.name for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return frozenset(part for name in names for part in name.split("."))
