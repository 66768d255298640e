"""The resources of this machine for running ranks: processor cores, the loopback interface, and GPUs."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from brigade.course.modules import CourseError

# In a container, this file contains the CPU time allowed per period (or "max") and the period, in microseconds.
CPU_LIMIT_FILE = Path("/sys/fs/cgroup/cpu.max")


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


def make_gloo_environment() -> dict[str, str]:
    """Return the environment variables for gloo. If the user has set GLOO_SOCKET_IFNAME, keep its value."""
    return {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": find_loopback_interface()}


def make_nccl_environments(world_size: int, share_gpu: bool) -> list[dict[str, str]]:
    """Return the environment variables of each rank for NCCL. Raise CourseError if there are too few GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise CourseError("--backend nccl needs a GPU, but torch finds none; --backend gloo works on any machine")
    if gpus >= world_size:
        return [{} for _ in range(world_size)]
    if not share_gpu:
        raise CourseError(
            f"{world_size} ranks need {world_size} GPUs, but there are {gpus}; --share-gpu puts several ranks on one "
            "GPU, to check correctness only"
        )
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": find_loopback_interface()}
    return [shared | {"NCCL_HOSTID": f"brigade-{rank}"} for rank in range(world_size)]
