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
from collections.abc import Collection, Iterator
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
MOST_NAMED = 5  # names in one note
LONGEST_PATH = 3_500  # bytes; a system call takes 4096 at most

EXAMPLE = CORE_MODULES[0].path.name
FILES = {path.name: entry for entry in MODULES for path in entry.paths}


@contextlib.contextmanager
def open_submission(path: str | Path) -> Iterator[tuple[Path, list[str]]]:
    """Yield the directory in which `submission.find` finds the modules of a submission, and notes.

    Raise CourseError if nothing can be graded. A directory is used in place. The module files of a zip are unpacked
    into a temporary directory. A directory with one zip and no module files is treated like the zip.
    """
    path = Path(path)
    if path.is_dir():
        files = walk(path)
        place, modules, notes = choose_modules(files)
        archives = [file for file in files if file.lower().endswith(ARCHIVES)]
        names = format_names(archives)
        if modules or not archives:
            if archives:
                notes.append(f"Not unpacked, because the submission has module files outside archives: {names}")
            yield path / place, notes
            return
        if len(archives) > 1:
            raise CourseError(f"found no module file, but {len(archives)} archives: {names}; hand in only one")
        archive = path / archives[0]
    elif path.is_file():
        archive = path.resolve()
    else:
        raise CourseError(f"there is no directory or zip {path}")
    with temporary_directory() as directory:
        take = take_module if archive.suffix == ".py" else unpack
        yield directory, take(archive, directory)


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
    """Return the directory to grade, its module files by their paths relative to it, and notes for the instructor.

    `submission.find` must find the modules there. A file with a name such as plan.py counts only beside its module's
    main file. Prefer the directory with `lessons`, then the one with the most modules, then the highest level.
    """
    found: dict[str, dict[str, str]] = {}
    present = set(files)
    for file in files:
        *above, name = file.split("/")
        entry = FILES.get(name)
        if entry and "/".join([*above, entry.path.name]) in present:
            depth = len(above)
            if above[-1:] == [entry.package]:
                depth -= 2 if above[-2:-1] == ["lessons"] else 1
            found.setdefault("/".join(above[:depth]), {})["/".join([*above[depth:], name])] = file
    if not found:
        what = format_names(files) if files else "nothing"
        return "", {}, [f"No module file such as {EXAMPLE} was found. Found instead: {what}"]

    def rank(place: str) -> tuple:
        has_lessons = any(name.startswith("lessons/") for name in found[place])
        return not has_lessons, -len(found[place]), place.count("/") + bool(place), place

    place = min(found, key=rank)
    given = [os.path.join(place, name) for name in ("solutions", "skeletons")]  # of a clone of the course
    others = [file for other, inside in found.items() if other not in (place, *given) for file in inside.values()]
    graded = make_line(place) if place else "those at the top level"
    several = f"Module files are in several places. Graded: {graded}. Not graded: {format_names(others)}"
    return place, found[place], [several] * bool(others)


def format_names(names: Collection[str]) -> str:
    """Return one line with the first names and the number of the others."""
    line = ", ".join(make_line(name)[-100:] for name in itertools.islice(names, MOST_NAMED))
    return line + (f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else "")


def take_module(path: Path, directory: Path) -> list[str]:
    """Copy a single module file to a new directory. Platforms put the student's name before the name of the file."""
    mains = [entry.path.name for entry in MODULES if f"_{path.name}".endswith(f"_{entry.path.name}")]
    if not mains:
        raise CourseError(f"unreadable: {format_names([path.name])} has no name of a module, such as {EXAMPLE}")
    (directory / mains[0]).write_text(read_text(path, path.parent), encoding="utf-8", errors="replace")
    return []


def unpack(archive: Path, directory: Path) -> list[str]:
    """Unpack the module files in the best place of a zip, each up to the maximum size of a module. Return notes.

    Write them to a new directory, at their paths relative to that place. The rest of each path in the zip is ignored.
    """
    shown = format_names([archive.name])
    if archive.suffix.lower() != ".zip":
        ending = archive.suffix.lower() or "no file extension"
        raise CourseError(f"unreadable: {ending}; hand in .zip or a directory ({shown})")
    try:
        with open(archive, "rb", opener=open_no_link) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or status.st_size > MOST_ARCHIVE_BYTES:
                raise ValueError(f"it is not a file, or it is larger than {MOST_ARCHIVE_BYTES} bytes")
            with zipfile.ZipFile(file) as bundle:
                members = list_members(bundle)
                _, modules, notes = choose_modules(members)
                inner = [file for file in members if file.lower().endswith(ARCHIVES)]
                if inner and not modules:
                    raise ValueError(f"it contains an archive instead of module files: {format_names(inner)}")
                for name, module in modules.items():
                    target = directory / name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with bundle.open(members[module]) as source:  # a longer file is refused when it is read
                        target.write_bytes(source.read(MAX_SOURCE_BYTES + 1))
                return notes
    except Exception as error:  # zipfile reports a damaged file in many ways
        raise CourseError(f"{shown} cannot be unpacked: {format_names([str(error)])}") from None


def list_members(bundle: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """Return the files of a zip by path, except links, irrelevant files and paths that lead outside.

    Also leave out files whose decompression may need an unlimited amount of memory.
    """
    members = {}
    for info in bundle.infolist():
        path = "/".join(part for part in info.filename.replace("\\", "/").split("/") if part != ".")
        usual = info.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
        is_file = usual and not info.is_dir() and not stat.S_ISLNK(info.external_attr >> 16)
        if is_file and {"", "..", *SKIPPED}.isdisjoint(path.split("/")):
            members[path] = info
    return members
