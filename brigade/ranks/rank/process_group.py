"""Start a rank's process groups: recording groups around those of torch."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from brigade.ranks.rank import api
from brigade.ranks.rank.recorder import Recorder
from brigade.ranks.rank.recording_group import BACKEND, RecordingGroup

GLOO_THREADS = 1  # torch's default of 2 can damage the memory of a rank: see docs/core.md


def start(
    group_class: type[RecordingGroup],
    recorder: Recorder,
    backend: str,
    make_inner: Callable[[str, list[int], Any], Any],
    **options: Any,
) -> None:
    """Start the default process group of this rank, with these options of `init_process_group`.

    This group and all later ones are a `group_class`. They wrap what `make_inner` returns for a group's name, its
    global ranks and torch's options, after all ranks of the group have called it.
    """

    def create(group_options: Any, _: Any) -> RecordingGroup:
        name = str(group_options.group_id)
        ranks = list(group_options.global_ranks_in_group) or list(range(group_options.group_size))
        recorder.note("connect", group=name, ranks=ranks)
        inner = make_inner(name, ranks, group_options)
        recorder.note("connected")
        group = group_class(inner, recorder, name, ranks)
        for device in ("cpu", "cuda") if backend == "nccl" else ("cpu",):
            register(group, device)
        return group

    dist.Backend.register_backend(BACKEND, create, extended_api=True, devices=["cpu", "cuda"])
    _wrap_group_functions(backend)
    dist.init_process_group(BACKEND, **options)


def make_torch_group(backend: str, name: str, ranks: list[int], options: Any) -> dist.ProcessGroup:
    """Return a group with the backends that `init_process_group` would register, and connect its ranks.

    `backend` is "gloo" or "nccl", which still uses gloo for CPU tensors.
    """
    store, rank, world_size, timeout = options.store, options.group_rank, options.group_size, options.timeout
    group = dist.ProcessGroup(store, rank, world_size)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, make_gloo_options(timeout))
    register(group, "cpu", gloo)
    if backend == "nccl":
        nccl_options = dist.ProcessGroupNCCL.Options()
        nccl_options._timeout = timeout
        nccl = dist.ProcessGroupNCCL(dist.PrefixStore("nccl", store), rank, world_size, nccl_options)
        register(group, "cuda", nccl)
        nccl.eager_connect_single_device(api.device())  # otherwise the first collective would connect the ranks
    group._set_group_name(name)  # torch's flight recorders write it, and module 13's `dump_trace` needs it
    return group


def register(group: dist.ProcessGroup, device: str, backend: dist.Backend | None = None) -> None:
    """Register a backend for tensors on a device. Without one, register torch's fake backend, which does nothing.

    The recording group needs a backend only because torch stores the group's name in it.
    """
    types = dist.ProcessGroup.BackendType
    kind = types.GLOO if device == "cpu" else types.NCCL
    fake = torch._C._distributed_c10d.FakeProcessGroup
    group._register_backend(torch.device(device), kind, backend or fake._create_internal(group.rank(), group.size()))
    group._set_default_backend(kind)


def make_gloo_options(timeout: timedelta) -> Any:
    """Return the default options of `ProcessGroupGloo` with this timeout and `GLOO_THREADS` threads."""
    options = dist.ProcessGroupGloo._Options()
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    devices = [dist.ProcessGroupGloo.create_device(interface=name) for name in interfaces]
    options._devices = devices or [dist.ProcessGroupGloo.create_default_device()]
    options._timeout, options._threads = timeout, GLOO_THREADS
    return options


def _wrap_group_functions(backend: str) -> None:
    """Make `new_group(backend="gloo")` return a recording group, and `get_backend()` return the real backend."""
    new_group, get_backend = c10d.new_group, c10d.get_backend

    def new_recorded_group(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("backend", None)
        return new_group(*(args[:2] + (None,) + args[3:] if len(args) > 2 else args), **kwargs)

    def get_real_backend(group: Any = None) -> str:
        return backend if get_backend(group) == BACKEND else get_backend(group)

    for module in (c10d, dist):
        module.new_group, module.get_backend = new_recorded_group, get_real_backend
