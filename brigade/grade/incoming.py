"""Find the modules in a submission: a clone, a lessons directory, flat files, or a zip of these.

Only the course's module files are used. Everything else is ignored. Notes tell the instructor if no module file was
found, or if there are several copies.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
import zipfile
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from brigade.course.modules import CORE_MODULES, MODULES, CourseError
from brigade.course.submission import MAX_SOURCE_BYTES, read_text
from brigade.course.submission import open_no_follow as open_no_link
from brigade.grade.formats import make_line
from brigade.ipc.temporary import temporary_directory

SKIPPED = (".git", ".venv", "venv", "node_modules", "__pycache__", "__MACOSX", ".ipynb_checkpoints")
ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".rar", ".7z", ".bz2", ".xz", ".zst")  # only a zip is unpacked
LOOKED_AT = 20_000  # entries of a directory tree to examine, the upper levels first
MOST_ARCHIVE_BYTES = 30_000_000
MOST_MEMBERS = 50_000  # members of an archive
MOST_FILES = 100  # files with a module's name in an archive
MOST_NAMED = 5  # names in one note
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

    A directory is used in place. The module files of a zip are unpacked into a temporary directory. A directory with
    one zip and no module files is treated like the zip.
    """
    path = archive = Path(path)
    if path.is_dir():
        files = walk(path)
        place = choose_place(files)
        archives = [file for file in files if file.lower().endswith(ARCHIVES)]
        if place is not None or not archives:
            notes = make_notes(files, place)
            if archives:
                names = format_names(archives)
                notes.append(f"Not unpacked, because the submission has module files outside archives: {names}")
            yield Incoming(path / (place or ""), notes)
            return
        if len(archives) > 1:
            names = format_names(archives)
            raise CourseError(f"found no module file, but {len(archives)} archives: {names}; hand in only one")
        archive = path / archives[0]
    elif not path.is_file():
        raise CourseError(f"there is no directory or zip {path}")
    with temporary_directory() as directory:
        take = take_module if archive.suffix == ".py" else unpack
        yield Incoming(directory, take(archive if path.is_dir() else archive.resolve(), directory))


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
    others = [file for other, inside in find_places(files).items() if other not in (place, *given) for file in inside]
    if others:
        graded = make_line(place) if place else "those at the top level"
        notes.append(f"Module files are in several places. Graded: {graded}. Not graded: {format_names(others)}")
    return notes


def format_names(names: Sequence[str]) -> str:
    """Return one line with the first names and the number of the others."""
    line = ", ".join(make_line(name)[-100:] for name in names[:MOST_NAMED])
    return line + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def take_module(path: Path, directory: Path) -> list[str]:
    """Copy a single module file to a new directory. Platforms put the student's name before the name of the file."""
    modules = [module for module in ENTRIES if path.name == module or path.name.endswith("_" + module)]
    if not modules:
        raise CourseError(f"unreadable: {format_names([path.name])} has no name of a module, such as {[*ENTRIES][1]}")
    (directory / modules[0]).write_text(read_text(path, path.parent), encoding="utf-8", errors="replace")
    return []


def unpack(archive: Path, directory: Path) -> list[str]:
    """Unpack the module files in the best place of a zip, each up to the maximum size of a module. Return notes.

    Write them to a new directory, at their paths relative to that place. The rest of each path in the zip is ignored.
    """
    name = archive.name
    if not name.lower().endswith(".zip"):
        ending = archive.suffix.lower() or "no file extension"
        raise CourseError(f"unreadable: {ending}; hand in .zip or a directory ({format_names([name])})")
    try:
        with open(archive, "rb", opener=open_no_link) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_ARCHIVE_BYTES:
                raise ValueError(f"it is not a file, or it is larger than {MOST_ARCHIVE_BYTES} bytes")
            with zipfile.ZipFile(file) as bundle:
                members = list_members(bundle)
                place = choose_place(members)
                inner = [file for file in members if file.lower().endswith(ARCHIVES)]
                if place is None and inner:
                    raise ValueError(f"it contains an archive instead of module files: {format_names(inner)}")
                for module in find_places(members).get(place, [])[:MOST_FILES]:
                    target = directory / make_relative(module, place)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with bundle.open(members[module]) as source:  # a longer file is refused when it is read
                        target.write_bytes(source.read(MAX_SOURCE_BYTES + 1))
    except Exception as error:  # zipfile reports a damaged file in many ways
        raise CourseError(f"{format_names([name])} cannot be unpacked: {format_names([str(error)])}") from None
    return make_notes([*members], place)


def list_members(bundle: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the files of a zip by path, except links, irrelevant files and paths that lead outside.

    Also leave out files whose decompression may need an unlimited amount of memory.
    """
    members = {}
    if len(bundle.infolist()) > MOST_MEMBERS:
        raise ValueError(f"it has more than {MOST_MEMBERS} files")
    for info in bundle.infolist():
        path = "/".join(part for part in info.filename.replace("\\", "/").split("/") if part != ".")
        usual = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        is_file = usual and not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16)
        if is_file and {"", "..", *SKIPPED}.isdisjoint(path.split("/")):
            members[path] = info
    return members
