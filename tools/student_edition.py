"""Make the student edition, which is the course without its answers, in out/student and out/student.zip:

    python -m tools.student_edition [--hints 3]

The edition contains the toolkit without the grader, and the other files in `INCLUDED`, if git tracks them. Skeletons
and the templates for written answers are generated. Files in `tools/student/` replace the course's own. No other file
is included. The third hints, which give away most of the code, are included only with `--hints 3`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from brigade.course.cli.errors import run_safely
from brigade.course.table import handout, skeletons, validation, written
from brigade.course.table.modules import MODULES, ROOT
from brigade.ranks.ipc.temporary import temporary_directory
from tools import lock
from tools.course_files import list_tracked_files

# The files that the Gradescope package contains, too: the core, its commands and the checks.
FOLDERS = ("ranks", "testing", "course")
CORE = ("brigade/*.py", *(f"brigade/{folder}/**/*.py" for folder in FOLDERS))
CHECKS = ("tests/test_m*.py", "tests/helpers/*.py")
CHECKS += tuple(f"tests/m*/{name}" for name in ("scenario*.py", "causes.py", "expected.py", "dumps/*.txt"))
CHECKS += tuple(f"tests/m17_prove_it/{name}.py" for name in ("blind", "faults", "implementations", "topics"))

BROWSER_NOTEBOOKS = ("notebooks/kaggle.ipynb", "notebooks/colab.ipynb")
INCLUDED = (".gitignore", "LICENSE", "assignments.md", "pyproject.toml", "tools/setup.mk", "brigade/course/table/*.md")
INCLUDED += (*CORE, "brigade/lab/**/*.py", "brigade/lab/cli/*.j2", "brigade/lab/*.html", "brigade/lab/*.js", *CHECKS)
INCLUDED += (".dockerignore", ".devcontainer/*", ".github/workflows/site.yml")
DOCUMENTS = ("bugs", "claims", "errors", "glossary", "gpus", "plan", "testing")
INCLUDED += (*BROWSER_NOTEBOOKS, *(f"docs/{name}.md" for name in DOCUMENTS), "docs/published.tsv")
INCLUDED += (
    *(f"lessons/*/{name}" for name in ("README.md", "last_mile.md", "nccl.md", "hints.md", "*.py")),
    *("lessons/*/measure/*.py", "lessons/*/pictures/*"),
    "site/**/*",
)
PACKAGES = ("torch", "pytest", "numpy", "matplotlib", "rich", "psutil", "setuptools")  # from requirements.txt
SITE_PACKAGES = ("sphinx", "furo", "myst-nb", "sphinx-design", "sphinx-copybutton")
OUT = ROOT / "out" / "student"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hints", type=int, choices=(2, 3), default=2, help="how many of the three hints")
    options = parser.parse_args()
    return run_safely(lambda: make_edition(options.hints), "edition")


def make_edition(hint_levels: int) -> int:
    """Make the edition. Return 0. Raise UserError outside a clone, or if the course is inconsistent."""
    validation.validate_course()
    files = collect_files(hint_levels)
    try_imports(files)
    shutil.rmtree(OUT, ignore_errors=True)
    write(files, OUT)
    archive = Path(shutil.make_archive(str(OUT), "zip", OUT.parent, OUT.name))
    print(f"{OUT.relative_to(ROOT)} and {archive.relative_to(ROOT)} contain {len(files)} files")
    return 0


def collect_files(hint_levels: int) -> dict[Path, bytes]:
    """Return the contents of the edition's files by relative path. Raise UserError outside a clone."""
    contents = {path: (ROOT / path).read_bytes() for path in list_tracked_files(*INCLUDED)}
    own = list_tracked_files("tools/student/**")
    contents |= {path.relative_to("tools", "student"): (ROOT / path).read_bytes() for path in own}
    for entry in MODULES:
        for folder in ("lessons", skeletons.STORED_SKELETONS):
            contents |= {folder / path: text.encode() for path, text in skeletons.make_skeletons(entry).items()}
        contents["lessons" / skeletons.get_answers_path(entry)] = written.make_template(entry).encode()
        hints = Path("lessons", entry.package, "hints.md")
        contents[hints] = cut_hints(contents[hints].decode(), hint_levels).encode()
    for document in contents.keys() & {*map(Path, handout.DOCUMENTS)}:
        text = handout.fill_in(contents[document].decode())
        contents[document] = re.sub(r"<!-- .* -->\n+", "", text).encode()
    for document in (path for path in contents if path.parent == Path("docs") and path.suffix == ".md"):
        contents[document] = re.sub(rb"<!--full-->.*?<!--end-->\n*", b"", contents[document], flags=re.DOTALL)
    pins = {Path("requirements.txt"): PACKAGES, Path("site", "requirements.txt"): SITE_PACKAGES}
    return contents | {path: lock.select(packages).encode() for path, packages in pins.items()}


def cut_hints(text: str, levels: int) -> str:
    """Return the first `levels` levels of a module's hints."""
    return "\n## ".join(text.split("\n## ")[: levels + 1]).rstrip("\n") + "\n"


def write(contents: Mapping[Path, bytes], directory: Path) -> None:
    """Write these files."""
    for path, content in contents.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)


def try_imports(contents: Mapping[Path, bytes]) -> None:
    """Raise UserError if these files are not enough to import all checks."""
    with temporary_directory() as directory:
        write(contents, directory)
        validation.import_checks(directory)


if __name__ == "__main__":
    sys.exit(main())
