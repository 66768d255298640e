"""What the planner predicts for published runs and collectives: how wrong is it?

    errors = list_errors(read_rows())                         one for each row: predicted / measured - 1
    print(make_table(errors))                                 `make validate-plan`, quoted in docs/plan.md

A training run is predicted twice: from the device's typical utilisation, and *calibrated*. Another run of the family
then tells how fast the GPUs compute this model: the smallest one with the same recomputation and micro-batch, as if
somebody had measured `--backward-ms` on fewer GPUs, or else the smallest one. Runs with other sequence lengths are also
*calibrated on two* runs, because attention has a rate of its own. Nothing else is fitted: the network is that of NCCL's
tuner (`nccl.py`), and peaks and memory bandwidths are those of datasheets.

The *null model* knows no network: each GPU computes as many tokens per second as in the run that calibrates. Where it
is as good as the plan, the comparison says nothing about how the plan describes the network.

**What changed the model** after its errors were seen. Each change is what a source says, without a number of our own:

1. Computation is slower while the network is busy. Without this, the median error of the 70 runs on more GPUs than the
   calibrating one was 4.0 %.
2. Attention counts masked positions, like the MFU of the sources.
3. The latency of a network's plugin, with NCCL's correction of NVLS trees on B200s. AWS's plugin reports 35 us, which
   its authors found by trying (aws-ofi-nccl 2496e7de), not by measuring a hop.
4. The time of the host in one benchmark.
5. The settings of NCCL on Google's machines. Google's NCCL also chooses by a table that is not published.
6. The rate of a tree between two nodes, which NCCL's search raises.
7. What recomputation repeats. Six runs of llm-foundry also exist with the other recomputation. Planned from those, they
   were 13 to 26 % off when recomputation added a whole forward, and 5 to 22 % afterwards; 165 of 188 calibrated runs
   were within 15 % before.

Then the run that calibrates was chosen by its micro-batch and recomputation (with the smallest run for all, the median
of those 70 runs was 3.0 %, and 91 % were within 15 %), and the two by their sequence lengths. One simplification, a
channel of NVLS for each GPU of a node, makes the tuner choose what was seen in NCCL's logs.

**What was held back**, planned only after the model was complete: first 29 rows with other sequence lengths and of
Google's machines, which showed changes 2 and 5, so they no longer count; then 26, of which 15 are calibrated, 11 within
15 % with a median of 9.5 %, and the other four showed change 7; Modalities' 171, which changed nothing; and at last 84
(VectorLM, Azure, Nebius, float8 on H200s), which changed nothing, too.

**What else was seen.** InternEvo all-reduces gradients, and then each owner broadcasts its weights. With one all-gather
instead of these broadcasts, its run on 1024 GPUs is planned 38 % too short, not 23 %. mpt-70b reaches 36 % of an A100's
peak with micro-batches of 2 sequences, and 49 % with 4. On a node of A100s where one process launches all kernels,
32 KiB take 44 us, and NCCL expects 16. Small collectives inside a node of B200s are further off than those of H200s of
the same source, which are within a factor of 1.2.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple

from brigade.lab.error_bars import (
    ERROR_BARS,
    LARGE,
    LARGE_BYTES,
    OTHER,
    PAIR,
    SEQUENCE,
    SMALL,
    ErrorBar,
    name_calibrated,
    name_nodes,
    widen_range,
)
from tools.planner.programs import Run, calibrate_two, make_rates, predict
from tools.planner.runs import COLLECTIVE, TRAINING, Row

SEQUENCES = "sequence"  # how the name of a family begins whose runs differ in sequence length


class Error(NamedTuple):
    """The error of a prediction, relative to what was measured: 0.1 means 10 % too long.

    `calibrated`, `share` (which part of the calibrated step communication costs) and `calibrator`, the run that
    calibrates it, are None for collectives and for a family's smallest run. `null` is the error of the null model, or
    None if the calibrator has another model. `paired` is the error of a run that is calibrated on two sequence lengths,
    or None. `in_range`: the step is between those with the highest and the lowest published utilisation.
    """

    row: Row
    raw: float
    calibrated: float | None = None
    share: float | None = None
    calibrator: Row | None = None
    null: float | None = None
    paired: float | None = None
    in_range: bool | None = None


def list_errors(rows: Iterable[Row]) -> list[Error]:
    """Return the errors of all rows, in their order."""
    families: dict[str, list[Row]] = defaultdict(list)
    rows = [*rows]
    for row in rows:
        if row.kind == TRAINING:
            families[row.family].append(row)
    calibrate = functools.cache(lambda row: Run(row).calibrate())
    calibrate_pair = functools.cache(lambda short, long: calibrate_two(Run(short), Run(long)) or calibrate(short))
    errors = []
    for row in rows:
        error = Error(row, predict(row) / row.measured_s - 1)
        if row.kind == TRAINING:
            error = error._replace(in_range=is_in_range(row))
        if calibrator := find_calibrator(row, families[row.family]):
            run, rates = Run(row), calibrate(calibrator)
            null = None
            if calibrator.subject == row.subject and calibrator.sequence == row.sequence:
                null = row.tokens_per_s / calibrator.tokens_per_s - 1
            calibrated = run.predict(rates) / row.measured_s - 1
            error = error._replace(
                calibrated=calibrated, share=run.measure_share(rates), calibrator=calibrator, null=null
            )
        if (pair := find_pair(families[row.family])) and row not in pair:
            error = error._replace(paired=predict(row, calibrate_pair(*pair)) / row.measured_s - 1)
        errors.append(error)
    return errors


def is_in_range(row: Row) -> bool:
    """Return whether the measured step is in the range that `brigade plan` prints."""
    utilisation = row.gpu.get_utilisation(row.precision)
    ends = (utilisation.high, utilisation.typical, utilisation.low)
    fast_s, step_s, slow_s = (predict(row, make_rates(row, end)) for end in ends)
    low, high = widen_range(fast_s, step_s, slow_s, row.num_nodes)
    return low <= row.measured_s <= high


def find_pair(family: Sequence[Row]) -> tuple[Row, Row] | None:
    """Return the runs that tell how fast GPUs compute matrix products and attention, or None if the family has none.

    They are the run with the shortest sequences, and the one with the shortest of those that are at least four times as
    long: with a smaller difference, an error of 1 % in both throughputs would be a large one of attention's rate.
    """
    if not family or not family[0].family.startswith(SEQUENCES):
        return None
    short = min(family, key=lambda one: one.sequence)
    long = min(
        (one for one in family if one.sequence >= 4 * short.sequence), key=lambda one: one.sequence, default=None
    )
    return (short, long) if long else None


def find_calibrator(row: Row, family: Sequence[Row]) -> Row | None:
    """Return the run that tells how fast the GPUs of another run compute: the smallest with the same micro-batch.

    If there is none, return the smallest of the family, or None for this one. Runs that recompute as much come first.
    """
    alike: Sequence[Row] = [one for one in family if one.recompute == row.recompute]
    if min(alike, key=lambda one: one.gpus, default=row) is row:
        alike = family
    smallest = min(alike, key=lambda one: one.gpus, default=row)
    if row is smallest:
        return None
    same = [one for one in alike if one.gpus < row.gpus and one.micro_batch == row.micro_batch]
    return min(same, key=lambda one: one.gpus, default=smallest)


def name_kinds(error: Error) -> dict[str, float]:
    """Return the errors of a row by the kind of prediction."""
    row = error.row
    if row.kind == COLLECTIVE:
        return {LARGE if row.sequence >= LARGE_BYTES else SMALL: error.raw}
    kinds = {f"guessed, {name_nodes(row.num_nodes)}": error.raw}
    if error.calibrated is not None and error.calibrator is not None and error.share is not None:
        is_same = error.calibrator.micro_batch == row.micro_batch
        calibrated = name_calibrated(error.share, row.num_nodes) if is_same else OTHER
        kinds[SEQUENCE if row.family.startswith(SEQUENCES) else calibrated] = error.calibrated
    if error.paired is not None:
        kinds[PAIR] = error.paired
    return kinds


def group_by_kind(errors: Iterable[Error]) -> dict[str, list[tuple[Error, float]]]:
    """Return the rows of each kind of prediction, with their errors, in the order of `ERROR_BARS`."""
    kinds: dict[str, list[tuple[Error, float]]] = defaultdict(list)
    for error in errors:
        for kind, value in name_kinds(error).items():
            kinds[kind].append((error, value))
    order = list(ERROR_BARS)
    return dict(sorted(kinds.items(), key=lambda one: order.index(one[0])))


def measure_error_bars(errors: Iterable[Error]) -> dict[str, ErrorBar]:
    """Return the error bar of each kind of prediction."""
    bars = {}
    for kind, rows in group_by_kind(errors).items():
        sizes = sorted(abs(value) for _, value in rows)
        most = sizes[math.ceil(0.9 * len(sizes)) - 1]
        bars[kind] = ErrorBar(len(sizes), median(sizes), most, sum(value < 0 for _, value in rows))
    return bars


def make_table(errors: Iterable[Error]) -> str:
    """Return the table of docs/plan.md: each kind with its error bar, the share inside of it, and the null model.

    Of guessed steps, the share is that of rows inside the printed range.
    """
    lines = ["| prediction | rows | too short | median error | nine of ten within | inside | null model |"]
    lines.append("|---|---|---|---|---|---|---|")
    for kind, rows in group_by_kind(errors).items():
        bar = ERROR_BARS[kind]
        if kind.startswith("guessed"):
            inside = sum(bool(error.in_range) for error, _ in rows)
        else:
            inside = sum(abs(value) <= bar.most + 0.0005 for _, value in rows)
        nulls = [abs(error.null) for error, _ in rows if error.null is not None] if kind.startswith("calib") else []
        null = f"{median(nulls):.1%} of {len(nulls)}" if nulls and kind not in (PAIR, SEQUENCE) else "-"
        cells = [kind, f"{bar.count}", f"{bar.too_short}", f"{bar.median:.1%}", f"{bar.most:.1%}"]
        lines.append(f"| {' | '.join([*cells, f'{inside / len(rows):.0%}', null])} |")
    return "\n".join(lines)
