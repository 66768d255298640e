"""The program of each variant: what a rank computes, launches and waits for in one training step.

    programs = record([get_variant(get_module(4))], setting)       by label
    programs["4 BucketedDDP"].launches                             the collectives, in launch order
    simulate(programs["4 BucketedDDP"].instructions, machine, network).step_s            the seconds of a step

A program is recorded: `recorded_step.py` runs the variant's own code once in a rank, without memory and without peers.
All ranks are assumed to do what rank 0 does, at the same time, so no collective waits for another rank to launch it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from brigade.course.table.modules import ROOT
from brigade.lab.ladder import Variant, read_reference
from brigade.lab.memory_accounting import Bytes
from brigade.ranks.errors import UserError
from brigade.ranks.runner.deadline import BUSY
from brigade.ranks.runner.ranks import RankFailure, run_ranks
from brigade.ranks.texts import Sources

DEADLINE_S = 300.0
STORED = ROOT / "out" / "programs"  # the recorded steps, by a hash of everything that they depend on


class Network(Protocol):
    """What carries collectives: `emulated_link.Link` or `nccl.Network`. Groups have equally many ranks in each node."""

    def count_nodes(self, ranks: Collection[int]) -> int:
        """Return the number of nodes of these ranks."""

    def seconds(self, op: str, nbytes: float, num_ranks: int, num_nodes: int) -> float:
        """Return how many seconds a collective on a buffer of `nbytes` (all parts together) takes."""


@dataclass(frozen=True)
class Machine:
    """The speed of a rank, in seconds or in bytes of memory traffic per second.

    `backward_s[i]` is the time of the part of backward that ends with the gradient of parameter i. Parameters are in
    the order of registration. While a collective is under way, computation takes `contention` times longer than alone:
    NCCL's kernels need some of the processors that matrix products use.
    """

    forward_s: float
    backward_s: tuple[float, ...]
    step_bytes_per_s: float
    copy_bytes_per_s: float
    contention: float = 0.0

    def compute_s(self, kind: str, parameter: int) -> float:
        """Return the time of a parameter's layer in "forward" or "backward", which have equal shares."""
        share = self.backward_s[parameter]
        return share if kind == "backward" else self.forward_s * share / self._total_s

    @functools.cached_property
    def _total_s(self) -> float:
        return sum(self.backward_s) or 1.0


# Of parameters: whether a group is a unit of module 11, and its shapes.
Groups = list[tuple[bool, list[list[int]]]]


@dataclass(frozen=True)
class Setting:
    """The training run to record: the parameters, the ranks, the buckets and the optimizer.

    `groups` are in the order of registration, and `bucket_mb` is in MiB. `dtype` is the name of the parameters'
    dtype. A node consists of `node_size` ranks (None: all ranks). The optimizer keeps `state_values` values per
    element: two are AdamW's, without its step counter, and one is SGD's momentum. Gradients become ready in the
    reverse order of the parameters' registration, as in TinyLM.

    If there is a `compute_dtype`, wrappers that accept one have parameters in fp32, and all others have `dtype`. A step
    has several `micro_batches`, all but the last one inside `no_sync`.
    """

    groups: Groups
    world_size: int
    bucket_mb: float
    dtype: str = "float32"
    node_size: int | None = None
    state_values: int = 2
    compute_dtype: str | None = None
    micro_batches: int = 1

    @property
    def numel(self) -> int:
        """The number of elements of all parameters together."""
        return sum(math.prod(shape) for _, shapes in self.groups for shape in shapes)


