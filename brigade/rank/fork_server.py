"""The process from which ranks are forked.

Importing torch takes seconds, but forking a process that has imported it takes milliseconds. The server imports torch,
then waits on a Unix socket for orders, each of which is one line of JSON:

    {"fork": true, "sandbox": {...}, "directory": path}
                            with 3n file descriptors: fork n ranks, and run `brigade.rank.main.main` in each of
                            them with its own three descriptors, in the sandbox if there is one (`brigade.sandbox`).
                            Answer: {"forked": [pid, ...]}
    {"kill": [pid, ...], "sandbox": {...}}
                            kill and reap these process groups, and all processes of the sandbox's user.
                            Answer: {"killed": [...]}

When a rank ends by itself, the server sends {"exited": pid, "status": s}. When the other end of the socket closes
because the parent has ended, the server kills every rank and removes the temporary directory. If the server itself is
killed, Linux kills the ranks (PR_SET_PDEATHSIG); on other systems, the ranks detect this and end themselves. The server
never imports a submission.
"""

from __future__ import annotations

import contextlib
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
from typing import Any

from brigade.ipc import protocol
from brigade.ipc.protocol import FDS_PER_RANK
from brigade.ipc.temporary import remove
from brigade.rank import dynamo_stub
from brigade.sandbox import enter, users

PR_SET_CHILD_SUBREAPER = 36
PATIENCE_S = 10.0  # limit on the wait for killed ranks


def serve(descriptor: int, locks: Sequence[int], scratch: str, import_path: str, modules: Sequence[str]) -> None:
    """Serve until the socket closes, then remove the directory `scratch`.

    The descriptors `locks` stay open until then. `modules` are imported before the first fork, so that ranks need not
    import them.
    """
    channel = socket.socket(fileno=descriptor)
    preload(modules)
    if import_path in sys.path:
        sys.path.remove(import_path)  # a submission must not find the course's own files
    gc.freeze()
    if sys.platform == "linux":
        enter.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of a rank become our children, and we kill them
    server = ForkServer(channel, locks)
    try:
        server.listen()
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        kill(set(server.ranks), server.ranks, server.sandbox_settings)
        remove(scratch)
        os._exit(0)  # the parent waits for this process to end, and unloading torch would take long


class ForkServer:
    """The forked ranks, and the loop that executes the parent's orders."""

    def __init__(self, channel: socket.socket, locks: Sequence[int]):
        self.ranks: set[int] = set()  # process ids
        self.sandbox_settings: dict | None = None  # the settings of the last rank with a sandbox
        self._channel = channel
        self._locks = locks
        self._wake_read, self._wake_write = os.pipe()  # receives a byte when a child ends
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for ignored in (signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)

    def listen(self) -> None:
        """Execute the parent's orders, and report ranks that have ended, until the socket closes."""
        while True:
            sources: list[Any] = [self._channel, self._wake_read]
            readable, _, _ = select.select(sources, [], [])
            if self._wake_read in readable:
                os.read(self._wake_read, 4096)
                self.report(reap(self.ranks))
            if self._channel in readable:
                order, descriptors = protocol.receive(self._channel)
                if order is None:
                    return
                protocol.send(self._channel, self.execute(order, descriptors))

    def report(self, ended: dict[int, int]) -> None:
        """Report the ranks that have ended by themselves, and their exit statuses, to the parent."""
        for pid, status in ended.items():
            protocol.send(self._channel, {"exited": pid, "status": status})

    def execute(self, order: dict, descriptors: list[int]) -> dict:
        """Execute one order and return the answer."""
        if "fork" in order:
            return {"forked": self.fork(descriptors, order["sandbox"], order["directory"])}
        self.report(kill(set(order["kill"]) & self.ranks, self.ranks, order["sandbox"]))
        return {"killed": order["kill"]}

    def fork(self, descriptors: list[int], sandbox_settings: dict | None, directory: str) -> list[int]:
        """Fork one rank for every three descriptors. Return their process ids."""
        if sandbox_settings and sandbox_settings != self.sandbox_settings:
            enter.leave_network()
            enter.join_groups(sandbox_settings)  # ranks inherit the groups: to join one takes several milliseconds
            with contextlib.suppress(OSError):  # this process must be able to end hundreds of others in the group
                os.setpriority(os.PRIO_PROCESS, 0, -20)
        self.sandbox_settings = sandbox_settings or self.sandbox_settings
        inherited = [self._channel.fileno(), self._wake_read, self._wake_write, *self._locks, *descriptors]
        pids = []
        for start in range(0, len(descriptors), FDS_PER_RANK):
            own = descriptors[start : start + FDS_PER_RANK]
            others, rank = [fd for fd in inherited if fd not in own], start // FDS_PER_RANK
            pids.append(fork_rank(own, others, sandbox_settings, directory, rank))
        self.ranks.update(pids)
        for fd in descriptors:
            os.close(fd)
        return pids


