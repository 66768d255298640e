"""Build out/gradescope.zip, which an instructor uploads to Gradescope: python -m brigade.cli.gradescope

All other arguments are options of `brigade grade`, used for every submission.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from brigade.cli.grade import select_graded_modules
from brigade.cli.main import parse
from brigade.course.modules import ROOT, CourseError
from brigade.grade import gradescope_package


def check_options(options: Sequence[str]) -> None:
    """Raise CourseError, or exit as argparse does, for options that `brigade grade` would refuse on Gradescope."""
    chosen = parse(["grade", "--submission", "", *options])
    if chosen.submission or chosen.out or chosen.format:
        raise CourseError("leave out --submission, --out and --format, which run_autograder sets")
    select_graded_modules(chosen)


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the archive. Return the exit status: 0 success, 2 the options are wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python -m brigade.cli.gradescope --modules 1-4 --limit 300",
    )
    _, options = parser.parse_known_args(arguments)
    archive = ROOT / "out" / "gradescope.zip"
    try:
        check_options(options)
        count = gradescope_package.build(archive, options)
    except CourseError as error:
        print(f"brigade: {error}", file=sys.stderr)
        return 2
    print(f"{archive.relative_to(ROOT)} contains {count} files: upload it as the autograder")
    return 0


if __name__ == "__main__":
    sys.exit(main())
