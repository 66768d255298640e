"""`make validate-plan`: compare predictions with the published runs in docs/published.tsv, without any GPU."""

from __future__ import annotations

from collections import defaultdict

from brigade.lab.published import COLLECTIVE, Error, list_errors, measure_error_bars, read_rows


def format_error(error: Error) -> str:
    """Return the number of GPUs, or the bytes of a buffer, with the errors in percent."""
    row = error.row
    size = f"{row.gpus}" if row.kind != COLLECTIVE else f"{row.subject} {row.sequence:,} B on {row.gpus}"
    if row.family.startswith("sequence"):
        size = f"{row.sequence:,} tokens"
    calibrated = "-" if error.calibrated is None else f"{error.calibrated:+.0%}"
    return f"  {size:>40}  {error.raw:+7.0%}" + ("" if row.kind == COLLECTIVE else f"  {calibrated:>10}")


def main() -> None:
    """Print the errors of all rows by family, and of each kind of prediction."""
    errors = list_errors(read_rows())
    families: dict[str, list[Error]] = defaultdict(list)
    for error in errors:
        families[error.row.family + (" (held back)" if error.row.held_back == "yes" else "")].append(error)
    print("error of predicted times: with the device's typical utilisation, and calibrated on a smaller run")
    for family, members in families.items():
        print(family)
        print("\n".join(map(format_error, members)))
    print(f"\n{'kind of prediction':<40} rows   median   nine of ten within")
    for kind, bar in measure_error_bars(errors).items():
        print(f"{kind:<40} {bar.count:>4}  {bar.median:>6.1%}  {bar.most:>6.1%}")
    held_back = measure_error_bars(error for error in errors if error.row.held_back == "yes")
    for kind, bar in held_back.items():
        print(f"{'held back: ' + kind:<40} {bar.count:>4}  {bar.median:>6.1%}  {bar.most:>6.1%}")


if __name__ == "__main__":
    main()
