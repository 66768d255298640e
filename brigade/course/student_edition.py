"""Make the student edition, which is the course without its answers, in out/student and out/student.zip:

    python -m brigade.course.student_edition [--hints 3]

The edition contains the toolkit without the grader, and the other files in `INCLUDED`, if git tracks them. Skeletons
and the templates for written answers are generated. Files in `student/` replace the course's own. No other file is
included. The third hints, which give away most of the code, are included only with `--hints 3`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from brigade.course import handout, skeletons, validation, written
from brigade.course.modules import MODULES, ROOT, CourseError

# The files that the Gradescope package contains, too: the core, its commands and the checks.
CORE = (
    "brigade/*.py",
    *(
        f"brigade/{folder}/**/*.py"
        for folder in ("course", "ipc", "runner", "sandbox", "rank", "switch", "checks", "cli")
    ),
)
CHECKS = ("tests/test_m*.py", "tests/helpers/*.py")
CHECKS += tuple(f"tests/m*/{name}" for name in ("scenario*.py", "causes.py", "expected.py", "dumps/*.txt"))

BROWSER_NOTEBOOKS = ("notebooks/kaggle.ipynb", "notebooks/colab.ipynb")
INCLUDED = (".gitignore", "LICENSE", "assignments.md", "pyproject.toml", "setup.mk")
INCLUDED += (*CORE, "brigade/lab/**/*.py", "brigade/lab/*.html", "brigade/lab/*.js", *CHECKS)
INCLUDED += ("Dockerfile", ".dockerignore", ".devcontainer/devcontainer.json", ".github/workflows/site.yml")
DOCUMENTS = ("browser", "claims", "glossary", "gpus", "plan", "privacy")
INCLUDED += (*BROWSER_NOTEBOOKS, *(f"docs/{name}.md" for name in DOCUMENTS))
INCLUDED += (*(f"lessons/*/{name}" for name in ("README.md", "hints.md", "*.png", "*.svg", "*.py")), "site/**/*")
PACKAGES = ("torch", "pytest", "numpy", "matplotlib", "rich", "psutil")  # from requirements.txt
SITE_PACKAGES = ("sphinx", "furo", "myst-nb", "sphinx-design", "sphinx-copybutton")
HINT_LEVELS = 2  # of the three in each hints.md
OUT = ROOT / "out" / "student"


def list_tracked_files() -> set[Path]:
    """Return the files that git tracks. Raise CourseError outside a clone."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise CourseError("make the student edition in a clone: it contains only files that git tracks") from None
    return {ROOT / name for name in listed.split("\0") if name}


def collect_files(hint_levels: int = HINT_LEVELS) -> dict[Path, bytes]:
    """Return the contents of the edition's files by relative path. Raise CourseError outside a clone."""
    tracked = list_tracked_files() - {Path(__file__).resolve()}
    paths = [path for pattern in INCLUDED for path in ROOT.glob(pattern) if path in tracked]
    contents = {path.relative_to(ROOT): path.read_bytes() for path in paths}
    own = [path for path in (ROOT / "student").rglob("*") if path in tracked]
    contents |= {path.relative_to(ROOT / "student"): path.read_bytes() for path in own}
    for entry in MODULES:
        for folder in ("lessons", skeletons.STORED_SKELETONS):
            contents |= {folder / path: text.encode() for path, text in skeletons.make_skeletons(entry).items()}
        contents["lessons" / skeletons.get_answers_path(entry)] = written.make_template(entry).encode()
        hints = Path("lessons", entry.package, "hints.md")
        contents[hints] = cut_hints(contents[hints].decode(), hint_levels).encode()
    for document in map(Path, handout.DOCUMENTS):
        text = handout.fill_in(contents[document].decode(), ROOT)
        contents[document] = re.sub(r"<!-- .* -->\n+", "", text).encode()
    pins = {Path("requirements.txt"): PACKAGES, Path("site", "requirements.txt"): SITE_PACKAGES}
    return contents | {path: select_requirements(packages).encode() for path, packages in pins.items()}


def select_requirements(packages: Iterable[str]) -> str:
    """Return the lines of requirements.txt that pin these packages."""
    pins = tuple(f"{package}==" for package in packages)
    lines = (ROOT / "requirements.txt").read_text().splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith(pins))


def cut_hints(text: str, levels: int) -> str:
    """Return the first `levels` levels of a module's hints."""
    return "\n## ".join(text.split("\n## ")[: levels + 1]).rstrip("\n") + "\n"


def build(target: Path, hint_levels: int = HINT_LEVELS) -> int:
    """Make the edition in `target` and return its number of files.

    Raise CourseError outside a clone, if the course is inconsistent, or if a check cannot be imported.
    """
    validation.validate_course()
    files = collect_files(hint_levels)
    shutil.rmtree(target, ignore_errors=True)
    for path, content in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(content)
    validation.import_checks(target)
    return len(files)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hints", type=int, choices=(2, 3), default=HINT_LEVELS, help="how many of the three hints")
    options = parser.parse_args()
    try:
        count = build(OUT, options.hints)
        archive = Path(shutil.make_archive(str(OUT), "zip", OUT.parent, OUT.name))
    except (CourseError, OSError) as error:
        print(f"edition: {error}", file=sys.stderr)
        return 2
    print(f"{OUT.relative_to(ROOT)} and {archive.relative_to(ROOT)} contain {count} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
