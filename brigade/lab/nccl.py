"""How long NCCL's collectives take, as its own tuner estimates. Pure functions, without torch and without NCCL.

    network = Network(HOPPER, ranks_per_node=8, node_gbps=400, cards=8)
    network.estimate("all_reduce", 2**30, num_ranks=512, num_nodes=64)     Estimate("tree", "Simple", 0.0063...)

Constants and formulas are those of NCCL 2.30.7 (git tag v2.30.7-1): `ncclTopoTuneModel` and `ncclTopoGetAlgoTime` in
src/graph/tuning.cc, the rates of links in src/graph/topo.h, and the rates of channels in src/graph/search.cc. The
latencies of rings are the same in every version since 2.18. A hop of a tree with the protocol Simple takes 14 us
between nodes in 2.18.3, 2.26.2 and 2.30.7, and 28 us in 2.21.5.

NCCL splits a collective over channels. Each channel is a ring or a tree over all ranks, and enters and leaves a node
through a card of the network. So a ring over several nodes is as fast as all cards together, or as NVLink if that is
slower. This file does not search for channels as NCCL does: it takes the largest total rate of equal channels that
the links carry. Not modelled: SHARP in the network (CollNet), several switches, and other traffic.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

ALGORITHMS = ("ring", "tree", "NVLS", "NVLS tree", "PAT")
PROTOCOLS = ("LL", "LL128", "Simple")
MAX_CHANNELS = 32  # MAXCHANNELS / 2: each channel that NCCL finds is used twice

# In microseconds, for the protocols LL, LL128 and Simple: `baseLatencies` and `hwLatencies` of the tuner.
BASE_US = {"ring": (6.6, 14.0, 8.4), "tree": (6.8, 14.0, 8.4), "NVLS": (0, 0, 0), "PAT": (8.0, 8.0, 8.0)}
NVLINK_US = {"ring": (0.6, 1.9, 3.4), "tree": (0.6, 1.25, 4.0), "NVLS": (0, 0, 25), "PAT": (0, 0, 4.0)}
PCI_US = {"ring": (1.0, 2.5, 5.7), "tree": (1.0, 1.9, 4.0), "NVLS": (0, 0, 0), "PAT": (0, 0, 4.0)}
NETWORK_US = {"ring": (2.7, 4.0, 14.0), "tree": (5.0, 8.5, 14.0), "NVLS": (0, 0, 20.9), "PAT": (0, 0, 14.0)}
NET_OVERHEAD_US = 1.0  # to post a message, on Intel processors (2.0 on AMD); a message of Simple needs three

# `treeCorrectionFactor`: from 64 bytes, for each power of two. On a B200 with x86 processors, also of NVLS trees.
TREE_CORRECTION = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)
PLATEAU = 1.4  # "plateau effect of ring": factor of the latency of an all-reduce over several nodes


@dataclass(frozen=True, eq=False)
class Fabric:
    """What NCCL assumes about the GPUs of a node. Rates are in GB/s in one direction.

    `gbps` is the rate of a GPU to all others of its node. The tuples `..._by_nodes` have values for one, two and more
    nodes: `llMaxBws` (for several nodes, those with Intel processors), and the limits of one channel.
    """

    name: str
    gbps: float
    is_nvlink: bool
    speeds: tuple[float, ...]  # of a channel inside a node
    network_speeds: tuple[float, ...]  # of a channel between nodes
    ll_by_nodes: tuple[float, float, float]
    ring_ll128_by_nodes: tuple[float, float, float] = (20.0, 20.0, 20.0)
    tree_ll128_by_nodes: tuple[float, float, float] = (20.0, 20.0, 20.0)
    tree_by_nodes: tuple[float, float, float] = (24.0, 23.6, 17.8)
    nvls_tree_by_nodes: tuple[float, float, float] = (0.0, 0.0, 0.0)
    nvls_efficiency: float = 0.0  # 0: there is no NVLink SHARP
    doubles_from: float = 25.0  # of `find_channels`


SPEEDS = (40, 30, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3)
NETWORK_SPEEDS = (48, 30, 28, 24, 20, 18, 15, 12, 10, 9, 7, 6, 5, 4, 3, 2.4, 1.2, 0.24, 0.12)
SM90_SPEEDS = (60, 50, 40, 30, 24, 20, 15, 12, 11, 6, 3)
SM90_NETWORK_SPEEDS = (48, 45, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12)
SM100_SPEEDS = (90, 80, 70, 60, 50, 45, 40, 30, 24, 20, 19, 18)
SM100_NETWORK_SPEEDS = (96, 86, 80, 48, 45.1, 42, 40, 30, 24, 22, 20, 17.5, 15, 12, 6, 3, 2.4, 1.2, 0.24, 0.12)

# The rate of a GPU is NCCL's rate of one NVLink times the number of links: 12 x 20, 18 x 20.6 and 18 x 40.1 GB/s.
# PCI Express 3.0 x16 carries 12 GB/s in NCCL's model, and version 4.0 twice as much.
AMPERE = Fabric("NVLink 3", 12 * 20.0, True, SPEEDS, NETWORK_SPEEDS, (87.7, 39.0, 20.4))
HOPPER = Fabric(
    "NVLink 4",
    18 * 20.6,
    True,
    SM90_SPEEDS,
    SM90_NETWORK_SPEEDS,
    (141.0, 39.0, 20.4),
    (36.7, 36.7, 36.7),
    (36.7, 36.7, 29.0),
    (38.7, 41.4, 36.0),
    (0.0, 57.7, 45.5),
    0.85,
    50.0,
)
BLACKWELL = Fabric(
    "NVLink 5",
    18 * 40.1,
    True,
    SM100_SPEEDS,
    SM100_NETWORK_SPEEDS,
    (282.0, 39.0, 20.4),
    (40.0, 40.0, 40.0),
    (55.6, 31.67, 20.0),
    (70.0, 42.8, 24.0),
    (0.0, 96.0, 80.0),
    0.74,
    50.0,
)
PCIE4 = Fabric("PCI Express 4.0 x16", 24.0, False, SPEEDS, NETWORK_SPEEDS, (39.0, 39.0, 20.4))
PCIE3 = Fabric("PCI Express 3.0 x16", 12.0, False, SPEEDS, NETWORK_SPEEDS, (39.0, 39.0, 20.4))


@dataclass(frozen=True)
class Channels:
    """Equal channels of one algorithm, with the rate of each in GB/s."""

    count: int
    gbps: float


class Estimate(NamedTuple):
    """The algorithm and the protocol that NCCL's tuner chooses, and how long it expects them to take."""

    algorithm: str
    protocol: str
    seconds: float


