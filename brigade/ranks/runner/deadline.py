"""The deadline of a run. A busy machine must not stop ranks that only lack processor time.

For each thread, Linux counts the seconds that it has run, and those that it was ready to run but waited for a
processor. On other systems, a run ends at its deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

BUSY = 5  # the deadline is at least this multiple of the time that a right answer takes on an idle machine
LOOK_S = 0.5  # pause between two looks at how the ranks got on
PROC = Path("/proc")


class Deadline:
    """The end of the time that the ranks with these process ids have.

    They have `limit_s` seconds, or any time if it is None. If they lack processor time, they get at most `longest_s`.
    They lack it as long as both times are less than limit_s / BUSY seconds:

    - the processor time of each rank, so that an endless loop does not use up `longest_s`
    - the time in which no rank waited for a processor, so that neither do ranks that sleep or wait for each other
    """

    def __init__(self, limit_s: float | None, longest_s: float | None, pids: Sequence[int]):
        self.limit_s = limit_s or float("inf")
        self._longest_s = longest_s or self.limit_s
        self._enough_s = self.limit_s / BUSY
        self._pids = pids
        self._began = time.monotonic()
        self._own_delay_s = self._read_own_delay()
        self._next_look_s = self.limit_s

    def has_passed(self) -> bool:
        """Return whether the run has to end. `limit_s` is then the time that it had."""
        elapsed_s = time.monotonic() - self._began
        if elapsed_s <= self._next_look_s:
            return False
        if elapsed_s <= self._longest_s and self._lacks_processor(elapsed_s):
            self._next_look_s = min(elapsed_s + LOOK_S, self._longest_s)
            return False
        self.limit_s = max(self.limit_s, min(self._next_look_s, elapsed_s))
        return True

    def _lacks_processor(self, elapsed_s: float) -> bool:
        own_delay_s = self._read_own_delay()
        if own_delay_s is None or self._own_delay_s is None:
            return False
        by_rank = [read_threads(pid) for pid in self._pids]
        ran_s = max(sum(ran for ran, _ in threads) for threads in by_rank)
        delay_s = own_delay_s - self._own_delay_s  # ranks wait for this process
        delay_s += sum(delay for threads in by_rank for _, delay in threads)
        return max(ran_s, elapsed_s - delay_s) < self._enough_s

    @staticmethod
    def _read_own_delay() -> float | None:
        """Return how long the current thread has waited for a processor, or None on a system that does not count it."""
        for _, delay in read_threads("self", str(threading.get_native_id())):
            return delay
        return None


def read_threads(pid: int | str, thread: str = "*") -> list[tuple[float, float]]:
    """Return for each thread of a process the seconds that it has run, and that it has waited for a processor."""
    threads = []
    for file in (PROC / str(pid) / "task").glob(f"{thread}/schedstat"):
        try:
            ran, delay, _ = file.read_text().split()
        except (OSError, ValueError):  # the thread has ended
            continue
        threads.append((int(ran) / 1e9, int(delay) / 1e9))
    return threads
