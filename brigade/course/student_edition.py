"""Make the student edition, the course without its answers, in out/student and out/student.zip:

    python -m brigade.course.student_edition

It has the toolkit without the grader, in whole folders, and the other files that are named here, as far as git tracks
them. Skeletons are made afresh, and `student/` has what differs. Whatever is not named stays out.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

from brigade.course import editions, handout, skeletons, validation
from brigade.course.modules import MODULES, ROOT, CourseError

TAKEN = (".gitignore", "LICENSE", "assignments.md", "pyproject.toml", "setup.mk")
TAKEN += (*editions.CORE, "brigade/lab/**/*.py", *editions.CHECKS)
TAKEN += ("docs/claims.md", "docs/gpus.md", "docs/plan.md")
TAKEN += ("lessons/*/README.md", "lessons/*/hints.md", "lessons/*/*.png", "lessons/*/*.py")
PACKAGES = ("torch", "pytest", "numpy", "matplotlib", "rich", "psutil")  # of requirements.txt
OUT = ROOT / "out" / "student"


def tracked() -> set[Path]:
    """The files that git knows. Raises CourseError outside of a clone."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise CourseError("the student edition has the files that git tracks: make it in a clone") from None
    return {ROOT / name for name in listed.split("\0") if name}


def contents() -> dict[Path, bytes]:
    """The files of the edition. Raises CourseError outside of a clone, and as `skeletons.skeleton` does."""
    known = tracked() - {Path(__file__).resolve()}
    found = {path.relative_to(ROOT): path.read_bytes() for name in TAKEN for path in ROOT.glob(name) if path in known}
    found |= {Path(path.name): path.read_bytes() for path in (ROOT / "student").glob("*") if path in known}
    for entry in MODULES:
        for place in ("lessons", skeletons.KEPT):
            found[place / entry.path] = skeletons.skeleton(entry).encode()
    for document in (Path("README.md"), Path("assignments.md")):
        text = handout.filled(found[document].decode(), ROOT)
        found[document] = re.sub(r"<!-- .* -->\n+", "", text).encode()
    return found | {Path("requirements.txt"): editions.requirements_for(PACKAGES).encode()}


def build(target: Path) -> int:
    """Make the edition in `target`; return the number of its files. Raise as `contents` does, and for broken checks."""
    validation.validate_course()
    files = contents()
    shutil.rmtree(target, ignore_errors=True)
    for path, content in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(content)
    validation.import_checks(target)
    return len(files)


def main() -> int:
    argparse.ArgumentParser(
        prog="python -m brigade.course.student_edition",
        description="Makes the student edition, without solutions, mutants and answers, in out/student, of which what "
        "was there before is deleted, and as out/student.zip.",
        epilog="Example: python -m brigade.course.student_edition",
    ).parse_args()
    try:
        count = build(OUT)
        archive = Path(shutil.make_archive(str(OUT), "zip", OUT.parent, OUT.name))
    except (CourseError, OSError) as error:
        print(f"edition: {error}", file=sys.stderr)
        return 2
    print(f"{OUT.relative_to(ROOT)} and {archive.relative_to(ROOT)} hold {count} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
