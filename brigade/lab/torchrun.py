"""Use ranks that were started by `torchrun`, or by another launcher that sets the same environment variables.

    run_on_torchrun(function)        like `run_ranks`, with this process as a rank
    report_rank_failures(command)    wrap a command, so that only rank 0 prints

`run_ranks` forks ranks on this machine and watches them from outside. With `torchrun`, no process watches from outside.
Every process runs the same command, becomes a rank when the command runs ranks, and sends its result to rank 0. Then
only rank 0 continues, and the other processes end. With gloo, the deadline applies to each collective. With NCCL, a
collective does not block the CPU, so a thread of each rank applies the deadline to the time without any event.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from brigade.ranks.errors import UserError
from brigade.ranks.events import Event
from brigade.ranks.progress import RankRecord
from brigade.ranks.runner.failure import BROKEN_LINK, RankFailure, make_exception_failure
from brigade.ranks.runner.machine import TORCHRUN, count_cores, is_torchrun, make_nccl_environments
from brigade.ranks.runner.options import MODES
from brigade.ranks.runner.ranks import RankResults, RunOptions, draw_seeds
from brigade.ranks.runner.server import SERVER
from brigade.ranks.texts import PACKAGE, find_sources

# As soon as one process has failed, torchrun ends its other processes. A process without a message of its own waits
# this long for torchrun to end it. If the failure was on another machine, the process then ends by itself.
OTHERS_FIRST_S = 5.0
# The process group's own timeout comes this much after the deadline. NCCL's would abort the process without a message.
GROUP_LATER_S = 30.0
POLL_S = 0.5
UNREACHABLE = "could not be reached: set GLOO_SOCKET_IFNAME to the interface that the machines share"


def read_rank_variables() -> tuple[int, int, int, int]:
    """Return this process's rank, the world size, its local rank and the number of ranks on this machine."""
    rank, size, local_rank, local_size = (int(os.environ[name]) for name in TORCHRUN[:4])
    return rank, size, local_rank, local_size


