"""Count a variant's bytes of parameters, gradients and optimizer state on a rank, between steps and at the peak.

Each block of memory is counted once and in full, even if several tensors are views of it. Activations and the flat
tensors of modules 2 and 4 are allocated only during a step, so only `PeakMemory` counts them.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from brigade.lab.engine import Engine, FullyShardEngine
from brigade.ranks.rank.memory import LiveMemory, get_local, list_tensors

KINDS = ("parameters", "gradients", "optimizer state")

Bytes = dict[str, int]  # kind -> number of bytes


def count_kept_bytes(engine: Engine) -> Bytes:
    """Return the bytes by kind that are kept now. Gradients include torch DDP's flat tensors.

    DDP does not expose these tensors, but logs their sizes. A communication hook could measure the tensors themselves,
    but would slow down the steps.
    """
    nbytes = LiveMemory().count(**list_tensors_by_kind(engine))
    del nbytes["other"]
    if isinstance(engine.wrapper, DistributedDataParallel):
        sizes = engine.wrapper._get_ddp_logging_data()["bucket_sizes"]  # such as "1380800, 99200"
        nbytes["gradients"] += sum(int(size) for size in sizes.split(","))
    return nbytes


def list_tensors_by_kind(engine: Engine) -> dict[str, list[Tensor]]:
    """Return the tensors of each kind that an engine has now, and this rank's shards of what torch has sharded."""
    grad_buffers = getattr(engine.wrapper, "grad_buffers", [])
    stepped = [p for one in engine.optimizers for group in one.param_groups for p in group["params"]]
    weights = [*engine.parameters(), *engine.shards()]  # the model has full parameters while shards are gathered
    kinds = {
        "parameters": [*weights, *(b.param_data for b in grad_buffers)],
        "gradients": [
            *(p.grad for p in weights),
            *(getattr(p, "main_grad", None) for p in engine.parameters()),
            *(buffer.grad_data for buffer in grad_buffers),
        ],
        # The inner optimizer steps on slices of the parameters, which are counted above, or on main parameters.
        "optimizer state": [
            *(value for one in engine.optimizers for entries in one.state.values() for value in entries.values()),
            *stepped,
        ],
    }
    return {kind: [*map(get_local, list_tensors(values))] for kind, values in kinds.items()}


class PeakMemory(LiveMemory):
    """A context manager that sets `at_peak` to the bytes by kind at the moment when the most bytes are alive.

    Everything that is neither a parameter nor optimizer state counts as gradients: buckets, flat tensors, other buffers
    for communication, and activations. Run a step on few tokens in the block, so that activations are small. The buffer
    into which torch's fully_shard gathers weights counts as parameters.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.at_peak: Bytes = {}
        self.gathered: list[weakref.ref[Tensor]] = []
        super().__init__(list_tensors([*list_tensors_by_kind(self.engine).values()]))

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if "all_gather_copy_in" in str(function):  # it has just allocated the buffer
            self.gathered.append(weakref.ref(result[1]))
            if self.total() >= self.peak:
                self._note_peak()
        return result

    def _follow(self, tensors: Iterable[Tensor]) -> None:
        before = self.peak
        if isinstance(self.engine, FullyShardEngine):  # while a unit computes, the model has different parameters
            tensors = [*tensors, *self.engine.parameters()]
        super()._follow(tensors)
        if self.peak > before:
            self._note_peak()

    def _note_peak(self) -> None:
        kinds = list_tensors_by_kind(self.engine)
        kinds["parameters"] += list_tensors([reference() for reference in self.gathered])
        nbytes = self.count(**kinds)
        nbytes["gradients"] += nbytes.pop("other")
        self.at_peak = nbytes
