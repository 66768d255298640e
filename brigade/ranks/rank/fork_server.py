"""The process from which ranks are forked.

Importing torch takes seconds, but forking a process that has imported it takes milliseconds. The server imports torch,
then waits on a Unix socket for orders, each of which is one line of JSON:

    {"fork": true, "sandbox": {...}, "directory": path}
                            with 2n file descriptors: fork n ranks, and run `brigade.ranks.rank.main.main` in each of
                            them with its own two descriptors, in the sandbox if there is one (`brigade.ranks.sandbox`).
                            Answer: [pid, ...]
    {"kill": [pid, ...]}    kill and reap these process groups, and all processes of the sandbox's user.
                            Answer: [[pid, exit status], ...]

When the other end of the socket closes because the parent has ended, the server kills every rank and removes the
temporary directory. If the server itself is killed, Linux kills the ranks (PR_SET_PDEATHSIG); on other systems, the
ranks detect this and end themselves. The server never imports a submission.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from brigade.ranks import dynamo_stub
from brigade.ranks.ipc import protocol
from brigade.ranks.ipc.protocol import FDS_PER_RANK
from brigade.ranks.ipc.temporary import remove
from brigade.ranks.sandbox import enter, users

PR_SET_CHILD_SUBREAPER = 36
IGNORED = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)  # by the server once it serves; they end a rank
PATIENCE_S = 10.0  # limit on the wait for killed ranks


def serve(
    descriptor: int, locks: Sequence[int], scratch: str, import_path: str, modules: Sequence[str], uid: int | None
) -> None:
    """Serve until the socket closes, then remove the directory `scratch`.

    The descriptors `locks` stay open until then. `modules` are imported before the first fork, so that ranks need not
    import them. With a `uid`, serve in a user namespace, in which the ordinary user of this process has this number.
    """
    if uid is not None:
        enter.become(uid)  # while there is one thread
    channel = socket.socket(fileno=descriptor)
    preload(modules)
    if import_path in sys.path:
        sys.path.remove(import_path)  # a submission must not find the course's own files
    gc.freeze()
    if sys.platform == "linux":
        enter.LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans of a rank become our children, and we kill them
    for ignored in IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    server = ForkServer([descriptor, *locks])
    try:
        while (received := protocol.receive(channel))[0]:
            protocol.send(channel, server.execute(*received))
    except (BrokenPipeError, ConnectionResetError):
        pass
    finally:
        server.kill(server.ranks)
        remove(scratch)
        os._exit(0)  # the parent waits for this process to end, and unloading torch would take long


class ForkServer:
    """The forked ranks, and the execution of the parent's orders."""

    def __init__(self, own_descriptors: Sequence[int] = ()):
        # By process id, the place of each rank. No two ranks have the same at a time, so they are different users.
        self.ranks: dict[int, int] = {}
        self._sandbox_settings: dict | None = None  # the settings of the last rank with a sandbox
        self._own_descriptors = own_descriptors

    def execute(self, order: dict, descriptors: list[int]) -> list:
        """Execute one order and return the answer."""
        if "fork" in order:
            return self.fork(descriptors, order["sandbox"], order["directory"])
        return list(self.kill(order["kill"]).items())

    def fork(self, descriptors: list[int], sandbox_settings: dict | None, directory: str) -> list[int]:
        """Fork one rank for every FDS_PER_RANK descriptors. Return their process ids."""
        if sandbox_settings and not self._sandbox_settings:
            enter.leave_network()
            with contextlib.suppress(OSError):  # this process must be able to end hundreds of others
                os.setpriority(os.PRIO_PROCESS, 0, -20)
        self._sandbox_settings = sandbox_settings or self._sandbox_settings
        if sandbox_settings:
            enter.make_filter(sandbox_settings["offline"])  # once, for all ranks
        pids = []
        for start in range(0, len(descriptors), FDS_PER_RANK):
            own = descriptors[start : start + FDS_PER_RANK]
            others = [fd for fd in [*self._own_descriptors, *descriptors] if fd not in own]
            place = min({*range(len(self.ranks) + 1)} - {*self.ranks.values()})
            pids.append(fork_rank(own, others, sandbox_settings, directory, place))
            self.ranks[pids[-1]] = place
        for fd in descriptors:
            os.close(fd)
        return pids

    def kill(self, pids: Iterable[int]) -> dict[int, int]:
        """Kill these ranks and everything that they started, and reap them.

        Return their exit statuses, as in `subprocess`. Killing a rank that has ended does not change its status.
        """
        give_up, settings = time.monotonic() + PATIENCE_S, self._sandbox_settings
        own = self.ranks.keys() & set(pids)
        for pid in own:
            protocol.kill_group(pid, and_leader=True)
        statuses: dict[int, int] = {}
        while (left := own - statuses.keys()) and time.monotonic() < give_up:
            statuses |= reap(left)
            time.sleep(0.001)
        for pid in own:
            del self.ranks[pid]
        if settings and settings["offline"] and enter.has_own_space():
            return statuses  # their processes and files have disappeared with them
        while (orphans := list_children() - self.ranks.keys()) and time.monotonic() < give_up:
            if settings:  # all at once; it costs a fork, and most ranks leave no processes behind
                users.kill_user(settings["uid"])
            for pid in orphans:
                protocol.kill_group(pid, and_leader=True)
            reap(orphans)
            time.sleep(0.001)
        if settings:
            users.remove_files(settings["uid"])
        return statuses


def preload(modules: Sequence[str]) -> None:
    """Import everything that ranks need, including `modules`."""
    dynamo_stub.import_torch()
    import torch.nn.parallel

    for module in ("brigade.ranks.rank.main", *modules):
        importlib.import_module(module)
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.zeros(1)
    # A step performs imports that each rank would otherwise perform. A step of Adam would also initialise CUDA if there
    # is a GPU, and then no forked rank could use it.
    torch.optim.SGD([weight]).step()


def fork_rank(own: list[int], others: list[int], sandbox_settings: dict | None, directory: str, place: int) -> int:
    """Fork one rank, with its own descriptors and without the others. Return its process id.

    The rank's working directory is `directory`, or its own one inside it if the sandbox requires this. For `place`, see
    `ForkServer.ranks`.
    """
    server, is_offline = os.getpid(), bool(sandbox_settings and sandbox_settings["offline"])
    if sandbox_settings and sandbox_settings["reservation"] is None:
        pid = enter.fork_apart()
    else:
        with enter.separate_processes() if is_offline else contextlib.nullcontext():
            pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()  # its own process group, so that its children are killed with it
        for ignored in IGNORED:
            signal.signal(ignored, signal.SIG_DFL)
        for fd in others:
            os.close(fd)
        from brigade.ranks.rank.main import main

        if sandbox_settings:
            directory = enter.enter(sandbox_settings, directory, place)
        os.chdir(directory)
        control, output = own
        main(control, output, server)
    finally:
        os._exit(1)


def reap(pids: Iterable[int]) -> dict[int, int]:
    """Reap those of these children that have ended. Return their exit statuses."""
    ended: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                ended[pid] = os.waitstatus_to_exitcode(status)
    return ended


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
