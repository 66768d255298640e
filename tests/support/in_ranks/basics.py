"""Functions for the tests of `run_ranks`, and simple ones for others."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from brigade.ranks.rank import process_group, recording
from in_ranks.gate import wait_at


def whoami(*args: Any) -> dict[str, Any]:
    """Return this rank's process id and arguments."""
    return {"pid": os.getpid(), "args": list(args)}


def import_submission(name: str) -> None:
    importlib.import_module(f"submission.{name}")


def mounts() -> str:
    """Return the mounts that this rank sees."""
    with open("/proc/self/mounts") as file:
        return file.read()


def random_number() -> float:
    return torch.rand(()).item()


def scheduling() -> list[int]:
    """Return the scheduling policies of the fork server and this process, and the number of gloo's threads for
    collectives.
    """
    dist.barrier()  # then the thread has begun, and has its name
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return [os.sched_getscheduler(os.getppid()), os.sched_getscheduler(0), names.count("pt_gloo_runloop")]


def cut_off(gate: str) -> None:
    """On all ranks except 0, raise gloo's error for a connection to an ended process. At the gate, kill rank 0."""
    if dist.get_rank():
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] timed out connecting: Connection refused")
    wait_at(gate)
    os.kill(os.getpid(), signal.SIGKILL)


def reduce_once() -> float:
    """Return the sum of rank + 1 over all ranks."""
    x = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(x)
    return x.item()


def reduce_often(times: int) -> None:
    x = torch.zeros(2)
    for _ in range(times):
        dist.all_reduce(x)


def write_file(name: str) -> str:
    """Write into the rank's directory. Return the path and this process's id."""
    Path(name).write_text("left here")
    return f"{os.path.abspath(name)} {os.getpid()}"


def fail(rank: int, message: str) -> None:
    """Raise ValueError on one rank, after all ranks have printed something, while the others wait for it."""
    print("before the error")
    dist.barrier()
    if dist.get_rank() == rank:
        raise ValueError(message)
    dist.all_reduce(torch.ones(3))


def fail_ahead(gate: str, call: int, how: str) -> None:
    """Let rank 2 wait at a gate in call 0. In call 1, fail on ranks 0 and 1, as `how` says."""
    rank = dist.get_rank()
    if call == 0:
        dist.all_reduce(torch.ones(3))
        if rank == 2:
            wait_at(gate)
    elif rank == 0 and how == "exception":
        raise ValueError
    elif rank == 0 and how == "died":
        os._exit(0)
    elif rank == 0:
        dist.broadcast(torch.ones(3), src=0)
    else:
        dist.all_reduce(torch.ones(3))


def end(rank: int, how: str) -> None:
    """End the process of one rank without a result while the others wait for it."""
    if dist.get_rank() == rank:
        print("last words", flush=True)
        if how == "os._exit(0)":
            os._exit(0)
        elif how == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "segfault":
            ctypes.string_at(0)
    dist.all_reduce(torch.ones(3))


def end_server() -> None:
    """On rank 0, kill the server from which the rank was forked."""
    if dist.get_rank() == 0:
        os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()


def spin() -> None:
    """Record the beginning of an endless loop on rank 1, and run it while rank 0 waits."""
    if dist.get_rank() == 1:
        recording.note("loop")
        while True:
            pass
    dist.all_reduce(torch.ones(3))


def forever() -> None:
    """Record the process id, then run forever."""
    recording.note("pid", pid=os.getpid())
    while True:
        signal.pause()


def leave_one_out() -> None:
    """Make two launches on rank 0 and one on rank 1, which then returns without waiting."""
    model = nn.Linear(4, 2)
    recording.name_parameters(model)
    dist.all_reduce(model.bias.detach())
    if dist.get_rank() == 0:
        dist.all_reduce(model.weight.detach(), async_op=True).wait()


def cross_over() -> None:
    """Use two sub-groups of both ranks. In each, one rank waits for a launch that the other rank makes later."""
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    first = groups[dist.get_rank()]
    second = groups[1 - dist.get_rank()]
    dist.all_reduce(torch.ones(3), group=first)
    dist.all_reduce(torch.ones(3), group=second)


