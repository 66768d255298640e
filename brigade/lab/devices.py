"""GPUs that plans know: peak rates, memory, links, and the fraction of the peak that published training runs reach.

Peaks are those of dense matrices, from NVIDIA's pages, which list Tensor Cores "with sparsity", twice as fast. `Device`
has the address of each. We compared all but the T4's with the tables of stas00/ml-engineering (commit 744d01e,
compute/accelerator/README.md), which cite the same pages. One differs: they have 80 TFLOPS for a B200 in fp32. We take
75, an eighth of what NVIDIA's page of the HGX B200 lists. NVIDIA's own ai-dynamo/aisimulate quotes it ("600 TFLOPS FP32
for each eight-GPU baseboard", read on 10 September 2026).
fp32 is the rate without Tensor Cores: torch does not use TF32 for matrices unless it is allowed (since torch 1.12,
`torch.backends.cuda.matmul.allow_tf32`). With TF32, an A100 reaches 156 TFLOPS and an H100 494.7.
"""

from __future__ import annotations

from dataclasses import dataclass

from brigade.lab.nccl import AMPERE, BLACKWELL, HOPPER, PCIE3, PCIE4, Fabric


@dataclass(frozen=True)
class Utilisation:
    """The fraction of the peak that computation reaches: what a plan assumes, and the lowest and highest published.

    Recomputed operations count, and all positions of attention, as in HFU.
    """

    typical: float
    low: float
    high: float
    source: str


@dataclass(frozen=True)
class Device:
    """A GPU. `tflops` and `utilisation` are by dtype, `memory_gbps` is in gigabytes per second, `page` is NVIDIA's."""

    name: str
    tflops: dict[str, float]
    memory_gb: float
    memory_gbps: float
    fabric: Fabric
    utilisation: dict[str, Utilisation]
    page: str

    def get_utilisation(self, dtype: str) -> Utilisation:
        """Return the fraction of the peak that computation in a dtype reaches."""
        return self.utilisation.get(dtype, ASSUMED_UTILISATION)


# How much longer computation takes while NCCL communicates: matrix products take 30 to 40 % longer on an H100 (pull
# request 179937 of pytorch/pytorch). A study of A100 and H100 finds that all computation together takes 19 % longer on
# average, and 40 % at most (arXiv 2507.03114).
CONTENTION = 0.35

# None of these sources is in docs/published.tsv, so that no plan is fitted to what it predicts. They train in bf16 and
# fp8. In fp32 without TF32, plans assume what Llama 3 and the older sources of A100s reach in bf16.
DGXC = "NVIDIA/dgxc-benchmarking 143b90d"  # 2025: Llama 3.1 with 8 billion parameters 59 %, 70 54 %; Nemotron 4 62 %
ASSUMED_UTILISATION = Utilisation(0.40, 0.30, 0.50, "assumed: we know no published run")
HOPPER_UTILISATION = {
    "fp32": Utilisation(0.40, 0.33, 0.46, "38 to 43 % in Llama 3 (arXiv 2407.21783, table 4), and a little beyond"),
    "bf16": Utilisation(
        0.46,
        0.38,
        0.62,
        f"38 to 43 % in Llama 3, 2024 (arXiv 2407.21783, table 4); 54 to 62 % with NeMo, 2025 ({DGXC})",
    ),
    "fp8": Utilisation(0.40, 0.27, 0.43, f"27 to 29 % with Pax, 36 to 43 % with NeMo, 2025 ({DGXC})"),
}
AMPERE_UTILISATION = {
    "fp32": Utilisation(0.52, 0.44, 0.60, "44 to 52 % in arXiv 2104.04473, table 1; 55 to 60 % in 2304.11277"),
    "bf16": Utilisation(
        0.56, 0.44, 0.72, "44 to 52 % in arXiv 2104.04473, table 1; 55 to 60 % in 2304.11277; up to 72 % in 2307.08691"
    ),
}

NVIDIA = "https://www.nvidia.com/en-us/data-center/"
DEVICES = {
    "h100": Device(
        "H100", {"fp32": 67.0, "bf16": 989.4, "fp8": 1978.9}, 80, 3350, HOPPER, HOPPER_UTILISATION, f"{NVIDIA}h100/"
    ),
    "h200": Device(
        "H200", {"fp32": 67.0, "bf16": 989.4, "fp8": 1978.9}, 141, 4800, HOPPER, HOPPER_UTILISATION, f"{NVIDIA}h200/"
    ),
    "b200": Device(
        "B200",
        {"fp32": 75.0, "bf16": 2250.0, "fp8": 4500.0},
        180,
        8000,
        BLACKWELL,
        {},
        f"{NVIDIA}hgx/",
    ),
    "a100": Device("A100", {"fp32": 19.5, "bf16": 312.0}, 80, 2039, AMPERE, AMPERE_UTILISATION, f"{NVIDIA}a100/"),
    "l40s": Device("L40S", {"fp32": 91.6, "bf16": 362.0, "fp8": 733.0}, 48, 864, PCIE4, {}, f"{NVIDIA}l40s/"),
    "t4": Device("T4", {"fp32": 8.1}, 16, 320, PCIE3, {}, f"{NVIDIA}tesla-t4/"),  # it has no bf16
}
