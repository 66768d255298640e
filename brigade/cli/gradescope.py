"""Build out/gradescope.zip, which an instructor uploads to Gradescope: python -m brigade.cli.gradescope

Arguments other than --help are options of `brigade grade`, which Gradescope uses for every submission. Without
`--seed`, this command draws a seed. The archive contains the seed in a file of its own, so that all uploads are graded
with the same cases. Students do not see it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from brigade.cli.grade import draw_seed, read_seed, select_graded_modules
from brigade.cli.main import parse
from brigade.course.modules import ROOT, CourseError
from brigade.grade import gradescope_package


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the archive. Return the exit status: 0 for success, 2 if the options are wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Example: python -m brigade.cli.gradescope --modules 1-4 --limit 300",
    )
    parser.add_argument("--seed", type=read_seed, metavar="N", help="default: a seed that nobody can guess")
    own, options = parser.parse_known_args(arguments)
    seed = draw_seed() if own.seed is None else own.seed
    archive = ROOT / "out" / "gradescope.zip"
    try:
        chosen = parse(["grade", "--submission", "", *options])
        if chosen.submission or chosen.out or chosen.format:
            raise CourseError("leave out --submission, --out and --format, which run_autograder sets")
        select_graded_modules(chosen)  # refuses modules that do not exist
        count = gradescope_package.build(archive, [*options, "--seed", "@seed"], seed)
    except CourseError as error:
        print(f"brigade: {error}", file=sys.stderr)
        return 2
    print(f"{archive.relative_to(ROOT)} contains {count} files. Upload it as the autograder.")
    print(f"All uploads are graded with seed {seed}, which students must not know.")
    print(f"To use the same seed in a new archive, pass --seed {seed}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
