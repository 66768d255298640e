"""Find the modules in an upload: a clone, a lessons directory, flat files, an archive of these, or single module files.

Only the course's module files are used. Everything else is ignored. Notes name what looks like an answer and was not
used, such as a second copy. If nothing can be graded, `Unreadable` says why, and what the student can do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from brigade.course.table.modules import CORE_MODULES, MODULES
from brigade.course.table.submission import find, read_bytes, read_text
from brigade.grader import archives
from brigade.grader.archives import READ_ARCHIVES
from brigade.grader.formats import make_line
from brigade.ranks.errors import UserError
from brigade.ranks.ipc.temporary import temporary_directory

SKIPPED = frozenset((".git", ".venv", "venv", "node_modules", "__pycache__", "__MACOSX", ".ipynb_checkpoints"))
ARCHIVES = (*READ_ARCHIVES, ".gz", ".bz2", ".xz", ".rar", ".7z", ".zst")
LOOKED_AT = 20_000  # entries of a directory tree to examine, the upper levels first
MOST_NAMED = 5  # names in one note
LONGEST_PATH = 3_500  # bytes; a system call takes 4096 at most

EXAMPLE = CORE_MODULES[0].path.name
REMEDY = "hand in the zip that `brigade submit` writes"
FILES = {path.name: entry for entry in MODULES for path in entry.paths}
# A single module file. Platforms put the student's name in front, and number the next upload of the same name.
MODULE_FILE = re.compile(
    rf"(?:(?P<owner>.+)_)?(?P<name>{'|'.join(name[:-3] for name in FILES)})(?:-(?P<again>\d+)| \((?P<copy>\d+)\))?\.py",
    re.IGNORECASE,
)


class Unreadable(UserError):
    """An upload in which nothing can be graded."""


@contextlib.contextmanager
def open_submission(*paths: str | Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the directory in which `submission.find` finds the modules of a submission, and notes.

    There is one path, or the paths of several module files. Raise Unreadable if nothing can be graded, also because no
    file is UTF-8. A directory is used in place if its files have the names of the course's. Otherwise, and for an
    archive, the module files are copied to a temporary directory. A directory with one archive and no module files is
    treated like the archive.
    """
    with open_modules(*paths) as (place, notes):
        texts, reasons = read_modules(place)
        if reasons and not texts:
            raise Unreadable(reasons[0])
        yield place, [*notes, *(f"Not read: {reason}" for reason in reasons[:MOST_NAMED])]


def read_modules(place: Path) -> tuple[dict[str, str], list[str]]:
    """Return the texts of the module files in a directory, by name, and why other files cannot be read."""
    texts: dict[str, str] = {}
    reasons = []
    for entry in MODULES:
        if not (main := find(place, entry)):
            continue
        for name in entry.paths:
            try:
                if (path := main.with_name(name.name)) == main or path.exists():
                    texts[str(name)] = read_text(path, place)
            except UserError as error:
                reasons.append(str(error))
    return texts, reasons


@contextlib.contextmanager
def open_modules(*paths: str | Path) -> Iterator[tuple[Path, list[str]]]:
    """Do what `open_submission` describes, without reading the texts."""
    path = Path(paths[0])
    if not path.is_dir() and not path.is_file():
        raise UserError(f"there is no directory, archive or module file {path}")
    if path.is_dir():
        files = walk(path)
        packed = [file for file in files if file.lower().endswith(ARCHIVES)]
        names = format_names(packed)
        place, modules, notes = choose_modules(files)
        if not modules and any(find(path, entry) for entry in MODULES):  # in a tree with more than LOOKED_AT entries
            yield path, []
            return
        if modules:
            if packed:
                notes.append(f"Not unpacked, because the submission has module files outside archives: {names}")
            if all(os.path.join(place, name) == file for name, file in modules.items()):
                yield path / place, notes
                return
            with temporary_directory() as directory:
                write_modules(directory, {name: read_bytes(path / file, path) for name, file in modules.items()})
                yield directory, notes
            return
        if len(packed) != 1:
            several = f"Found no module file, but {len(packed)} archives ({names}); {REMEDY}"
            raise Unreadable(several if packed else notes[0])
        archive = path / packed[0]
    else:
        archive = path.resolve()
    with temporary_directory() as directory:
        if all(MODULE_FILE.fullmatch(Path(path).name) for path in paths):
            notes = take_modules([Path(path) for path in paths], directory)
        else:
            notes = unpack(archive, directory)
        yield directory, notes


def walk(top: Path) -> list[str]:
    """Return the files below a directory, level by level, without following links; at most LOOKED_AT entries."""
    files: list[str] = []
    waiting, left = [""], LOOKED_AT
    for place in waiting:
        with contextlib.suppress(OSError):  # the directory is not readable
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


