"""Ranks for a notebook. After `ranks = start_ranks(2)`, every rank runs the code of each `%%px` cell.

    ranks.deadline_s = 5      how many seconds a cell may take from now on
    ranks["loss"]             the variable `loss` of every rank, in a list
    ranks.read_events()       for each rank, the events that it has recorded so far (see `recording.py`)
    ranks.stop()              end the ranks; they also end with the notebook's process, however that ends

A rank is a process with an initialised default process group that records every collective. The reference solutions are
importable there: `from solutions.m01_naive_ddp.naive_ddp import NaiveDDP`. `%%px -t 1` runs a cell on rank 1 only. If a
cell misses its deadline, a sentence for each rank says what the rank was doing, and the ranks end. For timings that
need clean processes, use `ladder.py` and `timeline.py`.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import io
import linecache
import os
import pickle
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from brigade.course.modules import MODULES, ROOT, get_module
from brigade.course.skeletons import BEGIN, END
from brigade.course.submission import Sources, read
from brigade.events import Event
from brigade.ipc.temporary import make_locked_directory
from brigade.progress import Progress
from brigade.runner.machine import count_cores, count_gpus, make_gloo_environment
from brigade.runner.report import describe_exit

if TYPE_CHECKING:
    from IPython.display import Markdown

START_S = 60.0
GRACE_S = 2.0  # after one rank has failed, the others have this much time to finish
ENDED = "ended"
CELL = "<cell>"  # the name of the file of a cell's code, in tracebacks


class RanksError(Exception):
    """A failure in the ranks, described in sentences. A notebook shows them without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return str(self).splitlines()


def start_ranks(n: int | None = None, *, mode: str = "record", deadline_s: float = 30.0) -> Ranks:
    """Start `n` ranks, which replace ranks that were started before. In a notebook, `%%px` then runs on them.

    If `n` is None, start one rank per GPU, or two ranks if there are fewer than two GPUs. Ranks use NCCL if there are
    at least two GPUs and one for each rank, and gloo otherwise. `mode` is "record", "strict" (`strict.py`) or "emulate"
    (`emulated_link.py`). `deadline_s` applies to each cell. Raise RanksError if the ranks do not start.
    """
    global _running
    if _running:
        _running.stop()
    _running = Ranks(n, mode, deadline_s)
    with contextlib.suppress(ImportError):
        from IPython import get_ipython

        if shell := get_ipython():
            shell.register_magic_function(run_cell, "cell", "px")
    return _running


def run_cell(options: str, code: str) -> None:
    """Run a `%%px` cell on all ranks, or with `%%px -t 1` on rank 1."""
    _running.run(code, [int(options.removeprefix("-t"))] if options.strip() else None)


_running: Ranks | None = None


