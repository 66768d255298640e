"""Find the modules in a submission: a clone, a lessons directory, flat files, or a directory or archive of these.

Only the course's module files are used. Everything else is ignored. Notes tell the instructor if no module file was
found, if there are several copies, or if some files may be an attempt to manipulate the grading.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import itertools
import os
import stat
import tarfile
import zipfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from brigade.course.modules import CORE_MODULES, MODULES, CourseError
from brigade.course.submission import MAX_SOURCE_BYTES, find, read_text
from brigade.course.submission import open_no_follow as open_no_link
from brigade.grade.formats import make_printable
from brigade.ipc.temporary import temporary_directory

MEDDLING = (
    "conftest.py",
    "sitecustomize.py",
    "usercustomize.py",
    "pytest.ini",
    "tox.ini",
    "setup.cfg",
    "torch",
    "pytest",
)
SKIPPED = (".git", ".venv", "venv", "node_modules", "__pycache__", "__MACOSX", ".ipynb_checkpoints")
ARCHIVES = (".zip", ".tar", ".tar.gz", ".tgz")
UNREADABLE = (".rar", ".7z", ".gz", ".bz2", ".xz", ".zst", ".tbz2", ".txz")  # archives, unless the name is in ARCHIVES
LOOKED_AT = 20_000  # entries of a directory tree to examine, the upper levels first
MOST_ARCHIVE_BYTES = 30_000_000
MOST_UNPACKED_BYTES = 300_000_000  # read from a tar; from a zip, only module files are unpacked
MOST_MEMBERS = 50_000  # members of an archive
MOST_FILES = 100  # files with a module's name in an archive
MOST_NAMED = 5  # names in one note
BLOCK = 512  # bytes: the unit of a tar
MOST_LONG_NAMES = 10_000_000  # bytes of a tar's headers with long names
WITHOUT_CONTENT = (
    tarfile.LNKTYPE,
    tarfile.SYMTYPE,
    tarfile.CHRTYPE,
    tarfile.BLKTYPE,
    tarfile.DIRTYPE,
    tarfile.FIFOTYPE,
)
LONGEST_PATH = 3_500  # bytes; a system call takes 4096 at most

ENTRIES = {entry.path.name: entry for entry in MODULES}  # by the names of main files
FILES = {path.name: entry for entry in MODULES for path in entry.paths}


@dataclass(frozen=True)
class Incoming:
    """A submission in a form that can be graded: `submission.find` finds its modules in `directory`."""

    directory: Path
    notes: list[str]


@contextlib.contextmanager
def open_submission(path: str | Path) -> Iterator[Incoming]:
    """Find the module files of a submission. Raise CourseError if nothing can be graded.

    A directory is used in place. The module files of an archive are unpacked into a temporary directory. A directory
    with one archive and no module files is treated like the archive.
    """
    path = Path(path)
    if not path.is_dir():
        if not path.is_file():
            raise CourseError(f"there is no directory or archive {path}")
        with (take_module if path.suffix == ".py" else unpack)(path.resolve(), path.name) as incoming:
            yield incoming
        return
    files = walk(path)
    place = choose_place(files)
    archives = [file for file in files if file.lower().endswith(ARCHIVES)]
    if place is None and not any(find(path, entry) for entry in MODULES):
        if len(archives) > 1:
            raise CourseError(
                f"found no module file, but {len(archives)} archives: {format_names(archives)}; hand in only one"
            )
        if archives:
            with unpack(path / archives[0], archives[0]) as incoming:
                yield Incoming(incoming.directory, [*incoming.notes, *find_meddling(files)])
            return
        if unreadable := [file for file in files if file.lower().endswith(UNREADABLE)]:
            raise make_unreadable(unreadable)
    notes = make_notes(files, place)
    if archives and place is not None:
        notes.append(
            f"Not unpacked, because the submission has module files outside archives: {format_names(archives)}"
        )
    yield Incoming(path / (place or ""), notes)


def walk(top: Path) -> list[str]:
    """Return the files below a directory, level by level, without following links; at most LOOKED_AT entries."""
    files: list[str] = []
    waiting, left = deque([""]), LOOKED_AT
    while waiting and left > 0:
        place = waiting.popleft()
        with contextlib.suppress(OSError):  # the directory is not readable, or its path is too long
            with os.scandir(os.path.join(top, place)) as scan:
                entries = sorted(itertools.islice(scan, left), key=lambda entry: entry.name)
            left -= len(entries)
            for entry in entries:
                name = os.path.join(place, entry.name)
                if not entry.is_dir(follow_symlinks=False):
                    files.append(name)
                elif entry.name not in SKIPPED and len(os.fsencode(os.path.join(top, name))) < LONGEST_PATH:
                    waiting.append(name)
    return files


def find_places(files: Iterable[str]) -> dict[str, list[str]]:
    """Return the directories in which `submission.find` finds modules, each with its module files.

    A file with a name such as plan.py counts only beside its module's main file.
    """
    found: dict[str, list[str]] = {}
    files = list(files)
    present = set(files)
    for file in files:
        *above, name = file.split("/")
        entry = FILES.get(name)
        if entry is None or "/".join([*above, entry.path.name]) not in present:
            continue
        if above[-1:] == [entry.package]:
            above.pop()
            if above[-1:] == ["lessons"]:
                above.pop()
        found.setdefault("/".join(above), []).append(file)
    return found


def choose_place(files: Iterable[str]) -> str | None:
    """Return the directory to grade. Prefer one with `lessons`, then the most modules, then the highest level."""

    found = find_places(files)

    def rank(place: str) -> tuple:
        has_lessons = any(make_relative(file, place).startswith("lessons/") for file in found[place])
        return not has_lessons, -len(found[place]), place.count("/") + bool(place), place

    return min(found, key=rank, default=None)


def make_relative(file: str, place: str) -> str:
    """Return the path of a file relative to `place`, a directory above it."""
    return file[len(place) + 1 :] if place else file


def make_notes(files: Sequence[str], place: str | None) -> list[str]:
    """Return notes about the files for the instructor. The files in `place` are graded."""
    notes = []
    if place is None:
        what = format_names(files) if files else "nothing"
        notes.append(f"No module file such as {CORE_MODULES[0].path.name} was found. Found instead: {what}")
    given = [os.path.join(place or "", name) for name in ("solutions", "skeletons")]  # of a clone of the course
    if alike := [file for file in files if (name := file.rpartition("/")[2]) not in FILES and name.lower() in FILES]:
        notes.append(f"Ignored, because module files have names in small letters: {format_names(alike)}")
    others = [file for other, inside in find_places(files).items() if other not in (place, *given) for file in inside]
    if others:
        graded = make_printable(place) if place else "those at the top level"
        notes.append(f"Module files are in several places. Graded: {graded}. Not graded: {format_names(others)}")
    return notes + find_meddling(files)


def find_meddling(files: Iterable[str]) -> list[str]:
    """Return a note on files that could influence a careless grader. They are ignored."""
    found = set()
    for file in files:
        parts = file.split("/")
        found |= {"/".join(parts[: index + 1]) for index, part in enumerate(parts) if part in MEDDLING}
    return [f"Ignored, and worth a look: {format_names(sorted(found))}"] if found else []


def format_names(names: Sequence[str]) -> str:
    """Return one line with the first names and the number of the others."""
    line = ", ".join(make_printable(name).replace("\n", "?")[-100:] for name in names[:MOST_NAMED])
    return line + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def make_unreadable(names: Sequence[str]) -> CourseError:
    """Return the exception for files in a form that cannot be read."""
    endings = ", ".join(dict.fromkeys(Path(name).suffix.lower() or "no file extension" for name in names))
    return CourseError(f"unreadable: {endings}; hand in {', '.join(ARCHIVES)} or a directory ({format_names(names)})")


@contextlib.contextmanager
def take_module(path: Path, name: str) -> Iterator[Incoming]:
    """Copy a single module file to a new directory. Platforms put the student's name before the name of the file."""
    modules = [module for module in ENTRIES if name == module or name.endswith("_" + module)]
    if not modules:
        raise CourseError(f"unreadable: {format_names([name])} has no name of a module, such as {[*ENTRIES][1]}")
    with temporary_directory() as directory:
        (directory / modules[0]).write_text(read_text(path, path.parent), encoding="utf-8", errors="replace")
        yield Incoming(directory, [])


