"""Print the table of docs/plan.md that says what each module leaves unchanged: python -m tools.unchanged

Its numbers are those of `brigade plan --model xl --dp 8`, which records a step of each module.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json

from brigade.cli.main import main
from brigade.course.modules import TRAINING_MODULES
from brigade.lab.ladder import get_variant
from brigade.lab.memory_accounting import KINDS

COMMAND = ("plan", "--model", "xl", "--dp", "8", "--json")
HEADINGS = ("module", "launches", "sent", "exposed", "copied", *KINDS)
SAME = "="


def make_table() -> str:
    """Return the table, in GB and seconds. A cell that equals the one above is SAME."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(COMMAND)
    steps = {step["label"]: step for step in json.loads(printed.getvalue())["variants"]}
    rows = []
    labels = [get_variant(entry).label for entry in TRAINING_MODULES]
    for step in (steps[label] for label in labels if label in steps):  # module 14 needs nodes
        sizes = step["sent_bytes"], step["copied_bytes"], *(step["memory"][kind] for kind in KINDS)
        sent, *memory = (f"{nbytes / 1e9:.2f}" for nbytes in sizes)
        rows.append([step["label"], str(step["launches"]), sent, f"{step['exposed_s']:.2f}", *memory])
    marked = [[SAME if cell == above else cell for cell, above in zip(*pair)] for pair in zip(rows[1:], rows)]
    lines = [HEADINGS, ["---"] * len(HEADINGS), rows[0], *marked]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m tools.unchanged", description=__doc__).parse_args()
    print(make_table(), end="")
