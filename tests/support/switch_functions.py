"""Functions that ranks run in `test_switch.py`."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import getpass
import math
import os
import re
import signal
import socket
import sqlite3
import struct
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from brigade.ranks.ipc import channel as channel_module
from brigade.ranks.ipc.channel import Channel


def find_channel() -> Channel:
    """Return the rank's channel, as an attacker would find it."""
    return next(thing for thing in gc.get_objects() if type(thing) is Channel)


def attack(code: str) -> None:
    """Rank 1 executes the code, while rank 0 waits for a message from it. EOFError ends rank 1 with a result.

    Events wait for the next message, however long that takes. Otherwise, the first of two could end the run alone.
    """
    channel_module.UNSTREAMED_S = math.inf
    if dist.get_rank() == 0:
        dist.recv(torch.ones(2), 1)
        return
    channel = find_channel()
    header = {"sizes": [8], "receives": [8], "splits": [], "tag": 0}

    def note(kind: str = "launch", **changes: Any) -> None:
        channel.add_event(
            {"kind": kind, "time": 0.0, "phase": "setup", "index": 0, "op": "all_reduce", "group": "0", "ranks": [0, 1],
             "dtype": "float32", "numel": 2, "nbytes": 8, "parts": 1, "reduce_op": "SUM", "root": None, "peer": None,
             "sync": True, "name": None, "memory": None, "line": None, "caller": None, "batch": 0, "number": 0}
            | changes
        )  # fmt: skip

    def launch(**changes: Any) -> None:
        channel.send_launch(header | changes, [bytes(8)])

    with contextlib.suppress(EOFError):
        exec(code, globals() | {"struct": struct, "channel": channel, "note": note, "launch": launch})
        signal.pause()


def never_read() -> None:
    """Rank 1 asks for a result that does not fit into its socket, and does not read it.

    Afterwards, the other ranks communicate, and rank 0 ends without a result.
    """
    others = dist.new_group([0, 2])
    tensor = torch.ones(1 << 21)
    if dist.get_rank() == 1:
        channel = find_channel()
        channel.receive_answer = lambda: channel._send() or signal.pause()
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=others)
    assert tensor[0] == 6.0
    if dist.get_rank() == 0:
        os._exit(6)


def hold_much(gate: str) -> None:
    """Rank 1 fills the memory for launches to the last byte, then lets rank 0 launch."""
    if dist.get_rank() == 0:
        with open(gate, "rb", buffering=0) as pipe:
            pipe.read(1)
        dist.all_reduce(torch.ones(1 << 20))
    for _ in range(4):
        handle = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    handle.is_completed()  # the switch has answered, so it has taken the launches
    Path(gate).write_bytes(b"x")
    signal.pause()


def look_around(path: str) -> dict[str, Any]:
    """Try to reach the other rank by everything except the switch. Return what worked."""
    rank, found = dist.get_rank(), {}

    def attempt(name: str, work: Any) -> None:
        try:
            found[name] = work()
        except OSError as error:
            found[name] = errno.errorcode[error.errno]

    attempt("internet", lambda: socket.socket(socket.AF_INET).close())
    attempt("unix", lambda: socket.socket(socket.AF_UNIX).close())
    attempt("socketpair", lambda: socket.socketpair()[0].close())  # it could be bound to a name
    attempt("change", lambda: os.utime(os.__file__))
    file = os.open(os.__file__, os.O_RDONLY)
    attempt("flock", lambda: fcntl.flock(file, fcntl.LOCK_SH))
    attempt("lock", lambda: fcntl.lockf(file, fcntl.LOCK_SH))
    attempt("notify", lambda: fcntl.fcntl(os.open("/usr", os.O_RDONLY), fcntl.F_NOTIFY, fcntl.DN_ACCESS))
    attempt("terminal", os.openpty)
    attempt("drop pages", lambda: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED))
    attempt("pages in memory", lambda: os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT))
    attempt("free memory", ask_for_free_memory)
    found["counters"] = sorted(str(path) for place in ("/proc", "/sys") for path in Path(place).rglob("*"))
    found["own numbers"] = re.findall(r"^(?:Pid|PPid|NSpid):\t(.*)$", Path("/proc/self/status").read_text(), re.M)
    found["rights"] = re.findall(r"^Cap(?!Bnd)\w+:\t(.*)$", Path("/proc/self/status").read_text(), re.M)
    found["memory"] = psutil.Process().memory_info().rss
    found["pid"] = os.getpid(), os.getppid()
    for place in ("/tmp", "/var/tmp", "/dev/shm", os.getcwd(), os.path.dirname(os.getcwd()), path):
        attempt(f"write {place}", lambda place=place: Path(place, f"from-{rank}").write_text("secret"))
    dist.barrier()
    places = ("/tmp", "/var/tmp", "/dev/shm", os.path.dirname(os.getcwd()), path)
    found["files"] = [str(file) for place in places for file in Path(place).glob(f"**/from-{1 - rank}")]
    found["uid"] = os.getuid()
    found["processes"] = [pid for pid in range(2, 1 << 15) if is_visible(pid)]
    dist.barrier()
    return found


