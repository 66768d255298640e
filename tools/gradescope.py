"""Build out/gradescope.zip, which an instructor uploads to Gradescope: python -m tools.gradescope

Arguments other than --help are options of `brigade grade`, which Gradescope uses for every submission. Without
`--seed`, this command draws a seed. The archive contains the seed in a file of its own, so that all uploads are graded
with the same cases. Students do not see it.
"""

from __future__ import annotations

import argparse
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

from brigade.cli.grade import draw_seed, read_seed, select_graded_modules
from brigade.cli.main import parse
from brigade.course import validation
from brigade.course.modules import ROOT, CourseError
from brigade.lab.experiment import run_to_status
from tools import student_edition

ARCHIVE = ROOT / "out" / "gradescope.zip"
SCRIPTS = ROOT / "tools" / "gradescope"
NEEDED = ("LICENSE", *student_edition.CORE, "brigade/grade/**/*.py", "solutions/*/*.py", *student_edition.CHECKS)
NEEDED += ("lessons/*/answers.md",)  # the points of the written questions
# From requirements.txt. Grading needs neither notebooks nor figures.
NEEDED_PACKAGES = ("torch", "pytest", "rich", "jinja2", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gradescope",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python -m tools.gradescope --modules 1-4 --limit 300",
    )
    what = "default: a seed that nobody can guess"
    parser.add_argument("--seed", type=read_seed, default=draw_seed(), metavar="N", help=what)
    own, options = parser.parse_known_args(arguments)
    return run_to_status("gradescope", lambda: make_archive(options, own.seed))


def make_archive(options: Sequence[str], seed: int) -> int:
    """Build the archive with options of `brigade grade`. Raise CourseError if they are wrong, or like `build`."""
    chosen = parse(["grade", "--submission", "", *options])
    if any(chosen.submission) or chosen.out or chosen.format:
        raise CourseError("leave out --submission, --out and --format, which run_autograder sets")
    select_graded_modules(chosen)  # refuses modules that do not exist
    count = build(ARCHIVE, [*options, "--seed", "@seed"], seed)
    print(f"{ARCHIVE.relative_to(ROOT)} contains {count} files. Upload it as the autograder.")
    print(f"All uploads are graded with seed {seed}, which students must not know.")
    print(f"To use the same seed in a new archive, pass --seed {seed}.")
    return 0


def build(archive: Path, options: Sequence[str], seed: int) -> int:
    """Write the zip and return the number of files in it. `options` are passed to `brigade grade` for every submission.

    The options may read `seed` from the file of this name, which only root can read. Raise CourseError if the course is
    inconsistent.
    """
    validation.validate_course()
    texts = {"options": "".join(f"{word}\n" for word in options), "seed": f"{seed}\n"}
    texts["requirements.txt"] = student_edition.select_requirements(NEEDED_PACKAGES)
    contents = {Path(name): text.encode() for name, text in texts.items()}
    contents |= {Path(path.name): path.read_bytes() for path in sorted(SCRIPTS.iterdir())}
    paths = sorted(path for pattern in NEEDED for path in ROOT.glob(pattern))
    contents |= {path.relative_to(ROOT): path.read_bytes() for path in paths}
    student_edition.try_imports(contents)
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    archive.touch(0o600, exist_ok=False)  # readable by the owner only, because it contains the solutions
    with zipfile.ZipFile(archive, "w") as bundle:
        for path, content in contents.items():
            member = zipfile.ZipInfo(path.as_posix())  # dated 1980, so that equal contents make equal archives
            mode = 0o755 if (SCRIPTS / path).exists() else 0o600 if path.name == "seed" else 0o644
            member.external_attr = mode << 16
            bundle.writestr(member, content, zipfile.ZIP_DEFLATED)
    return len(contents)


if __name__ == "__main__":
    sys.exit(main())