def preload(modules: Sequence[str]) -> None:
    """Import everything that ranks need, including `modules`."""
    dynamo_stub.import_torch()
    import torch.nn.parallel

    for module in ("brigade.rank.main", *modules):
        importlib.import_module(module)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    # A step performs imports that each rank would otherwise perform. A step of Adam would also initialise CUDA if there
    # is a GPU, and then no forked rank could use it.
    torch.optim.SGD([weight]).step()


def fork_rank(own: list[int], others: list[int], sandbox_settings: dict | None, directory: str, rank: int) -> int:
    """Fork one rank, with its own descriptors and without the others. Return its process id."""
    server, is_offline = os.getpid(), bool(sandbox_settings and sandbox_settings["offline"])
    with enter.separate_processes() if is_offline else contextlib.nullcontext():
        pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # its own process group, so that its children are killed with it
        if sys.platform == "linux":
            enter.prctl(enter.PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() not in (server, 0):
            os._exit(1)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        for fd in others:
            os.close(fd)
        from brigade.rank.main import main

        if sandbox_settings:
            enter.enter(sandbox_settings, directory, server, rank)
        control, output, trace = own
        main(control, output, trace, server)
    finally:
        os._exit(1)


def reap(ranks: set[int]) -> dict[int, int]:
    """Reap all children that have ended. Return the exit statuses of those in `ranks`, as in `subprocess`."""
    ended: dict[int, int] = {}
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
            protocol.kill_group(pid)


def kill(doomed: set[int], ranks: set[int], sandbox_settings: dict | None = None) -> dict[int, int]:
    """Kill these ranks and everything that they started, and wait until they are reaped.

    Return the exit statuses of other ranks that ended by themselves in the meantime.
    """
    give_up = time.monotonic() + PATIENCE_S
    ended: dict[int, int] = {}
    for pid in doomed & ranks:
        protocol.kill_group(pid, and_leader=True)
    while doomed & ranks and time.monotonic() < give_up:
        ended |= reap(ranks)
        time.sleep(0.001)
    while (orphans := list_children() - ranks) and time.monotonic() < give_up:
        if sandbox_settings:  # all at once; it costs a fork, and most ranks leave no processes behind
            users.kill_user(sandbox_settings["uid"])
        for pid in orphans:
            protocol.kill_group(pid, and_leader=True)
        ended |= reap(ranks)
        time.sleep(0.001)
    if sandbox_settings and not (sandbox_settings["offline"] and enter.has_private_mounts()):
        users.remove_files(sandbox_settings["uid"])  # private directories have disappeared with the rank
    return {pid: status for pid, status in ended.items() if pid not in doomed}


def list_children() -> set[int]:
    """Return the process ids of this process's children. The set is empty on systems other than Linux."""
    if sys.platform != "linux":
        return set()
    try:  # usually there are none, and examining all processes takes longer than most runs
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return set()
    pids, parent = set(), str(os.getpid())
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[1] == parent:
            pids.add(int(stat.parent.name))
    return pids
