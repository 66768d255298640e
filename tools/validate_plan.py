"""`make validate-plan`: compare predictions with the published runs in docs/published.tsv, without any GPU."""

from __future__ import annotations

from collections import defaultdict

from tools.planner.comparison import Error, list_errors, make_table
from tools.planner.runs import COLLECTIVE, read_rows


def format_error(error: Error) -> str:
    """Return the number of GPUs, or the bytes of a buffer, with the errors in percent."""
    row = error.row
    size = f"{row.gpus}" if row.kind != COLLECTIVE else f"{row.subject} {row.sequence:,} B on {row.gpus}"
    if row.family.startswith("sequence"):
        size = f"{row.sequence:,} tokens"
    columns = [f"{'-' if value is None else f'{value:+.0%}':>10}" for value in (error.calibrated, error.null)]
    share = "" if error.share is None else f"  {error.share:4.0%}"
    return f"  {size:>40}  {error.raw:+7.0%}" + ("" if row.kind == COLLECTIVE else f"  {'  '.join(columns)}{share}")


def main() -> None:
    """Print the errors of all rows by family, and of each kind of prediction."""
    errors = list_errors(read_rows())
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