def ask_for_free_memory() -> None:
    if ctypes.CDLL(None, use_errno=True).sysinfo(ctypes.create_string_buffer(256)):
        raise OSError(ctypes.get_errno(), "sysinfo")


def is_visible(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return True
    except OSError:
        return False


def exchange_everything() -> dict[str, Any]:
    """Exchange tensors of some dtypes and shapes with all operations that need no equal sizes."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pieces = [torch.full((rank + other + 1,), float(rank)) for other in range(size)]
    received = [torch.zeros(rank + other + 1) for other in range(size)]
    dist.all_to_all(received, pieces)
    same = torch.arange(float(2 * size)) + 100 * rank
    output = torch.zeros(2 * size)
    dist.all_to_all_single(output, same)
    any_source = torch.zeros(3)
    source = None
    if rank == 0:
        source = dist.recv(any_source)
    elif rank == 1:
        dist.send(torch.full((3,), 7.0), 0)
    return {"received": received, "output": output, "any": any_source, "source": source}


def call_unusually() -> dict[str, Any]:
    """Communicate with functions, methods and handles that few programs use. Return the numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.arange(4.0) + 10 * rank
    found: dict[str, Any] = {"gathered": [[torch.zeros(4), torch.zeros(2)] for _ in range(size)]}
    dist.all_gather_coalesced(found["gathered"], [own, own[:2].clone()])
    found["summed"] = [own.clone(), own[1:].clone()]
    with dist._coalescing_manager(async_ops=True) as block:
        for tensor in found["summed"]:
            dist.all_reduce(tensor)
    block.wait()
    for method in ("allreduce", "broadcast"):
        found[method] = own.clone()
        getattr(dist.group.WORLD, method)([found[method]]).wait()
    found["sent"] = torch.zeros(4)
    receive = dist.irecv(found["sent"], (rank - 1) % size, tag=1 << 30)
    dist.isend(own, (rank + 1) % size, tag=1 << 30).wait()
    receive.wait()
    found["results"] = [own + number for number in range(4)]
    handles = [dist.all_reduce(tensor, async_op=True) for tensor in found["results"]]
    doubled = [handle.get_future().then(lambda future: 2 * future.value()[0]) for handle in handles[:2]]
    found["futures"] = torch.futures.wait_all(doubled[::-1])
    while not handles[3].is_completed():
        pass
    for handle in handles[::-1] * 2:
        handle.wait()
    group = dist.new_group([0, size - 1])
    found["objects"] = [None, None] if rank in (0, size - 1) else []
    if found["objects"]:
        dist.all_gather_object(found["objects"], f"from {rank}", group=group)
    return {name: to_numbers(value) for name, value in found.items()}


def scatter_unequally() -> None:
    dist.reduce_scatter_tensor(torch.ones(3), torch.ones(4))


def pair_unequally(method: str) -> None:
    """Give a coalesced collective of two ranks another number of outputs than of inputs."""
    group, one = dist.group.WORLD, torch.ones(1)
    if method == "reduce_scatter":
        group.reduce_scatter_tensor_coalesced([one], [torch.ones(2), torch.ones(2)])
    else:
        dist.all_gather_coalesced([[one, one], [one]], [one, one])


def ask_in_loops(is_right: bool) -> list[float]:
    """Ask until launches are complete, and return the results. If that is not right, rank 1 does not launch."""
    found = []
    for number in range(3):
        tensor = torch.ones(1) * number
        if is_right or dist.get_rank() == 0:
            handle = dist.all_reduce(tensor, async_op=True)
            while not handle.is_completed():
                pass
            handle.wait()
        found.append(tensor.item())
    return found


def to_numbers(value: Any) -> Any:
    """Return nested lists of tensors as nested lists of numbers."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [to_numbers(item) for item in value] if isinstance(value, list) else value


def do_what_is_refused() -> list[tuple[str, str]]:
    """Return the type and the message of each exception. Then let a thread send a tensor to another process."""
    errors = []
    for attempt in (os.getloadavg, getpass.getuser, lambda: sqlite3.connect("x.db").execute("CREATE TABLE t(x)")):
        try:
            attempt()
        except Exception as error:
            errors.append((type(error).__name__, str(error)))
    queue = torch.multiprocessing.Queue()
    queue.put(torch.ones(1))
    queue.close()
    queue.join_thread()  # it has printed its exception
    return errors
