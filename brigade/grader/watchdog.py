"""Kill a grader that does not end: some time after its time limit, or soon after SIGTERM, also while it cleans up.

Python handles a signal only between two calls of C code, and one call may take hours. Therefore a small process watches
the grader. It has the other end of a pipe to which Python writes the number of each signal at once. If the grader is
killed, its results file has the last complete state, and the fork server ends all ranks.
"""

from __future__ import annotations

import contextlib
import functools
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

RESERVE_S = 30.0  # after the time limit, to end the last run and to judge it
PATIENCE_S = 5.0  # after SIGTERM
BEGIN = b"\0"  # in the pipe, in which no signal has this number


@contextlib.contextmanager
def watch(limit_s: float, reserve_s: float = RESERVE_S, patience_s: float = PATIENCE_S) -> Iterator[Callable[[], int]]:
    """Kill this process if the block does not end in time. Yield a function that lets the time limit begin again.

    Call this in the main thread only.
    """
    theirs, ours = os.pipe()
    os.set_blocking(ours, False)
    command = [sys.executable, "-I", "-S", __file__, *map(str, (os.getpid(), limit_s, reserve_s, patience_s))]
    process = subprocess.Popen(command, stdin=theirs, start_new_session=True)
    os.close(theirs)
    before = signal.set_wakeup_fd(ours, warn_on_full_buffer=False)
    try:
        yield functools.partial(os.write, ours, BEGIN)
    finally:
        signal.set_wakeup_fd(before)
        os.close(ours)  # ends the process
        process.wait()


def main(pid: int, limit_s: float, reserve_s: float, patience_s: float) -> None:
    """Kill the process `pid`, our parent, unless standard input closes in time."""
    late = f"{reserve_s:.0f} s after its time limit of {limit_s:.0f} s"
    ends = {late: time.monotonic() + limit_s + reserve_s}
    while select.select([0], [], [], max(0.0, min(ends.values()) - time.monotonic()))[0]:
        arrived = os.read(0, 1 << 10)
        if not arrived:
            return
        if BEGIN in arrived:
            ends[late] = time.monotonic() + limit_s + reserve_s
        if signal.SIGTERM in arrived:
            ends.setdefault(f"{patience_s:.0f} s after SIGTERM", time.monotonic() + patience_s)
    if os.getppid() == pid:
        reason = min(ends, key=lambda each: ends[each])
        print(f"brigade: killed, because the grader did not stop {reason}", file=sys.stderr, flush=True)
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), *map(float, sys.argv[2:]))
