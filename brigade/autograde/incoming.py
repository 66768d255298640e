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


@contextlib.contextmanager
def opened(path: str | Path) -> Iterator[Path]:
    """The directory in which `submission.find` finds the modules. Raises CourseError where nothing can be graded."""
    path = Path(path)
    try:
        if path.is_dir():
            yield root_of(path)
            return
        if not path.exists():
            raise CourseError(f"there is no submission {path}")
        with tempfile.TemporaryDirectory(prefix="brigade-zip-") as directory:
            unzip(path, Path(directory))
            yield root_of(Path(directory))
    except zipfile.BadZipFile:
        raise CourseError(f"{path.name} is neither a directory nor a zip file") from None


def root_of(directory: Path) -> Path:
    """The directory itself, or the one directory in it that has modules where it has none."""
    with contextlib.suppress(OSError):
        inner = sorted(Path(entry.path) for entry in os.scandir(directory) if entry.is_dir(follow_symlinks=False))
        for place in (directory, *inner):
            if any(find(place, entry) for entry in MODULES):
                return place
    return directory


def unzip(archive: Path, directory: Path) -> None:
    """Writes the module files of a zip, and no others, each of them up to the size that a module may have."""
    names = {entry.path.name for entry in MODULES}
    with zipfile.ZipFile(archive) as bundle:
        for member in bundle.infolist():
            path = PurePosixPath(member.filename)
            if path.name not in names or path.is_absolute() or ".." in path.parts or member.is_dir():
                continue
            target = directory.joinpath(*path.parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                with bundle.open(member) as source:
                    target.write_bytes(source.read(MAX_SOURCE_BYTES + 1))  # one more, and `read` refuses it
            except (OSError, RuntimeError, NotImplementedError, zipfile.BadZipFile) as error:  # encrypted, damaged
                raise CourseError(f"{archive.name} cannot be unpacked: {error}") from None


def meddling(directory: Path) -> list[str]:
    """Names in the submission that could take part in a careless grading. They are ignored, and worth a look."""
    found = []
    for count, (place, directories, files) in enumerate(os.walk(directory)):
        if count > LOOKED_AT:
            break
        directories[:] = [name for name in directories if name not in (".git", ".venv", "node_modules")]
        found += [os.path.relpath(os.path.join(place, n), directory) for n in (*directories, *files) if n in MEDDLING]
    return sorted(found)[:20]