def find_channels(
    total_gbps: float, link_gbps: float, speeds: tuple[float, ...], num_links: int = 1, doubles_from: float = 25.0
) -> Channels:
    """Return the channels with the largest total rate, of those with equal rates from `speeds` the fastest.

    All channels together carry at most `total_gbps`, and the channels on each of `num_links` links at most `link_gbps`.
    Up to four channels of 25 GB/s or more, and any number of `doubles_from`, become twice as many of half the rate.
    """
    options: list[tuple[float, float, int]] = []
    for speed in speeds:
        count = min(int(total_gbps / speed + 1e-9), num_links * int(link_gbps / speed + 1e-9), MAX_CHANNELS)
        if count and speed > 0.49 * (options[0][1] if options else 0):  # NCCL looks no further than half of the rate
            options.append((count * speed, speed, count))
    if not options:  # slower than NCCL's slowest channel
        return Channels(1, min(total_gbps, num_links * link_gbps))
    _, speed, count = max(options)
    is_doubled = speed >= (doubles_from if count > 4 else 25)
    return Channels(2 * count, speed / 2) if is_doubled else Channels(count, speed)


@dataclass(frozen=True)
class Network:
    """Nodes of `ranks_per_node` GPUs, each with `cards` network cards of `card_gbps` GB/s (None: there is one node).

    The GPUs of a node share its cards evenly. So a group of one rank in each node, beside which the other groups do the
    same at the same time, has `cards` / `ranks_per_node` cards. `latency_us` is what NCCL's plugin for the network
    reports: 0 for InfiniBand, and 35 or 75 us for AWS's EFA (aws-ofi-nccl 2daf7d30, src/platform-aws.cpp).
    `algorithms` and `protocols` are those that NCCL_ALGO and NCCL_PROTO allow.
    """

    fabric: Fabric
    ranks_per_node: int
    card_gbps: float | None = None
    cards: int = 1
    latency_us: float = 0.0
    algorithms: tuple[str, ...] = ALGORITHMS
    protocols: tuple[str, ...] = PROTOCOLS

    def count_nodes(self, ranks: Collection[int]) -> int:
        """Return the number of nodes of these ranks."""
        return len({rank // self.ranks_per_node for rank in ranks})

    def seconds(self, op: str, nbytes: float, num_ranks: int, num_nodes: int) -> float:
        """Return how many seconds a collective on a buffer of `nbytes` (all parts together) takes."""
        return self.estimate(op, nbytes, num_ranks, num_nodes).seconds

    def estimate(self, op: str, nbytes: float, num_ranks: int, num_nodes: int) -> Estimate:
        """Return what NCCL's tuner chooses for a collective of `num_ranks` ranks, equally many in each node."""
        return estimate(self, op, nbytes, num_ranks, num_nodes)

    def list_estimates(self, op: str, nbytes: float, num_ranks: int, num_nodes: int) -> Iterator[Estimate]:
        """Yield the estimates for all algorithms and protocols that NCCL could choose."""
        per_node = num_ranks / num_nodes
        for algorithm in self.algorithms:
            if not self.has_algorithm(algorithm, op, num_ranks, num_nodes):
                continue
            channels = self.find_group_channels(algorithm, per_node, num_nodes)
            for index, protocol in enumerate(PROTOCOLS):
                if protocol not in self.protocols or (protocol != "Simple" and algorithm not in ("ring", "tree")):
                    continue
                if protocol == "LL128" and not self.fabric.is_nvlink and per_node > 1:
                    continue
                gbps = self.compute_bus_rate(algorithm, index, channels, op, per_node, num_nodes)
                gbps *= get_ratio(algorithm, op, num_ranks)
                latency_us = self.compute_latency(algorithm, index, op, num_ranks, num_nodes)
                if algorithm == "tree" or (algorithm == "NVLS tree" and self.fabric is BLACKWELL):
                    gbps *= get_tree_correction(index, nbytes)
                is_large = nbytes / (channels.count * num_ranks) >= 64
                if (algorithm, protocol, op) == ("ring", "Simple", "all_reduce") and num_nodes > 1 and is_large:
                    latency_us *= PLATEAU
                yield Estimate(algorithm, protocol, latency_us * 1e-6 + nbytes / (gbps * 1e9))

    def has_algorithm(self, algorithm: str, op: str, num_ranks: int, num_nodes: int) -> bool:
        """Return whether NCCL's tuner considers an algorithm."""
        per_node = num_ranks / num_nodes
        if algorithm == "ring":
            return True
        if algorithm == "PAT":
            return op in ("all_gather", "reduce_scatter") and num_nodes > 1 and per_node == 1
        if op != "all_reduce":
            return False
        if algorithm == "tree":
            return True
        return self.fabric.nvls_efficiency > 0 and per_node > 1 and (num_nodes > 1) == (algorithm == "NVLS tree")

    def find_group_channels(self, algorithm: str, per_node: float, num_nodes: int) -> Channels:
        """Return the channels of a group with `per_node` ranks in each of its nodes."""
        fabric, card_gbps = self.fabric, math.inf if self.card_gbps is None else self.card_gbps
        cards = self.cards * per_node / self.ranks_per_node
        if algorithm in ("NVLS", "NVLS tree"):
            # Each GPU is the head of a channel, which takes its rate twice from the head's links, and once from others.
            limit = fabric.gbps / (per_node + 1)
            if num_nodes == 1:
                return find_nvls_channels(limit, int(per_node), fabric.speeds)
            return find_nvls_channels(min(limit, cards * card_gbps / per_node), int(per_node), fabric.network_speeds)
        if num_nodes == 1:
            return find_channels(fabric.gbps, fabric.gbps, fabric.speeds, 1, fabric.doubles_from)
        total = min(fabric.gbps if per_node > 1 else math.inf, cards * card_gbps)
        links = max(1, math.floor(cards)), fabric.doubles_from
        return find_channels(total, min(card_gbps, total), fabric.network_speeds, *links)

    def compute_bus_rate(
        self, algorithm: str, protocol: int, channels: Channels, op: str, per_node: float, num_nodes: int
    ) -> float:
        """Return the rate of all channels together in GB/s, as the tuner limits it."""
        fabric, index = self.fabric, min(num_nodes, 3) - 1
        count, total = channels.count, channels.count * channels.gbps
        if algorithm in ("NVLS", "NVLS tree"):
            intra = channels.gbps * fabric.nvls_efficiency * (count - 1) / count * 2
            if algorithm == "NVLS":
                return count * intra
            card_gbps = math.inf if self.card_gbps is None else self.card_gbps
            heads = min(self.cards * per_node / self.ranks_per_node * card_gbps / per_node, 2 * channels.gbps)
            inter = max(speed for speed in (*fabric.network_speeds, channels.gbps) if speed <= heads)
            return count * min(intra, inter * (2 if num_nodes == 2 else 1), fabric.nvls_tree_by_nodes[index])
        if algorithm == "PAT":
            return total * 0.75
        ll, per_ring, per_tree = (
            one[index] for one in (fabric.ll_by_nodes, fabric.ring_ll128_by_nodes, fabric.tree_ll128_by_nodes)
        )
        if algorithm == "ring":
            return (min(ll, total / 2), min(0.92 * total, count * per_ring), total)[protocol]
        if num_nodes == 2 and per_node > 1:  # the rate inside a node counts, at most twice that of a card's channel
            inner = min(2 * channels.gbps, fabric.gbps / count)
            total = count * max(speed for speed in (*fabric.network_speeds, channels.gbps) if speed <= inner)
        total = min(0.92 * total, count * fabric.tree_by_nodes[index])
        narrowing = 7 / 9 if num_nodes == 1 else 120 / 128
        return (min(total / 3.8, ll), min(total * narrowing, count * per_tree), total)[protocol]

    def compute_latency(self, algorithm: str, protocol: int, op: str, num_ranks: int, num_nodes: int) -> float:
        """Return the latency in microseconds that the tuner adds to the time of the bytes."""
        per_node = num_ranks / num_nodes
        inner = NVLINK_US if self.fabric.is_nvlink else PCI_US
        table = "NVLS" if algorithm == "NVLS tree" else algorithm
        intra = inner[table][protocol]
        inter = NETWORK_US["tree" if per_node == 1 else table][protocol]
        inter += self.latency_us * (2 if PROTOCOLS[protocol] == "Simple" else 1)  # Simple also flushes
        if algorithm == "NVLS":
            return intra
        if algorithm == "NVLS tree":
            return intra + 2 * log2(num_nodes) * inter
        base = BASE_US[algorithm][protocol]
        if algorithm == "PAT":
            return base + log2(num_nodes) * inter / 3.5 + 2.8 * num_ranks
        if algorithm == "tree":
            return base + 2 * ((per_node - 1) * intra + log2(num_nodes) * inter)
        rounds = 2 if op == "all_reduce" else 1
        if op not in ("all_reduce", "reduce_scatter", "all_gather"):  # a broadcast or a reduce
            lat = (inner if num_nodes == 1 else NETWORK_US)["tree" if protocol == 2 else "ring"][protocol]
            return base + num_ranks * lat
        if num_nodes > 1:
            intra = max(intra, NET_OVERHEAD_US * (3 if protocol == 2 else 1))
        between = rounds * (num_nodes - 1)
        return base + (rounds * (num_ranks - 1) - between) * intra + between * inter


@functools.lru_cache(maxsize=4096)
def estimate(network: Network, op: str, nbytes: float, num_ranks: int, num_nodes: int) -> Estimate:
    """Return `Network.estimate`, which plans ask for many times."""
    if num_ranks == 1:
        return Estimate("none", "none", 0.0)
    return min(network.list_estimates(op, nbytes, num_ranks, num_nodes), key=lambda one: one.seconds)


def find_nvls_channels(head_gbps: float, heads: int, speeds: tuple[float, ...]) -> Channels:
    """Return the channels of NVLink SHARP: one for each of a node's `heads`, whose links carry `head_gbps`."""
    return Channels(heads, max((speed for speed in speeds if speed <= head_gbps), default=head_gbps))


def get_ratio(algorithm: str, op: str, num_ranks: int) -> float:
    """Return the size of the buffer, relative to the bytes that the bus carries at its rate."""
    if algorithm == "PAT":
        return 1.0
    if algorithm == "tree":
        return 0.5
    steps = {"all_reduce": 2 * (num_ranks - 1), "reduce_scatter": num_ranks - 1, "all_gather": num_ranks - 1}
    return num_ranks / steps.get(op, num_ranks)


def get_tree_correction(protocol: int, nbytes: float) -> float:
    """Return the factor of a tree's rate for a buffer of `nbytes`."""
    size = log2(max(1, nbytes / 64))
    return TREE_CORRECTION[protocol][size] if size < len(TREE_CORRECTION[0]) else 1.0


def log2(number: float) -> int:
    """Return the logarithm to base 2, rounded down."""
    return int(math.log2(number))
