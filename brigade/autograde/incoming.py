"""What was handed in: a clone, a lessons directory, flat files, a directory around one of these, or a zip of one.

Only the course's module files are looked at. Everything else is ignored, and what looks like an attempt to take part in
the grading is named.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from brigade.course import MODULES, CourseError
from brigade.submission import MAX_SOURCE_BYTES, find

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
LOOKED_AT = 10_000  # entries of a submission that are looked at in search of these
MOST_AROUND = 100  # directories in which the modules are looked for, where they are not at the top
MOST_ARCHIVE_BYTES = 30_000_000
MOST_FILES = 100  # with a module's name, in an archive


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[Path]:
    """The directory in which `submission.find` finds the modules. Raises CourseError where nothing can be graded."""
    path = Path(path)
    if path.is_dir():
        yield root_of(path)
        return
    if not path.is_file():
        raise CourseError(f"there is no submission {path}, neither a directory nor a zip file")
    if path.stat().st_size > MOST_ARCHIVE_BYTES:
        raise CourseError(f"{path.name} is larger than {MOST_ARCHIVE_BYTES} bytes")
    with tempfile.TemporaryDirectory(prefix="brigade-zip-") as directory:
        unzip(path, Path(directory))
        yield root_of(Path(directory))


def root_of(directory: Path) -> Path:
    """The directory itself, or the one directory in it that has modules where it has none."""
    with contextlib.suppress(OSError):
        inner = sorted(Path(entry.path) for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
        for place in (directory, *inner[:MOST_AROUND]):
            if any(find(place, entry) for entry in MODULES):
                return place
    return directory


def unzip(archive: Path, directory: Path) -> None:
    """Writes the module files of a zip, and no others, each of them up to the size that a module may have."""
    try:
        with zipfile.ZipFile(archive) as bundle:
            for member in members(bundle)[:MOST_FILES]:
                target = directory.joinpath(*PurePosixPath(member.filename).parts)
                target.parent.mkdir(parents=True, exist_ok=True)
                with bundle.open(member) as source:
                    target.write_bytes(source.read(MAX_SOURCE_BYTES + 1))  # one more, and `submission.read` refuses it
    except Exception as error:  # of a damaged file zipfile says so in many ways
        raise CourseError(f"{archive.name} cannot be unpacked: {error}") from None


def members(bundle: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
    """What may be a module: by its name, inside the directory that is unpacked, and compressed as usual."""
    names = {entry.path.name for entry in MODULES}
    found = [(member, PurePosixPath(member.filename)) for member in bundle.infolist() if not member.is_dir()]
    return [
        member
        for member, path in found
        if path.name in names
        and not path.is_absolute()
        and ".." not in path.parts
        and member.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # others may want any amount of memory
    ]


def meddling(directory: Path) -> list[str]:
    """Names in the submission that could take part in a careless grading. They are ignored, and worth a look."""
    found = []
    for count, (place, directories, files) in enumerate(os.walk(directory)):
        if count > LOOKED_AT:
            break
        directories[:] = [name for name in directories if name not in (".git", ".venv", "node_modules")]
        found += [os.path.relpath(os.path.join(place, n), directory) for n in (*directories, *files) if n in MEDDLING]
    return sorted(found)[:20]
