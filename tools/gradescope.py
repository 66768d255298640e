"""Build out/gradescope.zip, which an instructor uploads to Gradescope: python -m tools.gradescope

Arguments other than --help are options of `brigade grade`, which Gradescope uses for every submission. The archive
contains a secret in a file of its own, from which and from an upload the random cases of the upload follow. So equal
uploads get equal points. Students do not see the secret.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from brigade.course.cli.errors import run_safely
from brigade.course.cli.main import parse
from brigade.course.table import listing, validation
from brigade.course.table.modules import ROOT
from brigade.grader.cli.grade import select_graded_modules
from brigade.grader.request import read_secret
from brigade.ranks.errors import UserError
from tools import lock, student_edition

ARCHIVE = ROOT / "out" / "gradescope.zip"
SCRIPTS = ROOT / "tools" / "gradescope"
NEEDED = ("LICENSE", *student_edition.CORE, "brigade/grader/**/*.py", "solutions/*/*.py", *student_edition.CHECKS)
NEEDED += ("lessons/*/answers.md",)  # the points of the written questions
# Module 17 tries students' checks on right and wrong implementations.
NEEDED += ("tests/mutants.py", "tests/m17_prove_it/hidden.py")
NEEDED += tuple(f"tests/m0[1-58]_*/{name}" for name in ("mutants.diff", "variants.diff", "alternative.py"))
# From requirements.txt, with what they need. Grading needs neither notebooks nor figures.
NEEDED_PACKAGES = ("torch", "pytest", "rich", "jinja2", "numpy")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tools.gradescope",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python -m tools.gradescope --modules 1-4 --limit 300",
    )
    what = "a file with the secret, so that a later archive gives equal uploads equal points again; it is made if it "
    parser.add_argument("--secret", type=Path, metavar="FILE", help=f"{what}does not exist (default: none)")
    own, options = parser.parse_known_args(arguments)
    return run_safely(lambda: make_archive(options, own.secret), "gradescope")


def make_archive(options: Sequence[str], secret_file: Path | None) -> int:
    """Build the archive with options of `brigade grade`. Raise UserError if they are wrong, or like `build`."""
    secret = read_secret(secret_file, draws_one=True) if secret_file else secrets.token_hex().encode()
    chosen = parse(["grade", "--submission", "", *options])
    if any(chosen.submission) or chosen.out or chosen.format:
        raise UserError("leave out --submission, --out and --format, which run_autograder sets")
    select_graded_modules(chosen)  # refuses modules that do not exist
    listing.set_extra(chosen.extra)  # refuses files that contain no checks
    names = {given: f"tests/extra/{Path(given).name}" for given in chosen.extra}  # students cannot read `tests`
    packed = {Path(name): Path(given).read_bytes() for given, name in names.items()}
    count = build(ARCHIVE, [*(names.get(word, word) for word in options), "--secret", "secret"], secret, packed)
    print(f"{ARCHIVE.relative_to(ROOT)} contains {count} files. Upload it as the autograder.")
    print("The random cases of an upload follow from it and from the file `secret`, which students must not see.")
    return 0


def build(archive: Path, options: Sequence[str], secret: bytes, extra: Mapping[Path, bytes] | None = None) -> int:
    """Write the zip and return the number of files in it. `options` are passed to `brigade grade` for every submission.

    `extra` are an instructor's own files, by their places in the archive. The options may read `secret` from the file
    of this name, which only root can read. Raise UserError if the course is inconsistent.
    """
    validation.validate_course()
    texts = {"options": "".join(f"{word}\n" for word in options), "secret": secret.decode()}
    texts["requirements.txt"], texts["torch.txt"] = lock.set_torch_apart(lock.select(NEEDED_PACKAGES))
    contents = {Path(name): text.encode() for name, text in texts.items()}
    contents |= {Path(path.name): path.read_bytes() for path in sorted(SCRIPTS.iterdir())}
    paths = sorted(path for pattern in NEEDED for path in ROOT.glob(pattern))
    contents |= {path.relative_to(ROOT): path.read_bytes() for path in paths}
    contents |= extra or {}
    student_edition.try_imports(contents)
    archive.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    archive.unlink(missing_ok=True)
    archive.touch(0o600, exist_ok=False)  # readable by the owner only, because it contains the solutions
    with zipfile.ZipFile(archive, "w") as bundle:
        for path, content in contents.items():
            member = zipfile.ZipInfo(path.as_posix())  # dated 1980, so that equal contents make equal archives
            mode = 0o755 if (SCRIPTS / path).exists() else 0o600 if path.name == "secret" else 0o644
            member.external_attr = mode << 16
            bundle.writestr(member, content, zipfile.ZIP_DEFLATED)
    return len(contents)


if __name__ == "__main__":
    sys.exit(main())
