"""How wrong plans are, as `make validate-plan` measures it (`tools/planner`, docs/plan.md).

A plan is compared with published runs of the same kind: by which part of the step communication costs, as predicted,
and by the number of nodes. `tests/lab/test_published.py` fails if a number moves.
"""

from __future__ import annotations

from dataclasses import dataclass

LARGE_BYTES = 256 * 2**20  # a collective on a larger buffer is limited by bandwidth rather than by latency
LITTLE, MUCH = 0.10, 0.20  # parts of a step that communication costs
COMPARED = 0.29  # the largest part in any published run: plans with more are outside of what was compared
MANY_NODES = 16  # on more, published runs with much communication are nearly always planned too short


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
    "calibrated, communication below 10%, 1 to 4 nodes": ErrorBar(30, 0.017, 0.052, 11),
    "calibrated, communication below 10%, 5 to 16 nodes": ErrorBar(51, 0.017, 0.047, 28),
    "calibrated, communication below 10%, 17 to 64 nodes": ErrorBar(26, 0.021, 0.076, 20),
    "calibrated, communication below 10%, more than 64 nodes": ErrorBar(13, 0.022, 0.135, 10),
    "calibrated, communication 10% to 20%, 1 to 16 nodes": ErrorBar(46, 0.024, 0.088, 14),
    "calibrated, communication 10% to 20%, 17 nodes or more": ErrorBar(49, 0.094, 0.346, 39),
    "calibrated, communication 20% or more, 1 to 16 nodes": ErrorBar(7, 0.056, 0.331, 6),
    "calibrated, communication 20% or more, 17 nodes or more": ErrorBar(13, 0.257, 0.573, 13),
    OTHER: ErrorBar(32, 0.056, 0.217, 10),
    SEQUENCE: ErrorBar(121, 0.041, 0.172, 74),
    PAIR: ErrorBar(96, 0.027, 0.166, 46),
    "guessed, 1 to 4 nodes": ErrorBar(256, 0.126, 0.266, 134),
    "guessed, 5 to 16 nodes": ErrorBar(106, 0.169, 0.296, 47),
    "guessed, 17 to 64 nodes": ErrorBar(66, 0.135, 0.368, 44),
    "guessed, more than 64 nodes": ErrorBar(39, 0.243, 0.446, 33),
    LARGE: ErrorBar(61, 0.034, 0.128, 37),
    SMALL: ErrorBar(88, 0.264, 0.642, 84),
}


def name_calibrated(share: float, num_nodes: int) -> str:
    """Return the kind of a calibrated plan in which communication costs `share` of the step."""
    nodes = f"1 to {MANY_NODES} nodes" if num_nodes <= MANY_NODES else f"{MANY_NODES + 1} nodes or more"
    if share >= MUCH:
        return f"calibrated, communication {MUCH:.0%} or more, {nodes}"
    if share >= LITTLE:
        return f"calibrated, communication {LITTLE:.0%} to {MUCH:.0%}, {nodes}"
    return f"calibrated, communication below {LITTLE:.0%}, {name_nodes(num_nodes)}"


def name_nodes(num_nodes: int) -> str:
    """Return the numbers of nodes that are compared together with this one."""
    nodes = {4: "1 to 4 nodes", 16: "5 to 16 nodes", 64: "17 to 64 nodes"}
    return next((name for most, name in nodes.items() if num_nodes <= most), "more than 64 nodes")


def widen_range(fast_s: float, step_s: float, slow_s: float, num_nodes: int) -> tuple[float, float]:
    """Return a range of a guessed step, from the steps with the highest and the lowest published utilisation.

    It is at least as wide as nine of ten published runs on as many nodes need.
    """
    most = ERROR_BARS[f"guessed, {name_nodes(num_nodes)}"].most
    return min(fast_s, step_s / (1 + most)), max(slow_s, step_s / (1 - most))
