"""Interrupts (Ctrl-C and SIGTERM) that come while Python would lose them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def delay_interrupts() -> Iterator[None]:
    """Delay interrupts until the end of the block. In threads other than the main one, there are none.

    An import of torch or numpy may swallow an interrupt or break. An exception in a function of
    `os.register_at_fork`, such as logging's, is swallowed, too.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, lambda number, _: arrived.append(number)) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
        if arrived:
            signal.raise_signal(arrived[0])