class Ranks:
    """The ranks of a notebook, returned by `start_ranks`. The object is also a context manager."""

    def __init__(self, n: int | None, mode: str, deadline_s: float):
        gpus = count_gpus()
        self.world_size = n or (gpus if gpus >= 2 else 2)
        self.backend = "nccl" if gpus >= max(2, self.world_size) else "gloo"
        self.deadline_s = deadline_s
        self._directory, self._lock = make_locked_directory()
        self._events: list[list[Event]] = [[] for _ in range(self.world_size)]
        self._processes: list[subprocess.Popen] = []
        self._connections: list[Connection] = []
        atexit.register(self.stop)
        request = {
            "world_size": self.world_size,
            "backend": self.backend,
            "mode": mode,
            "directory": str(self._directory),
            "environment": make_gloo_environment(),
            "packages": {"solutions": read_solutions()},
            "threads": max(1, count_cores() // self.world_size),
            "seed": 0,
        }
        for rank in range(self.world_size):
            self._start_rank(request | {"rank": rank})
        self._finish(range(self.world_size), START_S)

    def _start_rank(self, request: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        with theirs, open(self._directory / f"output-{request['rank']}", "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from brigade.lab.notebook import serve; serve({theirs.fileno()})"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                # Even the search for a temporary directory leaves a file if the process is killed during the search.
                env=os.environ | {"PYTHONPATH": make_import_path(), "TMPDIR": str(self._directory)},
                start_new_session=True,  # so that interrupting a cell does not interrupt the ranks
            )
        self._processes.append(process)
        self._connections.append(Connection(ours.detach()))
        self._send(request["rank"], request)

    def run(self, code: str, ranks: Sequence[int] | None = None) -> None:
        """Execute Python text on all ranks (or on `ranks`), as a `%%px` cell does, and show what they print.

        Raise RanksError if a rank raises an exception, dies or misses the deadline. In the last two cases, all ranks
        are terminated.
        """
        self._execute(code, "exec", range(self.world_size) if ranks is None else ranks)

    def __getitem__(self, name: str) -> list[Any]:
        """Return the value of a variable on every rank."""
        return self._execute(name, "eval", range(self.world_size))

    def read_events(self) -> list[list[Event]]:
        """Return, for each rank, the events that it recorded since it was started."""
        for rank, connection in enumerate(self._connections):
            while connection.poll() and (message := self._receive(rank))[0] == "event":
                self._events[rank].append(message[1])
        return [[*events] for events in self._events]

    def stop(self) -> None:
        """End all ranks, whatever they are doing. A second call has no effect."""
        atexit.unregister(self.stop)
        for process, connection in zip(self._processes, self._connections):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            connection.close()
        if self._directory.exists():
            shutil.rmtree(self._directory, ignore_errors=True)
            os.close(self._lock)
        self._processes.clear()
        self._connections.clear()

    def __repr__(self) -> str:
        return f"{self.world_size} ranks on {self.backend}" if self._processes else "ranks that have ended"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def _execute(self, code: str, mode: str, ranks: Sequence[int]) -> list[Any]:
        if not self._processes:
            raise RanksError("the ranks have ended; ranks = start_ranks() starts new ones")
        for rank in ranks:
            self._send(rank, (code, mode))
        return self._finish(ranks, self.deadline_s)

    def _send(self, rank: int, message: Any) -> None:
        with contextlib.suppress(OSError):  # the rank has died, which `_finish` reports
            self._connections[rank].send_bytes(pickle.dumps(message))

    def _finish(self, ranks: Sequence[int], deadline_s: float) -> list[Any]:
        """Wait for the ranks and return their values. If a rank fails, the others have `GRACE_S` seconds to finish."""
        endings: dict[int, tuple[str, Any]] = {}  # how each rank ended, and its value or a traceback
        printed: dict[int, list[str]] = {rank: [] for rank in ranks}
        pending = {self._connections[rank]: rank for rank in ranks}
        ends_at = time.monotonic() + deadline_s
        reason = f"stopped after {deadline_s:g} s"
        try:
            while pending and (ready := wait([*pending], max(0.0, ends_at - time.monotonic()))):
                for connection in ready:
                    rank = pending[connection]
                    kind, content = self._receive(rank)
                    if kind == "event":
                        self._events[rank].append(content)
                    elif kind == "printed":
                        printed[rank].append(content)
                    else:
                        endings[rank] = kind, content
                        del pending[connection]
                        if kind != ENDED:
                            ends_at = min(ends_at, time.monotonic() + GRACE_S)
                            reason = "a rank failed, and the others cannot continue"
        except KeyboardInterrupt:
            reason = "interrupted"
        for rank, texts in printed.items():
            if texts:
                print(f"[stdout:{rank}] \n{''.join(texts)}", end="")
        lines = [f"rank {rank} {endings[rank][0] if rank in endings else self._describe(rank)}" for rank in ranks]
        if pending or any(process.poll() is not None for process in self._processes):
            self.stop()
            advice = "All ranks were ended; ranks = start_ranks() starts new ones."
            raise RanksError("\n".join([reason, *lines, advice]))
        if tracebacks := [content for kind, content in endings.values() if kind != ENDED]:
            raise RanksError("\n".join([*lines, tracebacks[0]]))
        return [endings[rank][1] for rank in ranks]

    def _receive(self, rank: int) -> tuple[str, Any]:
        """Return the next message of a rank: see `serve`."""
        try:
            return pickle.loads(self._connections[rank].recv_bytes())
        except (EOFError, OSError):
            output = (self._directory / f"output-{rank}").read_text(errors="replace")[-2000:]
            return f"died ({describe_exit(self._processes[rank].wait())})\n{output}".strip(), None

    def _describe(self, rank: int) -> str:
        """Return text such as: waits in all_reduce #3 (fc2.weight, float32, 4096 B), which rank 1 never launched"""
        progress = Progress(self.world_size)
        for peer, events in enumerate(self._events):
            for event in events:
                progress.add(peer, event)
        return progress.describe_activity(rank)


# The code below runs in the ranks.


def serve(descriptor: int) -> None:
    """Become a rank and run cells until the notebook's process ends. Cells share the variables of `__main__`.

    Messages to the notebook are pairs: ("event", event), ("printed", text), ("ended", value of the expression) or
    ("raised ValueError: ...", traceback).
    """
    connection, lock = Connection(descriptor), threading.Lock()
    cells: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
    request = pickle.loads(connection.recv_bytes())

    def send(kind: str, content: Any) -> None:
        message = pickle.dumps((kind, content))
        with lock:
            connection.send_bytes(message)

    def receive() -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                cells.put(pickle.loads(connection.recv_bytes()))
        shutil.rmtree(request["directory"], ignore_errors=True)
        os.killpg(0, signal.SIGKILL)  # also ends what the cells have started

    threading.Thread(target=receive, daemon=True).start()
    sys.stdout = sys.stderr = Printer(lambda text: send("printed", text))
    from brigade.rank import main as rank

    work = {"module": "torch.distributed", "function": "get_rank", "calls": [[]]}  # a placeholder: cells come later
    list(rank.run(request | work, lambda event: send("event", event)))
    send(ENDED, None)
    variables = sys.modules["__main__"].__dict__
    while True:
        code, mode = cells.get()
        linecache.cache[CELL] = len(code), None, code.splitlines(keepends=True), CELL  # for tracebacks
        try:
            send(ENDED, eval(compile(code, CELL, mode), variables))
        except BaseException as error:
            lines = traceback.format_exception(error.with_traceback(error.__traceback__.tb_next))
            send(f"raised {type(error).__name__}: {error}", "".join(lines))


class Printer(io.TextIOBase):
    """A stream that passes its text on."""

    def __init__(self, write: Callable[[str], None]):
        self._write = write

    def write(self, text: str) -> int:
        self._write(text)
        return len(text)


# The code below serves the notebook.


def read_solutions() -> Sources:
    """Return the texts of all solutions."""
    return {name: text for entry in MODULES for name, text in read("solutions", entry.number).sources.items()}


def make_import_path() -> str:
    """Return the course's directory plus PYTHONPATH, because a notebook may have been started in any directory."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def show(number: int, name: str) -> Markdown:
    """Return the class or function `name` of a solution, such as "NaiveDDP.finish_grad_sync", for display.

    For a function, return its first line and its solution, without the docstring and the guidance.
    """
    from IPython.display import Markdown

    texts = [(ROOT / "solutions" / path).read_text() for path in get_module(number).paths]
    text = next(text for text in texts if re.search(rf"^(class|def) {name.partition('.')[0]}\b", text, re.MULTILINE))
    body = ast.parse(text).body
    for part in name.split("."):
        node = next(node for node in body if getattr(node, "name", None) == part)
        body = node.body
    lines = text.splitlines()
    begin = next(i for i in range(node.lineno, len(lines)) if BEGIN in lines[i])
    end = next(i for i in range(begin, len(lines)) if END in lines[i])
    head = next(i for i in range(node.lineno - 1, len(lines)) if lines[i].endswith(":"))
    selected = [*lines[node.lineno - 1 : head + 1], *lines[begin + 1 : end]]
    return Markdown("\n".join(["```python", textwrap.dedent("\n".join(selected)), "```"]))
