"""brigade init | update: write the student edition to a directory, or renew it there and keep the student's work."""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import zipfile
from pathlib import Path

from brigade.course.cli.console import console
from brigade.course.table.modules import MODULES, ROOT
from brigade.course.table.skeletons import get_answers_path
from brigade.ranks.errors import UserError

ARCHIVES = (ROOT / "brigade" / "course" / "student.zip", ROOT / "out" / "student.zip")  # in a package, in a clone
MANIFEST = ".brigade-edition.json"  # in the directory: the hashes of the edition's files
OWN = {("lessons" / path).as_posix() for entry in MODULES for path in entry.paths}  # what students write
OWN |= {("lessons" / get_answers_path(entry)).as_posix() for entry in MODULES}


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade init`."""
    parser.add_argument("directory", metavar="DIR", help="a new directory for the course")


def add_update_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `brigade update`."""
    parser.add_argument("directory", metavar="DIR", help="the directory that `brigade init` has written")


def run_init(options: argparse.Namespace) -> int:
    """brigade init DIR: write the student edition to a directory that does not exist yet, or is empty."""
    directory = Path(options.directory)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError(f"{directory} exists already: `brigade update {shlex.quote(str(directory))}` renews a course")
    count = write_edition(directory)
    console.print(f"{directory} contains the course: {count} files. Now run these two commands:", markup=False)
    place = shlex.quote(str(directory))
    console.print(f"  cd {place} && make setup\n  source .venv/bin/activate && brigade next", markup=False)
    return 0


def run_update(options: argparse.Namespace) -> int:
    """brigade update DIR: bring new readings, checks and hints, and keep everything that the student has written."""
    directory = Path(options.directory)
    if not (directory / MANIFEST).is_file():
        raise UserError(f"{directory} is no course that `brigade init` has written: it has no {MANIFEST}")
    count = write_edition(directory)
    console.print(
        f"{count} files of {directory} have changed. Your modules and answers are as they were.", markup=False
    )
    return 0


def write_edition(directory: Path) -> int:
    """Write the edition's files that differ, remove those that it no longer has, and return how many changed.

    A student's module or answers are replaced only if they are as an earlier edition wrote them. Other files that the
    student has changed, such as scripts, are kept beside the new ones as NAME.bak.
    """
    archive = next((path for path in ARCHIVES if path.is_file()), None)
    if not archive:
        raise UserError("this copy of the course contains no student edition: install the package, or `make student`")
    manifest, count = directory / MANIFEST, 0
    before = json.loads(manifest.read_text()) if manifest.exists() else {}
    with zipfile.ZipFile(archive) as bundle:
        names = [name for name in bundle.namelist() if not name.endswith("/")]
        files = {name.partition("/")[2]: bundle.read(name) for name in names}
    for name in sorted(files.keys() | before.keys()):
        path, content = directory / name, files.get(name)
        current = path.read_bytes() if path.is_file() else None
        is_changed = current is not None and compute_hash(current) != before.get(name)
        if current == content or is_changed and (name in OWN or content is None):
            continue
        if is_changed:
            path.replace(path.with_name(f"{path.name}.bak"))
        if content is None:
            path.unlink(missing_ok=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        count += 1
    manifest.write_text(json.dumps({name: compute_hash(content) for name, content in files.items()}, indent=0))
    return count


def compute_hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
