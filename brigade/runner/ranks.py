"""Run a function on N ranks, with a deadline.

    results = run_ranks(function, argument, world_size=2)
    results[1]            what rank 1 returned
    results.events[1]     what it recorded (see `recording.py`), in order
    results.output[1]     what it printed

`function` is a top-level function of a file; the ranks import that file (and the package it is in) from
its text. Each rank is a fresh process with an initialised default process group. Every rank must return a
value that `wire.py` can carry, else `RankFailure` says what happened on which rank. When this returns or raises, all
ranks have been killed and reaped and their files are gone.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import inspect
import json
import math
import os
import random
import re
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from brigade.course.modules import ROOT, CourseError
from brigade.course.parts import Part, named_part
from brigade.course.submission import Sources, is_sealed, sealed
from brigade.events import Event, Progress
from brigade.runner import protocol, sandbox

OUTSIDE = "setup"  # the phase of what is done in none of the training loop's: see `recording.Recorder`
DEADLINE_S = {"gloo": 20.0, "nccl": 90.0}
QUIET_S = 2.0  # all ranks blocked, nothing launched for so long, and a peer's launch missing: a deadlock
GRACE_S = 0.3  # after the first failure, the time that other ranks get to report theirs
LISTEN_S = 0.001  # pause between looks at what ranks say: waking up for each event would take the cores from them
OUTPUT_LIMIT = 20_000  # characters of a rank's output that are kept
MESSAGE_LIMIT = 4_000  # ... and of the message of its exception
BROKEN_LINK = re.compile(
    "[Cc]onnection (closed|refused|reset)|[Rr]emote (worker|process)|Broken pipe|connectFullMesh|ncclRemoteError"
)
JARGON = (
    (r"(group )?<brigade\.[\w.]+Group object at 0x\w+>", "process_group"),
    (r"\b(Held|Recorded)Work\b", "Work"),
    (r"\b(Holding|Recording|Paced)Group\b", "ProcessGroup"),
    (r"(?m)^terminate called .*\n?", ""),
    (r"(  what\(\):  )?\[enforce fail at [^\]]*\] ?", "gloo: "),
)
TRACE_LIMIT = 1 << 16  # bytes of what it says of where it stands
FRAMES_LIMIT = 30  # of an exception's
MOST_STEPS = 1 << 20  # and launches
SENT_LIMIT = 1 << 30  # bytes a rank may send to us, where no jail says less

Frame = tuple[str, int, str, str]  # file, line, function, text of the line

# What `recording.py` says in each event. A rank is not trusted to send it: anything else would fail later, here.
EVENT_FIELDS: dict[str, tuple[type, ...]] = {"kind": (str,), "time": (float,), "phase": (str,)}
LAUNCH_FIELDS: dict[str, tuple[type, ...]] = {
    "index": (int,), "group": (str,), "ranks": (list,), "op": (str,), "dtype": (str, type(None)), "numel": (int,),
    "nbytes": (int,), "parts": (int,), "reduce_op": (str, type(None)), "root": (int, type(None)), "sync": (bool,),
    "name": (str, type(None)), "memory": (str, type(None)),
}  # fmt: skip


class PerRank(list):
    """An argument of which rank r receives entry r only."""


class RankResults(list):
    """What each rank returned, with what it recorded and printed."""

    events: list[list[Event]]
    output: list[str]


class RankFailure(Exception):
    """A run that did not end with a result from every rank.

    `kind`: "exception" (a rank raised), "died" (its process ended), "deadline", "deadlock" (all wait and a launch
    is missing), "mismatch" (the ranks called different collectives) or "garbled" (unreadable result).
    `rank` is the first to fail, where one is to blame; `lines` say one thing per rank; `error` is the exception's
    type name and `message` what it said; `frames` are its frames in the files that ranks were sent, as (file, line,
    function, text); `part` is the part of a skeleton that raised it. `output` is what the ranks printed, `events` what
    they recorded.
    """

    events: list[list[Event]]
    own = False  # whether `lines` are the submission's, where a rank raised

    def __init__(
        self,
        kind: str,
        summary: str,
        lines: list[str],
        rank: int | None = None,
        error: str | None = None,
        output: list[str] | None = None,
        *,
        message: str = "",
        frames: Sequence[Frame] = (),
    ):
        super().__init__("\n".join([summary, *lines]))
        self.kind, self.summary, self.lines, self.rank, self.error = kind, summary, lines, rank, error
        self.output, self.events = output or [], []
        self.message, self.frames = message, list(frames)
        self.part: Part | None = named_part(message) if error == "NotImplementedError" else None


class ServerLost(CourseError):
    """The fork server has ended, and its ranks with it. The next run starts another."""


class Server:
    """The fork server of this process, started at first need and closed at exit."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        self._channel: socket.socket | None = None
        self._ready = False  # whether it has answered: it has imported torch
        self.scratch = Path()
        self.preload: set[str] = set()  # modules that it imports for all ranks, when it starts
        self.jail: sandbox.Jail | None = None  # of all ranks from now on

    def start(self) -> None:
        """Starts the server unless it runs; does not wait until it is ready."""
        if self._process and self._process.poll() is None:
            return
        self.close()
        sweep()
        self.scratch, lock = own_directory()  # held by the server as long as it lives
        mine, theirs = socket.socketpair()
        program = (
            f"import sys; sys.path[:1] = [{str(ROOT)!r}]; from brigade.rank.fork_server import serve; "
            f"serve({theirs.fileno()}, {lock}, {str(self.scratch)!r}, {str(ROOT)!r}, {sorted(self.preload)!r})"
        )
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "PYTHON"))}
        if self.jail:  # what a stranger may know of this machine
            environment = {name: value for name, value in environment.items() if name in ("PATH", "LANG", "LC_ALL")}
        environment |= {
            "OMP_NUM_THREADS": "1",  # no thread pools before the fork; each rank sets its own number
            "OPENBLAS_NUM_THREADS": "1",
            "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",  # fewer, larger pages: a fork copies less
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # looking for GPUs must not initialise CUDA before the fork
            "OBJC_DISABLE_INITIALIZE_FORK_SAFETY": "YES",
            "TORCHINDUCTOR_CACHE_DIR": str(self.scratch / "inductor"),  # torch._dynamo makes it on import
        }
        self._process = subprocess.Popen(
            [sys.executable, "-s", "-c", program],
            pass_fds=[theirs.fileno(), lock],
            env=environment,
            start_new_session=True,  # Ctrl-C is for us; we then end the ranks in order
        )
        self._ready = False
        theirs.close()
        os.close(lock)
        self._channel = mine

    def fork(self, descriptors: list[int], directory: Path, on_exit: Callable[[int, int], None]) -> list[int]:
        """Forks one rank for every three descriptors; returns their process ids."""
        self.start()
        with self._exchange():
            order = {"fork": len(descriptors) // protocol.FDS_PER_RANK, "directory": str(directory)}
            protocol.send(self._channel, order | self._jail(), descriptors)
            return self._answer("forked", on_exit)

    def kill(self, pids: list[int], on_exit: Callable[[int, int], None]) -> None:
        if self._channel is None:
            return  # closed in between: it took its ranks with it
        try:
            with self._exchange():
                protocol.send(self._channel, {"kill": pids} | self._jail())
                self._answer("killed", on_exit)
        except ServerLost:
            for pid in pids:  # on Linux they went with it
                protocol.kill_group(pid)

    def _jail(self) -> dict[str, Any]:
        return {"jail": asdict(self.jail) if self.jail else None}

    def exits(self, on_exit: Callable[[int, int], None]) -> None:
        """Reads one message that came unasked."""
        with self._exchange():
            message = self._message()
        on_exit(message["exited"], message["status"])

    @contextlib.contextmanager
    def _exchange(self) -> Iterator[None]:
        """Interrupted by Ctrl-C, half a message or an unread answer would stay for the next run: then we close.

        Raises ServerLost where the server has gone; what its ranks had started is killed.
        """
        try:
            yield
        except KeyboardInterrupt:
            self.close()
            raise
        except (OSError, EOFError):
            self.close()
            if self.jail:
                sandbox.kill_user(self.jail.uid)
            raise ServerLost("the process that starts the ranks has ended; does `import torch` work here?") from None

    def _answer(self, key: str, on_exit: Callable[[int, int], None]) -> Any:
        while True:
            message = self._message()
            if key in message:
                self._ready = True
                return message[key]
            on_exit(message["exited"], message["status"])

    def _message(self) -> dict[str, Any]:
        message, _ = protocol.receive(self._channel)
        if message is None:
            raise EOFError
        return message

    def fileno(self) -> int:
        return self._channel.fileno()

    def close(self) -> None:
        if self._channel:
            self._channel.close()
            self._channel = None
        if self._process:
            if not self._ready:
                self._process.kill()  # importing torch, it would not listen for seconds; it has no ranks yet
            try:
                self._process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
            sandbox.remove(self.scratch)


def own_directory() -> tuple[Path, int]:
    """A new temporary directory, and a descriptor that locks it. Once nobody has that open, `sweep` removes it."""
    directory = Path(tempfile.mkdtemp(prefix="brigade-"))
    lock = os.open(directory / "new", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    os.rename(directory / "new", directory / "lock")  # so that no `sweep` ever finds it unlocked
    return directory, lock


def sweep() -> None:
    """Removes temporary directories whose server is gone (someone killed it and its parent)."""
    for lock in Path(tempfile.gettempdir()).glob("brigade-*/lock"):
        try:
            with open(lock, "r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                sandbox.remove(lock.parent)
        except OSError:
            continue  # in use, or not ours


SERVER = Server()
atexit.register(SERVER.close)


def run_ranks(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    backend: str = "gloo",
    deadline: float | None = None,
    mode: str = "record",
    packages: dict[str, dict[str, tuple[str, str]]] | None = None,
    seed: int | None = None,
    share_gpu: bool = False,
    terminal: bool = False,
    stream: bool = True,
    on_event: Callable[[int, Event], None] | None = None,
) -> RankResults:
    """Runs `function(*args)` on `world_size` ranks and returns one result per rank.

    `deadline` is in seconds. `mode` is "record", "hold" (`strict.py`) or "pace" (`emulated_link.py`). `packages` are
    importable in the ranks, by name, from their texts. An argument made with `PerRank` gives each rank its own entry.
    `terminal` leaves the ranks on this terminal, without a deadline, so that a debugger works. Without `stream`,
    events come in batches: a measurement is disturbed less, and a deadlock is noticed at the deadline only. `on_event`
    is called in this process with each event as it arrives. Raises RankFailure or CourseError.
    """
    if world_size < 1:
        raise CourseError(f"a world size of {world_size} is not possible: it takes at least one rank")
    environment = nccl_environment(world_size, share_gpu) if backend == "nccl" else [{}] * world_size
    module, sources = importable(function)
    packages = {**sources, **(packages or {})}
    request = {
        "world_size": world_size,
        "backend": backend,
        "mode": mode,
        "module": module,
        "function": function.__qualname__,
        "packages": {name: sealed(of) if SERVER.jail else of for name, of in packages.items()},
        "threads": 1 if mode == "hold" else max(1, cores() // world_size),  # checks are small
        "seed": random.randrange(2**31) if seed is None else seed,
        "terminal": terminal,
        "stream": stream,
    }
    SERVER.start()
    from brigade.runner import wire  # torch is imported while the server is starting

    directory = Path(tempfile.mkdtemp(prefix="run-", dir=SERVER.scratch))
    if SERVER.jail:
        SERVER.scratch.chmod(0o711)  # the way to the run's directory, which will be the user's
    deadline = None if terminal else deadline or DEADLINE_S[backend]
    most = SERVER.jail.sent if SERVER.jail else SENT_LIMIT
    run = _Run(world_size, deadline, stream, on_event, packages, most)
    try:
        run.fork(directory)
        for rank in run.ranks:
            own = [arg[rank.number] if isinstance(arg, PerRank) else arg for arg in args]
            loopback = {} if "GLOO_SOCKET_IFNAME" in os.environ else {"GLOO_SOCKET_IFNAME": loopback_interface()}
            rank.send(
                wire.encode(
                    request
                    | {"rank": rank.number, "args": own, "directory": str(directory)}
                    | {"environment": loopback | environment[rank.number]}
                )
            )
        run.watch()
        failure = run.failure()
    finally:
        run.end()
        sandbox.remove(directory)
    if failure:
        failure.events = [rank.events for rank in run.ranks]
        raise failure
    results = RankResults(run.decoded())
    results.events = [rank.events for rank in run.ranks]
    results.output = [rank.text() for rank in run.ranks]
    return results


class _Rank:
    """The parent's view of one rank."""

    def __init__(self, number: int):
        self.number = number
        self.pid = 0
        self.control, self.theirs = socket.socketpair()
        self.output, self.their_output = os.pipe()
        self.trace, self.their_trace = os.pipe()
        self.buffer = bytearray()
        self.events: list[Event] = []
        self.printed = bytearray()
        self.stack = bytearray()
        self.result: bytes | None = None
        self.error: dict[str, Any] | None = None
        self.status: int | None = None
        self.received = 0  # bytes
        self.garbled = ""  # what is wrong with them
        self.closed = False

    @property
    def descriptors(self) -> list[int]:
        return [self.theirs.fileno(), self.their_output, self.their_trace]

    def close_theirs(self) -> None:
        self.theirs.close()
        os.close(self.their_output)
        os.close(self.their_trace)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.control.sendall(struct.pack("<Q", len(data)) + data)

    def text(self) -> str:
        text = plain(self.printed[:OUTPUT_LIMIT].decode(errors="replace"))
        return text + ("\n... (more was printed)" if len(self.printed) > OUTPUT_LIMIT else "")


class _Run:
    """One run: its ranks, the loop that listens to them, and the verdict on how it ended."""

    def __init__(
        self,
        world_size: int,
        deadline: float | None,
        stream: bool,
        on_event: Callable[[int, Event], None] | None,
        packages: dict[str, dict[str, tuple[str, str]]],
        most: int,
    ):
        self.ranks = [_Rank(number) for number in range(world_size)]
        self.deadline_s = deadline
        self.stream = stream  # else what a rank did last may not have arrived
        self.on_event = on_event
        self.most = most
        self.files = {name: {path for path, _ in sources.values()} for name, sources in packages.items()}
        self.texts = {} if SERVER.jail is None else sealed_lines(packages)
        self.selector = selectors.DefaultSelector()
        self.last_news = time.monotonic()
        self.failed_at: float | None = None
        self.kind: str | None = None
        self.mismatch: tuple[Event, int, Event, int] | None = None
        self.progress = Progress(world_size)

    def fork(self, directory: Path) -> None:
        descriptors = [fd for rank in self.ranks for fd in rank.descriptors]
        pids = SERVER.fork(descriptors, directory, self._exited)
        for rank, pid in zip(self.ranks, pids):
            rank.pid = pid
            rank.close_theirs()
            for fd, handler in ((rank.control, self._control), (rank.output, self._output), (rank.trace, self._trace)):
                self.selector.register(fd, selectors.EVENT_READ, (handler, rank))
        self.selector.register(SERVER.fileno(), selectors.EVENT_READ, (None, None))

    def watch(self) -> None:
        """Listens until all ranks delivered, or the run has failed; sets `kind` in that case."""
        ends_at = time.monotonic() + self.deadline_s if self.deadline_s else float("inf")
        while True:
            now = time.monotonic()
            if self.mismatch:  # even if all have delivered: some such collectives end
                self.kind = "mismatch"
            elif all(rank.result is not None for rank in self.ranks):
                return
            elif self.failed_at and (now > self.failed_at + GRACE_S or all(self._settled(r) for r in self.ranks)):
                self.kind = "failed"
            elif now > ends_at:
                self.kind = "deadline"
            elif self.stream and now > self.last_news + QUIET_S and self._deadlocked():
                self.kind = "deadlock"
            if self.kind:
                if self.kind in ("deadline", "deadlock", "mismatch"):
                    self._ask_where_they_stand()
                return
            self._listen(0.05)
            time.sleep(LISTEN_S)

    def _settled(self, rank: _Rank) -> bool:
        return rank.error is not None or rank.result is not None or rank.status is not None

    def _listen(self, timeout: float) -> None:
        for key, _ in self.selector.select(timeout):
            handler, rank = key.data
            if handler is None:
                SERVER.exits(self._exited)
            else:
                handler(rank)

    def _exited(self, pid: int, status: int) -> None:
        for rank in self.ranks:
            if rank.pid == pid:
                rank.status = status
                self._fail()

    def _fail(self) -> None:
        self.failed_at = self.failed_at or time.monotonic()

    def _read(self, rank: _Rank, fd: Any, keep: bytearray, limit: int) -> None:
        data = os.read(fd, 1 << 16)
        if not data:
            self.selector.unregister(fd)
        keep.extend(data[: max(0, limit - len(keep))])

    def _output(self, rank: _Rank) -> None:
        self._read(rank, rank.output, rank.printed, OUTPUT_LIMIT + 1)

    def _trace(self, rank: _Rank) -> None:
        self._read(rank, rank.trace, rank.stack, TRACE_LIMIT)

    def _control(self, rank: _Rank) -> None:
        try:
            data = rank.control.recv(1 << 20)
        except ConnectionResetError:
            data = b""
        if not data:
            self.selector.unregister(rank.control)
            rank.closed = True
            self._fail()
            return
        rank.buffer += data
        rank.received += len(data)
        if rank.received > self.most:
            self._garbled(rank, f"sent more than {self.most} bytes: does it launch collectives without end?")
            return
        while len(rank.buffer) >= 9:
            letter, (size,) = rank.buffer[:1], struct.unpack_from("<Q", rank.buffer, 1)
            if letter not in (b"E", b"R", b"X") or size > self.most:
                self._garbled(rank)
                return
            if len(rank.buffer) < 9 + size:
                return
            body = bytes(rank.buffer[9 : 9 + size])
            del rank.buffer[: 9 + size]
            try:
                events = self._frame(rank, letter, body)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
                self._garbled(rank)
                return
            for event in events if self.on_event else []:
                self.on_event(rank.number, event)

    def _garbled(self, rank: _Rank, why: str = "wrote something unreadable to its channel") -> None:
        rank.garbled = why
        self.selector.unregister(rank.control)
        self._fail()

    def _frame(self, rank: _Rank, letter: bytes, body: bytes) -> list[Event]:
        """Takes in one message; returns the events in it."""
        if rank.result is not None or rank.error is not None:
            return []  # a rank speaks once
        events: list[Event] = []
        if letter == b"R":
            rank.result = body
        elif letter == b"X":
            error = read_json(body)
            rank.error = {
                "type": str(error["type"])[:MESSAGE_LIMIT],
                "message": plain(str(error["message"])[:MESSAGE_LIMIT]),
                "own": bool(error["own"]),
                "frames": [self._told(*frame) for frame in error["frames"][-FRAMES_LIMIT:]],
            }
            self._fail()
        else:
            events = list(read_json(body))
            if not events:
                raise ValueError("no message that a rank sends")
            for event in events:
                self._event(rank, event)
        self.last_news = time.monotonic()
        return events

    def _told(self, file: Any, line: Any, name: Any, text: Any) -> list[str]:
        """Return one frame of an exception as texts. Fill in the line if the rank does not have the file's text."""
        if isinstance(file, str) and file in self.texts:
            lines = self.texts[file]
            text = lines[line - 1] if type(line) is int and 0 < line <= len(lines) else ""
        return [str(part)[:MESSAGE_LIMIT] for part in (file, int(line), name, text)]

    def _event(self, rank: _Rank, event: Any) -> None:
        require_fields(event, EVENT_FIELDS)
        # The parent finds events by these numbers. They must be small: a rank could choose large ones that collide.
        if not is_small(event.get("index", 0)) or not is_small(event.get("step", 0)) or math.isinf(event["time"]):
            raise ValueError("no event that a recorder makes")
        if event["kind"] == "launch":
            require_fields(event, LAUNCH_FIELDS)
            is_next = event["index"] == len(self.progress.launches[rank.number])
            if not is_next or not all(type(member) is int for member in event["ranks"]):
                raise ValueError("no launch that a recorder makes")
        rank.events.append(event)
        self.progress.add(rank.number, event)
        if event["kind"] == "launch":
            self._compare(rank, event)

    def _compare(self, rank: _Rank, event: Event) -> None:
        """Whether the peers' launch of the same number in this group is the same collective."""
        count = len(self.progress.sequence(event["group"], rank.number))
        for peer in self.ranks:
            theirs = self.progress.sequence(event["group"], peer.number)
            if peer is not rank and len(theirs) >= count:
                other = theirs[count - 1]
                if signature(event) != signature(other) and not self.mismatch:
                    self.mismatch = (event, rank.number, other, peer.number)

    def _deadlocked(self) -> bool:
        """Whether every rank waits or has finished, and none can go on by itself."""
        return self.progress.is_deadlocked([rank.number for rank in self.ranks if self._settled(rank)])

    def _ask_where_they_stand(self) -> None:
        alive = [rank for rank in self.ranks if rank.status is None]
        for rank in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(rank.pid, signal.SIGUSR1)
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            before = [len(rank.stack) for rank in alive]
            self._listen(0.1)
            if all(before) and before == [len(rank.stack) for rank in alive]:
                break  # all have answered, and nothing more is coming

    def end(self) -> None:
        """Kills and reaps all ranks; reads what they had still printed."""
        pids = [rank.pid for rank in self.ranks if rank.pid]
        try:
            if pids:
                SERVER.kill(pids, lambda pid, status: None)
        finally:
            self._close()

    def _close(self) -> None:
        for rank in self.ranks:
            if rank.pid:
                os.set_blocking(rank.output, False)
                with contextlib.suppress(OSError):
                    while data := os.read(rank.output, 1 << 16):
                        rank.printed += data[: max(0, OUTPUT_LIMIT + 1 - len(rank.printed))]
                        if len(rank.printed) > OUTPUT_LIMIT:
                            break
            else:
                rank.close_theirs()
            rank.control.close()
            os.close(rank.output)
            os.close(rank.trace)
        self.selector.close()

    def decoded(self) -> list[Any]:
        from brigade.runner import wire

        values = []
        for rank in self.ranks:
            try:
                values.append(wire.decode(rank.result))
            except wire.WireError as error:
                line = f"rank {rank.number}: {error}"
                raise RankFailure("garbled", "a rank delivered something unreadable", [line], rank.number) from None
        return values

    def failure(self) -> RankFailure | None:
        """What to tell the user, from everything that is known; None if all ranks delivered."""
        if self.kind is None:
            return None
        output = [rank.text() for rank in self.ranks]
        lines = [f"rank {rank.number} {self._doing(rank)}" for rank in self.ranks]
        if self.mismatch:
            one, rank, other, peer = self.mismatch
            summary = (
                f"rank {rank} called {describe(one)} where rank {peer} called {describe(other)}: "
                "all ranks of a group must call the same collectives in the same order"
            )
            return RankFailure("mismatch", summary, lines, rank, output=output)
        if self.kind == "deadlock":
            summary = "deadlock: every rank has stopped, and someone waits for a collective that a peer never launched"
            return RankFailure("deadlock", summary, lines, output=output)
        if self.kind == "deadline":
            return RankFailure("deadline", f"stopped after {self.deadline_s:.0f} s", lines, output=output)
        garbled = [rank for rank in self.ranks if rank.garbled]
        if garbled:
            number = garbled[0].number
            return RankFailure("garbled", f"rank {number} {garbled[0].garbled}", [], number, output=output)
        raised = [rank for rank in self.ranks if rank.error]
        died = [rank for rank in self.ranks if rank.status is not None]
        # A rank whose peer has gone gets an exception from gloo or NCCL, or is aborted by it: it is not the cause.
        closed = [rank for rank in self.ranks if rank.closed]
        first_hand = [rank for rank in raised if not BROKEN_LINK.search(rank.error["message"])]
        culprit = (first_hand or sorted(died, key=lambda rank: rank.status == -signal.SIGABRT) or raised or closed)[0]
        if culprit.error:
            error = culprit.error
            summary = f"rank {culprit.number} raised {error['type']}: {error['message'] or '(no message)'}"
            frames = [(Path(file).name, int(line), function, text) for file, line, function, text in error["frames"]]
            lines = [
                f"  {file}, line {n}, in {where}" + (f": {text}" if text else "") for file, n, where, text in frames
            ]
            failure = RankFailure(
                "exception",
                summary,
                lines,
                culprit.number,
                error["type"],
                output,
                message=error["message"],
                frames=frames,
            )
            failure.own = error["own"]
            return failure
        how = "it closed its channel" if culprit.status is None else ending(culprit.status)
        summary = f"rank {culprit.number} ended without a result ({how})"
        return RankFailure("died", summary, lines, culprit.number, output=output)

    def _doing(self, rank: _Rank) -> str:
        """Such as: waits in all_reduce #3 (fc2.weight, 4096 B), which rank 1 has not launched; naive_ddp.py:41 in f"""
        launches, waiting = self.progress.launches[rank.number], self.progress.waiting[rank.number]
        last = f"after {describe(launches[-1])}" if launches else "having launched nothing"
        if rank.result is not None:
            return f"finished {last}"
        if rank.error:
            return f"raised {rank.error['type']} {last}"
        if rank.status is not None:
            return f"ended ({ending(rank.status)}) {last}"
        where = self._where(rank)
        where = f", at {where}" if where else ""
        if waiting:
            missing = self.progress.missing_peers(rank.number)
            names = " and ".join(f"rank {number}" for number in missing)
            missing_text = f", which {names} never launched" if missing else ""
            return f"waits in {describe(waiting)}{missing_text}{where}"
        phase = rank.events[-1].get("phase", OUTSIDE) if rank.events else OUTSIDE
        return f"is busy {last}{where}" if phase == OUTSIDE else f"is in {phase} {last}{where}"

    def _where(self, rank: _Rank) -> str:
        """The innermost line of the submission, or of the scenario, that the rank stands on."""
        frames = re.findall(r'File "([^"\n]+)", line (\d+) in (.+)', rank.stack.decode(errors="replace"))
        packages = sorted(self.files, key=lambda name: name != "submission")
        for files in [self.files[name] for name in packages]:
            for path, line, name in frames:
                if path in files:
                    return f"{Path(path).name}:{line} in {name}"
        return ""


def read_json(body: bytes) -> Any:
    """Return what a rank says in JSON. Raise ValueError or RecursionError for what none of our ranks would say."""
    from brigade.runner import wire

    return json.loads(body, parse_int=wire.read_int, parse_constant=refuse_constant)


def refuse_constant(name: str) -> None:
    """Raise ValueError: NaN and infinity are neither times nor counts."""
    raise ValueError(f"{name} in an event")


def sealed_lines(packages: dict[str, Sources]) -> dict[str, list[str]]:
    """Return the lines of the files that ranks get as code only. A student's feedback shows none of the reference."""
    lines = {}
    for sources in packages.values():
        is_mixed = not all(is_sealed(path) for path, _ in sources.values())
        for path, text in sources.values():
            if is_sealed(path):
                lines[path] = [] if is_mixed else [line.strip() for line in text.splitlines()]
    return lines


def is_small(number: Any) -> bool:
    return number is None or type(number) is int and 0 <= number < MOST_STEPS


def require_fields(event: Any, fields: dict[str, tuple[type, ...]]) -> None:
    """Raises ValueError or KeyError unless `event` is a dict with these fields, of these types."""
    if type(event) is not dict or any(type(event[name]) not in types for name, types in fields.items()):
        raise ValueError("not an event")


def signature(event: Event) -> tuple:
    """What must agree between ranks. In a point-to-point call or a gather the sides differ rightly."""
    if event["op"] in ("send", "recv"):
        return ()
    if event["op"] in ("gather", "scatter", "all_to_all"):
        return (event["op"], event["root"])
    return tuple(event[field] for field in ("op", "dtype", "numel", "reduce_op", "root"))


def describe(event: Event) -> str:
    """A launch in words, such as: all_reduce #3 (fc2.weight, 4096 B)"""
    if event["op"] == "barrier":
        return f"barrier #{event['index']}"
    name = event.get("name")
    return f"{event['op']} #{event['index']} ({name + ', ' if name else ''}{event['dtype']}, {event['nbytes']} B)"


def plain(text: str) -> str:
    """Without the names of the toolkit's classes, and without what gloo's C++ says of itself."""
    for pattern, instead in JARGON:
        text = re.sub(pattern, instead, text)
    return text


def ending(status: int) -> str:
    if status < 0:
        with contextlib.suppress(ValueError):
            return f"killed by {signal.Signals(-status).name}"
    return f"exit code {status}"


def importable(function: Callable[..., Any]) -> tuple[str, dict[str, dict[str, tuple[str, str]]]]:
    """The module name under which a rank imports the function, and the texts it needs for that."""
    name = function.__module__
    file = Path(inspect.getsourcefile(function))
    if name == "__main__":  # a script, or a module run with -m: ranks import it under its own name
        spec = sys.modules["__main__"].__spec__
        name = spec.name if spec else file.stem
    if name.partition(".")[0] == "brigade":
        return name, {}
    if "." not in name:
        return f"{name}.{name}", {name: {name: (str(file), file.read_text())}}
    package, _, _ = name.partition(".")
    directory = file.parents[name.count(".") - 1]
    texts = {}
    for path in sorted(directory.rglob("*.py")):
        inner = ".".join(path.relative_to(directory).with_suffix("").parts)
        if path.name != "__init__.py":
            texts[inner] = (str(path), path.read_text())
    return name, {package: texts}


def cores() -> int:
    """How many of this machine's processor cores are ours."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


def nccl_environment(world_size: int, share_gpu: bool) -> list[dict[str, str]]:
    """What each rank needs in its environment for NCCL. Raises CourseError when there are too few GPUs."""
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
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": loopback_interface()}
    return [shared | {"NCCL_HOSTID": f"brigade-{rank}"} for rank in range(world_size)]
