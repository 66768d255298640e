"""The results of the last `brigade bench --save`, which students hand in with their written answers.

They are in `lessons/measurements.json`, beside the modules. `brigade bench --save` writes this file, `brigade submit`
adds it to the zip, and the person who grades the answers reads it. The autograder ignores it.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from brigade.course.modules import CourseError
from brigade.course.submission import open_no_follow

MEASUREMENTS = "measurements.json"
MAX_BYTES = 100_000  # the results of all modules take about 5 000 bytes


def locate_measurements(target: Path) -> Path:
    """Return the path of the measurements file in a clone, a `lessons` directory or a directory of modules.

    The file may not exist.
    """
    return (target / "lessons" if (target / "lessons").is_dir() else target) / MEASUREMENTS


def read_measurements(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the file's bytes and its content. Raise CourseError if `brigade bench --save` cannot have written it."""
    try:
        with open(path, "rb", opener=open_no_follow) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ValueError("it is not an ordinary file")
            raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES} bytes")
        content = json.loads(raw)
        if not isinstance(content, dict) or not isinstance(content.get("date"), str) or not content.get("rows"):
            raise ValueError("its date or its rows are missing")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CourseError(f"it is not what `brigade bench --save` writes ({reason})") from None
    return raw, content
