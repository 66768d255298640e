"""Describe the exception that ended a rank, for the parent."""

from __future__ import annotations

import os
import traceback
from typing import Any

from brigade.course import submission

MAX_MESSAGE = 4_000  # characters of the message that are sent


def describe(error: BaseException, packages: dict[str, Any]) -> dict[str, Any]:
    """Return the description of an exception, with its frames in the submission.

    If the submission has no frames, include the frames in the other packages that the rank received. If these packages
    have no frames either, include all frames outside the toolkit.
    """
    frames = traceback.extract_tb(error.__traceback__)
    toolkit = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
    files = {path for path, *_ in packages.get(submission.PACKAGE, {}).values()}
    own = [frame for frame in frames if frame.filename in files]
    ours = {path for sources in packages.values() for path, *_ in sources.values()}
    others = [frame for frame in frames if frame.filename in ours]
    others = others or [frame for frame in frames if not frame.filename.startswith(toolkit)]
    return {
        "type": type(error).__name__,
        "message": str(error)[:MAX_MESSAGE],
        "frames": [[frame.filename, frame.lineno, frame.name, frame.line] for frame in (own or others)],
        "own": bool(own),
    }
