"""Make the zip that an instructor uploads to Gradescope: the files that grading needs, and Gradescope's scripts."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

from brigade.course import student_edition, validation
from brigade.course.modules import ROOT
from brigade.ipc.temporary import temporary_directory

SCRIPTS = Path(__file__).parent / "gradescope"
NEEDED = ("LICENSE", *student_edition.CORE, "brigade/grade/**/*.py", "solutions/*/*.py", *student_edition.CHECKS)
NEEDED += ("lessons/*/answers.md",)  # the points of the written questions
# From requirements.txt. Grading needs neither notebooks nor figures.
NEEDED_PACKAGES = ("torch", "pytest", "rich", "jinja2", "numpy")


def build(archive: Path, options: Sequence[str] = (), seed: int = 0) -> int:
    """Write the zip and return the number of files in it. `options` are passed to `brigade grade` for every submission.

    The options may read `seed` from the file of this name, which only root can read.

    Raise CourseError if the course is inconsistent.
    """
    contents = {"options": "".join(f"{word}\n" for word in options), "seed": f"{seed}\n"}
    validation.validate_course()
    contents |= {path.name: path.read_text() for path in sorted(SCRIPTS.iterdir())}
    for path in sorted(path for pattern in NEEDED for path in ROOT.glob(pattern)):
        if path != Path(__file__).resolve():
            contents[path.relative_to(ROOT).as_posix()] = path.read_text()
    contents["requirements.txt"] = student_edition.select_requirements(NEEDED_PACKAGES)
    with temporary_directory() as directory:  # the packed files must be enough to import every check
        for name, text in contents.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(text)
        validation.import_checks(directory)
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    archive.touch(0o600, exist_ok=False)  # readable by the owner only, because it contains the solutions
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, text in contents.items():
            member = zipfile.ZipInfo(name)  # dated 1980, so that equal contents make equal archives
            mode = 0o755 if (SCRIPTS / name).exists() else 0o600 if name == "seed" else 0o644
            member.external_attr = mode << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            bundle.writestr(member, text)
    return len(contents)
