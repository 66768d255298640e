"""Run a copy of the course as its user does, who has installed it with `make setup`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

BRIGADE = (
    "import sys\nfrom brigade.course.cli.main import program\nsys.exit(program())\n"  # what pip writes to bin/brigade
)


def install(course: Path, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Return the beginning of a `brigade` command of a copy of the course, and the variables for all its commands.

    Python finds only the package `brigade` of the copy, because that is all that `make setup` installs.
    """
    folder.mkdir(exist_ok=True)
    if not (folder / "brigade").is_symlink():
        (folder / "brigade").symlink_to(course / "brigade")
        (folder / "command.py").write_text(BRIGADE)
    return [sys.executable, str(folder / "command.py")], os.environ | {"PYTHONPATH": str(folder), "COLUMNS": "300"}
