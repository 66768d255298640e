"""The count of NCCL's kernels by name."""

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
