"""What this machine gives to ranks: processor cores, the loopback interface, and GPUs."""

from __future__ import annotations

import os
import socket

from brigade.course.modules import CourseError


def count_cores() -> int:
    """Return how many processor cores of this machine this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def find_loopback_interface() -> str:
    """Return the name of the network interface through which the machine reaches itself."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def make_gloo_environment() -> dict[str, str]:
    """Return what each rank needs in its environment for gloo. A GLOO_SOCKET_IFNAME of the user's stays."""
    return {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": find_loopback_interface()}


def make_nccl_environments(world_size: int, share_gpu: bool) -> list[dict[str, str]]:
    """Return what each rank needs in its environment for NCCL. Raise CourseError when there are too few GPUs."""
    import torch

    gpus = torch.cuda.device_count()
    if gpus == 0:
        raise CourseError("--backend nccl needs a GPU, and torch sees none here; --backend gloo runs on any machine")
    if gpus >= world_size:
        return [{} for _ in range(world_size)]
    if not share_gpu:
        raise CourseError(
            f"{world_size} ranks need {world_size} GPUs and there are {gpus}: --share-gpu puts several ranks on one, "
            "for correctness only"
        )
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": find_loopback_interface()}
    return [shared | {"NCCL_HOSTID": f"brigade-{rank}"} for rank in range(world_size)]
