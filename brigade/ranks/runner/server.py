"""The parent's side of the fork server: start it, have it fork and kill ranks, and manage its temporary directory.

`SERVER` is the server of this process. Several threads may use it, each for its own ranks. `protocol.py` contains the
messages, and `rank/fork_server.py` contains the server itself.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from brigade.ranks.errors import UserError
from brigade.ranks.ipc import protocol
from brigade.ranks.ipc.temporary import make_locked_directory, remove, sweep
from brigade.ranks.runner.machine import find_loopback_interface
from brigade.ranks.runner.witness import Witness
from brigade.ranks.sandbox import enter, users

PLACE = str(Path(__file__).resolve().parents[3])  # the directory of this package
# The variables that a rank in a sandbox may see: those that select and find GPUs, but no keys such as NVIDIA_API_KEY.
VISIBLE = re.compile(
    "PATH|LANG|LC_ALL|LD_LIBRARY_PATH|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|NCCL_.*|NVIDIA_(?!.*(KEY|TOKEN|SECRET)).*"
)

LOST = "the process that starts the ranks has ended. Likely cause: `import torch` fails here."


class ServerLost(UserError):
    """The fork server and its ranks have ended. The next run starts another server."""


class Server:
    """The fork server of this process. It starts when it is first needed, and ends with this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._channel: socket.socket | None = None
        self._lock = threading.RLock()  # held from an order to its answer
        self.scratch = Path()
        self.preload: set[str] = set()  # modules that the server imports for all ranks when it starts
        self.sandbox: enter.Sandbox | None = None  # the sandbox of all ranks from now on
        # Returns the class that performs collectives on the CPU from now on, instead of gloo.
        self.load_witness: Callable[[], type[Witness]] | None = None

    def start(self) -> None:
        """Start the server if it is not running. Do not wait until it is ready."""
        with self._lock:
            if self._process and self._process.poll() is None:
                return
            self.close()
            sweep()
            self.scratch, lock = make_locked_directory()
            # The server holds the locks as long as it runs. It kills all processes of the user when it ends, so nobody
            # else may use the user before that.
            reservation, uid = (self.sandbox.reservation, self.sandbox.uid) if self.sandbox else (None, None)
            locks = [lock] if reservation is None else [lock, reservation]
            self._channel, server_end = socket.socketpair()
            own = uid if reservation is None else None
            settings = server_end.fileno(), locks, str(self.scratch), PLACE, sorted(self.preload), own
            program = f"import sys; sys.path[:1] = [{PLACE!r}]; from brigade.ranks.rank.fork_server import serve"
            self._process = subprocess.Popen(
                [sys.executable, "-s", "-c", f"{program}; serve(*{settings!r})"],
                pass_fds=[server_end.fileno(), *locks],
                env=self._make_environment(),
                start_new_session=True,  # Ctrl-C goes to this process only, which then ends the ranks
            )
            server_end.close()
            os.close(lock)

    def _make_environment(self) -> dict[str, str]:
        """Return the environment of the server, which its ranks inherit."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
        if self.sandbox:  # a submission may see only these variables
            environment = {name: value for name, value in environment.items() if VISIBLE.fullmatch(name)}
        return environment | {
            "OMP_NUM_THREADS": "1",  # no thread pools before the fork; each rank sets its own number of threads later
            "OPENBLAS_NUM_THREADS": "1",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # fewer, larger pages: a fork copies less
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # the search for GPUs does not initialise CUDA
            # The ranks are on this machine, whatever a cluster has exported. A sandbox has no other interface.
            "GLOO_SOCKET_IFNAME": find_loopback_interface(),
            "NCCL_SOCKET_IFNAME": find_loopback_interface(),
            "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor"),  # torch._dynamo creates it on import
        }

    def fork(self, descriptors: list[int], directory: Path, memory: int | None = None) -> list[int]:
        """Fork one rank for every two descriptors. Return their process ids. For `memory`, see `RunOptions`."""
        self.start()
        sandbox = asdict(self.sandbox) | {"memory": memory} if self.sandbox else None
        return self._order({"fork": True, "directory": str(directory), "sandbox": sandbox}, descriptors)

    def kill(self, pids: list[int]) -> dict[int, int]:
        """Kill and reap these ranks and all processes that they started. Return their exit statuses."""
        statuses = dict(self._order({"kill": pids}))
        if not statuses:
            raise ServerLost(LOST)  # another thread has noticed it, and has started a new server
        return statuses

    def _order(self, order: dict[str, Any], descriptors: Sequence[int] = ()) -> Any:
        """Send an order and return the answer.

        If Ctrl-C interrupts this, close the channel, which may contain half a message. If the server has ended, kill
        the processes that its ranks had started, and raise ServerLost.
        """
        with self._lock:
            try:
                if self._channel is None:
                    raise EOFError  # another thread has closed the channel
                protocol.send(self._channel, order, descriptors)
                answer, _ = protocol.receive(self._channel)
                if answer is None:
                    raise EOFError
                return answer
            except KeyboardInterrupt:
                self.close()
                raise
            except (OSError, EOFError):
                self.close()
                if self.sandbox and self.sandbox.reservation is not None:
                    users.kill_user(self.sandbox.uid)
                for pid in order.get("kill", ()):  # on Linux they ended with the server
                    protocol.kill_group(pid)
                raise ServerLost(LOST) from None

    def close(self) -> None:
        """End the server and all its ranks. The next `start` starts a new server."""
        if channel := self._channel:
            channel.close()
            self._channel = None
        process, scratch = self._process, self.scratch
        if process:  # another thread may be closing the server, too
            process.terminate()  # has an effect only while it imports torch
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=15)
            process.kill()  # has no effect if it has ended
            process.wait()
            if self._process is process:
                self._process = None
            remove(scratch)


SERVER = Server()
atexit.register(SERVER.close)
