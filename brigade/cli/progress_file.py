"""The progress that commands remember: hints shown, modules passed and failed. Losing it does no harm."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from brigade.course.listing import find_unwritten_parts
from brigade.course.modules import ROOT, CourseError, Module
from brigade.course.submission import Sources, join_texts, read, select_files, select_used

PROGRESS = ROOT / ".brigade-progress.json"


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
    """Return a fingerprint of the module's checks and of the module, with the earlier modules that it uses."""
    own = select_files(entry, sources)
    used = own | select_used(entry, join_texts(own), sources)
    texts = [entry.checks.read_text(), *(text for _, (_, text) in sorted(used.items()))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def find_state(entry: Module, target: Path) -> str:
    """Return the state of a module without running it: "broken", "not written", "passes", "fails" or "written"."""
    try:
        sources = read(target, entry.number)
    except CourseError:
        return "broken"
    if find_unwritten_parts(join_texts(select_files(entry, sources))):
        return "not written"
    key = hash_submission(entry, sources)
    if recall("passed").get(entry.package) == key:
        return "passes"
    return "fails" if recall("failed").get(entry.package) == key else "written"
