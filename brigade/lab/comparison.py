"""Compare a step of a module with a step of the previous module, both from the same submission.

The timed steps alternate on the emulated link of `ladder.EMULATED`. In a separate run, which is not timed, rank 0
counts the bytes that the submission's own lines copy and allocate in one step, and the views that they create.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

import torch
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from brigade.checks.tiny_lm import Size, TinyLM
from brigade.course.modules import CORE_MODULES, Module
from brigade.course.submission import Sources
from brigade.lab import corpus
from brigade.lab.bench import Spread, compute_spread
from brigade.lab.ladder import (
    COMPUTATION,
    EMULATED,
    Measurement,
    Variant,
    get_variant,
    make_measurement,
    run_variants,
)
from brigade.lab.on_ranks import build_setup, take_step
from brigade.lab.plots import make_empty_table
from brigade.rank.memory import list_tensors
from brigade.rank.recording import is_self_copy
from brigade.runner.ranks import run_ranks

WORKLOAD = replace(EMULATED, batch_size=16, rounds=10, warmup=2)
DEADLINE_S = 20.0  # for the whole comparison: its reader is waiting
COPIES = ("_foreach_copy_", "_to_copy", "cat", "clone", "copy_", "stack")


@dataclass(frozen=True)
class Comparison:
    """The results of one variant. `exposed_ms` is how much longer its timed steps take than computation alone.

    `copied` and `allocated` are in bytes, and `views` is the number of new views, all for one step.
    """

    measurement: Measurement
    exposed_ms: Spread
    copied: int
    allocated: int
    views: int


def count_steps(entry: Module) -> int:
    """Return how often `compare_with_previous` calls `on_step`."""
    return WORKLOAD.rounds * (len(get_variants(entry)) + 1)


def get_variants(entry: Module) -> list[Variant]:
    """Return the variants of the previous module, if there is one, and of this module."""
    return [get_variant(module) for module in CORE_MODULES if module.number <= entry.number][-2:]


def compare_with_previous(
    entry: Module, sources: Sources, on_step: Callable[[], None] | None = None
) -> list[Comparison]:
    """Measure a step of the previous module and of this module on two ranks. This takes a few seconds.

    Raise RankFailure if the previous module does not run.
    """
    ends_at = time.monotonic() + DEADLINE_S
    variants = get_variants(entry)
    together = [*variants, COMPUTATION]
    results = run_variants(WORKLOAD, together, sources, world_size=2, deadline=DEADLINE_S, on_step=on_step)
    how = {"packages": {"submission": sources}, "deadline": max(1.0, ends_at - time.monotonic())}
    arguments = asdict(WORKLOAD), [asdict(variant) for variant in variants]
    counts = run_ranks(count_operations, *arguments, mode="record", **how)[0]
    alone = make_measurement(WORKLOAD, together, COMPUTATION, results)
    rows = []
    for variant, count in zip(variants, counts):
        measurement = make_measurement(WORKLOAD, together, variant, results)
        rows.append(Comparison(measurement, compute_spread(measurement.compute_exposed_ms(alone)), *count))
    return rows


def make_table(rows: list[Comparison], previous: int) -> Table:
    """Return a table with a row for each variant, at most 80 columns wide.

    `previous` is the number of the module that the last row is compared with, or 0 if there is none.
    """
    headings = (
        "launches",
        "MB\nsent",
        "exposed\nms",
        "\nquartiles",
        "MB\ncopied",
        "MB\nnew",
        "new\nviews",
        "MB of\nstate",
    )
    title = f"Compared with module {previous}: one step" if previous else "One step"
    table = make_empty_table(f"{title} on an emulated link", "", headings)
    for row in rows:
        table.add_row(
            row.measurement.label,
            f"{row.measurement.collectives:g}",
            f"{row.measurement.sent_bytes / 1e6:.2f}",
            f"{row.exposed_ms.median:.0f}",
            f"{row.exposed_ms.lower:.0f} to {row.exposed_ms.upper:.0f}",
            f"{row.copied / 1e6:.2f}",
            f"{row.allocated / 1e6:.2f}",
            f"{row.views}",
            f"{row.measurement.kept_bytes['optimizer state'] / 1e6:.2f}",
        )
    return table


def describe_doubts(rows: list[Comparison]) -> str:
    """Return sentences about exposed times that are not significant, or "" if there are none.

    An exposed time is not significant if its lower quartile is below 0, and a difference is not significant if the
    quartiles overlap. On a busy machine, noise changes the time of a step more than communication does.
    """
    doubts = [
        f"The exposed time of {row.measurement.label} is not significant: its lower quartile is below 0."
        for row in rows
        if row.exposed_ms.lower < 0
    ]
    spreads = [row.exposed_ms for row in rows]
    if len(rows) > 1 and max(s.lower for s in spreads) <= min(s.upper for s in spreads):
        doubts.append("The difference between the exposed times is not significant: their quartiles overlap.")
    longer = "`brigade bench --comm-ratio 0.8` measures for longer: about two minutes."
    return " ".join([*doubts, longer] if doubts else [])


# The code below runs in the ranks.


class Ledger(TorchDispatchMode):
    """A context manager that counts what the submission does: bytes copied, bytes of new memory, and new views."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = self.allocated = self.views = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if is_in_submission(sys._getframe(1)):
            input_storages = {
                tensor.untyped_storage()._cdata for tensor in list_tensors([*args, *(kwargs or {}).values()])
            }
            outputs = list_tensors(result)
            if function.overloadpacket.__name__ in COPIES and not is_self_copy(args):
                self.copied += sum(tensor.nbytes for tensor in outputs or list_tensors(args[0]))
            self.allocated += sum(
                tensor.nbytes for tensor in outputs if tensor.untyped_storage()._cdata not in input_storages
            )
            self.views += len(outputs) if function.is_view else 0
        return result


def is_in_submission(frame: FrameType | None) -> bool:
    """Return whether a line of the submission called torch here, directly or through one of torch's helpers."""
    while frame and (name := frame.f_globals.get("__name__", "")).startswith("torch."):
        if name.startswith(("torch.distributed.", "torch.optim.")):
            return False
        frame = frame.f_back
    return bool(frame) and name.startswith("submission.")


def count_operations(workload: dict, variants: list[dict]) -> list[tuple[int, int, int]]:
    """Return, for the third step of each variant, the bytes copied, the bytes allocated and the number of views."""
    counts = []
    for variant in variants:
        setup = build_setup(variant, TinyLM(Size(**workload["size"])), workload)
        batch = corpus.draw_batch(corpus.read_text(), 2, 16, torch.Generator().manual_seed(0))
        for _ in range(3):
            with Ledger() as ledger:
                take_step(setup, *batch)
        counts.append((ledger.copied, ledger.allocated, ledger.views))
    return counts
