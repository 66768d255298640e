"""`make validate-plan`: compare predictions with the published runs in docs/published.tsv, without any GPU.

It also stores the predictions for the figure of the site's page about the planner.
"""

from __future__ import annotations

import functools
import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from brigade.course.table.modules import ROOT
from tools.planner.comparison import SEQUENCES, Error, list_errors, make_table
from tools.planner.programs import Run
from tools.planner.runs import COLLECTIVE, TRAINING, read_rows

PLANNED = ROOT / "site" / "planned.json"
HALF = 0.5  # the second efficiency of the network cards that the figure shows
DIGITS = 5  # of an error


def format_error(error: Error) -> str:
    """Return the number of GPUs, or the bytes of a buffer, with the errors in percent."""
    row = error.row
    size = f"{row.gpus}" if row.kind != COLLECTIVE else f"{row.subject} {row.sequence:,} B on {row.gpus}"
    if row.family.startswith("sequence"):
        size = f"{row.sequence:,} tokens"
    columns = [f"{'-' if value is None else f'{value:+.0%}':>10}" for value in (error.calibrated, error.null)]
    share = "" if error.share is None else f"  {error.share:4.0%}"
    return f"  {size:>40}  {error.raw:+7.0%}" + ("" if row.kind == COLLECTIVE else f"  {'  '.join(columns)}{share}")


def list_planned(errors: Iterable[Error]) -> list[list[str | int | float | None]]:
    """Return what the figure shows of each training run.

    These are its model, kind of GPU, numbers of GPUs and nodes, and seconds; then its errors, guessed, calibrated,
    calibrated with `HALF` of the cards' rate, and of the null model; the share of communication; and in what the run
    that calibrates differs. What a run does not have is None.
    """
    rows = []
    calibrate = functools.cache(lambda row: Run(row).calibrate())
    for error in errors:
        if error.row.kind == TRAINING:
            row, half, kind = error.row, None, None
            if error.calibrator:
                same = "same" if error.calibrator.micro_batch == row.micro_batch else "batch"
                kind = "sequence" if row.family.startswith(SEQUENCES) else same
                slower = Run(replace(row, card_gbit=HALF * row.card_gbit))
                half = slower.predict(calibrate(error.calibrator)) / row.measured_s - 1
            values = (row.measured_s, error.raw, error.calibrated, half, error.null, error.share)
            rounded = [None if value is None else round(value, DIGITS) for value in values]
            rows.append([row.subject, row.device, row.gpus, row.num_nodes, *rounded, kind])
    return rows


def main() -> None:
    """Print the errors of all rows by family, and of each kind of prediction. Store them for the site."""
    errors = list_errors(read_rows())
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in list_planned(errors))
    PLANNED.write_text(f"[\n{lines}\n]\n")
    families: dict[str, list[Error]] = defaultdict(list)
    for error in errors:
        families[error.row.family + (" (held back)" if error.row.held_back == "yes" else "")].append(error)
    print("error of predicted times: guessed, calibrated on a smaller run, of the null model; share of communication")
    for family, members in families.items():
        print(family)
        print("\n".join(map(format_error, members)))
    print(f"\n{make_table(errors)}")


if __name__ == "__main__":
    main()
