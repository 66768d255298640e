"""The resources of this machine for running ranks: processor cores, the loopback interface, and GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import socket
import warnings
from pathlib import Path

from brigade.ranks.errors import UserError

# In a container, this file contains the CPU time allowed per period (or "max") and the period, in microseconds.
CPU_LIMIT_FILE = Path("/sys/fs/cgroup/cpu.max")

# torchrun sets all of these variables. A cluster may set some of them for every process of a job.
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

# Connect the ranks of a group when it is created. Otherwise the first collective of each kind connects them, and a rank
# blocks inside the launch until all others launch it too.
EVERYWHERE = {"NCCL_RUNTIME_CONNECT": "0"}


def is_torchrun() -> bool:
    """Return whether this process is one of the ranks that `torchrun` has started."""
    return all(os.environ.get(name) for name in TORCHRUN)


def count_cores() -> int:
    """Return the number of processor cores that this process may use.

    Respect the CPU limit of a container, rounded down, but return at least 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError):  # there is no file, or its limit is "max"
        limit_us, period_us = map(int, CPU_LIMIT_FILE.read_text().split())
        cores = min(cores, max(1, limit_us // period_us))
    return cores


def find_loopback_interface() -> str:
    """Return the name of the loopback network interface."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def count_gpus() -> int:
    """Return the number of GPUs that ranks can use. CUDA is not initialised in this process."""
    return find_gpus()[0]


def find_gpus() -> tuple[int, str]:
    """Return the number of GPUs that ranks can use here and, if there are none, the reason as a part of a sentence."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a driver that does not answer
        gpus = torch.cuda.device_count()
    supported, needed = read_driver_version(), torch.version.cuda
    if needed is None:
        return gpus, "this torch was built without CUDA"
    if gpus and supported and supported // 1000 < int(needed.partition(".")[0]):
        has = f"{supported // 1000}.{supported % 1000 // 10}"
        return 0, f"the NVIDIA driver is too old: it supports CUDA {has}, but this torch was built for CUDA {needed}"
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return 0, "CUDA_VISIBLE_DEVICES is empty, which hides all GPUs"
    return gpus, "torch finds none" if supported else "there is no NVIDIA driver, or it does not answer"


@functools.cache
def read_driver_version() -> int:
    """Return the newest version of CUDA that the NVIDIA driver supports, such as 13010 for 13.1, or 0 if unknown.

    NVIDIA's management library (NVML) knows the version without initialising CUDA.
    """
    version = ctypes.c_int()
    with contextlib.suppress(OSError, AttributeError):
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() == 0:
            nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
    return version.value


def make_nccl_environments(world_size: int, share_gpu: bool) -> list[dict[str, str]]:
    """Return the environment variables of each rank for NCCL. Raise UserError if there are too few GPUs."""
    gpus, problem = find_gpus()
    if not gpus:
        raise UserError(f"--backend nccl needs a GPU, but {problem}; --backend gloo works on any machine")
    if gpus >= world_size:
        return [dict(EVERYWHERE) for _ in range(world_size)]
    if not share_gpu:
        raise UserError(
            f"{world_size} ranks need {world_size} GPUs, but this machine has {gpus}; --share-gpu puts several ranks "
            "on one GPU, to check correctness only"
        )
    shared = {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": find_loopback_interface(),
        # While a kernel waits for a rank that has no turn on the GPU, it occupies one block instead of many.
        "NCCL_MAX_CTAS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_MNNVL_ENABLE": "0",  # ranks that claim to be on separate hosts must not look for NVLink between them
    }
    return [EVERYWHERE | shared | {"NCCL_HOSTID": f"brigade-{rank}"} for rank in range(world_size)]