class Launch(NamedTuple):
    """The launch of a collective on a buffer of `nbytes` bytes, in a group from rank 0 to `last_rank`."""

    number: int
    op: str
    nbytes: float
    num_ranks: int
    last_rank: int

    @property
    def ranks(self) -> range:
        """The ranks of the group, which have equal distances."""
        return range(0, self.last_rank + 1, self.last_rank // (self.num_ranks - 1) if self.num_ranks > 1 else 1)


@dataclass(frozen=True)
class Program:
    """What a rank does in one step (see `recorded_step.Recorded`), and the bytes that it keeps afterwards, by kind.

    `peak_bytes` are all bytes at the peak of the step, without activations.
    """

    instructions: Sequence[Sequence[Any]]
    memory: Bytes
    peak_bytes: int = 0

    @property
    def launches(self) -> list[Launch]:
        """The collectives, in launch order."""
        return [Launch(*values) for kind, *values in self.instructions if kind == "launch"]


@functools.cache
def hash_course() -> str:
    """Return the SHA-256 of the files that record a step."""
    paths = sorted(
        path for folder in ("course/checks", "lab", "ranks/rank") for path in (ROOT / "brigade" / folder).glob("*.py")
    )
    return hash_content([path.read_text() for path in paths])


def record(variants: Sequence[Variant], setting: Setting, sources: Sources | None = None) -> dict[str, Program | str]:
    """Return the program of each variant by label, or a sentence that says why there is none.

    `sources` are the submission's modules (default: the solutions). Raise UserError if they hang.
    """
    sources = read_reference() if sources is None else sources
    case = asdict(setting), [asdict(variant) for variant in variants]
    texts = {name: text for name, (_, text) in sources.items()}
    path = STORED / f"{hash_content(case, texts, hash_course())}.json"
    try:
        text = path.read_text()
    except OSError:
        from brigade.lab.recorded_step import record_steps

        deadlines = {"deadline": DEADLINE_S, "longest": BUSY * DEADLINE_S}
        how = {"world_size": 1, "packages": {"submission": sources}, "stream": False} | deadlines
        try:
            text = run_ranks(record_steps, *case, **how)[0]
        except RankFailure as failure:
            raise UserError(f"no step can be recorded: {failure}") from None
        with contextlib.suppress(OSError):  # the course may belong to somebody else
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(text)
            new.replace(path)  # another process may read the file at the same time
    recorded = {variant.label: step for variant, step in zip(variants, json.loads(text), strict=True)}
    return {label: step if isinstance(step, str) else Program(*step) for label, step in recorded.items()}


def hash_content(*content: Any) -> str:
    """Return the SHA-256 of some content."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class Times(NamedTuple):
    """The seconds of a step, and how much longer computation takes in it because of collectives under way."""

    step_s: float
    slowed_s: float


def simulate(instructions: Sequence[Sequence[Any]], machine: Machine, network: Network | None) -> Times:
    """Return how long the instructions take. Launches of previous steps are complete.

    As in `emulated_link.py`, a collective starts when all ranks have launched it (here, at the same time) and its part
    of the network, inside a node or between nodes, is free. Without a network, return the time of the step's own
    computation: copies belong to communication.
    """
    now = slowed_s = 0.0
    free: dict[bool, float] = defaultdict(float)
    ends: dict[int, float] = {}  # by the number of the launch
    nodes: dict[range, int] = {}
    for kind, *values in instructions:
        if network and kind == "launch":
            launch = Launch(*values)
            if (ranks := launch.ranks) not in nodes:
                nodes[ranks] = network.count_nodes(ranks)
            num_nodes = nodes[ranks]
            start = max(now, free[num_nodes > 1])
            end = start + network.seconds(launch.op, launch.nbytes, launch.num_ranks, num_nodes)
            free[num_nodes > 1] = ends[launch.number] = end
        elif network and kind == "wait":
            now = max(now, ends[values[0]])
        elif kind in ("forward", "backward"):
            seconds = machine.compute_s(kind, values[0])
            busy_s = max(0.0, max(free.values(), default=0.0) - now)  # a rank launches nothing while it computes
            done_s = min(seconds, busy_s / (1 + machine.contention))  # of `seconds`, until the network is idle
            now += seconds + done_s * machine.contention
            slowed_s += done_s * machine.contention
        elif kind == "step":
            now += values[0] / machine.step_bytes_per_s
        elif network and kind == "copy":
            now += values[0] / machine.copy_bytes_per_s
    return Times(now, slowed_s)
