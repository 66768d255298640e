"""The progress that commands remember: hints shown, modules passed and failed. Losing it does no harm."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from brigade.course.table.listing import find_unwritten_parts
from brigade.course.table.modules import ROOT, Module
from brigade.course.table.submission import list_texts, read, select_files, select_used
from brigade.ranks.errors import UserError
from brigade.ranks.texts import Sources, list_imports, read_imported

PROGRESS = ROOT / ".brigade-progress.json"
NO_JUDGES = {"cli", "grader", "lab"}  # the folders of brigade on which no result of a check depends
CHANGED = "The course's own files have changed meanwhile, so this result is not recorded. Start the command again."

COURSE_FILES: dict[Path, bytes] = {}  # the files that judge modules, as this process has first read them


def recall(kind: str) -> dict[str, Any]:
    """Return the remembered values of one kind for all modules, by package.

    `kind` is "hints" (how many hints of each part were shown), or "passed", "failed" or "compared" (the fingerprint of
    the last sources that passed, failed, or were compared with the previous module).
    """
    try:
        return dict(json.loads(PROGRESS.read_text())[kind])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def remember(kind: str, package: str, value: Any) -> None:
    """Store the value that `recall` will return for a module. Do nothing if the directory is not writable."""
    content = {name: recall(name) for name in ("hints", "passed", "failed", "compared")}
    content[kind][package] = value
    with contextlib.suppress(OSError):
        PROGRESS.write_text(json.dumps(content))


def hash_submission(entry: Module, sources: Sources) -> str:
    """Return a fingerprint of the module, of the earlier modules that it uses, and of all that judges it.

    Call this before the checks run, and record no result if `has_changed` afterwards. Then a stored fingerprint belongs
    to the text and to the edition of the checks that gave this result.
    """
    own = select_files(entry, sources)
    used = own | select_used(entry, own, sources)
    digest = hashlib.sha256("\0".join(f"{name}\0{text}" for name, (_, text) in sorted(used.items())).encode())
    for content in list_judges(entry):
        digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def list_judges(entry: Module) -> list[bytes]:
    """Return the contents of all files on which a module's result depends, except the submission's.

    These are the module's checks, its scenarios and all else that they import from `tests`, the data beside them, and
    the toolkit without its commands, the grader and the lab.
    """
    checks = read_once(entry.checks).decode()
    imported = read_imported(ROOT / "tests", list_imports(checks), lambda path: read_once(path).decode())
    toolkit = [path for path in (ROOT / "brigade").rglob("*.py") if not NO_JUDGES & {*path.parts[-3:]}]
    files = [entry.checks, *(Path(path) for path, _ in imported.values()), *entry.tests.glob("dumps/*.txt"), *toolkit]
    return [read_once(path) for path in sorted(files)]


def read_once(path: Path) -> bytes:
    """Return the content of one of the course's files, as this process has first read it."""
    if path not in COURSE_FILES:
        COURSE_FILES[path] = path.read_bytes()
    return COURSE_FILES[path]


def has_changed() -> bool:
    """Return whether a file that `read_once` has read was changed since, for example by `brigade update`."""
    return any(not path.is_file() or path.read_bytes() != content for path, content in COURSE_FILES.items())


def find_state(entry: Module, target: Path) -> str:
    """Return the state of a module without running it: "broken", "not written", "passes", "fails" or "written"."""
    try:
        sources = read(target, entry.number)
    except UserError:
        return "broken"
    if any(map(find_unwritten_parts, list_texts(select_files(entry, sources)))):
        return "not written"
    key = hash_submission(entry, sources)
    if recall("passed").get(entry.package) == key:
        return "passes"
    return "fails" if recall("failed").get(entry.package) == key else "written"
