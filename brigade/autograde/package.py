"""Builds out/gradescope.zip, which an instructor uploads as the autograder: python -m brigade.autograde.package"""

from __future__ import annotations

import argparse
import sys
import zipfile
from pathlib import Path

from brigade.course import ROOT

SCRIPTS = Path(__file__).parent / "gradescope"
NEEDED = ("brigade", "lessons", "solutions", "tests/scenarios", "requirements.txt", "pyproject.toml")
NEEDED_PACKAGES = ("torch", "pytest", "rich", "numpy")  # of requirements.txt; notebooks and pictures are not graded


def build(archive: Path) -> int:
    """Writes the zip; returns the number of files in it."""
    files = {path.name: path for path in SCRIPTS.iterdir()}
    for name in NEEDED:
        place = ROOT / name
        for path in [place] if place.is_file() else sorted(place.rglob("*")):
            if path.is_file() and path.suffix in (".py", ".toml", ".txt"):
                files[path.relative_to(ROOT).as_posix()] = path
    files |= {f"tests/{path.name}": path for path in sorted((ROOT / "tests").glob("test_m*.py"))}
    archive.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, path in files.items():
            text = path.read_text()
            if name == "requirements.txt":
                text = "".join(line for line in text.splitlines(keepends=True) if line.startswith(NEEDED_PACKAGES))
            member = zipfile.ZipInfo(name)
            member.external_attr = (0o755 if path.parent == SCRIPTS else 0o644) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            bundle.writestr(member, text)
    return len(files)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, epilog="Example: python -m brigade.autograde.package").parse_args()
    archive = ROOT / "out" / "gradescope.zip"
    count = build(archive)
    print(f"{archive.relative_to(ROOT)} holds {count} files: upload it as the autograder")
    return 0


if __name__ == "__main__":
    sys.exit(main())