def choose_modules(files: Collection[str]) -> tuple[str, dict[str, str], list[str]]:
    """Return the directory to grade, its module files, and notes.

    The keys are the paths at which `submission.find` looks for the files in that directory. Capital letters in a name
    do not matter. If there are no module files, the only note says so. A file with a name such as plan.py counts only
    beside its module's main file. Prefer the directory with `lessons`, then the one with the most modules, then the
    highest level.
    """
    found: dict[str, dict[str, str]] = {}
    present = {file.lower() for file in files}
    for file in files:
        *above, name = file.split("/")
        parts = file.lower().split("/")
        entry = FILES.get(parts[-1])
        if entry and "/".join([*parts[:-1], entry.path.name]) in present:
            depth = len(above)
            if parts[-2:-1] == [entry.package]:
                depth -= 2 if parts[-3:-2] == ["lessons"] else 1
            inside = found.setdefault("/".join(above[:depth]), {})
            if name in FILES or "/".join(parts[depth:]) not in inside:  # of two files, the one with the course's name
                inside["/".join(parts[depth:])] = file
    if not found:
        names = format_names([file for file in files if not is_hidden(file)])
        what = f"No module file such as {EXAMPLE} was found, but {names}" if names else "The submission has no file"
        return "", {}, [f"{what}; {REMEDY}"]

    def rank(place: str) -> tuple:
        has_lessons = any(name.startswith("lessons/") for name in found[place])
        return not has_lessons, -len(found[place]), place.count("/") + bool(place), place

    place = min(found, key=rank)
    given = [os.path.join(place, name) for name in ("solutions", "skeletons")]  # of a clone of the course
    others = [file for other, inside in found.items() if other not in (place, *given) for file in inside.values()]
    graded = make_line(place) if place else "those at the top level"
    several = f"Module files are in several places. Graded: {graded}. Not graded: {format_names(others)}"
    beside = list_ignored(files, set(found[place].values()))
    ignored = f"Ignored, because only the course's files are read: {format_names(beside)}"
    return place, found[place], [several] * bool(others) + [ignored] * bool(beside)


def list_ignored(files: Collection[str], modules: Collection[str]) -> list[str]:
    """Return the Python files beside graded modules that do not belong to the course, such as a student's helpers."""
    course = {entry.package: {path.name for path in entry.lesson.rglob("*.py")} for entry in MODULES}
    everywhere = set().union(*course.values())
    places = {os.path.dirname(module) for module in modules}
    ignored = []
    for file in files:
        place, name = os.path.split(file)
        is_known = file in modules or name in course.get(os.path.basename(place), everywhere)
        if name.endswith(".py") and place in places and not is_known and not is_hidden(name):
            ignored.append(file)
    return ignored if everywhere else []  # a package for Gradescope does not have the course's scripts


def is_hidden(name: str) -> bool:
    """Return whether a file comes from an operating system or an office program, and not from a student."""
    name = os.path.basename(name)
    return name.startswith((".", "~$")) or name.lower() in ("thumbs.db", "desktop.ini", "__macosx")


def format_names(names: Collection[str]) -> str:
    """Return one line with the first names and the number of the others."""
    line = ", ".join(make_line(name[-300:])[-100:] for name in itertools.islice(names, MOST_NAMED))
    return line + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def take_modules(paths: Sequence[Path], directory: Path) -> list[str]:
    """Copy single module files of one student to a new directory. Return notes.

    Of several files of one module, take the one with the highest number, which a platform has given to the last upload.
    """
    latest: dict[str, Path] = {}
    for path in sorted(paths, key=lambda path: (get_number(path.name), path.name)):
        if match := MODULE_FILE.fullmatch(path.name):
            latest[f"{match['name'].lower()}.py"] = path
    write_modules(directory, {name: read_bytes(path.resolve(), path.parent.resolve()) for name, path in latest.items()})
    older = [path.name for path in paths if path not in latest.values()]
    return [f"Ignored, because there is a later file of this module: {format_names(older)}"] * bool(older)


def write_modules(directory: Path, contents: Mapping[str, bytes]) -> None:
    """Write module files, by their paths, to a new directory."""
    for name, content in contents.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_bytes(content)


def get_number(name: str) -> int:
    """Return the number that Canvas ("-1") or a browser (" (1)") has put at the end of a name, or 0."""
    match = re.search(r"(?:-(\d+)| \((\d+)\))(?:\.[A-Za-z][^/]*)?$", name)
    return int(match[1] or match[2]) if match else 0


def unpack(archive: Path, directory: Path) -> list[str]:
    """Copy the module files in the best place of an archive to a new directory. Return notes.

    Write them at their paths relative to that place. The rest of each path in the archive is ignored.
    """
    shown = format_names([archive.name])
    if not archive.name.lower().endswith(READ_ARCHIVES):
        if not archive.name.lower().endswith(ARCHIVES):
            raise Unreadable(f"No module file such as {EXAMPLE} was found, but {shown}; {REMEDY}")
        raise Unreadable(f"{shown} is a {archive.suffix.lower()} file, which the grader cannot unpack; {REMEDY}")
    try:
        contents = archives.read_archive(archive, lambda name: name.lower() in FILES, SKIPPED)
    except archives.Refused as refusal:
        raise Unreadable(f"{shown} {refusal}; {REMEDY}") from None
    _, modules, notes = choose_modules(contents.files)
    if not modules:
        packed = [file for file in contents.files if file.lower().endswith(ARCHIVES)]
        if contents.refused:
            file, reason = next(iter(contents.refused.items()))
            raise Unreadable(f"{format_names([file])} in {shown} {reason}; {REMEDY}")
        if packed:
            raise Unreadable(f"{shown} contains archives instead of modules ({format_names(packed)}); {REMEDY}")
        raise Unreadable(f"In {shown}: {notes[0]}")
    write_modules(directory, {name: contents.wanted[module] for name, module in modules.items()})
    notes += [f"Not read: {format_names([file])} {reason}" for file, reason in contents.refused.items()][:MOST_NAMED]
    return notes
