"""Ranks for a notebook. After `ranks = start_ranks(2)`, every rank runs the code of each `%%px` cell.

    ranks.deadline_s = 5      how many seconds a cell may take from now on
    ranks["loss"]             the variable `loss` of every rank, in a list
    ranks.read_events()       for each rank, the events that it has recorded so far (see `recording.py`)
    ranks.stop()              end the ranks; they also end with the notebook's process, however that ends

A rank is an ipyparallel engine with an initialised default process group that records every collective. The reference
solutions are importable there: `from solutions.m01_naive_ddp.naive_ddp import NaiveDDP`. `%%px -t 1` runs a cell on
rank 1 only. If a cell misses its deadline, a sentence for each rank says what the rank was doing, and the ranks end.
For timings that need clean processes, use `ladder.py` and `timeline.py`.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from brigade.course.modules import MODULES, ROOT, get_module
from brigade.course.skeletons import BEGIN, END
from brigade.course.submission import Sources, read
from brigade.events import Event
from brigade.ipc.temporary import make_locked_directory
from brigade.progress import Progress
from brigade.runner.machine import count_cores, count_gpus, make_gloo_environment
from brigade.runner.report import describe_exit

if TYPE_CHECKING:
    from ipyparallel import AsyncResult
    from IPython.display import Markdown

MARK = "BRIGADE_NOTEBOOK"  # the environment variable that contains the ranks' directory, in all of their processes
START_S = 60.0
# An engine is ready only after its second heartbeat, so the period is short. `Ranks` itself detects dead engines.
CONTROLLER = (
    "--nodb",
    "--IPController.use_threads=True",
    "--HeartMonitor.period=300",
    "--HeartMonitor.max_heartmonitor_misses=1000000",
)
ENGINE = ("--IPEngine.enable_nanny=False", "--IPEngine.max_heartbeat_misses=0", f"--IPEngine.timeout={START_S}")
GRACE_S = 2.0  # after one rank has failed, the others have this much time to finish


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
    _running = Ranks(deadline_s)
    try:
        _running.start(n, mode)
    except BaseException:
        _running.stop()
        raise
    return _running


_running: Ranks | None = None


class Ranks:
    """The ranks of a notebook, returned by `start_ranks`. The object is also a context manager."""

    world_size: int
    backend: str

    def __init__(self, deadline_s: float):
        self.deadline_s = deadline_s
        self._directory, lock = make_locked_directory()
        self._guard = start_guard(self._directory, lock)
        self._client: Any = None
        self._controller: subprocess.Popen | None = None
        self._engines: list[subprocess.Popen] = []
        atexit.register(self.stop)

    def start(self, n: int | None, mode: str) -> None:
        import ipyparallel

        self._controller = self._spawn("controller", *CONTROLLER)
        gpus = count_gpus()  # imports torch while the controller is starting
        self.world_size = n or (gpus if gpus >= 2 else 2)
        self.backend = "nccl" if gpus >= max(2, self.world_size) else "gloo"
        connection = {"IPP_CONNECTION_INFO": json.dumps(self._read_connection("engine"))}
        for rank in range(self.world_size):
            self._engines.append(self._spawn("engine", *ENGINE, f"--IPEngine.id={rank}", **connection, RANK=str(rank)))
        self._client = ipyparallel.Client(self._read_connection("client"), profile_dir=str(self._directory))
        try:
            self._client.wait_for_engines(self.world_size, timeout=START_S, interactive=False)
        except TimeoutError:
            raise self._make_start_error() from None
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
        everyone = range(self.world_size)
        self._finish(self._client[:].apply_async(become_rank, request), everyone, START_S)
        self._activate_magics()

    def run(self, code: str, ranks: Sequence[int] | None = None) -> None:
        """Execute Python text on all ranks (or on `ranks`), as a `%%px` cell does, and show what they print.

        Raise RanksError if a rank raises an exception, dies or misses the deadline. In the last two cases, all ranks
        are terminated.
        """
        self._require_running()
        ranks = list(range(self.world_size) if ranks is None else ranks)
        result = self._client[ranks].execute(code, silent=False, block=False)
        try:
            self._finish(result, ranks, self.deadline_s)
        finally:
            if result.ready():
                result.display_outputs()

    def __getitem__(self, name: str) -> list[Any]:
        """Return the value of a variable on every rank."""
        self._require_running()
        result = self._client[:].pull(name, block=False)
        return self._finish(result, range(self.world_size), self.deadline_s)

    def read_events(self) -> list[list[Event]]:
        """Return, for each rank, the events that it recorded since it was started."""
        files = [self._directory / f"events-{rank}" for rank in range(self.world_size)]
        return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]

    def stop(self) -> None:
        """End all ranks, whatever they are doing. A second call has no effect."""
        atexit.unregister(self.stop)
        if self._client:
            self._client.close()
            self._client = None
        end_everything(self._directory)
        for process in [self._controller, *self._engines]:
            if process:
                process.wait()
        self._guard.communicate()  # closes the guard's input, so that the guard ends

    def __repr__(self) -> str:
        return f"{self.world_size} ranks on {self.backend}" if self._client else "ranks that have ended"

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.stop()

    def _spawn(self, part: str, *options: str, **environment: str) -> subprocess.Popen:
        own = {MARK: str(self._directory), "IPYTHONDIR": str(self._directory), "PYDEVD_DISABLE_FILE_VALIDATION": "1"}
        own |= {"TORCHINDUCTOR_CACHE_DIR": str(self._directory / "inductor"), "PYTHONPATH": make_import_path()}
        # Even the search for a temporary directory leaves a file if the process is killed during the search.
        own |= {"TMPDIR": str(self._directory)}
        with open(self._directory / "output", "ab") as output:
            return subprocess.Popen(
                [sys.executable, "-m", f"ipyparallel.{part}", f"--profile-dir={self._directory}", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | own | environment,
                start_new_session=True,  # so that interrupting a cell does not interrupt the ranks
            )

    def _read_connection(self, side: str) -> dict[str, Any]:
        """Wait for the file in which the controller describes its connections for `side`. Return its content."""
        file = self._directory / "security" / f"ipcontroller-{side}.json"
        ends_at = time.monotonic() + START_S
        while time.monotonic() < ends_at and self._controller.poll() is None:
            with contextlib.suppress(OSError, ValueError):  # not there yet, or half written
                return json.loads(file.read_text())
            time.sleep(0.05)
        raise self._make_start_error()

    def _make_start_error(self) -> RanksError:
        return RanksError("the ranks did not start:\n" + (self._directory / "output").read_text()[-2000:])

    def _require_running(self) -> None:
        if self._client is None:
            raise RanksError("the ranks have ended; ranks = start_ranks() starts new ones")

    def _finish(self, result: AsyncResult, ranks: Sequence[int], deadline_s: float) -> Any:
        """Wait for the ranks and return their values. If a rank fails, the others have `GRACE_S` seconds to finish."""
        parts = dict(zip(ranks, result.split()))
        ends_at = time.monotonic() + deadline_s
        reason = f"stopped after {deadline_s:g} s"
        failed = False
        try:
            while not result.wait(0.1):
                if not failed and any(self._has_failed(rank, part) for rank, part in parts.items()):
                    failed, ends_at = True, min(ends_at, time.monotonic() + GRACE_S)
                    reason = "a rank failed, and the others cannot continue"
                if time.monotonic() > ends_at:
                    break
        except KeyboardInterrupt:
            reason = "interrupted"
        descriptions = [f"rank {rank} {self._describe_rank(rank, part)}" for rank, part in parts.items()]
        if not result.ready():
            for rank, part in parts.items():
                if part.stdout:
                    print(f"[stdout:{rank}]\n{part.stdout}", end="")
            self.stop()
            raise RanksError(
                "\n".join([reason, *descriptions, "All ranks were ended; ranks = start_ranks() starts new ones."])
            )
        if not result.successful():
            raised = next(part for part in parts.values() if not part.successful())
            raise RanksError("\n".join([*descriptions, raised.exception().traceback]))
        return result.get()

    def _has_failed(self, rank: int, part: AsyncResult) -> bool:
        return self._engines[rank].poll() is not None or (part.ready() and not part.successful())

    def _describe_rank(self, rank: int, part: AsyncResult) -> str:
        """Return text such as: waits in all_reduce #3 (fc2.weight, float32, 4096 B), which rank 1 never launched"""
        if part.ready() and part.successful():
            return "ended"
        if part.ready():
            return f"raised {part.exception().ename}: {part.exception().evalue}"
        if self._engines[rank].poll() is not None:
            return f"died ({describe_exit(self._engines[rank].returncode)})"
        progress = Progress(self.world_size)
        for peer, events in enumerate(self.read_events()):
            for event in events:
                progress.add(peer, event)
        return progress.describe_activity(rank)

    def _activate_magics(self) -> None:
        from ipyparallel.client.magics import ParallelMagics
        from IPython import get_ipython

        run = self.run

        class Magics(ParallelMagics):
            """ipyparallel's magics, with a deadline."""

            def parallel_execute(self, cell: str, block: bool | None = None, **options: Any) -> Any:
                if block is False:
                    return super().parallel_execute(cell, block=False, **options)
                targets = self.view.targets
                if isinstance(targets, int):
                    targets = [targets]
                return run(cell, None if targets == "all" else targets)

        if shell := get_ipython():
            view = self._client[:]
            view.block = True
            shell.register_magics(Magics(shell, view))


