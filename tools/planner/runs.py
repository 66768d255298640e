"""Published training runs and collectives: the rows of docs/published.tsv, and by which rule they are taken.

**The rule.** A source is a page, or a file of a repository, that anybody can read. Of a source that has a table of
throughputs, we take every row of its newest version that

1. is pure data parallel training (DDP, ZeRO, FSDP, also in groups of some ranks) of a dense decoder-only transformer on
   2 or more GPUs that `devices.py` knows, or a collective of NCCL, and
2. says, in the source or in the code that it names: the model, the number of GPUs, the micro-batch, the length of
   sequences, and what is recomputed. Modalities says the models' sizes and MFU, which counts
   72 layers d_model² + 12 layers d_model sequence operations per token. Two sequence lengths give layers and d_model:
   those of GPT-3's models of these sizes, and 52 layers of 6656 for 28 billion.

A row that repeats another one of its source (the same set-up, measured again) is taken once, the first time. The result
is no reason to take a row or to leave it out. `assumed` has what else a plan needs and the source does not say. We left
out issues whose authors look for a fault in their network, such as nccl-tests 152 and 319 or NCCL 1453 and 2409.
"""

from __future__ import annotations

import csv
import functools
import math
from dataclasses import dataclass
from typing import Any

from brigade.course.table.modules import ROOT
from brigade.lab.devices import DEVICES, Device
from brigade.lab.nccl import ALGORITHMS, PROTOCOLS, Network

PUBLISHED = ROOT / "docs" / "published.tsv"
TRAINING, COLLECTIVE = "training", "collective"


@dataclass(frozen=True)
class Row:
    """A row of docs/published.tsv. Rates of cards are in Gbit/s, and `latency_us` is that of `nccl.Network`.

    `launch_us` is the time of the host that a measured collective includes. The benchmark of stas00/ml-engineering
    (commit 744d01e) times one call on an idle GPU. Its later version (0cc3de50) says that this adds "some 20-30us".
    `settings` are variables of the environment that limit what NCCL may choose.

    Of a training run, `subject` is the model, `sequence` and `micro_batch` give the tokens of a GPU and micro-batch,
    `sharding` is "full", "keep" (units stay gathered after forward) or "zero1" (whole weights, and each rank of a group
    updates some), and `shard` is the number of ranks that share a replica, or the state of the optimizer (0: all).
    `precision` is that of matrix products, and `gather` and `reduce` are the dtypes on the wire. `recompute` is the
    part of blocks that backward computes again: as much of them as `Shape.recomputed_numel` says, and whole ones if
    `torch` is "1.13". The `torch` of llm-foundry's runs is the one in scripts/train/benchmarking/sweep.sh when they
    were added: 1.13.1 (33aeb79d) for those in bf16 PURE, and 2.1.0 (b2a43a14) for others. Of a collective, `subject` is
    the operation and `sequence` the bytes of the buffer.
    `held_back` is "yes" for rows that nobody compared with the model before it was complete. `assumed` says what the
    source does not.
    """

    name: str
    kind: str
    family: str
    device: str
    gpus: int
    node_size: int
    cards: int
    card_gbit: float
    latency_us: float
    launch_us: float
    settings: str
    subject: str
    sequence: int
    micro_batch: int
    accumulation: int
    sharding: str
    shard: int
    precision: str
    gather: str
    reduce: str
    recompute: float
    torch: str
    measured: float
    unit: str
    source: str
    date: str
    held_back: str
    assumed: str

    @property
    def num_nodes(self) -> int:
        """The number of nodes."""
        return math.ceil(self.gpus / self.node_size)

    @property
    def measured_s(self) -> float:
        """The measured seconds: of a training step, or of a collective."""
        if self.unit == "ms":
            return self.measured / 1e3
        if self.kind == TRAINING:  # tokens/s/GPU
            return self.sequence * self.micro_batch * self.accumulation / self.measured
        factor = (2 if self.subject == "all_reduce" else 1) * (self.gpus - 1) / self.gpus
        return self.sequence * factor / (self.measured * 1e9)  # of busbw, as nccl-tests defines it

    @property
    def tokens_per_s(self) -> float:
        """How many tokens a GPU computes per second."""
        return self.sequence * self.micro_batch * self.accumulation / self.measured_s

    @property
    def gpu(self) -> Device:
        """The GPU. Its memory is that of the larger variant."""
        return DEVICES[self.device.partition("-")[0]]

    @functools.cached_property
    def network(self) -> Network:
        """The network between these GPUs."""
        allowed = dict(one.split("=") for one in self.settings.split() if one != "-")
        named = allowed.get("NCCL_ALGO", "").lower().split(",")
        algorithms = tuple(name for name in ALGORITHMS if name.lower() in named) or ALGORITHMS
        protocols = tuple(allowed.get("NCCL_PROTO", ",".join(PROTOCOLS)).split(","))
        card_gbps = self.card_gbit / 8 or None
        return Network(self.gpu.fabric, self.node_size, card_gbps, self.cards, self.latency_us, algorithms, protocols)


def read_rows() -> list[Row]:
    """Return the rows of docs/published.tsv."""
    numbers: dict[str, Any] = {"recompute": float, "measured": float, "card_gbit": float}
    numbers |= dict.fromkeys(("latency_us", "launch_us"), float)
    numbers |= dict.fromkeys(("gpus", "node_size", "cards", "sequence", "micro_batch", "accumulation", "shard"), int)
    with PUBLISHED.open(newline="") as file:
        lines = [*csv.DictReader(file, delimiter="\t")]
    return [
        Row(
            **{
                name: numbers.get(name, str)("0" if value == "-" and name in numbers else value)
                for name, value in line.items()
            }
        )
        for line in lines
    ]
