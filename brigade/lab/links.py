"""The named links of `brigade bench`, `trace` and `plan`.

The effect of communication depends on how long it takes compared with backward. On a machine that computes more slowly
than a GPU, the real rate of a link would make communication look negligible. A named link is therefore defined by the
two ratios of a `Pace`: the ratios of its times to backward in one fixed GPU setup. The emulated link has the same
ratios to this machine's backward.

The setup: NVIDIA H100 GPUs reach 40 % of their dense bf16 peak, and train the XL model of module 4 with fp32
gradients on 32 768 tokens per GPU and step. Backward takes two multiplications and two additions per parameter and
token, not counting attention. With two ranks:

    backward    4 x 1 998 235 200 x 32 768 FLOP / (0.4 x 989.4 TFLOP/s) = 662 ms
    gradients   4 B x 1 998 235 200 = 7.99 GB

Only `make_pace` imports torch; the rest of this file does not need it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brigade.rank.emulated_link import Pace

# NVIDIA H100 Tensor Core GPU datasheet, SXM: 1 979 TFLOPS in bf16 "with sparsity", half of that for dense matrices.
PEAK_FLOPS = 989.4e12
UTILISATION = 0.4
PARAMETERS = 1_998_235_200  # of tiny_lm.SIZES["xl"]
TOKENS = 32_768
BACKWARD_FLOP = 4 * PARAMETERS * TOKENS
BACKWARD_S = BACKWARD_FLOP / (UTILISATION * PEAK_FLOPS)
GRAD_BYTES = 4 * PARAMETERS

LATENCY_RATIO = 0.002  # the default latency ratio of --comm-ratio


@dataclass(frozen=True)
class NamedLink:
    """A real link: its nominal bytes per second in one direction, and its latency in seconds per message of a ring."""

    what: str
    bytes_per_s: float
    latency_s: float

    def make_pace(self, world_size: int) -> Pace:
        """Return the link's ratios in the setup described above, for `world_size` ranks (at least two)."""
        from brigade.rank.emulated_link import Link, Pace

        link = Link(self.latency_s, self.bytes_per_s)
        latency_s = link.seconds("all_reduce", 0, world_size)
        transfer_s = link.seconds("all_reduce", GRAD_BYTES, world_size) - latency_s
        return Pace(transfer_s / BACKWARD_S, latency_s / BACKWARD_S)


# Rates are nominal: NVLink 4 from the H100 datasheet (900 GB/s, both directions together); PCI Express 4.0 with 16
# lanes of 16 GT/s and 128b/130b encoding; Ethernet from its name. Latencies are those that NCCL assumes for one
# message of a ring with its Simple protocol, on NVLink, PCI and network: `hwLat` in its src/graph/tuning.cc, commit
# b6475625. The 8.4 us that NCCL adds once per launch are left out.
NAMED = {
    "nvlink4": NamedLink("NVLink 4", 450e9, 3.4e-6),
    "pcie4": NamedLink("PCI Express 4.0 x16", 16e9 * 16 * (128 / 130) / 8, 5.7e-6),
    "100gbe": NamedLink("100 Gbit/s Ethernet", 100e9 / 8, 14e-6),
    "10gbe": NamedLink("10 Gbit/s Ethernet", 10e9 / 8, 14e-6),
}
