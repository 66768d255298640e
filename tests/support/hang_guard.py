"""The only limit on time in the tests: a test that hangs ends after HANG_S seconds.

No test depends on how fast the machine is, so the limit is far beyond what the slowest machine needs, and no test
expects anything to happen sooner.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import psutil

HANG_S = 600
POLL_S = 0.01

# A program that runs `brigade` with its arguments. Ranks that hang do so until the test ends them.
PATIENT = f"""
import sys
from brigade.course.cli.main import program
from brigade.ranks.runner import options
options.DEADLINE_S["gloo"] = {HANG_S}
sys.exit(program())
"""

T = TypeVar("T")


def run(command: Sequence[Any], **options: Any) -> subprocess.CompletedProcess:
    """Run a command as subprocess.run does, with its options."""
    return subprocess.run(list(map(str, command)), timeout=HANG_S, **options)


def hear_ctrl_c() -> None:
    """Let a child process end at SIGINT (as `preexec_fn`). A job in the background and its children ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def wait(process: subprocess.Popen) -> int:
    """Wait until a process has ended, and return its exit status."""
    return process.wait(timeout=HANG_S)


def communicate(process: subprocess.Popen, sent: Any = None) -> tuple[Any, Any]:
    """Send something to a process, wait until it has ended, and return what it has printed to stdout and stderr."""
    return process.communicate(sent, timeout=HANG_S)


@contextlib.contextmanager
def kill_if_it_hangs(process: subprocess.Popen) -> Iterator[subprocess.Popen]:
    """Kill a process of which the block reads or expects something, if the block does not end."""
    alarm = threading.Timer(HANG_S, process.kill)
    alarm.start()
    try:
        yield process
    finally:
        alarm.cancel()


def wait_until(condition: Callable[[], T]) -> T:
    """Ask again and again until the answer is true, and return it."""
    ends_at = time.monotonic() + HANG_S
    while not (answer := condition()):
        assert time.monotonic() < ends_at, f"it did not happen within {HANG_S} s"
        time.sleep(POLL_S)
    return answer


def wait_for_end(processes: Sequence[psutil.Process]) -> None:
    """Wait until all processes have ended."""
    _, alive = psutil.wait_procs(processes, timeout=HANG_S)
    assert not alive, f"still running after {HANG_S} s: {alive}"
