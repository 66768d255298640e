"""One rank, as this process sees it."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from brigade.ranks.ipc.channel import ParentChannel
from brigade.ranks.progress import RankRecord
from brigade.ranks.runner.failure import RankFailure, remove_jargon

OUTPUT_LIMIT = 20_000  # characters of a rank's output that are kept
STACK_LIMIT = 1 << 20  # bytes of a rank's stack that are kept, with what it prints meanwhile


class RankProcess:
    """One rank: its process, our ends of its channel and of the pipe that it prints to, and what it has sent."""

    def __init__(self, number: int, record: RankRecord, request: dict[str, Any]):
        self.number, self.record, self.request = number, record, request
        self.num_calls = len(request["calls"] or ())  # a notebook's calls come later
        self.pid = 0
        self.channel = ParentChannel()
        self.pipe, rank_pipe = os.pipe()
        os.set_blocking(self.pipe, False)
        self.rank_ends = [self.channel.rank_end, rank_pipe]  # until the rank has been forked
        self.printed = bytearray()
        self.stack: bytearray | None = None  # what it has printed since it was asked for its stacks
        self.num_events_then = 0  # the number of its events when it was asked
        self.results: list[Any] = []  # one for each call that has ended
        self.failure: RankFailure | None = None  # the exception that it raised, or what was wrong with its messages
        self.is_closed = False  # whether its channel is closed, usually because its process has ended
        self.status: int | None = None  # after the run: the exit status of its process, if it had ended by itself

    @property
    def is_complete(self) -> bool:
        """Whether the rank has delivered all results."""
        return len(self.results) == self.num_calls

    @property
    def is_settled(self) -> bool:
        """Whether the rank has delivered all results, raised an exception, been refused or ended."""
        return self.is_complete or self.failure is not None or self.is_closed

    def refuse(self, reason: str) -> None:
        """Let the run fail because of what the rank did."""
        self.failure = RankFailure("garbled", f"rank {self.number} {reason}", [], self.number)

    @property
    def resting_stack(self) -> bytes:
        """The stacks that the rank printed, or nothing if it reported events meanwhile: then they may be outdated."""
        has_rested = len(self.record.events) == self.num_events_then
        return bytes(self.stack) if self.stack and has_rested else b""

    def read_pipe(self) -> bool:
        """Read what the rank has printed. Return False if it has printed nothing, or has closed its end."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.pipe, 1 << 16)
            kept, limit = (self.printed, OUTPUT_LIMIT + 1) if self.stack is None else (self.stack, STACK_LIMIT)
            kept += data[: max(0, limit - len(kept))]
            return bool(data)
        return False

    def read_output(self) -> str:
        """Return the rank's printed output, up to OUTPUT_LIMIT characters."""
        text = remove_jargon(self.printed[:OUTPUT_LIMIT].decode(errors="replace"))
        return text + ("\n... (more was printed)" if len(self.printed) > OUTPUT_LIMIT else "")

    def close(self) -> None:
        """Read what the rank, which has ended, has printed. Then close our ends."""
        while self.stack is None and len(self.printed) <= OUTPUT_LIMIT and self.read_pipe():
            pass
        self.channel.socket.close()
        os.close(self.pipe)