def create_group_on_rank_0() -> None:
    """Create a process group of both ranks on one rank only."""
    if dist.get_rank() == 0:
        dist.new_group([0, 1])


def hang_in_a_new_group() -> None:
    """Create a process group whose backends never connect."""
    process_group.make_gloo_options = lambda *_: threading.Event().wait()  # pause() would end at SIGUSR1
    dist.new_group([0, 1])


def read_visible_devices() -> str | None:
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def send_first() -> None:
    """Send to the next rank before receiving. No send ends, because no rank receives."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.send(torch.ones(3), (rank + 1) % world_size)
    dist.recv(torch.empty(3), (rank - 1) % world_size)


def slow_peer(gate: str) -> float:
    """Let rank 1 wait at a gate before an all-reduce. A slow rank is not a deadlock."""
    if dist.get_rank() == 1:
        wait_at(gate)
    return reduce_once()


def mismatch(how: str) -> None:
    """Call different collectives on ranks 0 and 1."""
    rank = dist.get_rank()
    small, large = torch.ones(3), torch.ones(50_000)
    if how == "size":
        dist.all_reduce([small, large][rank])
    elif how == "order":
        for tensor in [small, large] if rank == 0 else [large, small]:
            dist.all_reduce(tensor)
    elif how == "operation":
        dist.broadcast(small, src=0) if rank == 0 else dist.all_reduce(small)
    elif how == "dtype":
        dist.all_reduce(small if rank == 0 else small.double())
    elif how == "root":
        dist.broadcast(small, src=rank)
    elif how == "reduce op":
        dist.all_reduce(small, op=dist.ReduceOp.SUM if rank == 0 else dist.ReduceOp.MAX)


def chatter(megabytes: int) -> int:
    """Print more than fits into a pipe, from Python and directly to the file descriptor."""
    for _ in range(megabytes):
        print("x" * 1_000_000)
        os.write(2, b"y" * 1000)
    return megabytes


def give_back() -> Any:
    """Return a result on rank 1 that cannot be sent."""
    return give_back if dist.get_rank() else 1


def start_daemon() -> list[int]:
    """Start processes outside this rank's session and process group. Return their ids."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], start_new_session=True)
    grandchild = subprocess.run(
        ["sh", "-c", "tail -f /dev/null >/dev/null 2>&1 & echo $!"],
        capture_output=True,
        start_new_session=True,
        check=True,
    )
    return [child.pid, int(grandchild.stdout)]


def import_all(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)


def import_by_name(name: str) -> dict[str, Any]:
    """Import a module of the submission, and return its public strings by name."""
    module = importlib.import_module(name)
    return {key: value for key, value in vars(module).items() if not key.startswith("_") and isinstance(value, str)}


MOST = 1 << 26


def keep_elsewhere() -> dict[str, int]:
    """Return how many bytes, up to MOST, this rank can keep in memory, files and pipes. Can it start processes?"""
    kept: dict[str, int] = {"memory": 0, "files": 0, "pipes": 0, "processes": 0}
    blocks = []
    with contextlib.suppress(RuntimeError, MemoryError):
        while kept["memory"] < MOST:
            blocks.append(torch.ones(1 << 18))
            kept["memory"] += blocks[-1].nbytes
    blocks.clear()
    for place in (".", "/tmp", "/var/tmp", "/dev/shm"):
        with contextlib.suppress(OSError), open(f"{place}/kept", "wb", buffering=0) as file:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            while kept["files"] < MOST:
                kept["files"] += file.write(bytes(1 << 16))
    with contextlib.suppress(OSError):
        while kept["pipes"] < MOST:
            _, end = os.pipe()
            os.set_blocking(end, False)
            with contextlib.suppress(OSError):
                fcntl.fcntl(end, 1031, 1 << 20)  # F_SETPIPE_SZ
            kept["pipes"] += os.write(end, bytes(1 << 20))
    with contextlib.suppress(OSError):
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        kept["processes"] = 1
    return kept