def run_on_torchrun(function: Callable[..., Any], *args: Any, **options: Any) -> RankResults:
    """Run a function as `run_ranks` does, on torchrun's ranks. Return on rank 0; the other processes end here.

    Times are those of each machine's own clock. `on_event` is called on rank 0 only, with the events of rank 0. Printed
    output is not kept. Raise UserError on every rank if a link is to be emulated, and RankFailure on the rank that
    failed, or that waited for another rank until the deadline.
    """
    how = RunOptions(**options)
    rank, size, local_rank, local_size = read_rank_variables()
    if how.mode == "emulate":
        raise UserError("under torchrun, the ranks use a real link: leave out the options of an emulated link")
    if how.share_gpu and local_size != size:
        raise UserError("--share-gpu needs all ranks on one machine, because it gives each rank its own host name")
    if how.backend == "nccl":
        os.environ.update(make_nccl_environments(local_size, how.share_gpu)[local_rank])
    from torch import distributed as dist

    from brigade.ranks.rank import main as inside

    module, sources = find_sources(function)
    packages = {**sources, **(how.packages or {})}
    record = RankRecord()

    def take(event: Event) -> None:
        record.add(event)
        if how.on_event and rank == 0:
            how.on_event(0, event)

    request: dict[str, Any] = {
        "rank": rank,
        "world_size": size,
        "backend": how.backend,
        "mode": how.mode,
        "group_class": MODES[how.mode],
        "module": module,
        "function": function.__qualname__,
        "packages": dict(packages),
        "threads": max(1, count_cores() // local_size),
        "seed": draw_seeds(how.seed or 0, size)[rank],  # ranks cannot agree on a random one before they communicate
        "calls": [args],
    }
    limit_s = how.deadline_s
    assert limit_s  # torchrun's ranks have no debugger
    timeout = timedelta(seconds=limit_s + (GROUP_LATER_S if how.backend == "nccl" else 0))
    watch = ProgressWatch(record, limit_s, lambda: end_without_progress(rank, record, limit_s))
    gathered: list[Any] = [None] * size
    try:
        store, _, _ = next(dist.rendezvous("env://", rank, size, timeout=timeout))
        store = dist.PrefixStore("brigade", store)
        if how.backend == "nccl":
            watch.start()
        [result] = inside.perform(request, take, store, local_rank, timeout)
        events = list(record.events)  # the gather is recorded too
        dist.gather_object((result, events), gathered if rank == 0 else None)
    except UserError:
        raise
    except Exception as error:
        failure = make_exception_failure(rank, inside.describe_exception(error, request["packages"]), packages)
        raise add_place(failure, record) from None
    finally:
        watch.stop()
    if rank:
        exit_process(0)
    return RankResults([value for value, _ in gathered], [events for _, events in gathered], [""] * size)


class ProgressWatch:
    """A thread that calls `give_up` once if `record` gets no event for `limit_s` seconds."""

    def __init__(self, record: RankRecord, limit_s: float, give_up: Callable[[], None]):
        self._record, self._limit_s, self._give_up = record, limit_s, give_up
        self._num_events, self._since = len(record.events), time.monotonic()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Begin to watch."""
        self._since = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def stop(self) -> None:
        """Watch no longer."""
        self._stopped.set()

    def look(self) -> None:
        """Give up if the limit has passed since the last new event."""
        num_events, now = len(self._record.events), time.monotonic()
        if num_events != self._num_events:
            self._num_events, self._since = num_events, now
        elif now - self._since >= self._limit_s and not self._stopped.is_set():
            self.stop()
            self._give_up()

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_S):
            self.look()


def end_without_progress(rank: int, record: RankRecord, limit_s: float) -> None:
    """Print what this rank is doing, give the other ranks time to do the same, and end the process."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame and not frame.f_globals.get("__name__", "").startswith(f"{PACKAGE}."):
        frame = frame.f_back
    line = f", at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame else ""
    where = f"rank {rank} on {socket.gethostname()}"
    text = f"{where} has done nothing for {limit_s:.0f} s; it {record.describe_activity()}{line}"
    print(f"brigade: {text}", file=sys.stderr, flush=True)
    time.sleep(OTHERS_FIRST_S)
    exit_process(1)


def add_place(failure: RankFailure, record: RankRecord) -> RankFailure:
    """Return the failure with the name of this machine and, if the rank waited in vain, what it was doing."""
    where = f"rank {failure.rank} on {socket.gethostname()}"
    message = failure.message.partition("\n")[0] or "(no message)"
    if BROKEN_LINK.search(failure.message):
        time.sleep(OTHERS_FIRST_S)  # the rank that failed first says why
        if "connectFullMesh" in failure.message:  # gloo never had a connection
            return RankFailure("died", f"{where}: a peer {UNREACHABLE}", [], failure.rank)
        return RankFailure("died", f"{where} lost a peer; it {record.describe_activity()}: {message}", [], failure.rank)
    failure.summary = f"{where} raised {failure.error}: {message}"
    if "imed out" in message:
        failure.summary += f"; it {record.describe_activity()}"
    return failure


def report_rank_failures(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Return a command that runs `command` and prints failures of ranks as messages.

    Under torchrun, only rank 0 and ranks that failed by themselves print. The returned command then ends the process
    itself, because a process that has used gloo may be aborted when Python shuts down.
    """

    def run(options: argparse.Namespace) -> int:
        speaks = not is_torchrun() or os.environ["RANK"] == "0"
        if not speaks:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        try:
            status, message = command(options), ""
        except RankFailure as error:
            printed = [f"[rank {r}] {line}" for r, text in enumerate(error.output) for line in text.splitlines()[-20:]]
            status, message, speaks = 1, "\n".join([str(error), *printed]), True
        except (UserError, OSError, KeyboardInterrupt) as error:
            if not is_torchrun():
                raise
            status, message = (130, "stopped") if isinstance(error, KeyboardInterrupt) else (2, str(error))
        if message and speaks:
            print(f"brigade: {message}", file=sys.stderr, flush=True)
        if not is_torchrun():
            return status
        if status and not speaks:
            time.sleep(OTHERS_FIRST_S)
        exit_process(status)

    return run


def exit_process(status: int) -> NoReturn:
    """Flush this process's output, close its fork server, and end the process immediately."""
    sys.stdout.flush()
    sys.stderr.flush()
    SERVER.close()
    os._exit(status)
