"""Builds out/gradescope.zip, which an instructor uploads to Gradescope: python -m brigade.grade.package

Everything that follows is an option of `brigade grade`, used for every submission.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from brigade.cli import main as cli
from brigade.course import validation
from brigade.course.modules import ROOT, CourseError, selected

SCRIPTS = Path(__file__).parent / "gradescope"
NEEDED = ("LICENSE", "requirements.txt", "brigade/*.py", "solutions/*/*.py")
NEEDED += ("brigade/lab/__init__.py", "brigade/lab/command.py", "brigade/lab/links.py")  # what the command line imports
NEEDED += tuple(
    f"brigade/{folder}/*.py" for folder in ("course", "runner", "rank", "checks", "checks/diagnose", "grade", "cli")
)
NEEDED += ("tests/test_m*.py", "tests/scenarios/*.py", "tests/diagnosis/*.py")
NEEDED_PACKAGES = ("torch", "pytest", "rich", "numpy")  # of requirements.txt; notebooks and pictures are not graded


def build(archive: Path, options: Sequence[str] = ()) -> int:
    """Write the zip; return the number of files in it.

    Raise CourseError for options that cannot be used there, and for a course that contradicts itself.
    """
    contents = {"options": "".join(f"{word}\n" for word in checked(options))}
    validation.validate_course()
    contents |= {path.name: path.read_text() for path in sorted(SCRIPTS.iterdir())}
    for path in sorted(path for pattern in NEEDED for path in ROOT.glob(pattern)):
        if path != Path(__file__).resolve():
            contents[path.relative_to(ROOT).as_posix()] = path.read_text()
    needed = re.compile(rf"({'|'.join(NEEDED_PACKAGES)})==")
    lines = contents["requirements.txt"].splitlines(keepends=True)
    contents["requirements.txt"] = "".join(line for line in lines if needed.match(line))
    import_checks(contents)
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    os.close(os.open(archive, os.O_CREAT | os.O_EXCL, 0o600))  # the solutions are in it
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in contents.items():
            member = zipfile.ZipInfo(name)  # dated 1980, so that equal contents make equal archives
            member.external_attr = (0o755 if (SCRIPTS / name).exists() else 0o644) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            bundle.writestr(member, text)
    return len(contents)


def import_checks(contents: Mapping[str, str]) -> None:
    """Import every check from the files that are packed, and from no others. Raise CourseError if that fails."""
    with tempfile.TemporaryDirectory(prefix="brigade-package-") as directory:
        for name, text in contents.items():
            path = Path(directory, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        validation.import_checks(Path(directory))


def checked(options: Sequence[str]) -> Sequence[str]:
    """The options, if `brigade grade` takes them: a mistake is found here, and not on Gradescope."""
    chosen = cli.parser().parse_args(["grade", "--submission", "", *options])
    if chosen.submission or chosen.out or chosen.format:
        raise CourseError("--submission, --out and --format are given by Gradescope")
    selected(chosen.modules)
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python -m brigade.grade.package --modules 1-4 --limit 300",
    )
    _, options = parser.parse_known_args(arguments)
    archive = ROOT / "out" / "gradescope.zip"
    try:
        count = build(archive, options)
    except CourseError as error:
        print(f"brigade: {error}", file=sys.stderr)
        return 2
    print(f"{archive.relative_to(ROOT)} holds {count} files: upload it as the autograder")
    return 0


if __name__ == "__main__":
    sys.exit(main())
