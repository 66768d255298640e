"""Use torch's profiler to count the kernels that NCCL launched. A group launch is one kernel."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator

import torch

from brigade.rank import recording
from brigade.rank.api import device

PREFIXES = ("ncclDevKernel", "ncclKernel")  # since NCCL 2.19, and before


def count_nccl_kernels(names: Iterable[str]) -> dict[str, int] | None:
    """Count each NCCL kernel. `names` are all kernels that ran on the GPU; the types of their arguments are ignored.

    Return None if there are no names, because the profiler cannot see this GPU. "nccl:all_reduce" is not a kernel but
    the profiler range around a kernel.
    """
    names = list(names)
    return dict(Counter(name.partition("(")[0] for name in names if name.startswith(PREFIXES))) if names else None


@contextlib.contextmanager
def record_kernels() -> Iterator[None]:
    """Record the NCCL kernels of the block as an event of kind "kernels". Do nothing in a rank without a GPU."""
    if device().type != "cuda":
        yield
        return
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        yield
        torch.cuda.synchronize()
    names = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    recording.note("kernels", counts=count_nccl_kernels(names))
