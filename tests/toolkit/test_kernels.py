"""The count of NCCL's kernels by name."""

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity

from brigade.rank import kernels
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


class FakeProfiler:
    """A profiler that saw two kernels on the GPU and an operator on the CPU."""

    def __init__(self, activities):
        assert ProfilerActivity.CUDA in activities

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def events(self):
        on_gpu, on_cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
        return [SimpleNamespace(name=name, device_type=kind) for name, kind in ((NEW, on_gpu), (OLD, on_cpu))]


@pytest.mark.parametrize("kind", ["cuda", "cpu"])
def test_kernels_of_a_block_are_recorded_on_a_gpu(kind, monkeypatch):
    noted = []
    monkeypatch.setattr(kernels, "device", lambda: torch.device(kind))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.profiler, "profile", FakeProfiler)
    monkeypatch.setattr(kernels.recording, "note", lambda kind, **fields: noted.append((kind, fields)))
    with kernels.record_kernels():
        pass
    counts = {"ncclDevKernel_AllReduce_Sum_f32_RING_LL": 1}
    assert noted == ([("kernels", {"counts": counts})] if kind == "cuda" else [])
