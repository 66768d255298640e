"""The results of the last `brigade bench --save`, which students hand in with their written answers.

They are in `lessons/measurements.json`, beside the modules. `brigade bench --save` writes this file, `brigade submit`
adds it to the zip, and the person who grades the answers reads it. The autograder ignores it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from brigade.course.modules import CourseError

MEASUREMENTS = "measurements.json"
MAX_BYTES = 100_000  # the results of all modules take about 5 000 bytes


def locate_measurements(target: Path) -> Path:
    """Return the path of the measurements file in a clone or a directory of modules. The file may not exist."""
    return (target / "lessons" if (target / "lessons").is_dir() else target) / MEASUREMENTS


def read_measurements(path: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the file's bytes and its content. Raise CourseError if `brigade bench --save` cannot have written it."""
    try:
        raw = path.read_bytes()
        content = json.loads(raw)
        if len(raw) > MAX_BYTES or not isinstance(content, dict) or not isinstance(content.get("date"), str):
            raise ValueError(f"it has no date or more than {MAX_BYTES} bytes")
    except (OSError, ValueError, RecursionError) as error:
        raise CourseError(f"it is not what `brigade bench --save` writes ({error})") from None
    return raw, content
