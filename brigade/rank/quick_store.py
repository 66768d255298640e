"""The store through which the ranks of a run find each other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from brigade.rank import locks

POLL_S = 0.0005


class QuickStore(dist.Store):
    """A store in a file. A rank that waits for a key notices immediately when another rank sets the key.

    `dist.FileStore` looks for a missing key only every 10 ms, and a rank waits for about three keys before its first
    collective. This store has no timeouts, because every run has a deadline.
    """

    def __init__(self, path: str, world_size: int):
        super().__init__()
        self._file = dist.FileStore(path, world_size)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        while not self._file.check(keys):
            time.sleep(POLL_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._file.get(key)

    def set(self, key: str, value: bytes) -> None:
        self._file.set(key, value)

    def add(self, key: str, amount: int) -> int:
        return self._file.add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._file.check(keys)

    def clone(self) -> QuickStore:
        return self  # a copy without a Python variable would lose these methods


locks.trust(globals())
