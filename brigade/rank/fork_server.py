"""The process that ranks are forked from: it has imported torch, so that a rank starts in milliseconds.

Importing torch takes seconds; forking a process that has done so takes milliseconds. The server imports,
then waits for orders on a Unix socket, one JSON line each:

    {"fork": n, "jail": {...}, "directory": path}
                            with 3n file descriptors: n ranks are forked, and `brigade.rank.main.main` runs in each
                            of them with its own three, confined if there is a jail (`sandbox.py`).
                            Answer: {"forked": [pid, ...]}
    {"kill": [pid, ...], "jail": {...}}
                            their process groups, and all else of the jail's user, are killed and reaped.
                            Answer: {"killed": [...]}

Unasked, it says {"exited": pid, "status": s} for a rank that ended by itself. When the other end of the socket
closes, however the parent died, every rank is killed and the temporary directory removed. Should the
server itself be killed, Linux kills the ranks (PR_SET_PDEATHSIG), and elsewhere they notice.
It never imports a submission.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from brigade.rank import dynamo_stub
from brigade.runner import sandbox
from brigade.runner.protocol import FDS_PER_RANK, kill_group, receive, send

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 10.0  # with ranks that are killed and do not end


def serve(descriptor: int, lock: int, scratch: str, import_path: str, modules: Sequence[str]) -> None:
    """Serve until the socket closes. `scratch` is the directory to remove then, `lock` an open file in it.

    `modules` are imported before the first fork, so that ranks need not import them.
    """
    channel = socket.socket(fileno=descriptor)
    preload(modules)
    if import_path in sys.path:
        sys.path.remove(import_path)  # a submission must not find the course's own files
    gc.collect()
    gc.freeze()
    if sys.platform == "linux":
        sandbox.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a rank leaves behind becomes our child, and is killed as such
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_read, False)
    os.set_blocking(wake_write, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    for ignored in (signal.SIGINT, signal.SIGHUP):
        signal.signal(ignored, signal.SIG_IGN)
    ranks: set[int] = set()
    jail: dict | None = None
    try:
        while True:
            readable, _, _ = select.select([channel, wake_read], [], [])
            if wake_read in readable:
                os.read(wake_read, 4096)
                for pid, status in reap(ranks).items():
                    send(channel, {"exited": pid, "status": status})
            if channel in readable:
                message, descriptors = receive(channel)
                if message is None:
                    break
                if "fork" in message:
                    forked = []
                    if message["jail"] and not jail:
                        sandbox.leave_network()
                    jail = message["jail"] or jail
                    for place in range(0, len(descriptors), FDS_PER_RANK):
                        mine = descriptors[place : place + FDS_PER_RANK]
                        inherited = [channel.fileno(), wake_read, wake_write, lock, *descriptors]
                        others = [fd for fd in inherited if fd not in mine]
                        forked.append(fork_rank(mine, others, message["jail"], message["directory"]))
                    ranks.update(forked)
                    for fd in descriptors:
                        os.close(fd)
                    send(channel, {"forked": forked})
                elif "kill" in message:
                    kill(set(message["kill"]) & ranks, ranks, message["jail"])
                    send(channel, {"killed": message["kill"]})
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        kill(set(ranks), ranks, jail)
        sandbox.remove(scratch)
        os._exit(0)  # unloading torch would take longer than all this, and someone waits for our end


def preload(modules: Sequence[str]) -> None:
    """Import what ranks need, `modules` included."""
    dynamo_stub.import_torch()
    import torch.nn.parallel

    for module in ("brigade.rank.main", "brigade.rank.kernels", *modules):
        importlib.import_module(module)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    torch.optim.Adam([weight]).step()  # a step imports and prepares what each rank would by itself


def fork_rank(mine: list[int], others: list[int], jail: dict | None, directory: str) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # a process group of its own, so that whatever it starts is killed with it
        if sys.platform == "linux":
            sandbox.prctl(sandbox.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != server:
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for fd in others:
            os.close(fd)
        from brigade.rank.main import main

        if jail:
            sandbox.confine(jail, directory, server)
        main(*mine, server)
    finally:
        os._exit(1)


def reap(ranks: set[int]) -> dict[int, int]:
    """The exit statuses (as `subprocess` gives them) of the ranks that have ended; others' children go unnoticed."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        if pid in ranks:
            ranks.discard(pid)
            ended[pid] = os.waitstatus_to_exitcode(status)
            kill_group(pid)


def kill(doomed: set[int], ranks: set[int], jail: dict | None = None) -> None:
    """Kills these ranks and whatever they started, and returns when they are reaped."""
    give_up = time.monotonic() + PATIENCE_S
    if jail:
        sandbox.kill_user(jail["uid"])
    for pid in doomed & ranks:
        kill_group(pid)
        signal_process(pid)  # just forked, it has no group yet
    while doomed & ranks and time.monotonic() < give_up:
        reap(ranks)
        time.sleep(0.001)
    while (orphans := children() - ranks) and time.monotonic() < give_up:
        for pid in orphans:
            kill_group(pid)
            signal_process(pid)
        reap(ranks)
        time.sleep(0.001)
    if jail:
        sandbox.remove_files(jail["uid"])


def signal_process(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass


def children() -> set[int]:
    """Process ids of this process's children, on Linux; elsewhere nothing is known of orphans."""
    found, me = set(), str(os.getpid())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == me:
            found.add(int(stat.parent.name))
    return found
