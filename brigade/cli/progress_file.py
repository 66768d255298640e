"""What the commands remember about a student: hints shown and modules passed. Losing it does no harm."""

from __future__ import annotations

import contextlib
import hashlib
import json
from typing import Any

from brigade.course.modules import ROOT, Module
from brigade.course.submission import Sources

PROGRESS = ROOT / ".brigade-progress.json"


def recall(kind: str) -> dict[str, Any]:
    """Return what is remembered about each module, by its package.

    `kind` is "hints" (how many hints of each part were shown) or "passed" (the fingerprint of the sources that passed).
    """
    try:
        return dict(json.loads(PROGRESS.read_text())[kind])
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def remember(kind: str, package: str, value: Any) -> None:
    """Store what `recall` returns. Do nothing if the directory is not writable."""
    content = {name: recall(name) for name in ("hints", "passed")}
    content[kind][package] = value
    with contextlib.suppress(OSError):
        PROGRESS.write_text(json.dumps(content))


def hash_submission(entry: Module, sources: Sources) -> str:
    """Return a fingerprint of the module's checks and of everything that they examine."""
    texts = [entry.checks.read_text(), *(text for _, (_, text) in sorted(sources.items()))]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()