@contextlib.contextmanager
def unpack(archive: Path, name: str) -> Iterator[Incoming]:
    """Unpack the module files in the best place of an archive, each up to the maximum size of a module.

    Write them to a new directory, at their paths relative to that place. The rest of each path in the archive is
    ignored.
    """
    if not name.lower().endswith(ARCHIVES):
        raise make_unreadable([name])
    with temporary_directory() as directory:
        try:
            with open(archive, "rb", opener=open_no_link) as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_ARCHIVE_BYTES:
                    raise ValueError(f"it is not a file, or it is larger than {MOST_ARCHIVE_BYTES} bytes")
                files, modules = read_archive(file, name)
            place = choose_place(modules)
            if place is None and (inner := [file for file in files if file.lower().endswith((*ARCHIVES, *UNREADABLE))]):
                raise ValueError(f"it contains an archive instead of module files: {format_names(inner)}")
            for module in find_places(modules).get(place, []):
                target = directory / make_relative(module, place)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(modules[module])
        except Exception as error:  # zipfile, gzip and tarfile report a damaged file in many ways
            raise CourseError(f"{format_names([name])} cannot be unpacked: {format_names([str(error)])}") from None
        yield Incoming(directory, make_notes(files, place))


def read_archive(file: BinaryIO, name: str) -> tuple[list[str], dict[str, bytes]]:
    """Return the paths of the files in an archive, and the contents of those with a module's name."""
    compressed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    is_tar = compressed or name.lower().endswith(".tar")
    files: list[str] = []
    modules: dict[str, bytes] = {}
    with contextlib.ExitStack() as stack:
        if is_tar:
            members = iterate_tar(stack.enter_context(gzip.open(file)) if compressed else file)
        else:
            members = iterate_zip(stack.enter_context(zipfile.ZipFile(file)))
        for path, read_beginning in members:
            path = "/".join(part for part in path.replace("\\", "/").split("/") if part != ".")
            parts = path.split("/")
            if "" in parts or ".." in parts or any(part in SKIPPED for part in parts):
                continue  # absolute, outside the archive, or irrelevant
            files.append(path)
            if len(files) > MOST_MEMBERS:
                raise ValueError(f"it has more than {MOST_MEMBERS} files")
            if parts[-1] in FILES and len(modules) < MOST_FILES:
                modules[path] = read_beginning(
                    MAX_SOURCE_BYTES + 1
                )  # if it is one byte longer, `submission.read` refuses it
    return files, modules


