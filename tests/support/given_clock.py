"""A clock that stands still until a test moves it."""

from __future__ import annotations

import time
from types import ModuleType

import pytest


class Clock:
    """Replaces `time` in a module of the toolkit. Pauses take real time, and move only real clocks."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sleep = time.sleep

    def monotonic(self) -> float:
        return self.now


def give_clock(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Clock:
    """Let these modules read one clock, which is returned."""
    clock = Clock()
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    return clock
