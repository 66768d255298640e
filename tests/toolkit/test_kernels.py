"""The count of NCCL's kernels by name, and the check of module 6 that uses it."""

import pytest
from test_m06_coalesced import expect_kernels

from brigade.checks.verdict import CheckFailed
from brigade.rank.kernels import count_nccl_kernels

NEW = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"  # NCCL 2.19 and later
GENERIC = "ncclDevKernel_Generic_1(ncclDevKernelArgsStorage<4096ul>)"
OLD = "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"
OTHERS = [
    "nccl:all_reduce",  # the range around it
    "Memcpy DtoD (Device -> Device)",
    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, 1>(int)",
]


def test_only_kernels_of_nccl_count():
    assert count_nccl_kernels([NEW, *OTHERS, NEW, OLD, GENERIC]) == {
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL": 2,
        "ncclKernel_AllReduce_RING_LL_Sum_float": 1,
        "ncclDevKernel_Generic_1": 1,
    }
    assert count_nccl_kernels(OTHERS) == {}


def test_a_profiler_that_sees_nothing_does_not_count():
    assert count_nccl_kernels([]) is None
    expect_kernels([{"kind": "kernels", "counts": None}], 4, 0)


def test_a_block_is_one_kernel():
    events = [{"kind": "kernels", "counts": count_nccl_kernels([NEW, GENERIC, *OTHERS])}]
    expect_kernels(events, 2, 1)
    with pytest.raises(CheckFailed, match="rank 1: 1 ncclDevKernel_AllReduce_Sum_f32_RING_LL and 1 ncclDevKernel_Gen"):
        expect_kernels(events, 1, 1)
    with pytest.raises(CheckFailed, match="rank 1: no kernel"):
        expect_kernels([{"kind": "kernels", "counts": {}}], 1, 1)
    expect_kernels([{"kind": "launch"}], 1, 0)  # on the CPU there are none