def read_solutions() -> Sources:
    """Return the texts of all solutions."""
    return {name: text for entry in MODULES for name, text in read("solutions", entry.number).sources.items()}


def become_rank(request: dict[str, Any]) -> None:
    """Turn an engine into a rank. Its events go to a file, which can be read even while the rank hangs."""
    from brigade.rank import main as rank

    number = int(os.environ["RANK"])
    record = open(Path(request["directory"]) / f"events-{number}", "w", buffering=1)  # noqa: SIM115
    function = {
        "module": "torch.distributed",
        "function": "get_rank",
        "calls": [[]],
    }  # a placeholder: the work comes cell by cell
    rank.run(request | function | {"rank": number}, lambda event: record.write(json.dumps(event) + "\n"))


def make_import_path() -> str:
    """Return the course's directory plus PYTHONPATH, because a notebook may have been started in any directory."""
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])


def start_guard(directory: Path, lock: int) -> subprocess.Popen:
    """Start a process that ends the ranks and removes their directory after this process has ended, however it ends.

    The new process holds the lock. If it is killed too, `temporary.sweep` removes the directory later.
    """
    program = "import sys; from brigade.lab.notebook import guard; guard(sys.argv[1])"
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(directory)],
        stdin=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": make_import_path()},
        pass_fds=[lock],
        start_new_session=True,
    )
    os.close(lock)
    return process


def guard(directory: str) -> None:
    """Wait until the notebook's process closes its end of standard input or dies, then end everything."""
    sys.stdin.read()
    end_everything(Path(directory))


def end_everything(directory: Path) -> None:
    """Kill all processes that were started for this directory, including their children, and remove the directory."""
    give_up = time.monotonic() + 10
    any_left = True
    while any_left and time.monotonic() < give_up:
        any_left = False
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # the process has ended meanwhile, or is not ours
                if process.environ().get(MARK) == str(directory):
                    process.kill()
                    any_left = True
        time.sleep(0.05 * any_left)
    shutil.rmtree(directory, ignore_errors=True)


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