Member = tuple[
    str, Callable[[int], bytes]
]  # the path of a file in an archive, and a function that reads its first bytes


def iterate_zip(bundle: zipfile.ZipFile) -> Iterator[Member]:
    """Yield the files of a zip, except links and files whose decompression may need an unlimited amount of memory."""

    def read_beginning(info: zipfile.ZipInfo, size: int) -> bytes:
        with bundle.open(info) as source:
            return source.read(size)

    for info in bundle.infolist():
        usual = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        if usual and not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16):
            yield info.filename, functools.partial(read_beginning, info)


def iterate_tar(stream: BinaryIO) -> Iterator[Member]:
    """Yield the ordinary files of a tar, which is read once from the beginning.

    Use only the parser of `tarfile`, because `tarfile.open` may need an unlimited amount of time and memory for a
    hostile header.
    """
    unread = MOST_UNPACKED_BYTES

    def take(size: int) -> bytes:
        nonlocal unread
        unread -= size
        if unread < 0:
            raise ValueError(f"it contains more than {MOST_UNPACKED_BYTES} bytes")
        data = stream.read(size)
        if len(data) < size:
            raise ValueError("its end is missing")
        return data

    name, long_names = "", 0
    for _ in range(MOST_MEMBERS):
        header = take(BLOCK)
        if not header.strip(b"\0"):
            return
        info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        left = 0 if info.type in WITHOUT_CONTENT else -(-info.size // BLOCK) * BLOCK
        if info.size < 0:
            raise ValueError("one of its sizes is negative")
        if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE):
            long_names += left
            if long_names > MOST_LONG_NAMES:
                raise ValueError(f"its headers take more than {MOST_LONG_NAMES} bytes")
            name = find_long_name(info.type, take(left)[: info.size]) or name
            continue
        if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            before, size = unread, info.size
            yield name or info.name, lambda most, size=size: take(min(most, size))
            left -= before - unread
        name = ""
        while left > 0:
            left -= len(take(min(left, 1 << 16)))
    raise ValueError(f"it has more than {MOST_MEMBERS} members")


def find_long_name(kind: bytes, content: bytes) -> str:
    """Return the name of the next member in a GNU long name or pax header of a tar, or "" if there is none."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return content.rstrip(b"\0").decode("utf-8", "surrogateescape")
    name, start = b"", 0
    while start < len(content):  # records such as b"30 path=somewhere/naive_ddp.py\n"
        space = content.index(b" ", start, start + 10)
        end = start + int(content[start:space])
        if not space < end <= len(content):
            raise ValueError("one of its headers is damaged")
        key, _, value = content[space + 1 : end - 1].partition(b"=")
        name = value if key == b"path" else name
        start = end
    return name.decode("utf-8", "surrogateescape")
