"""What a module bought: a step with it beside a step with the module before it, both of the same submission.

Times are of steps in turns on the emulated link of `ladder.PACED`. What the submission's own lines copy, allocate and
view is counted in one more step, on rank 0, which nobody times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any

import torch
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from brigade.course.modules import MODULES, Module
from brigade.course.submission import Sources
from brigade.lab import corpus
from brigade.lab.bench import Spread, spread
from brigade.lab.ladder import COMPUTATION, PACED, Measured, Rung, climber, measured, run_rungs, rung_of, take_step
from brigade.lab.models import Size, TinyLM
from brigade.lab.plots import bench_table
from brigade.rank.recording import onto_itself, tensors_in
from brigade.runner.ranks import run_ranks

WORKLOAD = replace(PACED, batch_size=16, rounds=10, warmup=2)
DEADLINE_S = 60.0
COPIES = ("_foreach_copy_", "_to_copy", "cat", "clone", "copy_", "stack")


@dataclass(frozen=True)
class Bought:
    """One rung: `found` of its timed steps, and `exposed_ms`, how much longer they take than computation alone. Of one
    step: bytes that are copied, bytes of new memory, and views that are made."""

    found: Measured
    exposed_ms: Spread
    copied: int
    allocated: int
    views: int


def steps_of(entry: Module) -> int:
    """How often `bought` calls `on_step`."""
    return WORKLOAD.rounds * (len(rungs_of(entry)) + 1)


def rungs_of(entry: Module) -> list[Rung]:
    """Of the module before, if there is one, and of the module."""
    return [rung_of(one) for one in MODULES if one.number <= entry.number][-2:]


def bought(entry: Module, sources: Sources, on_step: Callable[[], None] | None = None) -> list[Bought]:
    """Measures on two ranks, for some seconds. Raises RankFailure where a module before this one does not run."""
    rungs = rungs_of(entry)
    together = [*rungs, COMPUTATION]
    results = run_rungs(WORKLOAD, together, sources, world_size=2, deadline=DEADLINE_S, on_step=on_step)
    packages = {"submission": sources}
    arguments = asdict(WORKLOAD), [asdict(rung) for rung in rungs]
    counts = run_ranks(counted, *arguments, mode="record", packages=packages, deadline=DEADLINE_S)[0]
    alone = measured(WORKLOAD, together, COMPUTATION, results)
    rows = []
    for rung, count in zip(rungs, counts):
        found = measured(WORKLOAD, together, rung, results)
        rows.append(Bought(found, spread(found.exposed_ms(alone)), *count))
    return rows


def table(rows: list[Bought]) -> Table:
    """A row for each rung, 80 columns wide at most."""
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
    found = bench_table("What it bought: one step on an emulated link", "", headings)
    for row in rows:
        found.add_row(
            row.found.label,
            f"{row.found.collectives:g}",
            f"{row.found.sent_bytes / 1e6:.2f}",
            f"{row.exposed_ms.median:.0f}",
            f"{row.exposed_ms.lower:.0f} to {row.exposed_ms.upper:.0f}",
            f"{row.copied / 1e6:.2f}",
            f"{row.allocated / 1e6:.2f}",
            f"{row.views}",
            f"{max(row.found.state_bytes) / 1e6:.2f}",
        )
    return found


# What follows runs in the ranks.


class Ledger(TorchDispatchMode):
    """Adds up what the submission does while it is entered: bytes copied, bytes of new memory, views made."""

    def __init__(self) -> None:
        super().__init__()
        self.copied = self.allocated = self.views = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if of_submission(sys._getframe(1)):
            given = {tensor.untyped_storage()._cdata for tensor in tensors_in([*args, *(kwargs or {}).values()])}
            made = tensors_in(result)
            if function.overloadpacket.__name__ in COPIES and not onto_itself(args):
                self.copied += sum(tensor.nbytes for tensor in made or tensors_in(args[0]))
            self.allocated += sum(tensor.nbytes for tensor in made if tensor.untyped_storage()._cdata not in given)
            self.views += len(made) if function.is_view else 0
        return result


def of_submission(frame: FrameType | None) -> bool:
    """Whether a line of the submission called torch here, itself or through a helper of torch's own."""
    while frame and (name := frame.f_globals.get("__name__", "")).startswith("torch."):
        if name.startswith(("torch.distributed.", "torch.optim.")):
            return False
        frame = frame.f_back
    return bool(frame) and name.startswith("submission.")


def counted(workload: dict, rungs: list[dict]) -> list[tuple[int, int, int]]:
    """What the third step of every rung copies and allocates, in bytes, and how many views it makes."""
    found = []
    for rung in rungs:
        one = climber(rung, TinyLM(Size(**workload["size"])), workload)
        batch = corpus.batch(corpus.text(), 2, 16, torch.Generator().manual_seed(0))
        for _ in range(3):
            with Ledger() as ledger:
                take_step(one, *batch)
        found.append((ledger.copied, ledger.allocated, ledger.views))
    return found
