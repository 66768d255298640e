"""Step time and processor time of every rung, as ratios to torch DDP with the same buckets, in one interleaved run."""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from brigade.course import CourseError
from brigade.lab import ladder, plots
from brigade.ranks import RankFailure


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, epilog="Example: python -m brigade.lab.ratios --rounds 60")
    parser.add_argument("--rounds", type=int, default=65, help="steps of each rung, the first 5 not timed (default 65)")
    parser.add_argument("--bucket-mb", type=float, default=1.0, help="size of the buckets in MiB (default 1)")
    options = parser.parse_args()
    if options.rounds < 7 or not options.bucket_mb > 0:
        parser.error("at least 7 rounds and a bucket size above zero")
    try:
        found = ladder.run_ladder(ladder.Workload(rounds=options.rounds, bucket_mb=options.bucket_mb))
    except (CourseError, RankFailure) as error:
        print(f"ratios: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nratios: stopped", file=sys.stderr)
        return 130
    console = Console(highlight=False, soft_wrap=True)
    console.print(plots.ratio_table(found))
    console.print(plots.zero_sentence(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
