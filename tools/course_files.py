"""List the files that belong to the course, without what its commands have made."""

from __future__ import annotations

import os
import subprocess
from fnmatch import fnmatch
from pathlib import Path

from brigade.course.table.modules import ROOT
from brigade.ranks.errors import UserError

# A git hook sets these variables for the repository that it belongs to. Each command here names its own repository.
GIT_VARIABLES = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_COMMON_DIR", "GIT_OBJECT_DIRECTORY", "GIT_PREFIX")


def list_tracked_files(*patterns: str) -> list[Path]:
    """Return the files that git tracks and that match a pattern. Raise UserError outside a clone, or without git."""
    try:
        return ask_git(ROOT, "--glob-pathspecs", "ls-files", "-z", *patterns)
    except (OSError, subprocess.CalledProcessError):
        raise UserError("make the student edition in a clone: it contains only files that git tracks") from None


def list_files(root: Path = ROOT) -> list[Path]:
    """Return all files that git tracks or would track. Without git, or in a downloaded archive, read .gitignore."""
    try:
        listed = ask_git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    except (OSError, subprocess.CalledProcessError):
        listed = walk(root)
    return sorted({path for path in listed if (root / path).is_file()})


def ask_git(root: Path, *arguments: str) -> list[Path]:
    """Return the files that a git command lists. The clone may belong to another user, as in most containers."""
    command = ["git", "-c", "safe.directory=*", *arguments]
    environment = {name: value for name, value in os.environ.items() if name not in GIT_VARIABLES}
    listed = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.split("\0") if name]


def walk(root: Path) -> list[Path]:
    """Return the files below `root` that .gitignore does not name. Its patterns must not contain "!" or "**"."""
    lines = (line.strip() for line in (root / ".gitignore").read_text().splitlines())
    patterns = [line.strip("/") for line in lines if line and not line.startswith("#")]

    def is_kept(path: Path) -> bool:
        return path.name != ".git" and not any(fnmatch(text, p) for p in patterns for text in (path.name, str(path)))

    found = []
    for directory, folders, names in os.walk(root):
        here = Path(directory).relative_to(root)
        folders[:] = [name for name in folders if is_kept(here / name)]
        found += [here / name for name in names if is_kept(here / name)]
    return found
