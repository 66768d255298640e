"""Find out which files in a class's directory belong together, and whose they are.

A directory or an archive is a submission. The single module files of one student are one submission together. Moodle
and Canvas name downloads in their own way (`roster.MOODLE`, `roster.CANVAS`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path

from brigade.grader import incoming, roster
from brigade.grader.formats import make_line
from brigade.ranks.errors import UserError

ENDING = re.compile(rf"({'|'.join(map(re.escape, incoming.ARCHIVES))}|\.[^.]+)$", re.IGNORECASE)
MODULE_FILES = "(module files)"  # ends the name of a submission of single module files
LATE = "late (Canvas)"
METADATA = "submission_metadata.yml"  # in an export from Gradescope
CREATED = re.compile(r"^  :created_at: ['\"]?([\d-]{1,10})[ T]([\d:]{1,8})\S{0,40} ?(Z|[+-]\d\d:?\d\d)", re.MULTILINE)


@dataclass
class Upload:
    """What one student handed in at one time.

    `name` is what the gradebook calls it, unique and printable. `owner` is the name without endings. All `paths` are of
    the same submission: one directory or archive, or several module files.
    """

    paths: list[Path]
    name: str
    owner: str
    notes: list[str] = field(default_factory=list)
    uploaded: datetime | None = None  # when, as far as the platform or the date of the file tells
    is_marked: bool | None = None  # whether Canvas marked it as late; None if it is not from Canvas


def list_uploads(directory: Path, ours: Collection[Path]) -> list[Upload]:
    """Return the uploads in a class's directory, also files that cannot be graded. `ours` do not come from students.

    Raise UserError if there is nothing that a student could have handed in.
    """
    found = [path for path in sorted(directory.iterdir()) if path not in ours and not is_skipped(path)]
    if not any(path.is_dir() or path.name.lower().endswith((*incoming.ARCHIVES, ".py", ".ipynb")) for path in found):
        raise UserError(f"there are no submissions in {directory}; it must contain one directory or zip per student")
    uploads: list[Upload] = []
    files: dict[str, list[Path]] = {}
    metadata = read_metadata(directory)
    for path in found:
        if who := "" if path.is_dir() else find_owner(path.name):
            files.setdefault(who, []).append(path)
        else:
            uploads.append(Upload([path], path.name, path.name if path.is_dir() else ENDING.sub("", path.name)))
    for who, paths in files.items():
        uploads += join_files(who, paths)
    for upload in uploads:
        owner, upload.uploaded = metadata.get(upload.paths[0].name, (upload.owner, get_date(upload.paths)))
        upload.owner = make_line(owner)
        matches = [match for path in upload.paths if (match := roster.CANVAS.fullmatch(make_line(path.name)))]
        upload.is_marked = any(match["late"] for match in matches) if matches else None
        upload.notes += [LATE] * bool(upload.is_marked)
    uploads.sort(key=lambda upload: upload.paths[0])
    for upload, name in zip(uploads, make_unique([make_line(upload.name) for upload in uploads]), strict=True):
        upload.name = name
    return uploads


def is_skipped(path: Path) -> bool:
    """Return whether an entry of a class's directory is not from a student, such as Thumbs.db."""
    return incoming.is_hidden(path.name) or path.name in (*incoming.SKIPPED, METADATA)


def read_metadata(directory: Path) -> dict[str, tuple[str, datetime]]:
    """Return what Gradescope's export says about each submission: whose it is, and when it was uploaded.

    The export is YAML, with one block for each directory. Only its first submitter and its first time are read.
    """
    path = directory / METADATA
    blocks = re.split(r"^(\S+):[ \t]*$", path.read_text(errors="replace") if path.is_file() else "", flags=re.MULTILINE)
    found = {}
    for name, block in zip(blocks[1::2], blocks[2::2], strict=True):
        owner = re.search(r":(?:sid|email): ['\"]?([^\s'\"]+)", block)
        time = CREATED.search(block)
        if owner and time:
            zone = "+00:00" if time[3] == "Z" else f"{time[3][:3]}:{time[3][-2:]}"
            found[name] = owner[1], datetime.fromisoformat(f"{time[1]} {time[2]}{zone}")
    return found


def get_date(paths: Iterable[Path]) -> datetime:
    """Return the date of the newest file of an upload."""
    files = [path / name for path in paths for name in (incoming.walk(path) if path.is_dir() else [""])]
    dates = [path.lstat().st_mtime for path in files or paths]
    return datetime.fromtimestamp(max(dates), timezone.utc)


def find_owner(name: str) -> str:
    """Return what the name of a file says about its owner; "" if the file belongs to no other files."""
    if match := roster.CANVAS.fullmatch(name):
        return f"{match['name']}_{match['id']}"
    if match := roster.MOODLE_FILE.fullmatch(name):
        return match["folder"]
    match = incoming.MODULE_FILE.fullmatch(name)
    return (match and match["owner"]) or ""


def join_files(who: str, paths: Sequence[Path]) -> list[Upload]:
    """Return the uploads of one owner: each archive, and all module files together. A note names the other files."""
    modules = [path for path in paths if incoming.MODULE_FILE.fullmatch(path.name)]
    packed = [path for path in paths if path.name.lower().endswith(incoming.ARCHIVES)]
    others = [path for path in paths if path not in modules and path not in packed]
    uploads = [Upload([path], path.name, ENDING.sub("", path.name)) for path in packed]
    if modules:
        uploads.append(Upload(modules, f"{who} {MODULE_FILES}", who))
    if not uploads:
        return [Upload(list(others), others[0].name, who)]
    if others:
        uploads[-1].notes.append(f"Ignored: {incoming.format_names([path.name for path in others])}")
    return uploads


def make_unique(names: Iterable[str], fold: Callable[[str], str] = str) -> list[str]:
    """Return the names with numbers such as " (2)" where `fold` makes two of them equal."""
    taken: set[str] = set()
    unique = []
    for name in names:
        numbered, number = name, 1
        while fold(numbered) in taken:
            number += 1
            numbered = f"{name} ({number})"
        taken.add(fold(numbered))
        unique.append(numbered)
    return unique


def sort_key(name: str) -> tuple:
    """Return the key that sorts a student's submissions by time, as far as their names tell it.

    Canvas numbers every upload. It also appends -1 to the name of the next upload, and a browser (1).
    """
    match = roster.CANVAS.fullmatch(name)
    return int(match["attachment"]) if match else 0, incoming.get_number(name), name
