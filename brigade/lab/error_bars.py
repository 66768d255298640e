"""How wrong plans are, as `make validate-plan` measures it (`tools/planner`, docs/plan.md).

A plan is compared with published runs of the same kind: by which part of the step communication costs, as predicted,
and by the number of nodes. `tests/lab/test_published.py` fails if a number moves.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGE_BYTES = 256 * 2**20  # a collective on a larger buffer is limited by bandwidth rather than by latency
FEW = 5  # a kind with fewer rows has no error bar: the plan is outside of what was compared
LITTLE, MUCH = 0.10, 0.25  # parts of a step that communication costs


@dataclass(frozen=True)
class ErrorBar:
    """How wrong predictions of one kind are: the number of rows, and the median and 90th percentile of their errors.

    `too_short` is the number of rows that are planned too short.
    """

    count: int
    median: float
    most: float  # nine of ten rows have at most this error
    too_short: int


# The kinds of predictions. "guessed" means: with the device's typical utilisation; "calibrated": with one measured run.
OTHER, SEQUENCE = "calibrated, another micro-batch", "calibrated, another sequence length"
PAIR = "calibrated on two sequence lengths"
LARGE, SMALL = "collectives of 256 MiB or more", "smaller collectives"

# What `make validate-plan` prints, in the order of docs/plan.md.
ERROR_BARS = {
    "calibrated, communication below 10%, 1 to 4 nodes": ErrorBar(16, 0.021, 0.080, 9),
    "calibrated, communication below 10%, 5 to 16 nodes": ErrorBar(29, 0.020, 0.082, 21),
    "calibrated, communication below 10%, 17 to 64 nodes": ErrorBar(19, 0.020, 0.076, 15),
    "calibrated, communication below 10%, more than 64 nodes": ErrorBar(6, 0.039, 0.140, 6),
    "calibrated, communication 10% to 25%, 1 to 16 nodes": ErrorBar(12, 0.009, 0.058, 6),
    "calibrated, communication 10% to 25%, 17 nodes or more": ErrorBar(7, 0.118, 0.257, 7),
    "calibrated, communication 25% or more": ErrorBar(1, 0.232, 0.232, 1),
    OTHER: ErrorBar(22, 0.052, 0.183, 10),
    SEQUENCE: ErrorBar(117, 0.039, 0.174, 74),
    PAIR: ErrorBar(94, 0.027, 0.166, 45),
    "guessed, 1 to 4 nodes": ErrorBar(196, 0.096, 0.253, 98),
    "guessed, 5 to 16 nodes": ErrorBar(57, 0.133, 0.299, 16),
    "guessed, 17 to 64 nodes": ErrorBar(24, 0.115, 0.272, 8),
    "guessed, more than 64 nodes": ErrorBar(11, 0.194, 0.399, 5),
    LARGE: ErrorBar(42, 0.030, 0.155, 22),
    SMALL: ErrorBar(31, 0.272, 0.647, 27),
}


def name_calibrated(share: float, num_nodes: int) -> str:
    """Return the kind of a calibrated plan in which communication costs `share` of the step."""
    if share >= MUCH:
        return f"calibrated, communication {MUCH:.0%} or more"
    if share >= LITTLE:
        nodes = "1 to 16 nodes" if num_nodes <= 16 else "17 nodes or more"
        return f"calibrated, communication {LITTLE:.0%} to {MUCH:.0%}, {nodes}"
    return f"calibrated, communication below {LITTLE:.0%}, {name_nodes(num_nodes)}"


def name_nodes(num_nodes: int) -> str:
    """Return the numbers of nodes that are compared together with this one."""
    nodes = {4: "1 to 4 nodes", 16: "5 to 16 nodes", 64: "17 to 64 nodes"}
    return next((name for most, name in nodes.items() if num_nodes <= most), "more than 64 nodes")
