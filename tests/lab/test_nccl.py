"""The model of NCCL's tuner gives what its formulas give by hand, and chooses what was seen to be chosen."""

from dataclasses import replace
from itertools import pairwise

import pytest

from brigade.lab.nccl import AMPERE, BLACKWELL, HOPPER, PCIE4, Channels, Network, find_channels

H200, B200 = Network(HOPPER, 8, 50.0, 8), Network(BLACKWELL, 8, 50.0, 8)
GIB = 2**30


@pytest.mark.parametrize(
    ("network", "per_node", "num_nodes", "channels"),
    [
        (Network(AMPERE, 8), 8, 1, Channels(12, 20)),  # 240 GB/s
        (Network(HOPPER, 8), 8, 1, Channels(12, 30)),  # 360 of 370.8
        (Network(BLACKWELL, 8), 8, 1, Channels(16, 45)),  # 720 of 721.8
        (H200, 8, 2, Channels(8, 45)),  # NVLink is slower than eight cards
        (Network(AMPERE, 8, 25.0, 8), 8, 4, Channels(8, 24)),
        (Network(AMPERE, 8, 25.0, 4), 8, 4, Channels(4, 24)),
        (Network(HOPPER, 8, 50.0, 8), 1, 4, Channels(2, 24)),  # one card of a group with one rank in each node
        (Network(HOPPER, 8, 1.25, 1), 8, 2, Channels(1, 1.2)),  # 10 Gbit/s
    ],
)
def test_the_channels_of_a_ring(network, per_node, num_nodes, channels):
    assert network.find_group_channels("ring", per_node, num_nodes) == channels


def test_no_link_carries_more_than_it_can():
    for total in (0.05, 1.0, 12.5, 100.0, 370.8):
        channels = find_channels(total, total / 2, HOPPER.network_speeds, 2)
        assert 0 < channels.count * channels.gbps <= total


def test_rings_that_were_computed_by_hand():
    """With the formulas of `ncclTopoTuneModel`, for the protocol Simple."""
    rings = {
        op: next(
            one.seconds
            for one in H200.list_estimates(op, GIB, 32, 4)
            if (one.algorithm, one.protocol) == ("ring", "Simple")
        )
        for op in ("all_reduce", "all_gather", "broadcast")
    }
    # 62 hops, of which 6 are between nodes, and 40 % more latency; 31 hops, of which 3; 32 hops.
    assert rings["all_reduce"] == pytest.approx(1e-6 * 1.4 * (8.4 + 56 * 3.4 + 6 * 14) + GIB * (62 / 32) / 360e9)
    assert rings["all_gather"] == pytest.approx(1e-6 * (8.4 + 28 * 3.4 + 3 * 14) + GIB * (31 / 32) / 360e9)
    assert rings["broadcast"] == pytest.approx(1e-6 * (8.4 + 32 * 14) + GIB / 360e9)


@pytest.mark.parametrize(
    ("network", "op", "nbytes", "num_ranks", "num_nodes", "algorithm"),
    [
        # stas00/ml-engineering, network/README.md, commit 744d01e, read from NCCL's log.
        *((H200, "all_reduce", 8 * GIB, ranks, 1, "ring" if ranks == 4 else "NVLS") for ranks in range(4, 9)),
        *((B200, "all_reduce", 8 * GIB, ranks, 1, "ring") for ranks in (4, 5)),
        (B200, "all_reduce", 8 * GIB, 8, 1, "NVLS"),
        (H200, "all_reduce", 2**20, 8, 1, "ring"),
        (H200, "all_gather", 16 * GIB, 8, 1, "ring"),
        (H200, "all_reduce", 16 * GIB, 16, 2, "NVLS tree"),
        # Not from a log: trees have fewer hops, and only groups of one rank in each node have PAT.
        (Network(AMPERE, 8, 25.0, 8), "all_reduce", 2**16, 256, 32, "tree"),
        (Network(PCIE4, 1, 12.5), "all_gather", 2**20, 64, 64, "PAT"),
    ],
)
def test_the_algorithm_that_nccl_chooses(network, op, nbytes, num_ranks, num_nodes, algorithm):
    assert network.estimate(op, nbytes, num_ranks, num_nodes).algorithm == algorithm


def test_more_cards_and_larger_buffers():
    seconds = [Network(HOPPER, 8, 12.5, cards).seconds("all_gather", GIB, 64, 8) for cards in (1, 2, 4, 8)]
    assert [round(slow / fast, 1) for slow, fast in pairwise(seconds)] == [2.0, 2.0, 2.0]
    small, large = (H200.seconds("all_reduce", nbytes, 512, 64) for nbytes in (2**10, 2**33))
    assert small < 1e-3 < large
    assert H200.seconds("all_reduce", GIB, 1, 1) == 0


def test_the_latency_of_a_plugin_counts_for_hops_between_nodes():
    """Once for the protocols LL and LL128, and twice for Simple, which also flushes."""
    efa = replace(B200, latency_us=35.0)
    longer = {
        (one.algorithm, one.protocol): 1e6 * (one.seconds - plain.seconds)
        for one, plain in zip(
            efa.list_estimates("all_reduce", 64, 32, 4), B200.list_estimates("all_reduce", 64, 32, 4), strict=True
        )
    }
    # A ring has 6 hops between 4 nodes, a tree 4; an NVLS tree has 4, too.
    assert longer == pytest.approx({
        ("ring", "LL"): 6 * 35, ("ring", "LL128"): 6 * 35, ("ring", "Simple"): 6 * 70,
        ("tree", "LL"): 4 * 35, ("tree", "LL128"): 4 * 35, ("tree", "Simple"): 4 * 70,
        ("NVLS tree", "Simple"): 4 * 70,
    })  # fmt: skip
    assert efa.seconds("all_reduce", GIB, 8, 1) == B200.seconds("all_reduce", GIB, 8, 1)


def test_an_environment_that_limits_the_choice():
    """As on Google's A3 mega machines: rings and trees only, with the protocol Simple."""
    limited = replace(Network(HOPPER, 8, 25.0, 8), algorithms=("ring", "tree"), protocols=("Simple",))
    estimates = {one.algorithm: one for one in limited.list_estimates("all_reduce", 8 * GIB, 16, 2)}
    assert estimates.keys() == {"ring", "tree"} and {one.protocol for one in estimates.values()} == {"Simple"}
    # Between two nodes, NCCL raises a tree's rate inside nodes: eight channels of 45 GB/s, as much as NVLink carries.
    latency_s = 1e-6 * (8.4 + 2 * (7 * 4 + 14))
    assert estimates["tree"].seconds == pytest.approx(latency_s + 8 * GIB / (0.5 * 8 * min(0.92 * 45, 41.4) * 1e9))


def test_the_rate_of_an_nvls_tree_is_corrected_on_a_b200():
    def get_rate(network, nbytes):
        """Return the rate of an NVLS tree, from two buffers with the same correction."""
        one, more = (
            next(e.seconds for e in network.list_estimates("all_reduce", n, 32, 4) if e.algorithm == "NVLS tree")
            for n in (nbytes, 1.5 * nbytes)
        )
        return nbytes / 2 / (more - one)

    assert get_rate(B200, 2**24) / get_rate(B200, GIB) == pytest.approx(0.7)
    assert get_rate(H200, 2**24) / get_rate(H200, GIB) == pytest.approx(1.0)
